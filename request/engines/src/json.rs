//! Scans the top-level members of a JSON object, or the elements of an array, in bodies that must be forwarded byte for
//! byte.
//!
//! Does only what splicing requires: finds the start and end of each member and compares keys with escapes resolved.
//! Strings, nesting (up to a limit) and separators are validated, since a body that two parsers split differently could
//! smuggle a pin past this one. Numbers and literals are left to the engine. Allocates nothing.

mod elements;
mod encoding;
pub mod ids;

use std::ops::Range;

pub use elements::Elements;
pub use encoding::{Encoding, NotEncoded, begins_object};

/// Maximum nesting depth of arrays and objects; Python's parser stops at about a thousand.
pub const MAX_DEPTH: usize = 512;

/// The reason why a body is not a JSON object that can be spliced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// A byte that the grammar does not allow.
    #[error("the body is not a JSON object: expected {expected} at byte {at}")]
    Expected {
        /// Byte offset.
        at: usize,
        /// The grammar's requirement.
        expected: &'static str,
    },
    /// Nesting beyond [`MAX_DEPTH`].
    #[error("the body nests deeper than {MAX_DEPTH} levels at byte {0}")]
    TooDeep(usize),
}

/// One top-level member, as byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The range between the previous and the next separator, including whitespace.
    pub segment: Range<usize>,
    /// The key without its quotes, with escapes unresolved.
    pub key: Range<usize>,
    /// The value without surrounding whitespace.
    pub value: Range<usize>,
}

impl Member {
    /// Returns whether the key, with escapes resolved, equals this ASCII name.
    pub fn is(&self, body: &[u8], name: &str) -> bool {
        is_key(&body[self.key.clone()], name)
    }
}

/// Returns whether a raw key, with escapes resolved, equals this ASCII name.
pub(crate) fn is_key(raw: &[u8], name: &str) -> bool {
    key_is(raw, name.as_bytes())
}

/// Iterates over the top-level members of an object, including duplicates; stops after the first error.
#[derive(Debug)]
pub struct Members<'a> {
    body: &'a [u8],
    at: usize,
    state: State,
    /// Position of an already parsed value, which is not scanned again.
    known: Option<Range<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Between,
    End,
}

impl<'a> Members<'a> {
    /// Iterates over the members of `body`, which must be one object with optional surrounding whitespace.
    pub fn new(body: &'a [u8]) -> Self {
        Self::knowing(body, None)
    }

    /// Iterates over the members of `body`; `known` is the position of a value already parsed by a stricter parser,
    /// which is skipped.
    pub fn knowing(body: &'a [u8], known: Option<Range<usize>>) -> Self {
        Self { body, at: 0, state: State::Start, known }
    }

    /// Converts a step to an iterator item; an error ends the iteration.
    fn ended_by<T>(&mut self, step: Result<Option<T>, ScanError>) -> Option<Result<T, ScanError>> {
        if step.is_err() {
            self.state = State::End;
        }
        step.transpose()
    }

    fn step(&mut self) -> Result<Option<Member>, ScanError> {
        let start = match self.state {
            State::End => return Ok(None),
            State::Start => {
                self.space();
                self.expect(b'{', "'{'")?;
                let start = self.at;
                self.space();
                if self.peek() == Some(b'}') {
                    return self.close();
                }
                start
            }
            State::Between => {
                if self.peek() == Some(b'}') {
                    return self.close();
                }
                self.expect(b',', "',' or '}'")?;
                self.at
            }
        };
        self.state = State::Between;
        self.space();
        let key = self.string("a key")?;
        self.space();
        self.expect(b':', "':'")?;
        self.space();
        let value = self.value()?;
        self.space();
        Ok(Some(Member { segment: start..self.at, key, value }))
    }

    fn close(&mut self) -> Result<Option<Member>, ScanError> {
        self.at += 1;
        self.space();
        self.state = State::End;
        if self.at == self.body.len() { Ok(None) } else { Err(self.expected("the end of the body")) }
    }

    /// Scans one value and advances `at` past it.
    fn value(&mut self) -> Result<Range<usize>, ScanError> {
        let start = self.at;
        match self.peek() {
            Some(b'"') => {
                self.string("a string")?;
            }
            Some(b'{' | b'[') => match self.known.take_if(|known| known.start == start && known.end <= self.body.len())
            {
                Some(known) => self.at = known.end.max(start),
                None => self.nested()?,
            },
            _ => self.scalar()?,
        }
        Ok(start..self.at)
    }

