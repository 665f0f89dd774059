//! See `semmoe_fuzz::requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::requests(data));
