//! Answers in which an engine says that it failed: errors of the server, and generations that it aborted.
//!
//! vLLM's API servers and SGLang's HTTP server outlive what computes behind them. Then requests get a 500 that names
//! the cause, a 200 whose generation ended as `abort`, or an error event in a stream that began well. Recognised in
//! pieces of the answer as they pass; text cannot pretend to be any of it, as quotes in it are escaped.

use std::sync::LazyLock;

use memchr::memmem::{self, Finder};
use serde_json::Value;

/// vLLM's name for a dead engine core, in errors of every shape. It is final: the core does not come back by itself.
const DEAD_CORE: &str = "EngineCore encountered an issue";

/// Types of errors that are the server's, where they have no code.
const SERVER_ERRORS: [&str; 3] = ["InternalServerError", "internal_server_error", "server_error"];
static ERROR_EVENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("data: {\"error\""));
static ABORT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"abort\""));

/// How an engine failed a request that it had taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The engine core is dead, and the server in front of it reports that.
    Dead,
    /// It ended the generation for a reason of its own.
    Abort,
    /// It reports an error of the server.
    Error,
}

impl Failure {
    /// In metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Dead => "engine_dead",
            Self::Abort => "abort",
            Self::Error => "engine_error",
        }
    }
}

/// The engine's failure as a piece of a 200 answer shows it. Pieces are whole events, or JSON.
pub fn in_piece(piece: &[u8]) -> Option<Failure> {
    let error = ERROR_EVENT.find_iter(piece).filter_map(|at| error_event(&piece[at..])).last();
    error.or_else(|| ABORT.find_iter(piece).any(|at| is_abort(piece, at)).then_some(Failure::Abort))
}

/// The failure in a whole document with a status of 500 and above: a dead engine, or another error of the server.
/// `None` where it is not an engine's error document.
pub fn in_error(document: &[u8]) -> Option<Failure> {
    let value: Value = serde_json::from_slice(document).ok()?;
    // SGLang's OpenAI routes have the members of the error at the top.
    let error = value.get("error").filter(|error| error.is_object()).unwrap_or(&value);
    let message = error.get("message")?.as_str()?;
    Some(of_message(message))
}

fn of_message(message: &str) -> Failure {
    if message.contains(DEAD_CORE) { Failure::Dead } else { Failure::Error }
}

/// Whether the first piece of an answer has no content for the client yet: no text, no tokens, no tool call.
/// `false` where that is not certain.
pub fn is_empty(piece: &[u8]) -> bool {
    let nothing = |json: &[u8]| serde_json::from_slice(json).is_ok_and(|value| says_nothing(&value));
    if !piece.starts_with(b"data:") {
        return nothing(piece);
    }
    let lines = piece.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data: "));
    let mut lines = lines.filter(|data| *data != b"[DONE]").peekable();
    lines.peek().is_some() && lines.all(nothing)
}

/// One document of an answer, an event or the whole.
fn says_nothing(value: &Value) -> bool {
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    let all_empty = |holder: &Value, fields: &[&str]| fields.iter().all(|field| holder.get(field).is_none_or(empty));
    const SAID: [&str; 7] =
        ["text", "content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal"];
    let choice = |choice: &Value| {
        let part = choice.get("message").or_else(|| choice.get("delta"));
        all_empty(choice, &SAID) && part.is_none_or(|part| all_empty(part, &SAID))
    };
    if value.get("error").is_some_and(Value::is_object) {
        return true;
    }
    match (value.get("choices").and_then(Value::as_array), value.get("meta_info")) {
        (Some(choices), _) => choices.iter().all(choice),
        (None, Some(_)) => all_empty(value, &["text", "output_ids"]),
        (None, None) => false,
    }
}

/// `event` starts with `data: {"error"`. Errors of the client's making are no failures of the engine.
fn error_event(event: &[u8]) -> Option<Failure> {
    let end = memmem::find(event, b"\n").unwrap_or(event.len());
    let value: Value = serde_json::from_slice(&event[b"data: ".len()..end]).ok()?;
    let error = &value["error"];
    let code = error["code"].as_u64().or_else(|| error["code"].as_str()?.parse().ok());
    let is_server = match code {
        Some(code) => code >= 500,
        None => error["type"].as_str().is_some_and(|kind| SERVER_ERRORS.contains(&kind)),
    };
    is_server.then(|| of_message(error["message"].as_str().unwrap_or_default()))
}

