//! A scanner of the top-level members of a JSON object (and the elements of an array), for bodies that must pass through byte for byte.
//!
//! It does what splicing needs and no more: it finds where each member starts and ends and compares keys with escapes
//! resolved. Strings, nesting (with a limit) and separators are checked, for a body that two parsers cut differently
//! could smuggle a pin past this one; the insides of numbers and of literals are left to the engine. Nothing is
//! allocated.

mod elements;

use std::ops::Range;

pub use elements::Elements;

/// Deepest nesting of arrays and objects; Python's own parser stops at about a thousand.
pub const MAX_DEPTH: usize = 512;

/// Why bytes are no JSON object that can be spliced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// Something else than what the grammar asks for.
    #[error("the body is not a JSON object: expected {expected} at byte {at}")]
    Expected {
        /// Byte offset.
        at: usize,
        /// What the grammar asks for.
        expected: &'static str,
    },
    /// Nesting beyond [`MAX_DEPTH`].
    #[error("the body nests deeper than {MAX_DEPTH} levels at byte {at}")]
    TooDeep {
        /// Byte offset.
        at: usize,
    },
}

/// One top-level member, as byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// From behind the separator before it to the separator behind it, white space included.
    pub segment: Range<usize>,
    /// The key, without its quotes, escapes not resolved.
    pub key: Range<usize>,
    /// The value, without white space around it.
    pub value: Range<usize>,
}

impl Member {
    /// Whether the key, with escapes resolved, is this ASCII name.
    pub fn is(&self, body: &[u8], name: &str) -> bool {
        key_is(&body[self.key.clone()], name.as_bytes())
    }
}

/// Iterates over the top-level members of an object, duplicates included; ends after the first error.
#[derive(Debug)]
pub struct Members<'a> {
    body: &'a [u8],
    at: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Between,
    End,
}

