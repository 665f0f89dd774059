//! Finds token ids in a JSON value, in every spelling that an engine's validation converts to a number.
//!
//! Engines validate with pydantic, and some values with Python's `int()`, which accept `"99_999"`, `" +5 "`,
//! `"\u0039"`, `7.0` and `true` as numbers. Anything that no engine accepts as a number may be classified either way
//! here, since the engine itself rejects the request. `tests/ids/run.py` compares this module with pydantic.

use super::{Members, unescape_ascii};

/// How to interpret strings in a value that may contain token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Only ids are expected, so every string is an id.
    Ids,
    /// A bare string is a prompt; a string in a list is an id.
    IdsOrPrompt,
    /// A list that contains only strings is a list of prompts, even if they spell numbers.
    IdsOrText,
}

impl Form {
    /// Returns whether text at this depth is an id regardless of its siblings.
    fn takes_text_for_ids(self, depth: usize) -> bool {
        match self {
            Self::Ids => true,
            Self::IdsOrPrompt => depth > 0,
            Self::IdsOrText => depth > 1,
        }
    }
}

/// Returns the first id in a value that is not below `size`, as written. Checks numbers, strings in place of numbers,
/// and keys, in lists and objects at any depth, but not the values of object members.
pub fn outside(value: &[u8], size: u32, form: Form) -> Option<&[u8]> {
    let mut scan = Members::new(value);
    let (mut depth, mut suspect, mut is_mixed) = (0_usize, None, false);
    while let Some(byte) = scan.peek() {
        let start = scan.at;
        match byte {
            b',' | b' ' | b'\t' | b'\n' | b'\r' => {
                scan.at += 1;
                continue;
            }
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                scan.at += 1;
                continue;
            }
            b'[' | b'{' => {
                is_mixed |= depth == 1;
                depth += 1;
                scan.at += 1;
            }
            b':' => {
                scan.at += 1;
                scan.space();
                scan.value().ok()?;
            }
            b'"' => {
                let text = &value[scan.string("text").ok()?];
                match spelled(text, size) {
                    Spelled::Inside => {}
                    Spelled::Outside if form.takes_text_for_ids(depth) => return Some(text),
                    Spelled::Outside => suspect = suspect.or(Some(text)),
                    // Either the entire list is text, or no engine accepts it.
                    Spelled::Text if form == Form::IdsOrText => return None,
                    Spelled::Text => {}
                }
            }
            _ => {
                scan.scalar().ok()?;
                let item = &value[start..scan.at];
                if !is_inside(item, size) {
                    return Some(item);
                }
                is_mixed |= depth == 1;
            }
        }
        if is_mixed && suspect.is_some() {
            return suspect;
        }
    }
    None
}

/// Returns whether an unquoted literal is in the vocabulary, or is not a number at all.
fn is_inside(item: &[u8], size: u32) -> bool {
    // The common case.
    if item.len() < 10 && item.iter().all(u8::is_ascii_digit) {
        return item.iter().fold(0_u32, |number, digit| number * 10 + u32::from(digit - b'0')) < size;
    }
    match std::str::from_utf8(item).ok().and_then(|item| item.parse::<f64>().ok()) {
        Some(number) => (0.0..f64::from(size)).contains(&number),
        None => true,
    }
}

enum Spelled {
    Inside,
    Outside,
    Text,
}

/// Parses a string with escapes as an id.
fn spelled(raw: &[u8], size: u32) -> Spelled {
    let Ok(mut rest) = std::str::from_utf8(raw) else { return Spelled::Text };
    let (mut number, mut is_negative, mut has_digits, mut in_fraction) = (0_u64, false, false, false);
    while let Some((character, behind)) = next_character(rest) {
        rest = behind;
        match character {
            '0'..='9' => {
                has_digits = true;
                if !in_fraction {
                    number = number.saturating_mul(10).saturating_add(u64::from(u32::from(character) - 0x30));
                }
            }
            '-' => is_negative = true,
            '+' | '_' => {}
            '.' => in_fraction = true,
            // Python treats these characters as whitespace, unlike Unicode.
            '\u{1c}'..='\u{1f}' => {}
            blank if blank.is_whitespace() => {}
            // Python accepts digits of all scripts. Clients do not use them, so they count as an id outside the
            // vocabulary.
            digit if digit.is_numeric() || digit == SURROGATE => (has_digits, number) = (true, u64::MAX),
            _ => return Spelled::Text,
        }
    }
    match (has_digits, number) {
        (false, _) => Spelled::Text,
        (true, 0) => Spelled::Inside,
        (true, number) if !is_negative && number < u64::from(size) => Spelled::Inside,
        (true, _) => Spelled::Outside,
    }
}

