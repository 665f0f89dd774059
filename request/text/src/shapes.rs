//! Chat shapes, i.e. the features that engines and templates treat specially, and built-in chats that exercise each of
//! them, for comparing an engine with this crate.

use std::fmt;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use crate::PlainChat;

/// A set of chat shapes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shapes(u16);

const NAMES: [&str; 15] = [
    "plain",
    "system",
    "turns",
    "part",
    "parts",
    "tools",
    "tool_choice",
    "tool_results",
    "reasoning",
    "effort",
    "kwargs",
    "continue_final",
    "documents",
    "other",
    "text",
];

/// Members covered by [`Shapes::OTHER`].
const OTHERS: [&str; 4] = ["chat_template", "add_special_tokens", "reasoning", "input_ids"];

impl Shapes {
    /// No shapes: the prompt is token ids, or was not parsed.
    pub const NONE: Self = Self(0);
    /// Every chat.
    pub const PLAIN: Self = Self(1);
    /// A message with the role `system` or `developer`.
    pub const SYSTEM: Self = Self(1 << 1);
    /// An earlier assistant turn.
    pub const TURNS: Self = Self(1 << 2);
    /// Content that is a list of one part.
    pub const PART: Self = Self(1 << 3);
    /// Content that is a list of several parts.
    pub const PARTS: Self = Self(1 << 4);
    /// Tools.
    pub const TOOLS: Self = Self(1 << 5);
    /// A `tool_choice` other than `auto`.
    pub const TOOL_CHOICE: Self = Self(1 << 6);
    /// Tool calls and their results.
    pub const TOOL_RESULTS: Self = Self(1 << 7);
    /// Reasoning in an earlier assistant turn.
    pub const REASONING: Self = Self(1 << 8);
    /// `reasoning_effort`.
    pub const EFFORT: Self = Self(1 << 9);
    /// `chat_template_kwargs`.
    pub const KWARGS: Self = Self(1 << 10);
    /// The last message is to be continued, or there is no generation prompt.
    pub const CONTINUE_FINAL: Self = Self(1 << 11);
    /// Documents.
    pub const DOCUMENTS: Self = Self(1 << 12);
    /// Members that no built-in chat has, such as the request's own template.
    pub const OTHER: Self = Self(1 << 13);
    /// A text rather than a chat.
    pub const TEXT: Self = Self(1 << 14);
    /// All shapes.
    pub const ALL: Self = Self((1 << NAMES.len()) - 1);

    /// Returns the shapes of the body of a chat or text completion.
    pub fn of(body: &Value) -> Self {
        let given = |name: &str| body.get(name).filter(|value| !is_empty(value));
        if body.get("messages").is_none() {
            return Self::TEXT;
        }
        let mut shapes = Self::PLAIN;
        let choice = given("tool_choice").filter(|choice| *choice != "auto");
        for (is_there, shape) in [
            (given("tools").is_some(), Self::TOOLS),
            (choice.is_some(), Self::TOOL_CHOICE),
            (given("reasoning_effort").is_some(), Self::EFFORT),
            (given("chat_template_kwargs").is_some(), Self::KWARGS),
            (given("continue_final_message").is_some(), Self::CONTINUE_FINAL),
            (body.get("add_generation_prompt") == Some(&Value::Bool(false)), Self::CONTINUE_FINAL),
            (given("documents").is_some(), Self::DOCUMENTS),
            (OTHERS.iter().any(|name| given(name).is_some()), Self::OTHER),
        ] {
            shapes = shapes.and_if(is_there, shape);
        }
        let messages = body.get("messages").and_then(Value::as_array).into_iter().flatten();
        messages.filter_map(Value::as_object).fold(shapes, |shapes, message| shapes | of_message(message))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the set contains all of `others`.
    pub fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the intersection.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the difference.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The number of shapes.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Iterates over the names of the shapes.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        NAMES.into_iter().enumerate().filter(move |(at, _)| self.0 >> at & 1 == 1).map(|(_, name)| name)
    }

    /// Encodes the set as a number.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// Decodes [`Shapes::bits`].
    pub fn from_bits(bits: u16) -> Self {
        Self(bits & Self::ALL.0)
    }

    fn and_if(self, is_there: bool, shape: Self) -> Self {
        if is_there { self | shape } else { self }
    }
}

impl std::ops::BitOr for Shapes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Shapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().collect::<Vec<_>>().join(", "))
    }
}

impl PlainChat<'_> {
    /// Returns the shapes of this chat.
    pub fn shapes(&self) -> Shapes {
        self.messages.iter().fold(Shapes::PLAIN, |shapes, message| shapes | of_role(&message.role))
    }
}

fn of_role(role: &str) -> Shapes {
    match role {
        "system" | "developer" => Shapes::SYSTEM,
        "assistant" => Shapes::TURNS,
        "tool" | "function" => Shapes::TOOL_RESULTS,
        _ => Shapes::NONE,
    }
}

fn of_message(message: &Map<String, Value>) -> Shapes {
    let given = |name: &str| message.get(name).is_some_and(|value| !is_empty(value));
    let parts = match message.get("content").and_then(Value::as_array).map(Vec::len) {
        None => Shapes::NONE,
        Some(0 | 1) => Shapes::PART,
        Some(_) => Shapes::PARTS,
    };
    let role = message.get("role").and_then(Value::as_str).map_or(Shapes::NONE, of_role);
    let reasoning = ["reasoning", "reasoning_content", "thinking"].into_iter().any(given);
    (role | parts).and_if(given("tool_calls"), Shapes::TOOL_RESULTS).and_if(reasoning, Shapes::REASONING)
}

