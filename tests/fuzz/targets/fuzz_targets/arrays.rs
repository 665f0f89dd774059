//! See `semmoe_fuzz::arrays`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::arrays(data));
