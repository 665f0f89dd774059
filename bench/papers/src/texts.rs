//! The prompts of `assets/prompts`.

use std::path::Path;

use serde::Deserialize;

use crate::Outcome;

pub(crate) const PROFILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/prompts/profile.jsonl");
pub(crate) const HELD_OUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/prompts/heldout.jsonl");

/// A prompt: a text or a conversation, and its kind.
#[derive(Deserialize)]
pub(crate) struct Prompt {
    pub(crate) domain: String,
    prompt: Option<String>,
    #[serde(default)]
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    content: String,
}

impl Prompt {
    /// The text, or that of all messages of a conversation.
    pub(crate) fn text(self) -> String {
        let contents: Vec<String> = self.messages.into_iter().map(|message| message.content).collect();
        self.prompt.unwrap_or_else(|| contents.join("\n"))
    }
}

pub(crate) fn prompts(file: &str) -> Outcome<Vec<Prompt>> {
    let text = std::fs::read_to_string(Path::new(file)).map_err(|error| format!("{file}: {error}"))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
