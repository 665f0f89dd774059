//! See `semmoe_fuzz::templates`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::templates(data));