impl<'a> Members<'a> {
    /// Over all of `body`, which must be one object and white space.
    pub fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0, state: State::Start }
    }

    fn open(&mut self) -> Result<(), ScanError> {
        self.space();
        self.expect(b'{', "'{'")
    }

    fn step(&mut self) -> Result<Option<Member>, ScanError> {
        let start = match self.state {
            State::End => return Ok(None),
            State::Start => {
                self.open()?;
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

    /// One value of any kind; afterwards `at` is just behind it.
    fn value(&mut self) -> Result<Range<usize>, ScanError> {
        let start = self.at;
        match self.peek() {
            Some(b'"') => {
                self.string("a string")?;
            }
            Some(b'{' | b'[') => self.nested()?,
            _ => self.scalar()?,
        }
        Ok(start..self.at)
    }

    /// An array or object. Which of the two each open level is sits in one bit, so that nothing is allocated.
    fn nested(&mut self) -> Result<(), ScanError> {
        let mut objects = [0u64; MAX_DEPTH / 64];
        let mut depth = 0;
        loop {
            match self.peek() {
                Some(open @ (b'{' | b'[')) => {
                    if depth == MAX_DEPTH {
                        return Err(ScanError::TooDeep { at: self.at });
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

    /// A number or a literal: letters, digits and signs, as parsers that know NaN or Infinity also accept them.
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

    /// A string; returns the range inside its quotes.
    fn string(&mut self, expected: &'static str) -> Result<Range<usize>, ScanError> {
        self.expect(b'"', expected)?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            match memchr::memchr2(b'"', b'\\', rest) {
                None => return Err(ScanError::Expected { at: self.body.len(), expected: "the end of a string" }),
                Some(length) if rest[length] == b'"' => {
                    let end = self.at + length;
                    self.at = end + 1;
                    return Ok(start..end);
                }
                Some(length) if length + 1 < rest.len() => self.at += length + 2,
                Some(_) => return Err(ScanError::Expected { at: self.body.len(), expected: "the end of a string" }),
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
        let step = self.step().transpose();
        if matches!(step, Some(Err(_))) {
            self.state = State::End;
        }
        step
    }
}

/// The bytes of the value of top-level key `name`; the last one wins, as in the engines' parsers.
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

/// Compares a raw key with an ASCII name, resolving escapes. A malformed escape is equal to nothing.
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

/// The first character of a raw string, if it is ASCII, and the rest.
fn unescape_ascii(raw: &[u8]) -> Option<(u8, &[u8])> {
    match raw {
        [b'\\', b'u', digits @ ..] if digits.len() >= 4 => {
            let (digits, rest) = digits.split_at(4);
            // from_str_radix would take a sign.
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
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys_and_values(body: &str) -> Result<Vec<(&str, &str)>, ScanError> {
        Members::new(body.as_bytes()).map(|member| member.map(|m| (&body[m.key], &body[m.value]))).collect()
    }

    #[test]
    fn members_of_good_objects() {
        for (body, members) in [
            ("{}", vec![]),
            (" { } \n", vec![]),
            (r#"{"a":1}"#, vec![("a", "1")]),
            (r#" { "a" : [1,{"b":"]}"}] , "" : "x\"y\\" }"#, vec![("a", r#"[1,{"b":"]}"}]"#), ("", r#""x\"y\\""#)]),
            (r#"{"a":null,"a":-1.5e+3,"b":NaN}"#, vec![("a", "null"), ("a", "-1.5e+3"), ("b", "NaN")]),
        ] {
            assert_eq!(keys_and_values(body), Ok(members), "{body}");
        }
    }

    #[test]
    fn bad_bodies() {
        for body in [
            "",
            " ",
            "[]",
            "1",
            "\"a\"",
            "{",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1",
            "{\"a\":1,}",
            "{,}",
            "{\"a\":1}}",
            "{\"a\":1} x",
            "{a:1}",
            "{\"a\":[}",
            "{\"a\":[1}]}",
            "{\"a\":\"x}",
            "{\"a\\",
            "{\"a\":\"\\",
            "\u{feff}{}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":1 2}",
            "{\"a\":'x'}",
        ] {
            assert!(keys_and_values(body).is_err(), "{body}");
        }
        // UTF-16, which Python's parser would take.
        let wide: Vec<u8> = "{\"routed_dp_rank\":1}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(Members::new(&wide).any(|member| member.is_err()));
    }

    #[test]
    fn depth_is_limited() {
        let nest = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(keys_and_values(&nest(MAX_DEPTH)).is_ok());
        assert!(matches!(keys_and_values(&nest(MAX_DEPTH + 1)), Err(ScanError::TooDeep { .. })));
        assert!(matches!(
            keys_and_values(&format!("{{\"a\":{}", "{\"a\":".repeat(100_000))),
            Err(ScanError::TooDeep { .. })
        ));
    }

    #[test]
    fn keys_compare_with_escapes_resolved() {
        for (key, same) in [
            ("routed_dp_rank", true),
            (r"routed\u005fdp_rank", true),
            (r"routed\u005Fdp_ran\u006b", true),
            (r"routed\u00dfdp_rank", false),
            (r"routed\u+05fdp_rank", false),
            (r"routed_dp_rank\u0000", false),
            (r"routed_dp_ran\", false),
            (r"routed_dp_ran\u006", false),
            ("routed_dp_ran", false),
            ("Routed_dp_rank", false),
        ] {
            assert_eq!(key_is(key.as_bytes(), b"routed_dp_rank"), same, "{key}");
        }
        assert!(key_is(br"\/\n", b"/\n"));
        assert_eq!(top_level(br#"{"m\u006fdel":"a","model":"b"}"#, "model"), Ok(Some(&br#""b""#[..])));
    }

    proptest! {
        /// What serde_json takes as an object, the scanner takes too and cuts into the same members.
        #[test]
        fn agrees_with_serde_json(body in any_json_object(), indent in any::<bool>()) {
            let text = if indent { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) }.unwrap();
            let members: Vec<Member> = Members::new(text.as_bytes()).collect::<Result<_, _>>().unwrap();
            let object = body.as_object().unwrap();
            prop_assert_eq!(members.len(), object.len());
            for member in members {
                let key: String = serde_json::from_str(&format!("\"{}\"", &text[member.key])).unwrap();
                let value: serde_json::Value = serde_json::from_str(&text[member.value]).unwrap();
                prop_assert_eq!(&object[&key], &value);
            }
        }

        #[test]
        fn any_bytes_end_without_panic(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Members::new(&body).count();
        }

        #[test]
        fn damaged_objects_end_without_panic(body in any_json_object(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = serde_json::to_vec(&body).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let scanned = Members::new(&bytes).collect::<Result<Vec<_>, _>>();
            if serde_json::from_slice::<serde_json::Value>(&bytes).is_ok_and(|value| value.is_object()) {
                prop_assert!(scanned.is_ok());
            }
        }
    }

    /// Objects with nesting, odd keys and strings.
    pub(crate) fn any_json_object() -> impl Strategy<Value = serde_json::Value> {
        use serde_json::Value;
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "\\PC{0,8}".prop_map(Value::from),
            "[\"\\\\{}\\[\\],: a]{0,8}".prop_map(Value::from),
        ];
        let value = leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("[\"\\\\{}a]{0,4}", inner, 0..4)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        });
        proptest::collection::btree_map("[\"\\\\{},:a-z_]{0,6}", value, 0..6)
            .prop_map(|m| Value::Object(m.into_iter().collect()))
    }
}
