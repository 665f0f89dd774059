//! The most common kind of chat, parsed in place from the body: its messages have only a role and a text, and the body
//! has no other fields that affect the template.

mod quick;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

/// Body fields that affect a template's output.
pub(crate) const LOOKED_AT: [&str; 10] = [
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "reasoning",
    "documents",
    "add_special_tokens",
    "chat_template",
    "input_ids",
];

/// A chat whose messages have only a role and a text each. Everything else has the template's defaults: no tools, no
/// variables, and a generation prompt for the assistant's turn.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct PlainChat<'a> {
    pub(crate) messages: Vec<PlainMessage<'a>>,
}

/// A message with only a role and a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PlainMessage<'a> {
    pub(crate) role: Cow<'a, str>,
    pub(crate) content: Cow<'a, str>,
    /// Whether the text precedes the role.
    pub(crate) content_first: bool,
}

impl<'a> PlainChat<'a> {
    /// Parses a body; `None` if it is JSON but not a plain chat, which is left to
    /// [`Prompt::from_json`](crate::Prompt::from_json). Stops at the first sign that the chat is not plain.
    ///
    /// # Errors
    /// If the text is not JSON.
    pub fn read(body: &'a str) -> Result<Option<Self>, serde_json::Error> {
        match Self::quickly(body) {
            Some((chat, _)) => Ok(Some(chat)),
            None => Self::read_slowly(body),
        }
    }

    /// Parses a body in the usual spelling, and also returns the position of the message list. On `None`,
    /// [`PlainChat::read`] may still succeed. A body that is parsed here is valid JSON.
    pub fn quickly(body: &'a str) -> Option<(Self, Range<usize>)> {
        quick::messages(body).map(|(messages, at)| (Self { messages }, at))
    }

    /// Parses a body with the full parser.
    fn read_slowly(body: &'a str) -> Result<Option<Self>, serde_json::Error> {
        let mut json = serde_json::Deserializer::from_str(body);
        match json.deserialize_map(Body).and_then(|chat| json.end().map(|()| chat)) {
            Ok(chat) => Ok(Some(chat)),
            // The body is JSON, but not a plain chat.
            Err(error) if error.is_data() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl PlainMessage<'_> {
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        match key {
            "role" => Some(&self.role),
            "content" => Some(&self.content),
            _ => None,
        }
    }

    /// Returns keys and texts in the order of the body.
    pub(crate) fn entries(&self) -> [(&str, &str); 2] {
        let mut entries = [("role", &*self.role), ("content", &*self.content)];
        if self.content_first {
            entries.reverse();
        }
        entries
    }
}

/// Templates see the keys of a message in the order of the body.
impl Serialize for PlainMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.entries())
    }
}

/// Returns the value of a JSON string; `None` if the JSON is not a string. Texts are long and full of line ends, so
/// memory is reserved once and everything between two escapes is copied in one go.
fn text(json: &str) -> Option<Cow<'_, str>> {
    let raw = json.strip_prefix('"')?.strip_suffix('"')?;
    let Some(mut escape) = memchr::memchr(b'\\', raw.as_bytes()) else { return Some(Cow::Borrowed(raw)) };
    let (mut text, mut rest) = (String::with_capacity(raw.len()), raw);
    loop {
        text.push_str(rest.get(..escape)?);
        rest = unescape(rest.get(escape + 1..)?, &mut text)?;
        match memchr::memchr(b'\\', rest.as_bytes()) {
            Some(next) => escape = next,
            None => {
                text.push_str(rest);
                return Some(Cow::Owned(text));
            }
        }
    }
}

/// Appends the value of an escape, whose backslash is already consumed; returns the remainder.
fn unescape<'a>(escape: &'a str, text: &mut String) -> Option<&'a str> {
    let character = match escape.as_bytes().first()? {
        b'n' => '\n',
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b't' => '\t',
        b'r' => '\r',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'u' => return unescape_unicode(&escape[1..], text),
        _ => return None,
    };
    text.push(character);
    Some(&escape[1..])
}

fn unescape_unicode<'a>(digits: &'a str, text: &mut String) -> Option<&'a str> {
    let (first, rest) = code_unit(digits)?;
    let (character, rest) = match char::from_u32(first.into()) {
        Some(character) => (character, rest),
        // Half of a surrogate pair. A missing other half is an error, which the full parser reports.
        None => {
            let (second, rest) = code_unit(rest.strip_prefix("\\u")?)?;
            (char::decode_utf16([first, second]).next()?.ok()?, rest)
        }
    };
    text.push(character);
    Some(rest)
}

fn code_unit(digits: &str) -> Option<(u16, &str)> {
    let (digits, rest) = digits.split_at_checked(4)?;
    // from_str_radix would accept a sign.
    let all = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    all.then(|| u16::from_str_radix(digits, 16).ok()).flatten().map(|unit| (unit, rest))
}

/// A text, unescaped by [`text`].
struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        text(raw.get()).map(Text).ok_or_else(|| D::Error::custom("no text"))
    }
}

struct Body;

impl<'de> Visitor<'de> for Body {
    type Value = PlainChat<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a chat")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut messages: Option<Vec<PlainMessage<'de>>> = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == "messages" {
                if messages.replace(map.next_value()?).is_some() {
                    return Err(A::Error::duplicate_field("messages"));
                }
            } else if LOOKED_AT.contains(&key.as_str()) {
                // Null counts as absent.
                map.next_value::<()>()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        match messages {
            Some(messages) if !messages.is_empty() => Ok(PlainChat { messages }),
            _ => Err(A::Error::custom("no messages")),
        }
    }
}

