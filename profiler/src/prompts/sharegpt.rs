//! Reads ShareGPT's format, a JSON list of conversations, one conversation at a time.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use semmoe_text::{BadLine, LinePrompt, PromptLineError};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::{Value, json};

use super::error::PromptError;
use crate::ProfilerError;

/// Passes each conversation and its index, from 0, to `take` until `take` returns false.
pub(super) fn read(
    path: &Path,
    take: &mut dyn FnMut(usize, Result<LinePrompt, PromptError>) -> bool,
) -> Result<(), ProfilerError> {
    let file = File::open(path).map_err(ProfilerError::io(path, "read"))?;
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 20, file));
    let mut list = List { take, enough: false };
    match json.deserialize_seq(&mut list) {
        Err(error) if !list.enough => {
            let (line, cause) = (error.line(), BadLine::NotConversations(error));
            Err(PromptLineError::Line { path: path.to_path_buf(), line, cause }.into())
        }
        _ => Ok(()),
    }
}

struct List<'a> {
    take: &'a mut dyn FnMut(usize, Result<LinePrompt, PromptError>) -> bool,
    enough: bool,
}

impl<'de> Visitor<'de> for &mut List<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut number = 0;
        while let Some(record) = list.next_element::<Value>()? {
            if !(self.take)(number, conversation(record)) {
                // Skips the rest, which the list reader treats as an error.
                self.enough = true;
                return Ok(());
            }
            number += 1;
        }
        Ok(())
    }
}

/// Returns the turns up to the last human turn, which the model answers next.
fn conversation(mut record: Value) -> Result<LinePrompt, PromptError> {
    let turns = match record.get_mut("conversations").map(Value::take) {
        Some(Value::Array(turns)) => turns,
        _ => return Err(PromptError::Unusable("no list of conversations")),
    };
    let mut messages = Vec::with_capacity(turns.len());
    for (at, turn) in turns.into_iter().enumerate() {
        let role = match turn["from"].as_str() {
            Some("human" | "user") => "user",
            Some("gpt" | "chatgpt" | "assistant" | "bing" | "bard" | "model") => "assistant",
            Some("system") => "system",
            Some(other) => {
                return Err(PromptError::Speaker { turn: at, from: other.chars().take(40).collect() });
            }
            None => return Err(PromptError::NoSpeaker(at)),
        };
        let Some(text) = turn["value"].as_str() else { return Err(PromptError::NoText(at)) };
        messages.push(json!({ "role": role, "content": text }));
    }
    let last =
        messages.iter().rposition(|message| message["role"] == "user").ok_or(PromptError::Unusable("no human turn"))?;
    messages.truncate(last + 1);
    Ok(LinePrompt::Messages { messages: messages.into(), tools: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &[u8], most: usize) -> (Vec<Result<Value, PromptError>>, Result<(), ProfilerError>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut found = Vec::new();
        let ended = read(file.path(), &mut |number, prompt| {
            assert_eq!(number, found.len());
            found.push(prompt.map(|prompt| match prompt {
                LinePrompt::Messages { messages, tools: None } => messages,
                other => panic!("{other:?}"),
            }));
            found.len() < most
        });
        (found, ended)
    }

    #[test]
    fn conversations_end_with_the_last_human_turn() {
        let text = br#"[
            {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "h"},
                {"from": "gpt", "value": "g"}, {"from": "user", "value": "u"}, {"from": "gpt", "value": "x"}]},
            {"conversations": []}, {"items": 1}, 7, {"conversations": [{"from": "gpt", "value": "x"}]},
            {"conversations": [{"from": "human", "value": 1}]}, {"conversations": [{"from": "dog", "value": "w"}]},
            {"conversations": [{"value": "w"}]}, {"conversations": [{"from": "human", "value": "last"}]}
        ]"#;
        let (found, ended) = read_text(text, usize::MAX);
        ended.unwrap();
        let roles: Vec<_> = found[0].as_ref().unwrap().as_array().unwrap().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        let errors: Vec<String> = found[1..8].iter().map(|bad| bad.as_ref().unwrap_err().to_string()).collect();
        assert_eq!(
            errors,
            [
                "no human turn",
                "no list of conversations",
                "no list of conversations",
                "no human turn",
                "turn 0 has no text",
                "turn 0 is from \"dog\", expected human, gpt or system",
                "turn 0 has no speaker",
            ]
        );
        assert_eq!(*found[8].as_ref().unwrap(), json!([{"role": "user", "content": "last"}]));
        let (first, ended) = read_text(text, 1);
        assert_eq!((first.len(), ended.is_ok()), (1, true));
    }

    #[test]
    fn what_is_no_list_is_named_with_its_line() {
        for (text, cause) in [
            (&b"{}"[..], "line 1: not a JSON list of conversations: invalid type: map"),
            (b"[\n{\"conversations\": [\n", "line 3: not a JSON list"),
            (b"[\n\"\xff\"]", "line 2: not a JSON list"),
            (b"", "EOF"),
        ] {
            let error = read_text(text, usize::MAX).1.unwrap_err().to_string();
            assert!(error.contains(cause), "{error}");
        }
    }
}
