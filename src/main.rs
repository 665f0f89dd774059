//! The `semmoe` command.
fn main() {}
