//! Reads the prompts file (JSON Lines, ShareGPT's JSON or plain text) completely before the first request. Invalid
//! records are reported with their position and skipped.

mod error;
mod sharegpt;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use semmoe_engines::recording::Asked;
use semmoe_text::{
    ChatTemplate, Limits, LineForm, LinePrompt, Prompt as TextPrompt, PromptLineError, PromptLines, Route, TextError,
    Tokenizer, prompt_ids, tokenizer_file,
};
use serde_json::json;

use crate::options::{PromptFormat, RecordOptions};
use crate::{BadRecord, ProfilerError};
use error::PromptError;

const EMPTY: &str = "the prompt is empty";

/// Hashes a prompt's kind and content with 128-bit FNV-1a.
fn hash(input: &LinePrompt) -> u128 {
    let fold = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    let start = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    match input {
        LinePrompt::Text(text) => text.bytes().fold(fold(start, 0), fold),
        LinePrompt::Ids(ids) => ids.iter().flat_map(|id| id.to_le_bytes()).fold(fold(start, 1), fold),
        LinePrompt::Messages { messages, tools } => {
            json!([messages, tools]).to_string().into_bytes().into_iter().fold(fold(start, 2), fold)
        }
    }
}

/// Identifies a prompt across resumed runs by its content and its index among equal prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PromptKey {
    pub(crate) hash: u128,
    pub(crate) occurrence: u32,
}

/// One record of the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    /// The record's line number, from 1, or its index in a list, from 0.
    pub(crate) place: usize,
    pub(crate) key: PromptKey,
    /// The request. If it contains messages, the engine applies the model's chat template.
    pub(crate) input: LinePrompt,
}

impl Prompt {
    pub(crate) fn asked(&self) -> Asked<'_> {
        match &self.input {
            LinePrompt::Text(text) => Asked::Text(text),
            LinePrompt::Ids(ids) => Asked::Ids(ids),
            LinePrompt::Messages { messages, tools } => Asked::Messages { messages, tools: tools.as_ref() },
        }
    }

    /// Approximate length, comparable only between prompts of the same kind.
    pub(crate) fn length(&self) -> usize {
        match &self.input {
            LinePrompt::Text(text) => text.len(),
            LinePrompt::Ids(ids) => ids.len(),
            LinePrompt::Messages { messages, .. } => messages.to_string().len(),
        }
    }
}

/// A tokenizer and, if present, its chat template.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl Encoder {
    /// Opens a directory with `tokenizer.json` (and `tokenizer_config.json`), or a `tokenizer.json`.
    pub(crate) fn open(path: &Path) -> Result<Self, ProfilerError> {
        let file = tokenizer_file(path);
        let template = match ChatTemplate::beside(&file, semmoe_engines::unix_seconds) {
            Err(TextError::NoTemplate) => None,
            template => Some(template?),
        };
        Ok(Encoder { tokenizer: Tokenizer::from_file(&file)?, template })
    }
}

/// Settings for preparing prompts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preparation<'a> {
    pub(crate) encoder: Option<&'a Encoder>,
    /// Vocabulary size; token ids must be below it.
    pub(crate) vocab_size: u32,
    pub(crate) options: &'a RecordOptions,
}

/// A file's prompts and invalid records.
#[derive(Debug, Default)]
pub(crate) struct Prompts {
    pub(crate) good: Vec<Prompt>,
    /// Bad records with their positions.
    pub(crate) bad: Vec<(usize, BadRecord)>,
    pub(crate) file: PathBuf,
    /// The word for a record: "line" or "conversation".
    unit: &'static str,
    occurrences: HashMap<u128, u32>,
}

