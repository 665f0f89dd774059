//! See `semmoe_fuzz::answers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::answers(data));
