//! The prompts file: JSON Lines with `messages`, `input_ids` or `prompt`, checked whole before the first request.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use semmoe_text::{ChatTemplate, Limits, Prompt as TextPrompt, Route, TextError, Tokenizer, prompt_ids};
use serde_json::{Value, json};

use crate::ProfilerError;

/// The longest line taken, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;

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
    let io = |source| ProfilerError::Io { path: path.to_path_buf(), action: "read", source };
    let mut reader = BufReader::new(File::open(path).map_err(io)?);
    let mut prompts = Vec::new();
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let bad = |cause: String| ProfilerError::Prompt { path: path.to_path_buf(), line, cause };
        let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text).map_err(io)?;
        if read as u64 > MAX_LINE_BYTES {
            return Err(bad(format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        let enough = how.max_prompts.is_some_and(|most| prompts.len() >= most);
        if read == 0 || enough {
            break;
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let input = how.prepare(&text).map_err(bad)?;
        prompts.push(Prompt { line, input });
    }
    if prompts.is_empty() {
        return Err(ProfilerError::NoPrompts { path: path.to_path_buf() });
    }
    Ok(prompts)
}

impl Preparation<'_> {
    fn prepare(self, line: &[u8]) -> Result<Input, String> {
        let record: Value = serde_json::from_slice(line).map_err(|error| format!("not JSON: {error}"))?;
        let prompt = find_prompt(record)?;
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

/// `messages` win over `input_ids`, and these over `prompt`: where a data set has messages, `prompt` is often the last turn
/// alone.
fn find_prompt(mut record: Value) -> Result<TextPrompt, String> {
    let Some(object) = record.as_object_mut() else { return Err("not a JSON object".into()) };
    let mut take = |name: &str| object.remove(name).filter(|value| !value.is_null());
    let (messages, ids, prompt) = (take("messages"), take("input_ids"), take("prompt"));
    match (messages, ids, prompt) {
        (Some(messages), ..) => {
            let tools = take("tools");
            let body = json!({ "messages": messages, "tools": tools });
            TextPrompt::from_json(Route::Chat, &body).map_err(|error| error.to_string())
        }
        (None, Some(ids), _) => match serde_json::from_value(ids) {
            Ok(ids) => Ok(TextPrompt::Ids(vec![ids])),
            Err(_) => Err("input_ids is not a list of token ids".into()),
        },
        (None, None, Some(Value::String(text))) => Ok(TextPrompt::Texts(vec![text])),
        (None, None, Some(_)) => Err("prompt is not a string".into()),
        (None, None, None) => Err("none of messages, input_ids and prompt".into()),
    }
}
