//! Text encodings that Python's `json.loads` accepts in addition to UTF-8: the engines' servers pass it the raw body,
//! and it detects the encoding from byte order marks and zero bytes.

use std::fmt;

/// The encoding of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// UTF-8, by far the most common encoding.
    Utf8,
    /// Units of two bytes.
    Utf16 {
        /// Big endian.
        big: bool,
    },
    /// Units of four bytes.
    Utf32 {
        /// Big endian.
        big: bool,
    },
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Utf8 => "UTF-8",
            Self::Utf16 { .. } => "UTF-16",
            Self::Utf32 { .. } => "UTF-32",
        })
    }
}

impl Encoding {
    /// Detects a body's encoding and the offset after a byte order mark, if any.
    pub fn of(body: &[u8]) -> (Self, usize) {
        use Encoding::{Utf8, Utf16, Utf32};
        match body {
            [0, 0, 0xfe, 0xff, ..] => (Utf32 { big: true }, 4),
            [0xff, 0xfe, 0, 0, ..] => (Utf32 { big: false }, 4),
            [0xfe, 0xff, ..] => (Utf16 { big: true }, 2),
            [0xff, 0xfe, ..] => (Utf16 { big: false }, 2),
            [0xef, 0xbb, 0xbf, ..] => (Utf8, 3),
            [0, 0, _, _, ..] => (Utf32 { big: true }, 0),
            [0, _, ..] => (Utf16 { big: true }, 0),
            [_, 0, 0, 0, ..] => (Utf32 { big: false }, 0),
            [_, 0, ..] => (Utf16 { big: false }, 0),
            _ => (Utf8, 0),
        }
    }

    /// Iterates over the characters of `text` in this encoding, up to the first invalid one, which yields an error. A
    /// lone surrogate is invalid here, although Python accepts it.
    pub fn characters(self, text: &[u8]) -> impl Iterator<Item = Result<char, NotEncoded>> {
        let unit = match self {
            Self::Utf8 => 1,
            Self::Utf16 { .. } => 2,
            Self::Utf32 { .. } => 4,
        };
        let units = text.chunks(unit).map(move |bytes| (bytes.len() == unit).then(|| self.unit(bytes)));
        let not_encoded = move || NotEncoded(self);
        let mut units = units.peekable();
        std::iter::from_fn(move || {
            let first = units.next()?;
            let character = first.and_then(|first| match (self, first) {
                (Self::Utf16 { .. }, 0xd800..0xdc00) => {
                    let second = units.next_if(|unit| matches!(unit, Some(0xdc00..0xe000)))??;
                    char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00))
                }
                _ => char::from_u32(first),
            });
            Some(character.ok_or_else(not_encoded))
        })
    }

    fn unit(self, bytes: &[u8]) -> u32 {
        let shifted = |number: u32, byte: &u8| number << 8 | u32::from(*byte);
        match self {
            Self::Utf16 { big: false } | Self::Utf32 { big: false } => bytes.iter().rev().fold(0, shifted),
            _ => bytes.iter().fold(0, shifted),
        }
    }

    /// Returns the next character, if it is ASCII, and its length in bytes.
    fn ascii(self, rest: &[u8]) -> Option<(u8, usize)> {
        match (self, rest) {
            (Self::Utf8, [byte, ..]) => Some((*byte, 1)),
            (Self::Utf16 { big: true }, [0, byte, ..]) | (Self::Utf16 { big: false }, [byte, 0, ..]) => {
                Some((*byte, 2))
            }
            (Self::Utf32 { big: true }, [0, 0, 0, byte, ..]) | (Self::Utf32 { big: false }, [byte, 0, 0, 0, ..]) => {
                Some((*byte, 4))
            }
            _ => None,
        }
    }
}

/// The bytes are not valid in the encoding detected from their start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it begins as {0} but contains invalid bytes")]
pub struct NotEncoded(pub Encoding);

/// Returns whether a body begins like a JSON object in any encoding that an engine's parser would accept.
pub fn begins_object(body: &[u8]) -> bool {
    let (encoding, mut at) = Encoding::of(body);
    while let Some((byte, length)) = encoding.ascii(&body[at..]) {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => at += length,
            byte => return byte == b'{',
        }
    }
    false
}