/// Placeholder for a surrogate, which is half of a character that may be a digit.
const SURROGATE: char = '\u{fffd}';

/// Returns the first character, with its escape resolved, and the remainder; `None` at the end or at a malformed
/// escape.
fn next_character(text: &str) -> Option<(char, &str)> {
    if !text.starts_with('\\') {
        let mut characters = text.chars();
        return characters.next().map(|character| (character, characters.as_str()));
    }
    if let Some((byte, rest)) = unescape_ascii(text.as_bytes()) {
        return Some((char::from(byte), &text[text.len() - rest.len()..]));
    }
    let code = u32::from_str_radix(text.strip_prefix("\\u")?.get(..4)?, 16).ok()?;
    Some((char::from_u32(code).unwrap_or(SURROGATE), &text[6..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(value: &str, form: Form) -> Option<&str> {
        outside(value.as_bytes(), 100, form).map(|id| std::str::from_utf8(id).unwrap())
    }

    #[test]
    fn ids_outside_the_vocabulary_are_found() {
        for (value, expected) in [
            ("[0, 99]", None),
            ("[100]", Some("100")),
            ("[[1,2],[3 , -1]]", Some("-1")),
            ("[1, 1e8]", Some("1e8")),
            ("[99.0, 5, -0, -0.0]", None),
            ("[99999999999999999999999999]", Some("99999999999999999999999999")),
            ("[true, null, 5, 100]", Some("100")),
            ("[true,\"100\"]", Some("100")),
            ("[\"1\", 100]", Some("100")),
            ("[100, \"1\"]", Some("100")),
            ("[\"100\", [1]]", Some("100")),
            ("[[\"100\"]]", Some("100")),
            ("[[\" +1_00 \"]]", Some(" +1_00 ")),
            (r#"[[1], ["\u0031\u0030\u0030"]]"#, Some(r"\u0031\u0030\u0030")),
            (r#"[["\u0039\u0039"]]"#, None),
            ("[[\"100.0\", 1]]", Some("100.0")),
            ("[[\"-0\", \"0000000000000000000000000000000099.0\"]]", None),
            ("[[\"-1\"]]", Some("-1")),
            ("[\"a\", \"b\"]", None),
            ("[{\"role\": 100, \"content\": [200]}]", None),
            ("{\"5\": 100, \"100\": 1}", Some("100")),
            ("{\"5\": {\"x\": [1000]}, \" 9\": 1}", None),
            ("[]", None),
            ("[", None),
        ] {
            assert_eq!(found(value, Form::Ids).is_some(), expected.is_some(), "{value}");
            let is_list = value.starts_with('[');
            assert!(!is_list || found(value, Form::IdsOrText) == expected, "{value}");
        }
        for text in ["[\"100\"]", "[\"100\", \"200\"]", "\"100\""] {
            assert_eq!(found(text, Form::IdsOrText), None, "{text}: prompts");
            assert_eq!(found(text, Form::Ids), Some("100"), "{text}");
            assert_eq!(found(text, Form::IdsOrPrompt), Some("100").filter(|_| text.starts_with('[')), "{text}");
        }
        for digits in ["[\"٩\"]", r#"["\ud835\udfd9"]"#, "[\"９9\"]"] {
            assert!(found(digits, Form::Ids).is_some(), "{digits}");
        }
    }

    proptest! {
        /// The oracle is a parser.
        #[test]
        fn as_a_parser_sees_it(lists in proptest::collection::vec(proptest::collection::vec(-3i64..103, 0..5), 0..5)) {
            let wrong = lists.iter().flatten().find(|id| !(0..100).contains(*id)).map(i64::to_string);
            for value in [serde_json::to_value(&lists).unwrap(), serde_json::to_value(lists.concat()).unwrap()] {
                let text = value.to_string();
                for form in [Form::Ids, Form::IdsOrText] {
                    prop_assert_eq!(found(&text, form).map(str::to_owned), wrong.clone());
                }
            }
        }

        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..40), text in any::<bool>()) {
            let _ = outside(&bytes, 100, if text { Form::IdsOrText } else { Form::Ids });
        }
    }
}
