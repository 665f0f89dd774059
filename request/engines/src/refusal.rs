//! Detects responses in which an engine rejects a pin because it has no such rank.
//!
//! | engine | message |
//! |---|---|
//! | vLLM | `data_parallel_rank 1 is out of range [0, 1).` |
//! | vLLM's Rust front end | `data parallel rank 1 is out of range for 1 engine(s)` |
//! | SGLang | `routed_dp_rank=1 out of range [0, 1)`, `routed_dp_rank=1 is not active` |
//!
//! All have status 400, except streams of vLLM and of SGLang's `/generate` (200 with an error event) and inactive ranks
//! (503). The text must be the entire error message, since engines quote client input in other messages.

use http::StatusCode;
use serde_json::Value;

/// Maximum length of a document that reports a rejected pin; a longer one reports another error.
const LONGEST: usize = 1024;

/// A pin that an engine rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRefusal {
    /// The rank that was pinned.
    pub rank: u32,
    /// Number of ranks that the engine claims to have.
    pub ranks: Option<u16>,
}

/// Returns whether a response with this status may reject a pin; `streams` is whether a stream was requested.
pub fn may_refuse(status: StatusCode, streams: bool) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::SERVICE_UNAVAILABLE) || streams && status == StatusCode::OK
}

/// Returns the rejected pin that an error document, or the first event of a stream, reports.
pub fn of_rank(piece: &[u8]) -> Option<RankRefusal> {
    let document = match piece.strip_prefix(b"data: ") {
        None => piece,
        // This check rules out almost every stream.
        Some(event) => Some(event).filter(|event| event.starts_with(b"{\"error\""))?,
    };
    let document = document[..document.len().min(LONGEST + 1)].split(|byte| *byte == b'\n').next();
    let document = document.filter(|document| document.len() <= LONGEST)?;
    let value: Value = serde_json::from_slice(document).ok()?;
    of_message(["/error/message", "/message", "/detail"].into_iter().find_map(|at| value.pointer(at)?.as_str())?)
}

fn of_message(message: &str) -> Option<RankRefusal> {
    let rest = ["data_parallel_rank", "data parallel rank", "routed_dp_rank"]
        .iter()
        .find_map(|name| message.strip_prefix(name))?
        .strip_prefix(['=', ' '])?;
    let (rank, rest) = rest.split_once(' ')?;
    let rest = rest.strip_prefix("is ").unwrap_or(rest);
    let ranks = match rest.trim_end_matches('.') {
        "out of range" | "not active" => None,
        range => {
            let range = range.strip_prefix("out of range ")?;
            let by_interval = range.strip_prefix("[0, ").and_then(|range| range.strip_suffix(')'));
            let by_count = || range.strip_prefix("for ").and_then(|range| range.strip_suffix(" engine(s)"));
            Some(by_interval.or_else(by_count)?.parse().ok()?)
        }
    };
    Some(RankRefusal { rank: rank.parse().ok()?, ranks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn refusals_of_all_engines_are_read() {
        for (message, ranks) in [
            ("data_parallel_rank 1 is out of range [0, 1).", Some(1)),
            ("data parallel rank 1 is out of range for 4 engine(s)", Some(4)),
            ("routed_dp_rank=1 out of range [0, 1)", Some(1)),
            ("routed_dp_rank=1 is not active", None),
            ("data_parallel_rank=1 out of range", None),
        ] {
            let error = json!({ "message": message, "type": "BadRequestError", "code": 400 });
            let documents =
                [json!({ "error": error }), error.clone(), json!({ "detail": message })].map(|body| body.to_string());
            let event = format!("data: {}\n\ndata: [DONE]\n\n", documents[0]);
            let anthropic =
                json!({ "type": "error", "error": { "type": "BadRequestError", "message": message } }).to_string();
            for document in documents.iter().chain([&event, &anthropic]) {
                assert_eq!(of_rank(document.as_bytes()), Some(RankRefusal { rank: 1, ranks }), "{document}");
            }
        }
    }

    /// Words that a client can make an engine quote are not a refusal.
    #[test]
    fn quotes_are_no_refusals() {
        for message in [
            "unknown field 'data_parallel_rank 1 is out of range [0, 1).'",
            "data_parallel_rank 1 is out of range [0, 1).'",
            "data_parallel_rank 1 is out of range [0, x).",
            "data_parallel_rank x is out of range [0, 1).",
            "data_parallel_rank 1 is out of range [0, 99999999999).",
            "data_parallel_rank",
            "max_tokens=1 out of range [0, 1)",
        ] {
            assert_eq!(of_message(message), None, "{message}");
        }
        let long = json!({ "error": { "message": "routed_dp_rank=1 is not active" }, "more": "x".repeat(LONGEST) });
        assert_eq!(of_rank(long.to_string().as_bytes()), None);
        let text = json!({ "choices": [{ "text": "routed_dp_rank=1 is not active" }] });
        assert_eq!(of_rank(text.to_string().as_bytes()), None);
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_panic(piece in "(data: )?[{}\":,a-z_=\\[\\]() 0-9\\.]{0,80}") {
            let _ = (of_rank(piece.as_bytes()), of_message(&piece));
        }
    }
}
