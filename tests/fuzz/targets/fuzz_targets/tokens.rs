//! See `semmoe_fuzz::tokens`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::tokens(data));
