//! See `semmoe_fuzz::ids`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::ids(data));
