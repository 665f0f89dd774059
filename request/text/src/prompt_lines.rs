//! Reads prompt files line by line: JSON Lines with `messages`, `input_ids` or `prompt`, or one plain text per line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Maximum length of a line, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The format of the lines of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineForm {
    /// One JSON object per line.
    Json,
    /// The prompt itself.
    Plain,
}

/// The prompt on one line, unchanged.
#[derive(Clone, Debug, PartialEq)]
pub enum LinePrompt {
    /// A conversation in OpenAI's format, unchecked.
    Messages {
        /// The turns.
        messages: Value,
        /// The tools that the model may call.
        tools: Option<Value>,
    },
    /// Token ids.
    Ids(Vec<u32>),
    /// A text, which may be empty.
    Text(String),
}

/// An error while reading a prompt file.
#[derive(Debug, thiserror::Error)]
pub enum PromptLineError {
    /// Reading the file failed.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A line is invalid.
    #[error("{} line {line}: {cause}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The problem.
        #[source]
        cause: BadLine,
    },
}

/// The reason why a line is not a prompt.
#[derive(Debug, thiserror::Error)]
pub enum BadLine {
    /// Too many bytes.
    #[error("longer than {MAX_LINE_BYTES} bytes")]
    TooLong,
    /// Expected JSON.
    #[error("not JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    /// Expected ShareGPT's list.
    #[error("not a JSON list of conversations: {0}")]
    NotConversations(#[source] serde_json::Error),
    /// Expected text.
    #[error("not UTF-8: {0}")]
    NotUtf8(#[from] std::str::Utf8Error),
    /// JSON of another form.
    #[error("{0}")]
    Form(&'static str),
}

/// Iterates over the prompts of a file with their line numbers, from 1; skips blank lines. An invalid line yields an
/// error and reading continues; an I/O error ends the iteration.
#[derive(Debug)]
pub struct PromptLines {
    reader: BufReader<File>,
    path: PathBuf,
    form: LineForm,
    line: usize,
    text: Vec<u8>,
    ended: bool,
}

impl PromptLines {
    /// Opens `path`.
    ///
    /// # Errors
    /// [`PromptLineError`] if the file cannot be opened.
    pub fn open(path: &Path, form: LineForm) -> Result<Self, PromptLineError> {
        let file = File::open(path).map_err(|source| PromptLineError::Io { path: path.to_path_buf(), source })?;
        let reader = BufReader::new(file);
        Ok(Self { reader, path: path.to_path_buf(), form, line: 0, text: Vec::new(), ended: false })
    }

    /// Reads a line, but stores only enough of an overlong one to detect that it is too long; returns the number of
    /// bytes stored.
    fn read_line(&mut self) -> io::Result<usize> {
        let kept = self.reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut self.text)?;
        if kept as u64 > MAX_LINE_BYTES && !self.text.ends_with(b"\n") {
            self.reader.skip_until(b'\n')?;
        }
        Ok(kept)
    }

    fn next_prompt(&mut self) -> Result<Option<LinePrompt>, PromptLineError> {
        loop {
            self.line += 1;
            self.text.clear();
            let read = self.read_line().map_err(|source| {
                self.ended = true;
                PromptLineError::Io { path: self.path.clone(), source }
            })?;
            let bad = |cause| PromptLineError::Line { path: self.path.clone(), line: self.line, cause };
            if read as u64 > MAX_LINE_BYTES {
                return Err(bad(BadLine::TooLong));
            }
            if read == 0 {
                self.ended = true;
                return Ok(None);
            }
            if !self.text.iter().all(u8::is_ascii_whitespace) {
                return parse(&self.text, self.form).map(Some).map_err(bad);
            }
        }
    }
}

impl Iterator for PromptLines {
    type Item = Result<(usize, LinePrompt), PromptLineError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        self.next_prompt().map(|prompt| prompt.map(|prompt| (self.line, prompt))).transpose()
    }
}

fn parse(line: &[u8], form: LineForm) -> Result<LinePrompt, BadLine> {
    match form {
        LineForm::Json => find_prompt(serde_json::from_slice(line)?),
        LineForm::Plain => Ok(LinePrompt::Text(std::str::from_utf8(line)?.trim_end_matches(['\r', '\n']).to_owned())),
    }
}

/// Finds the prompt in a record. `messages` takes precedence over `input_ids`, which takes precedence over `prompt`: in
/// data sets with messages, `prompt` is often only the last turn.
fn find_prompt(mut record: Value) -> Result<LinePrompt, BadLine> {
    let Some(object) = record.as_object_mut() else { return Err(BadLine::Form("not a JSON object")) };
    let mut take = |name: &str| object.remove(name).filter(|value| !value.is_null());
    let (messages, ids, prompt) = (take("messages"), take("input_ids"), take("prompt"));
    match (messages, ids, prompt) {
        (Some(messages), ..) => Ok(LinePrompt::Messages { messages, tools: take("tools") }),
        (None, Some(ids), _) => match serde_json::from_value(ids) {
            Ok(ids) => Ok(LinePrompt::Ids(ids)),
            Err(_) => Err(BadLine::Form("input_ids is not a list of token ids")),
        },
        (None, None, Some(Value::String(text))) => Ok(LinePrompt::Text(text)),
        (None, None, Some(_)) => Err(BadLine::Form("prompt is not a string")),
        (None, None, None) => Err(BadLine::Form("it has none of messages, input_ids and prompt")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], form: LineForm) -> Vec<Result<(usize, LinePrompt), String>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        PromptLines::open(file.path(), form).unwrap().map(|line| line.map_err(|error| error.to_string())).collect()
    }

