//! Detects responses that report an engine failure: server errors, and generations aborted by the engine.
//!
//! vLLM's API servers and SGLang's HTTP server outlive the processes that run the model. Requests then receive a 500, a
//! 200 whose generation finished with `abort`, or an error event in a stream that started normally. Engines echo client
//! input, even as objects (the `metadata` of a response), so a failure counts only at its proper position in the
//! document:
//!
//! | place | routes | failure if |
//! |---|---|---|
//! | `error`, `response.error` | every route; events of `/v1/responses` | `code` is 500 or above, or there is none and `type` or `code` names the server |
//! | `choices[].finish_reason` | chat, completions | `"abort"`, or an object of that `type` whose `status_code` is not 400 to 499 |
//! | `meta_info.finish_reason` | `/generate`, also in each element of an array | as for `choices[].finish_reason` |
//!
//! The text of an error proves nothing, since a client may have supplied it; only the health route shows whether an
//! engine core is dead.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde_json::Value;

mod document;

pub use document::Document;

static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static ABORT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"abort\""));

/// How an engine failed a request after accepting it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The engine core is dead, according to the health route of the server in front of it.
    Dead,
    /// The engine itself aborted the generation.
    Abort,
    /// The engine reported a server error.
    Error,
}

impl Failure {
    /// Returns the label used in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Dead => "engine_dead",
            Self::Abort => "abort",
            Self::Error => "engine_error",
        }
    }
}

/// Returns the failure that complete events of a stream report, if any.
pub fn in_events(events: &[u8]) -> Option<Failure> {
    if !may_report(events) {
        return None;
    }
    data_lines(events).filter_map(|data| Document::default().push(data, true)).last()
}

/// Iterates over the data of each event.
fn data_lines(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = events.split(|byte| matches!(byte, b'\n' | b'\r'));
    lines.filter_map(|line| Some(line.strip_prefix(b"data:")?.trim_ascii()))
}

/// Returns whether the bytes contain a quoted word that every failure report has. Generated text cannot contain one,
/// since quotes in it are escaped.
fn may_report(bytes: &[u8]) -> bool {
    ERROR.find(bytes).is_some() || ABORT.find(bytes).is_some()
}

/// Returns whether the first piece of a response has no content for the client yet: no text, tokens or tool call.
/// Returns `false` if that is uncertain.
pub fn is_empty(piece: &[u8]) -> bool {
    let nothing = |json: &[u8]| serde_json::from_slice(json).is_ok_and(|value| says_nothing(&value));
    if matches!(piece.trim_ascii_start().first(), Some(b'{' | b'[')) {
        return nothing(piece);
    }
    let mut lines = data_lines(piece).filter(|data| *data != b"[DONE]").peekable();
    lines.peek().is_some() && lines.all(nothing)
}

