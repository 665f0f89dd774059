//! See `semmoe_fuzz::events`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::events(data));
