//! See `semmoe_fuzz::files`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| semmoe_fuzz::files(data));
