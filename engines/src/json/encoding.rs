//! Text in other encodings than UTF-8, as Python's `json.loads` takes it: the engines' servers hand it the bytes of a
//! body, and it finds out by byte order marks and zero bytes how they are encoded.

/// One character of a text, as far as its beginning has to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Utf8,
    Utf16 { big: bool },
    Utf32 { big: bool },
}

impl Encoding {
    /// Which one a body has, and where it begins behind the mark.
    fn of(body: &[u8]) -> (Self, usize) {
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