impl<'de> Deserialize<'de> for PlainMessage<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Message)
    }
}

/// The keys of a plain message; any other key rules it out.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Key {
    Role,
    Content,
}

struct Message;

impl<'de> Visitor<'de> for Message {
    type Value = PlainMessage<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut role, mut content, mut content_first) = (None, None, false);
        while let Some(key) = map.next_key()? {
            let place = match key {
                Key::Role => &mut role,
                Key::Content => {
                    content_first = role.is_none();
                    &mut content
                }
            };
            if place.replace(map.next_value::<Text<'_>>()?.0).is_some() {
                return Err(A::Error::custom("a key twice"));
            }
        }
        match (role, content) {
            (Some(role), Some(content)) => Ok(PlainMessage { role, content, content_first }),
            _ => Err(A::Error::custom("no role or no content")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn plain_chats_are_read_as_they_stand() {
        for body in [
            json!({"messages": [{"role": "user", "content": "a\nb"}]}),
            json!({"model": "m", "messages": [{"content": "", "role": "system"}, {"role": "user", "content": "é\"\u{1}"}], "n": 1}),
            json!({"messages": [{"role": "x", "content": "y"}], "tools": null, "chat_template_kwargs": null, "stop": ["a", {"b": 1e300}]}),
        ] {
            for text in [body.to_string(), serde_json::to_string_pretty(&body).unwrap()] {
                let chat = PlainChat::read(&text).unwrap().unwrap();
                let read = serde_json::to_string(&chat).unwrap();
                // Including the order.
                assert_eq!(read, body["messages"].to_string());
            }
        }
        let text = r#"{"messages":[{"role":"user","content":"here"}]}"#;
        let chat = PlainChat::read(text).unwrap().unwrap();
        assert!(matches!(chat.messages[0].content, Cow::Borrowed("here")));
        assert_eq!(
            PlainChat::read(r#"{"m\u0065ssages":[{"r\u006fle":"u","content":"\u00e9"}]}"#)
                .unwrap()
                .unwrap()
                .messages
                .len(),
            1
        );
    }

    proptest! {
        /// Any string that serde_json accepts has the same value here; any that it rejects has none.
        #[test]
        fn texts_are_those_of_the_whole_parser(raw in r#"(\PC|[a-z\n"\\/]|\\[nrtbf"/\\]|\\u(d8[0-9a-f]{2}|D[c-f][0-9A-F]{2}|00[0-9a-f]{2}|[0-9a-f]{3,4}|\+[0-9a-f]{3})){0,12}"#) {
            let json = format!("\"{raw}\"");
            let body = format!(r#"{{"messages":[{{"role":"user","content":{json}}}]}}"#);
            let read = PlainChat::read(&body).ok().flatten().map(|chat| chat.messages[0].content.to_string());
            let expected = serde_json::from_str::<Value>(&body).ok().and_then(|body| Some(body["messages"][0]["content"].as_str()?.to_owned()));
            prop_assert_eq!(read, expected.filter(|_| serde_json::from_str::<String>(&json).is_ok()));
        }

        /// Both readers agree, and the quick one reads most bodies.
        #[test]
        fn quick_reading_is_slow_reading(body in quick::tests::body()) {
            let slowly = PlainChat::read_slowly(&body);
            if let Some((chat, at)) = PlainChat::quickly(&body) {
                prop_assert_eq!(serde_json::to_value(&chat).unwrap(), serde_json::from_str::<Value>(&body[at]).unwrap());
                prop_assert_eq!(slowly.unwrap(), Some(chat));
            }
        }
    }

    #[test]
    fn other_kinds_of_chat_are_left_to_the_whole_parser() {
        let message = json!({"role": "user", "content": "a"});
        for body in [
            json!({}),
            json!({"messages": []}),
            json!({"messages": "a"}),
            json!({"messages": null}),
            json!({"messages": [1]}),
            json!({"messages": [[]]}),
            json!({"messages": [{"role": "user"}]}),
            json!({"messages": [{"content": "a"}]}),
            json!({"messages": [{"role": 1, "content": "a"}]}),
            json!({"messages": [{"role": "user", "content": null}]}),
            json!({"messages": [{"role": "user", "content": ["a"]}]}),
            json!({"messages": [{"role": "user", "content": "a", "name": null}]}),
            json!({"messages": [message], "tools": []}),
            json!({"messages": [message], "chat_template_kwargs": {}}),
            json!({"add_generation_prompt": true, "messages": [message]}),
        ] {
            assert_eq!(PlainChat::read(&body.to_string()).unwrap(), None, "{body}");
        }
        for twice in [
            r#"{"messages":[{"role":"u","content":"a"}],"messages":[{"role":"u","content":"a"}]}"#,
            r#"{"messages":[{"role":"u","content":"a","role":"u"}]}"#,
        ] {
            assert_eq!(PlainChat::read(twice).unwrap(), None, "{twice}");
        }
    }

    #[test]
    fn what_is_no_json_is_not_taken() {
        let good = r#"{"a":[1],"messages":[{"role":"user","content":"a\n"}],"b":true}"#;
        for end in 0..good.len() {
            let cut = &good[..end];
            assert!(!matches!(PlainChat::read(cut), Ok(Some(_))), "{cut}");
            assert!(serde_json::from_str::<Value>(cut).is_err());
        }
        for bad in
            ["{} {}", r#"{"a":1} x"#, r#"{"messages":[{"role":"user","content":"a"}]}}"#, r#"{"a":nul}"#, "[]", "1"]
        {
            assert!(!matches!(PlainChat::read(bad), Ok(Some(_))), "{bad}");
        }
    }
}