    /// Scans an array or object. One bit per open level distinguishes them, so nothing is allocated.
    fn nested(&mut self) -> Result<(), ScanError> {
        let mut objects = [0u64; MAX_DEPTH / 64];
        let mut depth = 0;
        loop {
            match self.peek() {
                Some(open @ (b'{' | b'[')) => {
                    if depth == MAX_DEPTH {
                        return Err(ScanError::TooDeep(self.at));
                    }
                    let bit = 1 << (depth % 64);
                    if open == b'{' {
                        objects[depth / 64] |= bit
                    } else {
                        objects[depth / 64] &= !bit
                    }
                    depth += 1;
                    self.at += 1;
                }
                Some(close @ (b'}' | b']')) => {
                    let is_object = objects[(depth - 1) / 64] >> ((depth - 1) % 64) & 1 == 1;
                    if is_object != (close == b'}') {
                        return Err(self.expected(if is_object { "'}'" } else { "']'" }));
                    }
                    depth -= 1;
                    self.at += 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                Some(b'"') => {
                    self.string("a string")?;
                }
                Some(b',' | b':' | b' ' | b'\t' | b'\n' | b'\r') => self.at += 1,
                Some(_) => self.scalar()?,
                None => return Err(self.expected("the end of a list or object")),
            }
        }
    }

    /// Scans a number or a literal: letters, digits and signs, as in parsers that accept NaN or Infinity.
    fn scalar(&mut self) -> Result<(), ScanError> {
        let rest = &self.body[self.at..];
        let length = rest
            .iter()
            .position(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')))
            .unwrap_or(rest.len());
        if length == 0 {
            return Err(self.expected("a value"));
        }
        self.at += length;
        Ok(())
    }

    /// Scans a string; returns the range inside its quotes.
    fn string(&mut self, expected: &'static str) -> Result<Range<usize>, ScanError> {
        self.expect(b'"', expected)?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            match memchr::memchr2(b'"', b'\\', rest) {
                Some(length) if rest[length] == b'"' => {
                    let end = self.at + length;
                    self.at = end + 1;
                    return Ok(start..end);
                }
                Some(length) if length + 1 < rest.len() => self.at += length + 2,
                _ => return Err(ScanError::Expected { at: self.body.len(), expected: "the end of a string" }),
            }
        }
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), ScanError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(self.expected(expected))
        }
    }

    fn expected(&self, expected: &'static str) -> ScanError {
        ScanError::Expected { at: self.at, expected }
    }
}

impl Iterator for Members<'_> {
    type Item = Result<Member, ScanError>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step();
        self.ended_by(step)
    }
}

/// Returns the raw value of the top-level key `name`; the last duplicate wins, as in the engines' parsers.
///
/// # Errors
/// `ScanError` if the body is not a JSON object.
pub fn top_level<'a>(body: &'a [u8], name: &str) -> Result<Option<&'a [u8]>, ScanError> {
    let mut found = None;
    for member in Members::new(body) {
        let member = member?;
        if member.is(body, name) {
            found = Some(&body[member.value]);
        }
    }
    Ok(found)
}

/// Compares a raw key with an ASCII name, resolving escapes. A malformed escape matches nothing.
fn key_is(mut raw: &[u8], name: &[u8]) -> bool {
    if raw.len() == name.len() && !raw.contains(&b'\\') {
        return raw == name;
    }
    for &wanted in name {
        let Some((byte, rest)) = unescape_ascii(raw) else { return false };
        if byte != wanted {
            return false;
        }
        raw = rest;
    }
    raw.is_empty()
}

/// Returns the first character of a raw string, if it is ASCII, and the remainder.
fn unescape_ascii(raw: &[u8]) -> Option<(u8, &[u8])> {
    match raw {
        [b'\\', b'u', digits @ ..] if digits.len() >= 4 => {
            let (digits, rest) = digits.split_at(4);
            // from_str_radix would accept a sign.
            if !digits.iter().all(u8::is_ascii_hexdigit) {
                return None;
            }
            let code = u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
            u8::try_from(code).ok().filter(u8::is_ascii).map(|byte| (byte, rest))
        }
        [b'\\', escape, rest @ ..] => {
            let byte = match escape {
                b'"' | b'\\' | b'/' => *escape,
                b'b' => 8,
                b'f' => 12,
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                _ => return None,
            };
            Some((byte, rest))
        }
        [byte, rest @ ..] if byte.is_ascii() && *byte != b'\\' => Some((*byte, rest)),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
