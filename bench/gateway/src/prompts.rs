//! Requests of a given number of words, cut from the prompts in JSONL files.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::BenchError;

/// An eight-digit number at the start of every prompt; changing it makes a prompt that no cache holds.
pub(crate) const MARK: &str = "Request 00000000. ";
/// The digits in [`MARK`].
pub(crate) const MARK_DIGITS: std::ops::Range<usize> = 8..16;

/// All text of the files, in order.
fn text(files: &[PathBuf]) -> Result<String, BenchError> {
    let mut text = String::new();
    for path in files {
        let lines = std::fs::read_to_string(path).map_err(|source| BenchError::Read { path: path.clone(), source })?;
        for (index, line) in lines.lines().enumerate() {
            let fail = |cause: String| BenchError::Prompts { path: path.clone(), line: index + 1, cause };
            let line: Value = serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
            let said =
                of_line(&line).ok_or_else(|| fail("neither \"messages\" nor \"prompt\" holds text".to_owned()))?;
            text.push_str(&said);
            text.push('\n');
        }
    }
    Ok(text)
}

fn of_line(line: &Value) -> Option<String> {
    let Some(messages) = line["messages"].as_array() else { return line["prompt"].as_str().map(str::to_owned) };
    let said: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
    Some(said.join("\n")).filter(|said| !said.is_empty())
}

/// `count` different prompts of `words` words each, white space included. If the text is too short, it is reused with
/// other offsets.
pub(crate) fn prompts(files: &[PathBuf], count: usize, words: usize) -> Result<Vec<String>, BenchError> {
    let text = text(files)?;
    let starts: Vec<usize> =
        text.split_ascii_whitespace().map(|word| word.as_ptr() as usize - text.as_ptr() as usize).collect();
    if words == 0 || starts.len() < 2 * words {
        return Err(BenchError::TooFewWords { found: starts.len(), expected: (2 * words).max(1) });
    }
    let per_round = starts.len() / words - 1;
    let prompt = |index: usize| {
        let (round, at) = (index / per_round, index % per_round);
        // Every pass starts a few words later.
        let first = at * words + round * 97 % words;
        text[starts[first]..starts[first + words]].trim_end().to_owned()
    };
    Ok((0..count).map(prompt).collect())
}

/// The request for one prompt, and the range of its mark's digits.
pub(crate) fn request(host: &str, prompt: &str, streams: bool) -> (Vec<u8>, std::ops::Range<usize>) {
    let content = format!("{MARK}{prompt}");
    let body = json!({
        "model": "bench", "messages": [{ "role": "user", "content": content }], "max_tokens": 64,
        "temperature": 0.7, "stream": streams,
    })
    .to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nuser-agent: semmoe-bench\r\naccept: */*\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mark = head.len() + body.find(MARK).unwrap_or_default();
    ((head + &body).into_bytes(), mark + MARK_DIGITS.start..mark + MARK_DIGITS.end)
}

/// The repository's own prompts.
pub(crate) fn bundled() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/prompts");
    ["profile.jsonl", "heldout.jsonl"].map(|file| folder.join(file)).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn two_hundred_different_prompts_of_700_words() {
        let prompts = prompts(&bundled(), 200, 700).unwrap();
        assert!(prompts.iter().all(|prompt| prompt.split_ascii_whitespace().count() == 700));
        assert_eq!(prompts.iter().collect::<HashSet<_>>().len(), 200);
    }

    #[test]
    fn a_request_is_json_with_its_mark() {
        let (request, mark) = request("127.0.0.1:1", "a \"quoted\" word", true);
        assert_eq!(&request[mark], b"00000000");
        let text = String::from_utf8(request).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["messages"][0]["content"], "Request 00000000. a \"quoted\" word");
        assert_eq!(body["stream"], true);
    }
}
