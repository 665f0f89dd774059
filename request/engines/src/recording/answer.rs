//! Extracts token ids, counts and encoded routes from a response, wherever the engine's version puts them.

use serde::Deserialize;
use serde_json::Value;

use super::RecordingError;
use crate::Route;
use crate::sglang::{FinishReason, GenerateResponse};

/// The fields of a response, if present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedAnswer {
    /// The prompt's ids.
    pub prompt_ids: Option<Vec<u32>>,
    /// The generated ids.
    pub output_ids: Option<Vec<u32>>,
    /// Number of prompt tokens reported by the engine.
    pub prompt_tokens: Option<u64>,
    /// Number of generated tokens reported by the engine.
    pub output_tokens: Option<u64>,
    /// Why the engine aborted the generation, if it did.
    pub aborted: Option<String>,
    /// The rank that ran the request, in the engine's numbering; only on `/generate`.
    pub dp_rank: Option<u32>,
    /// Base64; see [`super::decode`].
    pub routed_experts: Option<String>,
}

/// Parses the response to a [`super::Question`] on this route.
///
/// # Errors
/// If the text is not a response of that route.
pub fn read(route: Route, answer: &[u8]) -> Result<ReportedAnswer, RecordingError> {
    let not_one = |error: serde_json::Error| RecordingError::Answer(error.into());
    if route == Route::Generate {
        return serde_json::from_slice(answer).map(of_generate).map_err(not_one);
    }
    let answer: OpenAi = serde_json::from_slice(answer).map_err(not_one)?;
    answer.into_reported()
}

fn of_generate(answer: GenerateResponse) -> ReportedAnswer {
    let meta = answer.meta_info;
    let count = |tokens: u64| (tokens > 0).then_some(tokens);
    ReportedAnswer {
        prompt_ids: answer.prompt_token_ids.or(meta.prompt_token_ids),
        output_ids: Some(answer.output_ids),
        prompt_tokens: count(meta.prompt_tokens),
        output_tokens: count(meta.completion_tokens),
        aborted: match meta.finish_reason {
            Some(FinishReason::Abort { message }) => Some(message.unwrap_or_else(|| "no reason given".to_owned())),
            _ => None,
        },
        dp_rank: meta.dp_rank,
        routed_experts: meta.routed_experts,
    }
}

/// A response of chat or completions. Null counts as absent.
#[derive(Debug, Deserialize)]
struct OpenAi {
    choices: Vec<Choice>,
    usage: Option<Usage>,
    #[serde(alias = "sgl_ext")]
    sglext: Option<Extension>,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    finish_reason: Option<Value>,
    routed_experts: Option<String>,
    #[serde(alias = "response_token_ids")]
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(alias = "sglext")]
    sgl_ext: Option<Extension>,
}

#[derive(Debug, Default, Deserialize)]
struct Extension {
    routed_experts: Option<String>,
    #[serde(alias = "prompt_token_ids")]
    input_ids: Option<Vec<u32>>,
    #[serde(alias = "token_ids")]
    output_ids: Option<OutputIds>,
}

/// Output ids: SGLang 0.5.23 returns a list per choice; other builds and semmoe's worker return a single list.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OutputIds {
    One(Vec<u32>),
    PerChoice([Vec<u32>; 1]),
}

