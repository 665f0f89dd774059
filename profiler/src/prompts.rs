//! The prompts file: JSON Lines with `messages`, `input_ids` or `prompt`, checked whole before the first request.

use std::path::Path;

use semmoe_text::{
    ChatTemplate, Limits, LineForm, LinePrompt, Prompt as TextPrompt, PromptLines, Route, TextError, Tokenizer,
    prompt_ids,
};
use serde_json::json;

use crate::ProfilerError;

/// What is sent for one line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    Text(String),
    Ids(Vec<u32>),
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    /// From 1.
    pub(crate) line: usize,
    pub(crate) input: Input,
}

/// Tokenizer and, where there is one, chat template.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl Encoder {
    /// From a directory with `tokenizer.json` (and `tokenizer_config.json`), or from a `tokenizer.json` itself.
    pub(crate) fn open(path: &Path) -> Result<Self, ProfilerError> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let config = file.with_file_name("tokenizer_config.json");
        let template = match config.is_file().then(|| ChatTemplate::from_config_file(&config)) {
            None | Some(Err(TextError::NoTemplate)) => None,
            Some(template) => Some(template?),
        };
        Ok(Encoder { tokenizer: Tokenizer::from_file(&file)?, template })
    }
}

/// How prompts are prepared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preparation<'a> {
    pub(crate) encoder: Option<&'a Encoder>,
    /// V: ids are below it.
    pub(crate) vocab_size: u32,
    /// Longer prompts are cut to this many tokens.
    pub(crate) max_prompt_tokens: Option<usize>,
    /// Only so many lines are taken.
    pub(crate) max_prompts: Option<usize>,
}

/// Reads and prepares all prompts; blank lines are skipped.
pub(crate) fn read(path: &Path, how: Preparation<'_>) -> Result<Vec<Prompt>, ProfilerError> {
    let mut prompts = Vec::new();
    for item in PromptLines::open(path, LineForm::Json)?.take(how.max_prompts.unwrap_or(usize::MAX)) {
        let (line, prompt) = item?;
        let bad = |cause: String| ProfilerError::Prompt { path: path.to_path_buf(), line, cause };
        prompts.push(Prompt { line, input: how.prepare(prompt).map_err(bad)? });
    }
    if prompts.is_empty() {
        return Err(ProfilerError::NoPrompts { path: path.to_path_buf() });
    }
    Ok(prompts)
}

impl Preparation<'_> {
    fn prepare(self, prompt: LinePrompt) -> Result<Input, String> {
        let prompt = text_prompt(prompt)?;
        let mut ids = match (prompt, self.encoder) {
            (TextPrompt::Ids(lists), _) => lists.into_iter().next().unwrap_or_default(),
            (TextPrompt::Texts(_), None) if self.max_prompt_tokens.is_some() => {
                return Err("a text can be cut to a number of tokens only with a tokenizer".into());
            }
            (TextPrompt::Texts(texts), None) => {
                let text = texts.into_iter().next().unwrap_or_default();
                return if text.is_empty() { Err("the prompt is empty".into()) } else { Ok(Input::Text(text)) };
            }
            (_, None) => return Err("it has messages, which need a tokenizer with a chat template".into()),
            (prompt, Some(encoder)) => {
                let lists = prompt_ids(&prompt, &encoder.tokenizer, encoder.template.as_ref(), Limits::default());
                lists.map_err(|error| error.to_string())?.into_iter().next().unwrap_or_default()
            }
        };
        if ids.is_empty() {
            return Err("the prompt is empty".into());
        }
        ids.truncate(self.max_prompt_tokens.unwrap_or(usize::MAX));
        match ids.iter().find(|&&id| id >= self.vocab_size) {
            Some(id) => Err(format!("token id {id} is not below the vocabulary size ({})", self.vocab_size)),
            None => Ok(Input::Ids(ids)),
        }
    }
}

fn text_prompt(prompt: LinePrompt) -> Result<TextPrompt, String> {
    match prompt {
        LinePrompt::Messages { messages, tools } => {
            let body = json!({ "messages": messages, "tools": tools });
            TextPrompt::from_json(Route::Chat, &body).map_err(|error| error.to_string())
        }
        LinePrompt::Ids(ids) => Ok(TextPrompt::Ids(vec![ids])),
        LinePrompt::Text(text) => Ok(TextPrompt::Texts(vec![text])),
    }
}