/// Reads and prepares all prompts, skipping blank lines.
pub(crate) fn read(how: Preparation<'_>) -> Result<Prompts, ProfilerError> {
    let path = how.options.prompts.as_path();
    let format = how.options.format.of(path);
    let unit = if format == PromptFormat::ShareGpt { "conversation" } else { "line" };
    let mut prompts = Prompts { file: path.to_owned(), unit, ..Prompts::default() };
    let mut left = how.options.max_prompts.unwrap_or(usize::MAX);
    let mut take = |place: usize, prompt: Result<LinePrompt, PromptError>| {
        prompts.push(place, prompt.and_then(|prompt| how.prepare(prompt)));
        left -= 1;
        left > 0
    };
    if format == PromptFormat::ShareGpt {
        sharegpt::read(path, &mut take)?;
    } else {
        let form = if format == PromptFormat::Text { LineForm::Plain } else { LineForm::Json };
        for item in PromptLines::open(path, form)? {
            let (line, prompt) = match item {
                Ok((line, prompt)) => (line, Ok(prompt)),
                Err(PromptLineError::Line { line, cause, .. }) => (line, Err(PromptError::Line(cause.into()))),
                Err(error) => return Err(error.into()),
            };
            if !take(line, prompt) {
                break;
            }
        }
    }
    if prompts.good.is_empty() && prompts.bad.is_empty() {
        return Err(ProfilerError::NoPrompts(path.to_path_buf()));
    }
    Ok(prompts)
}

impl Prompts {
    fn push(&mut self, place: usize, input: Result<LinePrompt, PromptError>) {
        match input {
            Ok(input) => {
                let hash = hash(&input);
                let occurrence = self.occurrences.entry(hash).or_default();
                let key = PromptKey { hash, occurrence: *occurrence };
                *occurrence += 1;
                self.good.push(Prompt { place, key, input });
            }
            Err(error) => self.bad.push((place, self.bad_record(place, error.to_string()))),
        }
    }

    pub(crate) fn bad_record(&self, place: usize, reason: String) -> BadRecord {
        BadRecord { file: self.file.clone(), record: format!("{} {place}", self.unit), reason }
    }

    /// Number of records, including bad ones.
    pub(crate) fn len(&self) -> usize {
        self.good.len() + self.bad.len()
    }
}

impl Preparation<'_> {
    fn prepare(self, prompt: LinePrompt) -> Result<LinePrompt, PromptError> {
        let mut ids = match (prompt, self.encoder) {
            (LinePrompt::Ids(ids), _) => ids,
            (_, None) if self.options.max_prompt_tokens.is_some() => {
                return Err(PromptError::Unusable("truncating text to a token limit requires a tokenizer"));
            }
            (prompt, None) => {
                let is_empty = match &prompt {
                    LinePrompt::Text(text) => text.is_empty(),
                    LinePrompt::Ids(ids) => ids.is_empty(),
                    LinePrompt::Messages { messages, .. } => messages.as_array().is_none_or(Vec::is_empty),
                };
                return if is_empty { Err(PromptError::Unusable(EMPTY)) } else { Ok(prompt) };
            }
            (prompt, Some(encoder)) => {
                let prompt = text_prompt(prompt)?;
                let lists = prompt_ids(&prompt, &encoder.tokenizer, encoder.template.as_ref(), Limits::default());
                lists?.into_iter().next().unwrap_or_default()
            }
        };
        if ids.is_empty() {
            return Err(PromptError::Unusable(EMPTY));
        }
        ids.truncate(self.options.max_prompt_tokens.unwrap_or(usize::MAX));
        match ids.iter().find(|&&id| id >= self.vocab_size) {
            Some(&id) => Err(PromptError::TokenId { id, vocabulary: self.vocab_size }),
            None => Ok(LinePrompt::Ids(ids)),
        }
    }
}

fn text_prompt(prompt: LinePrompt) -> Result<TextPrompt, TextError> {
    match prompt {
        LinePrompt::Messages { messages, tools } => {
            let body = json!({ "messages": messages, "tools": tools });
            TextPrompt::from_json(Route::Chat, &body)
        }
        LinePrompt::Ids(ids) => Ok(TextPrompt::Ids(vec![ids])),
        LinePrompt::Text(text) => Ok(TextPrompt::Texts(vec![text])),
    }
}