/// Whether the `"abort"` at `at` is why a generation ended: `"finish_reason": "abort"`, or SGLang's
/// `"finish_reason": {"type": "abort", ...}`, unless that says that the request was at fault.
fn is_abort(piece: &[u8], at: usize) -> bool {
    let before = |bytes: &[u8], end: &[u8]| bytes.trim_ascii_end().strip_suffix(end).map(<[u8]>::len);
    let Some(colon) = before(&piece[..at], b":") else { return false };
    if before(&piece[..colon], b"\"finish_reason\"").is_some() {
        return true;
    }
    if before(&piece[..colon], b"\"type\"").is_none() || memmem::find(&piece[..colon], b"\"finish_reason\"").is_none() {
        return false;
    }
    let rest = &piece[at..];
    let object = &rest[..memchr::memchr(b'}', rest).unwrap_or(rest.len())];
    let Some(status) = memmem::find(object, b"\"status_code\":") else { return true };
    let digit = object[status + b"\"status_code\":".len()..].trim_ascii_start().first();
    digit != Some(&b'4')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CORE: &str = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#;

    /// As vLLM 0.30 answered when an engine core was killed, and as SGLang 0.5.23 writes its errors.
    #[test]
    fn errors_by_engine() {
        for (document, expected) in [
            (CORE, Some(Failure::Dead)),
            (
                r#"{"object":"error","message":"Internal","type":"InternalServerError","param":null,"code":500}"#,
                Some(Failure::Error),
            ),
            (r#"{"error":{"message":"the scheduler is gone"}}"#, Some(Failure::Error)),
            (r#"{"detail":"Not Found"}"#, None),
            ("Internal Server Error", None),
            ("", None),
        ] {
            assert_eq!(in_error(document.as_bytes()), expected, "{document}");
        }
    }

    #[test]
    fn failures_in_pieces() {
        let spaced = CORE.replace("\":", "\": ").replace(",\"", ", \"");
        for (piece, expected) in [
            (format!("data: {spaced}\n\n"), Some(Failure::Dead)),
            (format!("data: {{\"choices\":[]}}\n\ndata: {spaced}\n\ndata: [DONE]\n\n"), Some(Failure::Dead)),
            ("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n".to_owned(), Some(Failure::Error)),
            (
                "data: {\"error\":{\"message\":\"x\",\"type\":\"InternalServerError\"}}\n\n".to_owned(),
                Some(Failure::Error),
            ),
            ("data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n".to_owned(), None),
            ("data: {\"error\":{\"message\":\"too long\",\"type\":\"BadRequestError\"}}\n\n".to_owned(), None),
            ("data: {\"error\"".to_owned(), None),
            (r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#.to_owned(), Some(Failure::Abort)),
            (r#"{"choices":[{"text":"","finish_reason" : "abort"}]}"#.to_owned(), Some(Failure::Abort)),
            (r#"{"meta_info":{"finish_reason":{"type":"abort","message":"x"}}}"#.to_owned(), Some(Failure::Abort)),
            (
                r#"{"meta_info":{"finish_reason":{"type":"abort","status_code":503,"err_type":null}}}"#.to_owned(),
                Some(Failure::Abort),
            ),
            (r#"{"meta_info":{"finish_reason":{"type":"abort","status_code": 400}}}"#.to_owned(), None),
            (r#"{"choices":[{"text":"\"finish_reason\":\"abort\"","finish_reason":"stop"}]}"#.to_owned(), None),
            (r#"{"choices":[{"text":"abort","stop":"abort"}]}"#.to_owned(), None),
            (r#"data: {"choices":[{"text":"data: {\"error\": 1}"}]}"#.to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(in_piece(piece.as_bytes()), expected, "{piece}");
        }
    }

    #[test]
    fn first_pieces_without_content() {
        for (piece, expected) in [
            (r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#, true),
            (r#"{"choices":[{"text":"","finish_reason":"abort"},{"text":"a"}]}"#, false),
            (r#"{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[]}}]}"#, true),
            (r#"{"choices":[{"message":{"content":"","tool_calls":[{"id":1}]}}]}"#, false),
            (r#"{"choices":[{"message":{"content":"","reasoning":"so"}}]}"#, false),
            (r#"{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"abort"}}}"#, true),
            (r#"{"text":"","output_ids":[1],"meta_info":{}}"#, false),
            ("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n", true),
            ("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", false),
            ("data: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n", true),
            ("data: [DONE]\n\n", false),
            (r#"{"path":"/x"}"#, false),
            (r#"{"choices":"#, false),
            ("", false),
        ] {
            assert_eq!(is_empty(piece.as_bytes()), expected, "{piece}");
        }
    }

    proptest! {
        #[test]
        fn any_piece_ends_without_panic(piece in "(data: )?[\"abort:finish_reason error{}\\\\\n 0-9]{0,60}") {
            let _ = (in_piece(piece.as_bytes()), in_error(piece.as_bytes()), is_empty(piece.as_bytes()));
        }

        /// Whatever the text of an answer is, it is no failure.
        #[test]
        fn text_is_no_failure(text in ".{0,40}", at in 0usize..3) {
            let bait = ["\"finish_reason\":\"abort\"", "\n\ndata: {\"error\":{\"code\":500}}\n\n", "\"abort\""][at];
            let text = serde_json::json!(format!("{text}{bait}{text}"));
            let whole = format!("{{\"choices\":[{{\"text\":{text},\"finish_reason\":null}}]}}");
            prop_assert_eq!(in_piece(whole.as_bytes()), None);
            prop_assert_eq!(in_piece(format!("data: {whole}\n\n").as_bytes()), None);
        }
    }
}
