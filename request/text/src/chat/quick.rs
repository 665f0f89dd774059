//! Parses plain chats in the usual spelling, in one pass over 32 bytes at a time.
//!
//! Accepts only what the full parser accepts as a plain chat, with the same result. Anything unusual (keys with
//! escapes, deep nesting, possible errors) is left to that parser, which also reports the errors.

use std::borrow::Cow;
use std::ops::Range;

use super::{LOOKED_AT, PlainMessage, unescape};

/// Maximum nesting depth in skipped members; deeper nesting is left to the full parser.
const MAX_DEPTH: u32 = 16;

/// Returns the messages of a plain chat's body and the position of the message list; `None` leaves the body to the full
/// parser.
pub(super) fn messages(body: &str) -> Option<(Vec<PlainMessage<'_>>, Range<usize>)> {
    let mut reader = Reader { body, at: 0, room: 2 * body.len() };
    let mut messages = None;
    reader.object(|reader, key| {
        if key == "messages" {
            if messages.is_some() {
                return None;
            }
            let start = reader.at;
            messages = Some((reader.messages()?, start..reader.at));
            Some(())
        } else if LOOKED_AT.contains(&key) {
            reader.literal("null")
        } else {
            reader.value(MAX_DEPTH)
        }
    })?;
    reader.space();
    if reader.at == body.len() { messages } else { None }
}

