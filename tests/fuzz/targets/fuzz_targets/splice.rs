//! See `semmoe_fuzz::splice`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::splice(data));
