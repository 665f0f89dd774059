//! See `semmoe_fuzz::sr`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::sr(data));