/// Returns whether one document (an event or an entire response) has no content.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    /// The answer of vLLM 0.30 after an engine core was killed.
    const CORE: &str = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#;

    fn in_document(document: &str) -> Option<Failure> {
        Document::default().push(document.as_bytes(), true)
    }

    #[test]
    fn failures_in_events() {
        let spaced = CORE.replace("\":", "\": ").replace(",\"", ", \"");
        let error = |error: &str| format!("data: {{\"error\":{error}}}\n\n");
        for (events, expected) in [
            (format!("data: {spaced}\n\n"), Some(Failure::Error)),
            (format!("data: {{\"choices\":[]}}\n\ndata: {spaced}\n\ndata: [DONE]\n\n"), Some(Failure::Error)),
            (error(r#"{"message":"x","code":500}"#), Some(Failure::Error)),
            (error(r#"{"message":"x","code":"503"}"#), Some(Failure::Error)),
            (error(r#"{"message":"x","type":"InternalServerError"}"#), Some(Failure::Error)),
            (error(r#"{"message":"too long","code":400,"type":"InternalServerError"}"#), None),
            (error(r#"{"message":"too long","type":"BadRequestError"}"#), None),
            (error(r#""some text""#), None),
            ("data: {\"error\"".to_owned(), None),
            // In Anthropic's form, and that of responses.
            (
                "event: error\r\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"}}\r\n\r\n".to_owned(),
                Some(Failure::Error),
            ),
            (
                r#"data: {"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}"#
                    .to_owned(),
                Some(Failure::Error),
            ),
            (r#"data:{"choices":[{"delta":{},"finish_reason":"abort"}]}"#.to_owned(), Some(Failure::Abort)),
            (r#"data: {"choices":[{"text":"data: {\"error\": 1}"}]}"#.to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(in_events(events.as_bytes()), expected, "{events}");
        }
    }

    #[test]
    fn failures_in_documents() {
        let aborted = |more: &str| format!(r#"{{"text":"","meta_info":{{"finish_reason":{{"type":"abort"{more}}}}}}}"#);
        let schema = r#","message":"Failed to compile json grammar: {\"a\": {}} }}}","status_code":"#;
        for (document, expected) in [
            (r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#.to_owned(), Some(Failure::Abort)),
            (
                r#"{ "choices" : [ {"finish_reason":"stop"} , { "finish_reason" : "abort" } ] }"#.to_owned(),
                Some(Failure::Abort),
            ),
            (aborted(r#","message":"x""#), Some(Failure::Abort)),
            (aborted(r#","status_code":503,"err_type":null"#), Some(Failure::Abort)),
            (aborted(r#","status_code":null"#), Some(Failure::Abort)),
            (aborted(r#","status_code": 400"#), None),
            (format!("[{},{}]", aborted(r#","status_code":400"#), aborted("")), Some(Failure::Abort)),
            // The message quotes a client's schema, with arbitrary brackets.
            (aborted(&format!("{schema}400")), None),
            (aborted(&format!("{schema}500")), Some(Failure::Abort)),
            (CORE.to_owned(), Some(Failure::Error)),
            (r#"{"choices":[{"text":"\"finish_reason\":\"abort\"","finish_reason":"stop"}]}"#.to_owned(), None),
            (r#"{"choices":[{"text":"abort","stop":"abort"}]}"#.to_owned(), None),
            (r#"{"choices":[{"finish_reason":{"type":"stop","matched":"abort"}}]}"#.to_owned(), None),
            (r#"{"id":"x","status":"completed","error":null,"metadata":{"finish_reason":"abort"}}"#.to_owned(), None),
            ("\"abort\"".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(in_document(&document), expected, "{document}");
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
            ("event: error\ndata: {\"error\":{\"type\":\"api_error\"}}\n\n", true),
            ("data: [DONE]\n\n", false),
            (r#"{"path":"/x"}"#, false),
            (r#"{"choices":"#, false),
            ("", false),
        ] {
            assert_eq!(is_empty(piece.as_bytes()), expected, "{piece}");
        }
    }

    /// Any object that a client may have an engine echo, with words of failures at every depth.
    fn any_object() -> impl Strategy<Value = Value> {
        let key = || {
            let keys =
                ["error", "choices", "meta_info", "finish_reason", "response", "type", "code", "status_code", "x"];
            proptest::sample::select(keys.map(str::to_owned).to_vec())
        };
        let words = json!(["abort", "InternalServerError", "server_error", 500, 503, 400, null, "}", "\\\"}"]);
        let leaf = proptest::sample::select(words.as_array().unwrap().clone());
        leaf.prop_recursive(5, 24, 4, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                proptest::collection::btree_map(key(), inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    /// Applies the rules to a parsed document.
    fn by_parsing(value: &Value) -> Option<Failure> {
        let of_error = |error: &Value| {
            let code = error["code"].as_u64();
            let named = || {
                ["type", "code"]
                    .iter()
                    .any(|key| matches!(error[*key].as_str(), Some("InternalServerError" | "server_error")))
            };
            error.is_object() && code.map_or_else(named, |code| code >= 500)
        };
        let of_reason = |reason: &Value| {
            let status = reason["status_code"].as_u64();
            reason == "abort"
                || (reason["type"] == "abort" && !status.is_some_and(|status| (400..500).contains(&status)))
        };
        if of_error(&value["error"]) || of_error(&value["response"]["error"]) {
            return Some(Failure::Error);
        }
        let choices = value["choices"].as_array().into_iter().flatten();
        let mut holders = choices.chain([&value["meta_info"]]);
        holders.any(|holder| of_reason(&holder["finish_reason"])).then_some(Failure::Abort)
    }

    proptest! {
        #[test]
        fn any_piece_ends_without_panic(piece in "(data: )?[\"abort:finish_reason error{}\\[\\]\\\\\n 0-9]{0,60}") {
            let _ = (in_events(piece.as_bytes()), Document::default().push(piece.as_bytes(), false), is_empty(piece.as_bytes()));
        }

        /// Whatever the text of an answer is, and whatever it echoes from the request, it is not a failure.
        #[test]
        fn what_a_client_sent_is_no_failure(text in ".{0,40}", at in 0usize..3, object in any_object()) {
            let bait = ["\"finish_reason\":\"abort\"", "\n\ndata: {\"error\":{\"code\":500}}\n\n", "\"abort\""][at];
            let whole = json!({
                "metadata": object, "error": null, "response": { "metadata": object, "error": null },
                "choices": [{ "text": format!("{text}{bait}{text}"), "finish_reason": null, "echo": object }],
                "meta_info": { "finish_reason": { "type": "abort", "message": text, "status_code": 400 }, "echo": object },
            });
            prop_assert_eq!(in_document(&whole.to_string()), None);
            prop_assert_eq!(in_events(format!("data: {whole}\n\n").as_bytes()), None);
        }

        /// A document reports the same failure however it is cut.
        #[test]
        fn cuts_do_not_matter(
            error in any_object(), reason in any_object(), meta in any_object(), cuts in proptest::collection::vec(0usize..400, 0..6)
        ) {
            let whole = json!({
                "metadata": meta, "error": error, "choices": [{ "finish_reason": reason }, { "text": "a \" }" }],
            });
            let text = whole.to_string();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut < text.len()).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let mut document = Document::default();
            let mut found = None;
            for pair in cuts.windows(2) {
                found = document.push(&text.as_bytes()[pair[0]..pair[1]], false);
            }
            prop_assert_eq!(found, in_document(&text));
            prop_assert_eq!(found.is_some(), by_parsing(&whole).is_some(), "{}", text);
        }
    }
}
