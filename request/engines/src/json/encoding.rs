//! Text in other encodings than UTF-8, as Python's `json.loads` takes it: the engines' servers hand it the bytes of a
//! body, and it finds out by byte order marks and zero bytes how they are encoded.

use std::fmt;

/// How a text is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Nearly always.
    Utf8,
    /// In units of two bytes.
    Utf16 {
        /// The greater byte comes first.
        big: bool,
    },
    /// In units of four bytes.
    Utf32 {
        /// The largest byte comes first.
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
    /// Which one a body has, and where it begins behind the mark.
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

    /// The characters of a text in this encoding; the first one that is none ends them as an error. Half a character
    /// alone is none, although Python lets it pass.
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

    /// The next character, if it is ASCII, and how many bytes it has.
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

/// Bytes that are not a text in the encoding in which they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it begins as {0}, and goes on otherwise")]
pub struct NotEncoded(pub Encoding);

/// Whether a body begins as a JSON object does, in any encoding that an engine's parser would read.
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