impl OutputIds {
    fn only(self) -> Vec<u32> {
        match self {
            Self::One(ids) | Self::PerChoice([ids]) => ids,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl OpenAi {
    fn into_reported(self) -> Result<ReportedAnswer, RecordingError> {
        let found = self.choices.len();
        let Ok([choice]) = <[Choice; 1]>::try_from(self.choices) else {
            return Err(RecordingError::Choices(found));
        };
        let (outer, inner) = (self.sglext.unwrap_or_default(), choice.sgl_ext.unwrap_or_default());
        let usage = self.usage.unwrap_or_default();
        let aborted = choice.finish_reason.is_some_and(|reason| reason == "abort");
        Ok(ReportedAnswer {
            prompt_tokens: usage.prompt_tokens,
            output_tokens: usage.completion_tokens,
            aborted: aborted.then(|| "no reason given".to_owned()),
            dp_rank: None,
            routed_experts: choice.routed_experts.or(outer.routed_experts).or(inner.routed_experts),
            prompt_ids: self.prompt_token_ids.or(choice.prompt_token_ids).or(outer.input_ids).or(inner.input_ids),
            output_ids: choice.token_ids.or(outer.output_ids.or(inner.output_ids).map(OutputIds::only)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_and_spelling() {
        let routes = Some("AAAA".to_owned());
        let full = ReportedAnswer {
            prompt_ids: Some(vec![1, 2]),
            output_ids: Some(vec![3]),
            prompt_tokens: Some(2),
            output_tokens: Some(1),
            aborted: None,
            dp_rank: None,
            routed_experts: routes,
        };
        let usage = r#""usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}"#;
        let extension = r#"{"routed_experts":"AAAA","input_ids":[1,2],"output_ids":[3]}"#;
        for (route, answer) in [
            (
                Route::Generate,
                r#"{"text":"x","output_ids":[3],"prompt_token_ids":[1,2],"meta_info":{"id":"a","prompt_tokens":2,"completion_tokens":1,"routed_experts":"AAAA","finish_reason":{"type":"length","length":1}}}"#.to_owned(),
            ),
            (
                Route::Generate,
                r#"{"output_ids":[3],"meta_info":{"prompt_token_ids":[1,2],"prompt_tokens":2,"completion_tokens":1,"routed_experts":"AAAA"}}"#.to_owned(),
            ),
            (Route::Chat, format!(r#"{{"choices":[{{"index":0,"message":{{"content":"x"}},"finish_reason":"length"}}],{usage},"sglext":{extension}}}"#)),
            // SGLang 0.5.23.
            (Route::Chat, format!(r#"{{"choices":[{{"index":0,"message":{{"content":"x"}},"prompt_token_ids":[1,2]}}],{usage},"sglext":{{"routed_experts":"AAAA","input_ids":[1,2],"output_ids":[[3]]}}}}"#)),
            (Route::Chat, format!(r#"{{"choices":[{{"index":0,"prompt_token_ids":[1,2],"response_token_ids":[3]}}],{usage},"sglext":{{"routed_experts":"AAAA"}}}}"#)),
            (Route::Completions, format!(r#"{{"choices":[{{"index":0,"text":"x","token_ids":[3],"prompt_token_ids":[1,2]}}],{usage},"sglext":{{"routed_experts":"AAAA"}}}}"#)),
            (Route::Completions, format!(r#"{{"choices":[{{"index":0,"text":"x","sgl_ext":{extension}}}],{usage}}}"#)),
            (Route::Chat, format!(r#"{{"choices":[{{"token_ids":[3],"routed_experts":"AAAA"}}],"prompt_token_ids":[1,2],{usage}}}"#)),
            (Route::Completions, format!(r#"{{"choices":[{{"token_ids":[3],"routed_experts":"AAAA","prompt_token_ids":[1,2],"logprobs":null}}],{usage}}}"#)),
        ] {
            assert_eq!(read(route, answer.as_bytes()).unwrap(), full, "{answer}");
        }
    }

    #[test]
    fn what_is_no_answer() {
        for (route, answer, reason) in [
            (Route::Chat, r#"{"choices":[]}"#, "0 choices, expected 1"),
            (Route::Chat, r#"{"choices":[{},{}]}"#, "2 choices, expected 1"),
            (Route::Chat, r#"{"error":"x"}"#, "missing field `choices`"),
            (Route::Completions, r#"{"choices":[{"token_ids":[-1]}]}"#, "invalid value"),
            (Route::Chat, r#"{"choices":[{}],"sglext":{"output_ids":[[1],[2]]}}"#, "OutputIds"),
            (Route::Chat, r#"{"choices":[{}],"sglext":{"output_ids":[-1]}}"#, "OutputIds"),
            (Route::Generate, "[1, 2", "unexpected response"),
        ] {
            let error = read(route, answer.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let none = read(Route::Chat, br#"{"choices":[{"finish_reason":"abort"}],"usage":null}"#).unwrap();
        assert_eq!(none, ReportedAnswer { aborted: Some("no reason given".into()), ..ReportedAnswer::default() });
    }
}
