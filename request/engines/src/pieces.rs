//! Extracts the numbers that an engine reports about a request from pieces of its response, without parsing the
//! response.
//!
//! A piece may be JSON or server-sent events. A number cut off by the end of a piece is ignored. Generated text cannot
//! imitate a key, since quotes in it are escaped.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use crate::Route;

static DP_RANK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"dp_rank\""));
static PROMPT_TOKENS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"prompt_tokens\""));
static COMPLETION_TOKENS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"completion_tokens\""));
static OUTPUT_TOKENS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"output_tokens\""));

/// Returns the rank in `meta_info.dp_rank` of SGLang's `/generate` (since 0.5.10).
pub fn rank_in_meta(piece: &[u8]) -> Option<u32> {
    u32::try_from(number_after(piece, &DP_RANK)?).ok()
}

/// Returns the number of prompt tokens reported by the engine: `usage.prompt_tokens` of the OpenAI routes (in the last
/// event of a stream, if the client requested it) or `meta_info.prompt_tokens` of SGLang's `/generate`.
pub fn prompt_tokens(piece: &[u8]) -> Option<u64> {
    number_after(piece, &PROMPT_TOKENS)
}

/// Returns the number of tokens generated so far, as reported by the engine: `completion_tokens` of the OpenAI routes
/// and of SGLang's `/generate`, `output_tokens` of responses and messages. The last value counts, since some engines
/// report one in each event.
pub fn output_tokens(route: Route, piece: &[u8]) -> Option<u64> {
    let key = match route {
        Route::Chat | Route::Completions | Route::Generate => &*COMPLETION_TOKENS,
        Route::Responses | Route::Messages => &*OUTPUT_TOKENS,
        Route::Embeddings | Route::Tokenize | Route::Detokenize | Route::CountTokens | Route::Extra => return None,
    };
    key.find_iter(piece).filter_map(|at| number_at(piece, at, key)).last()
}

/// Returns the integer after the first `key`, which includes its quotes.
fn number_after(piece: &[u8], key: &Finder<'_>) -> Option<u64> {
    number_at(piece, key.find(piece)?, key)
}

/// Returns the integer after the `key` at this offset.
fn number_at(piece: &[u8], at: usize, key: &Finder<'_>) -> Option<u64> {
    if at > 0 && piece[at - 1] == b'\\' {
        return None;
    }
    let rest = skip_space(&piece[at + key.needle().len()..]);
    let rest = skip_space(rest.strip_prefix(b":")?);
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

fn skip_space(bytes: &[u8]) -> &[u8] {
    &bytes[bytes.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(bytes.len())..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_in_answers() {
        for (piece, rank) in [
            (r#"{"text":"a","meta_info":{"id":"x","dp_rank":3,"e2e_latency":0.1}}"#, Some(3)),
            ("data: {\"meta_info\": {\"dp_rank\" : 12}}\n\n", Some(12)),
            (r#"{"meta_info":{"dp_rank":1"#, None),
            (r#"{"meta_info":{"dp_rank":null}}"#, None),
            (r#"{"text":"\"dp_rank\":7,"}"#, None),
            (r#"{"text":"\"dp_rank","x":1}"#, None),
            (r#"{"meta_info":{"dp_rank":99999999999}}"#, None),
            ("\"dp_rank\"", None),
            ("", None),
        ] {
            assert_eq!(rank_in_meta(piece.as_bytes()), rank, "{piece}");
        }
    }

    #[test]
    fn prompt_tokens_in_answers() {
        for (piece, tokens) in [
            (r#"{"usage":{"prompt_tokens":12,"total_tokens":14,"completion_tokens":2}}"#, Some(12)),
            (r#"{"usage":{"prompt_tokens_details":null,"prompt_tokens": 7}}"#, Some(7)),
            ("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9}}\n\ndata: [DONE]\n\n", Some(9)),
            (r#"{"meta_info":{"prompt_tokens":5,"dp_rank":1}}"#, Some(5)),
            (r#"{"usage":{"prompt_tokens":1"#, None),
            (r#"{"usage":null}"#, None),
            (r#"{"text":"\"prompt_tokens\":3,"}"#, None),
        ] {
            assert_eq!(prompt_tokens(piece.as_bytes()), tokens, "{piece}");
        }
    }

    #[test]
    fn output_tokens_in_answers() {
        for (route, piece, tokens) in [
            (Route::Chat, r#"{"usage":{"prompt_tokens":12,"total_tokens":14,"completion_tokens":2}}"#, Some(2)),
            (Route::Completions, r#"{"usage":{"completion_tokens_details":{"x":1},"completion_tokens": 7}}"#, Some(7)),
            (
                Route::Generate,
                "data: {\"meta_info\":{\"completion_tokens\":1}}\n\ndata: {\"completion_tokens\":2}\n\n",
                Some(2),
            ),
            (Route::Messages, r#"{"usage":{"input_tokens":3,"output_tokens":5}}"#, Some(5)),
            (Route::Responses, r#"{"usage":{"output_tokens":6,"output_tokens_details":{}}}"#, Some(6)),
            (Route::Chat, r#"{"usage":{"output_tokens":6}}"#, None),
            (Route::Chat, r#"{"content":"\"completion_tokens\":3,"}"#, None),
            (Route::Chat, r#"{"usage":{"completion_tokens":1"#, None),
            (Route::Embeddings, r#"{"usage":{"completion_tokens":1}}"#, None),
        ] {
            assert_eq!(output_tokens(route, piece.as_bytes()), tokens, "{piece}");
        }
    }

    proptest! {
        #[test]
        fn any_piece_ends_without_panic(piece in "[\"dp_rank:0-9\\\\ {}]{0,40}|(\"output_tokens\"[: 0-9}]{0,3}){0,3}") {
            let _ = (rank_in_meta(piece.as_bytes()), output_tokens(Route::Messages, piece.as_bytes()));
        }
    }
}
