//! See `semmoe_fuzz::pickle`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::pickle(data));