/// Returns whether engines and templates treat the value as absent.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// A chat or a text on which to compare an engine with this crate.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltInChat {
    /// The shape that this exercises: one shape beyond [`Shapes::PLAIN`], [`Shapes::PLAIN`] itself for the plain chat,
    /// or [`Shapes::TEXT`] for the text.
    pub shows: Shapes,
    /// The body of a request, without a model.
    pub body: Value,
}

/// Returns at least one chat for each shape, the plain one first, and a text.
pub fn built_in_chats() -> &'static [BuiltInChat] {
    static CHATS: LazyLock<Vec<BuiltInChat>> = LazyLock::new(make_chats);
    &CHATS
}

fn make_chats() -> Vec<BuiltInChat> {
    let user = |content: Value| json!({"role": "user", "content": content});
    let text = |text: &str| json!({"type": "text", "text": text});
    let hello = user(json!("Hello!  How are you, \u{4f60}\u{597d}? 3.14\n"));
    let turns = |answer: Value| json!([hello, answer, user(json!("And now?"))]);
    let call = json!({"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}}]});
    let result =
        json!({"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "{\"degrees\": 21}"});
    let city = json!({"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}, "required": ["city"]});
    let tools = json!([
        {"type": "function", "function": {"name": "weather", "description": "How warm it is", "parameters": city}},
        {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]);
    let begun = json!([hello, {"role": "assistant", "content": "I am"}]);
    let chats = [
        (Shapes::PLAIN, json!({"messages": [hello]})),
        (Shapes::SYSTEM, json!({"messages": [{"role": "system", "content": "Be brief."}, hello]})),
        (Shapes::TURNS, json!({"messages": turns(json!({"role": "assistant", "content": "Fine."}))})),
        (Shapes::PART, json!({"messages": [user(json!([text("One part")]))]})),
        (Shapes::PARTS, json!({"messages": [user(json!([text("One"), text("two")]))]})),
        (Shapes::TOOLS, json!({"messages": [hello], "tools": tools})),
        (Shapes::TOOL_CHOICE, json!({"messages": [hello], "tools": tools, "tool_choice": "none"})),
        (Shapes::TOOL_RESULTS, json!({"messages": [hello, call, result]})),
        (
            Shapes::REASONING,
            json!({"messages": turns(json!({"role": "assistant", "reasoning_content": "Hm.", "content": "Fine."}))}),
        ),
        (Shapes::EFFORT, json!({"messages": [hello], "reasoning_effort": "low"})),
        (Shapes::KWARGS, json!({"messages": [hello], "chat_template_kwargs": {"enable_thinking": false}})),
        (
            Shapes::CONTINUE_FINAL,
            json!({"messages": begun, "continue_final_message": true, "add_generation_prompt": false}),
        ),
        (Shapes::CONTINUE_FINAL, json!({"messages": begun, "continue_final_message": true})),
        (Shapes::TEXT, json!({"prompt": "Once upon a time, \u{4f60}\u{597d}!\n 3.14  "})),
        (Shapes::DOCUMENTS, json!({"messages": [hello], "documents": [{"title": "A", "text": "Of letters"}]})),
    ];
    chats.into_iter().map(|(shows, body)| BuiltInChat { shows, body }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_built_in_chat_has_the_shape_that_it_shows() {
        let chats = built_in_chats();
        assert_eq!(chats[0].shows, Shapes::PLAIN);
        let shown = chats.iter().fold(Shapes::NONE, |shown, chat| shown | chat.shows);
        assert_eq!(shown, Shapes::ALL.without(Shapes::OTHER));
        for &BuiltInChat { shows, ref body } in chats {
            let shapes = Shapes::of(body);
            let all = if shows == Shapes::TEXT { shows } else { shows | Shapes::PLAIN };
            assert!(shapes.has(all), "{shows}: {shapes}");
            if let Some(chat) = PlainChat::read(&body.to_string()).unwrap().filter(|_| shapes.has(shows)) {
                assert!(shapes.has(chat.shapes()), "{shows}: {}", chat.shapes());
            }
        }
    }

    #[test]
    fn shapes_of_chats() {
        let user = json!({"role": "user", "content": "a"});
        let of = |more: Value| {
            let mut body = json!({"messages": [user], "model": "m", "temperature": 0});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            Shapes::of(&body).names().collect::<Vec<_>>().join(" ")
        };
        for (more, names) in [
            (json!({}), "plain"),
            (json!({"tools": [], "tool_choice": "auto", "chat_template_kwargs": {}, "documents": null}), "plain"),
            (json!({"add_generation_prompt": true, "continue_final_message": false}), "plain"),
            (json!({"add_generation_prompt": false}), "plain continue_final"),
            (json!({"tools": [{}], "tool_choice": {"type": "function"}}), "plain tools tool_choice"),
            (json!({"chat_template": "x", "reasoning_effort": "high"}), "plain effort other"),
            (json!({"messages": [{"role": "developer", "content": []}, 1, {"role": 1}]}), "plain system part"),
            (
                json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [{}], "reasoning": "r"}]}),
                "plain turns tool_results reasoning",
            ),
            (json!({"messages": "a", "tools": "b"}), "plain tools"),
        ] {
            assert_eq!(of(more.clone()), names, "{more}");
        }
        assert_eq!(Shapes::from_bits(u16::MAX), Shapes::ALL);
        assert_eq!((Shapes::PLAIN | Shapes::TOOLS).to_string(), "plain, tools");
    }
}
