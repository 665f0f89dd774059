//! `semmoe keys`: client keys; the configuration contains only their digests.

use std::io::Read;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::print_result;
use crate::args::{KeyName, KeysCommand};
use crate::error::CliError;

/// The gateway's limit.
const MAX_KEY_BYTES: u64 = 512;
const RANDOM_BYTES: usize = 32;

pub(crate) fn run(command: &KeysCommand) -> Result<(), CliError> {
    match command {
        KeysCommand::New(KeyName { name, output }) => {
            let key = format!("sk-semmoe-{}", hex(&random()?));
            let hashed = Hashed::new(name, &key)?;
            let text = || format!("key: {key}\n{}", hashed.line());
            print_result(*output, "keys new", &New { key: &key, hashed: &hashed }, text)
        }
        KeysCommand::Hash(KeyName { name, output }) => {
            let hashed = Hashed::new(name, &read_key()?)?;
            print_result(*output, "keys hash", &hashed, || hashed.line())
        }
    }
}

/// A new key, which is printed but never stored.
#[derive(Serialize)]
struct New<'a> {
    key: &'a str,
    #[serde(flatten)]
    hashed: &'a Hashed<'a>,
}

/// An entry in the `keys` list of `[auth]`.
#[derive(Serialize)]
struct Hashed<'a> {
    name: &'a str,
    sha256: String,
}

impl<'a> Hashed<'a> {
    fn new(name: &'a str, key: &str) -> Result<Self, CliError> {
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.@:".contains(&byte)) {
            return Err(CliError::input(format!("the name is {name:?}, expected letters, digits and any of -_.@:")));
        }
        Ok(Self { name, sha256: hex(&Sha256::digest(key)) })
    }

    /// The entry as a line of the configuration file.
    fn line(&self) -> String {
        format!("{{ name = \"{}\", sha256 = \"{}\" }}", self.name, self.sha256)
    }
}

fn read_key() -> Result<String, CliError> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(MAX_KEY_BYTES + 1).read_to_string(&mut text);
    read.map_err(|error| CliError::input(format!("cannot read the key from standard input: {error}")))?;
    let key = text.trim();
    if key.is_empty() || text.len() as u64 > MAX_KEY_BYTES || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        let expected = format!("expected one line of at most {MAX_KEY_BYTES} printable characters without spaces");
        return Err(CliError::input(format!("standard input is not a key: {expected}")));
    }
    Ok(key.to_owned())
}

/// Reads random bytes from the operating system.
fn random() -> Result<[u8; RANDOM_BYTES], CliError> {
    let mut bytes = [0; RANDOM_BYTES];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut bytes));
    read.map_err(|error| CliError::failed(format!("cannot read random bytes: {error}")))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
