//! NumPy's `.npy`: a line of Python that describes the array, then its bytes.

use super::PickleError;
use super::array::{Array, Element, Strided};
use super::error::shown;
use super::source::Source;

const MAGIC: &[u8] = b"\x93NUMPY";
/// As NumPy itself allows.
const MAX_HEADER: u64 = 10_000;
const KINDS: [(&[u8], Element); 12] = [
    (b"|b1", Element::Bool),
    (b"|u1", Element::U8),
    (b"|i1", Element::I8),
    (b"<u2", Element::U16),
    (b"<i2", Element::I16),
    (b"<u4", Element::U32),
    (b"<i4", Element::I32),
    (b"<u8", Element::U64),
    (b"<i8", Element::I64),
    (b"<f2", Element::F16),
    (b"<f4", Element::F32),
    (b"<f8", Element::F64),
];

/// Reads an array that fills all of `source`.
///
/// # Errors
/// Says what is damaged, or of a kind that is not read: arrays of objects are pickles.
pub fn read_npy(source: &Source) -> Result<Array, PickleError> {
    read_part(source, 0, source.length())
}

/// Reads an array that fills a part of `source`.
pub(super) fn read_part(source: &Source, from: u64, length: u64) -> Result<Array, PickleError> {
    let start = source.read("the array", from, 12.min(length))?;
    if !start.starts_with(MAGIC) || start.len() < 12 {
        return Err(PickleError::Kind { found: "not a NumPy array", expected: "a .npy file" });
    }
    let (header_from, header) = match start[6] {
        1 => (10, u64::from(u16::from_le_bytes([start[8], start[9]]))),
        2 | 3 => (12, u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]]))),
        other => return Err(PickleError::array("version", other, "1 to 3")),
    };
    if header > MAX_HEADER || header_from + header > length {
        return Err(PickleError::array(
            "header",
            format!("{header} bytes long"),
            format!("at most {MAX_HEADER}, and within the file"),
        ));
    }
    let text = source.read("the array's header", from + header_from, header)?;
    let (element, strided) = Header { text: &text, at: 0 }.parse()?;
    let found = length - header_from - header;
    let expected = strided.elements().and_then(|elements| elements.checked_mul(element.bytes()));
    if expected != Some(found) {
        let expected = format!("{:?} of {} bytes each", strided.shape, element.bytes());
        return Err(PickleError::array("data", format!("{found} bytes"), expected));
    }
    let bytes = source.read("the array's data", from + header_from + header, found)?;
    Ok(Array::new(element, strided, bytes))
}

/// The header: a dict of exactly `descr`, `fortran_order` and `shape`.
struct Header<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Header<'a> {
    fn parse(mut self) -> Result<(Element, Strided), PickleError> {
        let (mut element, mut fortran, mut shape) = (None, None, None);
        self.expect(b'{')?;
        while !self.next_is(b'}') {
            let key = self.quoted()?;
            self.expect(b':')?;
            match key {
                b"descr" => element = Some(self.element()?),
                b"fortran_order" => fortran = Some(self.boolean()?),
                b"shape" => shape = Some(self.shape()?),
                other => {
                    return Err(PickleError::array(
                        "header",
                        format!("`{}`", shown(other)),
                        "descr, fortran_order and shape",
                    ));
                }
            }
            if !self.next_is(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        match (element, fortran, shape) {
            (Some(element), Some(fortran), Some(shape)) => Ok((element, Strided::dense(shape, fortran)?)),
            _ => Err(PickleError::array("header", shown(self.text), "descr, fortran_order and shape")),
        }
    }

    fn element(&mut self) -> Result<Element, PickleError> {
        let wrong =
            |found: &[u8]| PickleError::array("element type", format!("`{}`", shown(found)), "little-endian numbers");
        if self.peek() != Some(b'\'') {
            return Err(wrong(&self.text[self.at..]));
        }
        let name = self.quoted()?;
        KINDS.iter().find(|(known, _)| *known == name).map(|(_, element)| *element).ok_or_else(|| wrong(name))
    }

    fn boolean(&mut self) -> Result<bool, PickleError> {
        self.skip_spaces();
        for (word, value) in [(&b"True"[..], true), (&b"False"[..], false)] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.wrong())
    }

    fn shape(&mut self) -> Result<Vec<u64>, PickleError> {
        self.expect(b'(')?;
        let mut shape = Vec::new();
        while !self.next_is(b')') {
            if shape.len() == Strided::MAX_DIMENSIONS {
                return Err(PickleError::array(
                    "shape",
                    "longer",
                    format!("at most {} sizes", Strided::MAX_DIMENSIONS),
                ));
            }
            shape.push(self.number()?);
            if !self.next_is(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(shape)
    }

    fn number(&mut self) -> Result<u64, PickleError> {
        self.skip_spaces();
        let digits = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let text = std::str::from_utf8(&self.text[self.at..self.at + digits]).unwrap_or_default();
        let number = text.parse().map_err(|_| self.wrong())?;
        self.at += digits;
        Ok(number)
    }

    fn quoted(&mut self) -> Result<&'a [u8], PickleError> {
        self.expect(b'\'')?;
        let text = self.text;
        let length = text[self.at..].iter().position(|byte| *byte == b'\'').ok_or_else(|| self.wrong())?;
        let from = self.at;
        self.at += length + 1;
        Ok(&text[from..from + length])
    }

    fn skip_spaces(&mut self) {
        self.at += self.text[self.at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    }

    fn peek(&mut self) -> Option<u8> {
        self.skip_spaces();
        self.text.get(self.at).copied()
    }

    fn next_is(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, byte: u8) -> Result<(), PickleError> {
        if self.next_is(byte) { Ok(()) } else { Err(self.wrong()) }
    }

    fn wrong(&self) -> PickleError {
        PickleError::array("header", format!("`{}`", shown(&self.text[self.at..])), "a dict as NumPy writes it")
    }
}
