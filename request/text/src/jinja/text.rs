//! Python's treatment of strings: whitespace, printing, JSON.

use std::fmt::Write as _;

/// Implements `str.isspace` for one character.
pub(crate) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

/// Returns whether `str.splitlines` splits at this character.
pub(crate) fn is_line_end(char: char) -> bool {
    matches!(char, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Splits a text into lines, with or without their line ends.
pub(crate) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(is_line_end).unwrap_or(rest.len());
        let end = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(if keep_ends { &rest[..at + end] } else { &rest[..at] });
        rest = &rest[at + end..];
    }
    lines
}

pub(crate) fn capitalize(word: &str) -> String {
    let mut chars = word.chars();
    // If a letter has several characters in upper case, only the first stays upper case: `ß` becomes `Ss`.
    let mut upper = chars.next().into_iter().flat_map(char::to_uppercase);
    let first = upper.next().map(String::from).unwrap_or_default();
    first + &upper.collect::<String>().to_lowercase() + &chars.as_str().to_lowercase()
}

/// `markupsafe.escape`
pub(crate) fn escape(text: &str) -> String {
    let entity = |char| match char {
        '&' => Some("&amp;"),
        '<' => Some("&lt;"),
        '>' => Some("&gt;"),
        '\'' => Some("&#39;"),
        '"' => Some("&#34;"),
        _ => None,
    };
    let (mut escaped, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(|char| entity(char).is_some()) {
        let (before, after) = rest.split_at(at);
        escaped.push_str(before);
        escaped.push_str(after.chars().next().and_then(entity).unwrap_or_default());
        rest = &after[1..];
    }
    escaped + rest
}

/// `repr` of a string.
pub(crate) fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for char in text.chars() {
        match char {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            char if char == mark => {
                out.push('\\');
                out.push(mark);
            }
            ' '..='~' => out.push(char),
            char if !char.is_ascii() && is_printable(char) => out.push(char),
            char => {
                let code = u32::from(char);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(mark);
}

fn is_printable(char: char) -> bool {
    // `escape_debug` escapes combining marks only as the first character of a text.
    let mut pair = [b'a'; 5];
    let length = 1 + char.encode_utf8(&mut pair[1..]).len();
    let pair = std::str::from_utf8(&pair[..length]).unwrap_or_default();
    pair.escape_debug().nth(1) == Some(char)
}

/// Returns the `repr` of a float: the shortest digits that round-trip.
pub(crate) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// A JSON string.
pub(crate) fn quote_json(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        match (char, escape_of(char)) {
            (_, Some(escape)) => out.push_str(escape),
            (char, _) if char < ' ' || (ascii && char > '~') => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            (char, _) => out.push(char),
        }
    }
    out.push('"');
}

/// Returns the short JSON escape of a character, if it has one.
fn escape_of(char: char) -> Option<&'static str> {
    Some(match char {
        '"' => "\\\"",
        '\\' => "\\\\",
        '\n' => "\\n",
        '\r' => "\\r",
        '\t' => "\\t",
        '\u{8}' => "\\b",
        '\u{c}' => "\\f",
        _ => return None,
    })
}
