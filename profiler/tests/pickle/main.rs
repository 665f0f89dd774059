//! The restricted reader of array files: what real torch and NumPy wrote is read, everything else is refused by name.
#![allow(clippy::unwrap_used, reason = "tests")]

mod archives;
mod build;
mod hostile;
mod real;

use std::path::{Path, PathBuf};

use semmoe_profiler::pickle::{Document, Source, TorchFile, Value};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/import").join(name)
}

fn open(bytes: Vec<u8>) -> Result<TorchFile, String> {
    TorchFile::from_source(Source::from_bytes(bytes)).map_err(|error| error.to_string())
}

/// The message of a refusal, which holds each of these.
fn refused(bytes: Vec<u8>, holds: &[&str]) {
    let message = open(bytes).expect_err("refused");
    holds.iter().for_each(|part| assert!(message.contains(part), "{message:?} has no {part:?}"));
}

fn key(document: &Document, name: &str) -> Value {
    document.get(document.root(), name).unwrap_or_else(|| panic!("{name} is there"))
}