struct Reader<'a> {
    body: &'a str,
    at: usize,
    /// Bytes that may still be reserved for texts of unknown length, which bounds the memory reserved for many short
    /// texts.
    room: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.body.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        let rest = &self.body.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| b" \t\n\r".contains(byte)).count();
    }

    /// Consumes this byte, after optional whitespace.
    fn take(&mut self, byte: u8) -> Option<()> {
        self.space();
        (self.peek()? == byte).then(|| self.at += 1)
    }

    fn literal(&mut self, literal: &str) -> Option<()> {
        self.body.as_bytes().get(self.at..)?.starts_with(literal.as_bytes()).then(|| self.at += literal.len())
    }

    /// Reads comma-separated items up to `close`; the opening byte is already consumed.
    fn items(&mut self, close: u8, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.space();
        if self.peek()? == close {
            self.at += 1;
            return Some(());
        }
        loop {
            self.space();
            item(self)?;
            self.space();
            let byte = self.peek()?;
            self.at += 1;
            if byte != b',' {
                return (byte == close).then_some(());
            }
        }
    }

    /// Reads an object; `member` reads the value after each key.
    fn object(&mut self, mut member: impl FnMut(&mut Self, &'a str) -> Option<()>) -> Option<()> {
        self.take(b'{')?;
        self.items(b'}', |reader| {
            let key = reader.plain_string()?;
            reader.take(b':')?;
            reader.space();
            member(reader, key)
        })
    }

    fn messages(&mut self) -> Option<Vec<PlainMessage<'a>>> {
        let mut messages = Vec::new();
        self.take(b'[')?;
        self.items(b']', |reader| {
            messages.push(reader.message()?);
            Some(())
        })?;
        (!messages.is_empty()).then_some(messages)
    }

    fn message(&mut self) -> Option<PlainMessage<'a>> {
        let (mut role, mut content, mut content_first) = (None, None, false);
        self.object(|reader, key| {
            let place = match key {
                "role" => &mut role,
                "content" => {
                    content_first = role.is_none();
                    &mut content
                }
                _ => return None,
            };
            place.replace(reader.text()?).is_none().then_some(())
        })?;
        Some(PlainMessage { role: role?, content: content?, content_first })
    }

    /// Reads a string without escapes.
    fn plain_string(&mut self) -> Option<&'a str> {
        match self.text()? {
            Cow::Borrowed(text) => Some(text),
            Cow::Owned(_) => None,
        }
    }

    /// Consumes the text up to the next quote or backslash, and that character.
    fn run(&mut self) -> Option<(&'a str, u8)> {
        let rest = &self.body.as_bytes()[self.at..];
        let length = memchr::memchr2(b'"', b'\\', rest)?;
        let run = self.body.get(self.at..self.at + length)?;
        // Check all bytes with a fold, which avoids a branch per byte.
        let controls = run.bytes().fold(false, |found, byte| found | (byte < b' '));
        self.at += length + 1;
        (!controls).then_some((run, rest[length]))
    }

    /// Reads a string and returns its value.
    fn text(&mut self) -> Option<Cow<'a, str>> {
        self.take(b'"')?;
        let (first, end) = self.run()?;
        if end == b'"' {
            return Some(Cow::Borrowed(first));
        }
        let reserved = self.room.min(self.body.len() - self.at);
        self.room -= reserved;
        let mut text = String::with_capacity(first.len() + reserved);
        text.push_str(first);
        loop {
            let rest = unescape(self.body.get(self.at..)?, &mut text)?;
            self.at = self.body.len() - rest.len();
            let (run, end) = self.run()?;
            text.push_str(run);
            if end == b'"' {
                return Some(Cow::Owned(text));
            }
        }
    }

    /// Checks and skips any value.
    fn value(&mut self, depth: u32) -> Option<()> {
        match self.peek()? {
            b'"' => self.skip_string(),
            b'{' => {
                let depth = depth.checked_sub(1)?;
                self.object(|reader, _| reader.value(depth))
            }
            b'[' => {
                let depth = depth.checked_sub(1)?;
                self.at += 1;
                self.items(b']', |reader| reader.value(depth))
            }
            b't' => self.literal("true"),
            b'f' => self.literal("false"),
            b'n' => self.literal("null"),
            _ => self.number(),
        }
    }

    fn skip_string(&mut self) -> Option<()> {
        self.take(b'"')?;
        while self.run()?.1 == b'\\' {
            // Surrogates must be paired, which the full parser checks.
            matches!(self.peek()?, b'n' | b'"' | b'\\' | b'/' | b't' | b'r' | b'b' | b'f').then(|| self.at += 1)?;
        }
        Some(())
    }

    fn number(&mut self) -> Option<()> {
        if self.peek()? == b'-' {
            self.at += 1;
        }
        let leading_zero = self.peek()? == b'0';
        let digits = self.digits();
        if digits == 0 || (leading_zero && digits > 1) {
            return None;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            (self.digits() > 0).then_some(())?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            (self.digits() > 0).then_some(())?;
        }
        Some(())
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        self.at - start
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates bodies of plain chats, many of them malformed.
    pub(in super::super) fn body() -> impl Strategy<Value = String> {
        let space = "[ \t\n\r]?";
        let text = r#""([a-z é中"]|\\[nrtbf"/\\u]|\\u(d8[0-9a-f]{2}\\udc00|00[0-9a-f]{2}|d800)|\x{1}){0,9}""#;
        let scalar = prop_oneof![
            r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{0,2})?([eE][+-]?[0-9]{0,2})?",
            "(true|false|null|nul|[0-9]{1,2}|-|\\.5)",
            text,
        ];
        let value = scalar.prop_recursive(3, 8, 3, |value| {
            prop_oneof![
                prop::collection::vec(value.clone(), 0..3).prop_map(|items| format!("[{}]", items.join(","))),
                prop::collection::vec(value, 0..3).prop_map(|items| {
                    let members: Vec<String> = items.iter().map(|item| format!("\"k\":{item}")).collect();
                    format!("{{{}}}", members.join(" ,"))
                }),
            ]
        });
        let message = (text, text, any::<bool>(), space).prop_map(|(role, content, first, space)| {
            if first {
                format!("{{\"content\":{space}{content},\"role\" :{role}}}")
            } else {
                format!("{{{space}\"role\":{role},{space}\"content\":{content}{space}}}")
            }
        });
        let messages =
            prop::collection::vec(message, 0..3).prop_map(|list| format!("\"messages\":[{}]", list.join(",")));
        let other = (prop_oneof!["model", "tools", "stop", "messages", "a\\\\n"], value)
            .prop_map(|(key, value)| format!("\"{key}\":{value}"));
        (prop::collection::vec(other, 0..3), messages, 0usize..3, prop_oneof!["", " ", "\n", "x", ","]).prop_map(
            |(mut members, messages, at, end)| {
                members.insert(at.min(members.len()), messages);
                format!("{{{}}}{end}", members.join(", "))
            },
        )
    }

    #[test]
    fn what_clients_write_is_read_here() {
        for body in [
            r#"{"model":"m","messages":[{"role":"user","content":"a\nb \u00e9 \ud83d\ude00"}],"max_tokens":64,"temperature":0.7,"stream":false}"#,
            r#" { "messages" : [ { "role" : "system", "content" : "" } , {"content":"x","role":"user"} ] , "stop":["a\n",{"b":[-1.5e+3,0]}], "tools":null } "#,
        ] {
            let (found, at) = messages(body).unwrap();
            assert!(!found.is_empty(), "{body}");
            assert!(body[at.clone()].starts_with('[') && body[at].ends_with(']'), "{body}");
        }
    }

    #[test]
    fn many_short_texts_reserve_no_more_than_twice_the_body() {
        let message = r#"{"role":"user","content":"\n"}"#;
        let body = format!("{{\"messages\":[{}]}}", vec![message; 1000].join(","));
        let reserved: usize = messages(&body)
            .unwrap()
            .0
            .iter()
            .map(|message| match &message.content {
                Cow::Owned(text) => text.capacity(),
                Cow::Borrowed(_) => 0,
            })
            .sum();
        assert!(reserved <= 2 * body.len() + 16 * 1000, "{reserved}");
    }
}
