//! Why an array file is refused.

/// An error of a reader; every message is one sentence, and the caller names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The operating system refused.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// Bytes end before what they announce.
    #[error("{what} ends after {found} bytes, expected {expected}")]
    Short {
        /// The part that ends.
        what: &'static str,
        /// Bytes there.
        found: u64,
        /// Bytes announced.
        expected: u64,
    },
    /// The archive is damaged, or of a kind that torch and NumPy do not write.
    #[error("the archive's {what} is {found}, expected {expected}")]
    Archive {
        /// The part.
        what: &'static str,
        /// The value found.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
    /// Neither an archive nor a NumPy array.
    #[error("{found}, expected {expected}")]
    Kind {
        /// Its appearance.
        found: &'static str,
        /// The forms that can be read.
        expected: &'static str,
    },
    /// An entry is not there.
    #[error("the archive holds no `{name}`")]
    NoEntry {
        /// Its name.
        name: String,
    },
    /// An opcode that is not read.
    #[error("the pickle has the opcode {name} at byte {at}, which is never executed here")]
    Opcode {
        /// Its name.
        name: &'static str,
        /// Where.
        at: usize,
    },
    /// A name that is not read.
    #[error("the pickle names `{name}` at byte {at}, which is never imported here")]
    Global {
        /// Module and name.
        name: String,
        /// Where.
        at: usize,
    },
    /// The pickle is no well-formed one.
    #[error("the pickle's {what} at byte {at} is {found}, expected {expected}")]
    Pickle {
        /// The part.
        what: &'static str,
        /// Where.
        at: usize,
        /// The value found.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
    /// Values would take more memory than the file has bytes.
    #[error("the pickle asks for more than the {limit} bytes that a file of its size may take")]
    Memory {
        /// The most.
        limit: u64,
    },
    /// An array does not fit what it is made of.
    #[error("an array's {what} is {found}, expected {expected}")]
    Array {
        /// The part.
        what: &'static str,
        /// The value found.
        found: String,
        /// The expected value.
        expected: String,
    },
}

impl PickleError {
    pub(super) fn array(what: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        Self::Array { what, found: found.to_string(), expected: expected.to_string() }
    }

    pub(super) fn archive(what: &'static str, found: impl ToString, expected: &'static str) -> Self {
        Self::Archive { what, found: found.to_string(), expected }
    }
}

/// Text of an untrusted file for a message: short, without control characters.
pub(super) fn shown(bytes: &[u8]) -> String {
    const SHOWN: usize = 60;
    let start = &bytes[..bytes.len().min(SHOWN)];
    let mut text = String::from_utf8_lossy(start).escape_debug().to_string();
    if bytes.len() > SHOWN {
        text.push_str("...");
    }
    text
}