    #[test]
    fn lines_of_json() {
        let text = concat!(
            r#"{"prompt": "a", "messages": [1], "tools": [2]}"#,
            "\n\n",
            r#"{"input_ids": [1, 2], "prompt": "b"}"#,
            "\r\n",
            r#"{"prompt": "c", "messages": null}"#
        );
        let expected = vec![
            Ok((1, LinePrompt::Messages { messages: serde_json::json!([1]), tools: Some(serde_json::json!([2])) })),
            Ok((3, LinePrompt::Ids(vec![1, 2]))),
            Ok((4, LinePrompt::Text("c".into()))),
        ];
        assert_eq!(read(text.as_bytes(), LineForm::Json), expected);
    }

    #[test]
    fn plain_lines() {
        let expected = vec![Ok((1, LinePrompt::Text("a b".into()))), Ok((3, LinePrompt::Text("{}".into())))];
        assert_eq!(read(b"a b\r\n \n{}", LineForm::Plain), expected);
        assert!(read(b"\xff\n", LineForm::Plain)[0].as_ref().unwrap_err().contains("line 1: not UTF-8"));
    }

    #[test]
    fn a_wrong_line_is_named_and_the_next_is_read() {
        for (text, cause) in [
            ("{}\n", "none of messages"),
            ("[]\n", "not a JSON object"),
            ("x\n", "not JSON"),
            ("{\"prompt\": 1}\n", "prompt is not a string"),
            ("{\"input_ids\": [-1]}\n", "input_ids is not a list"),
        ] {
            let lines = read(format!("\n{text}{{\"prompt\": \"a\"}}\n").as_bytes(), LineForm::Json);
            let error = lines[0].as_ref().unwrap_err();
            assert!(error.contains("line 2: ") && error.contains(cause), "{error}");
            assert_eq!(lines[1..], [Ok((3, LinePrompt::Text("a".into())))]);
        }
        assert!(PromptLines::open(Path::new("/nowhere/at-all"), LineForm::Json).is_err());
        let long = [vec![b'x'; MAX_LINE_BYTES as usize + 1], b"\n{\"prompt\": \"a\"}".to_vec()].concat();
        let lines = read(&long, LineForm::Json);
        assert!(lines[0].as_ref().unwrap_err().contains("line 1: longer than"));
        assert_eq!(lines[1..], [Ok((2, LinePrompt::Text("a".into())))], "it hides no line after it");
    }
}
