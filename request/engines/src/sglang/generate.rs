//! Requests and responses of `/generate`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

/// Body of `POST /generate`: one prompt, as text or as ids. Absent fields are not sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerateRequest {
    /// The prompt as text; exactly one of `text` and `input_ids` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The prompt as token ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_ids: Option<Vec<u32>>,
    /// Sampling parameters; the default is [`SamplingParams::default`].
    #[serde(deserialize_with = "null_is_default")]
    pub sampling_params: SamplingParams,
    /// Whether to respond with server-sent events, each containing the entire text so far, followed by `[DONE]`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
    /// Whether to return `meta_info.routed_experts`, which requires the server flag `--enable-return-routed-experts`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub return_routed_experts: bool,
    /// First position whose route to return; some builds ignore it, so callers must count the rows in the response.
    #[serde(skip_serializing_if = "is_zero")]
    pub routed_experts_start_len: u32,
    /// Whether to return the prompt's token ids in the response.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub return_prompt_token_ids: bool,
    /// The request's id; the engine generates one if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rid: Option<String>,
    /// Attention-DP rank to run on; signed so that an error message can quote an invalid one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_dp_rank: Option<i64>,
    /// The older name of `routed_dp_rank`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_rank: Option<i64>,
}

/// Sampling parameters with SGLang's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// Maximum number of tokens to generate.
    pub max_new_tokens: Option<u32>,
    /// Minimum number of tokens before end-of-sequence or a stop can end the generation.
    pub min_new_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus sampling threshold.
    pub top_p: f32,
    /// Number of most likely tokens to sample from; -1 means all.
    pub top_k: i32,
    /// Texts that end the output and are removed from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopStrings>,
    /// Tokens that end the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether to continue past the end of sequence.
    pub ignore_eos: bool,
    /// Whether to omit special tokens from the text.
    pub skip_special_tokens: bool,
    /// Sampling seed for this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_new_tokens: Some(128),
            min_new_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: -1,
            stop: None,
            stop_token_ids: None,
            ignore_eos: false,
            skip_special_tokens: true,
            sampling_seed: None,
        }
    }
}

impl SamplingParams {
    /// Creates the parameters for greedy decoding of at most `max_new_tokens`.
    pub fn greedy(max_new_tokens: u32) -> Self {
        Self { max_new_tokens: Some(max_new_tokens), temperature: 0.0, ..Self::default() }
    }
}

/// One stop text or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StopStrings {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl StopStrings {
    /// All stop texts.
    pub fn as_slice(&self) -> &[String] {
        match self {
            Self::One(stop) => std::slice::from_ref(stop),
            Self::Many(stops) => stops,
        }
    }
}

/// Response of `/generate`; with `stream`, the data of every event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerateResponse {
    /// The text so far, without the prompt.
    pub text: String,
    /// The generated ids so far.
    pub output_ids: Vec<u32>,
    /// The prompt's ids, if requested; some builds return them in `meta_info` instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Counts and further details.
    pub meta_info: MetaInfo,
}

impl GenerateResponse {
    /// Returns the prompt's ids from whichever field the build uses.
    pub fn prompt_ids(&self) -> Option<&[u32]> {
        self.prompt_token_ids.as_deref().or(self.meta_info.prompt_token_ids.as_deref())
    }
}

/// The `meta_info` of a response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetaInfo {
    /// The request's id.
    pub id: String,
    /// The reason why generation ended; `None` while it is running.
    pub finish_reason: Option<FinishReason>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated so far.
    pub completion_tokens: u64,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Seconds from the request's arrival to this response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_latency: Option<f64>,
    /// The attention-DP rank that ran the request, if the engine reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_rank: Option<u32>,
    /// Base64 of raw little-endian i32; see [`super::encode_routed_experts`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_experts: Option<String>,
    /// The prompt's ids; see [`GenerateResponse::prompt_ids`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// The reason why generation ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum FinishReason {
    /// End of sequence, a stop token (a number) or a stop text.
    Stop {
        /// The tokens matched.
        #[serde(default)]
        matched: serde_json::Value,
    },
    /// `max_new_tokens` reached.
    Length {
        /// The request's `max_new_tokens`.
        #[serde(default)]
        length: u32,
    },
    /// Aborted by the engine.
    Abort {
        /// The engine's reason.
        #[serde(default)]
        message: Option<String>,
    },
}

/// Encodes [`MetaInfo::routed_experts`]: base64 of little-endian i32 without a header, in the order rows x layers x k.
/// [`crate::recording::decode`] is the inverse.
pub fn encode_routed_experts(ids: &[i32]) -> String {
    let bytes: Vec<[u8; 4]> = ids.iter().map(|id| id.to_le_bytes()).collect();
    STANDARD.encode(bytes.as_flattened())
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_sends_only_what_is_set() {
        let request = GenerateRequest {
            input_ids: Some(vec![1, 2]),
            sampling_params: SamplingParams::greedy(3),
            ..Default::default()
        };
        let sent = serde_json::to_value(&request).unwrap();
        let keys: Vec<&String> = sent.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["input_ids", "sampling_params"]);
        assert_eq!(serde_json::from_value::<GenerateRequest>(sent).unwrap(), request);
    }

    #[test]
    fn a_foreign_request_is_read() {
        let request: GenerateRequest = serde_json::from_value(json!({
            "text": "hi", "sampling_params": null, "data_parallel_rank": -1, "lora_path": "x", "stream": true
        }))
        .unwrap();
        assert_eq!(request.sampling_params, SamplingParams::default());
        assert_eq!((request.routed_dp_rank, request.data_parallel_rank), (None, Some(-1)));
    }

    #[test]
    fn finish_reasons() {
        for (json, reason) in [
            (json!({"type": "stop", "matched": 7}), FinishReason::Stop { matched: json!(7) }),
            (json!({"type": "length", "length": 3}), FinishReason::Length { length: 3 }),
            (json!({"type": "abort", "message": "x"}), FinishReason::Abort { message: Some("x".into()) }),
        ] {
            assert_eq!(serde_json::to_value(&reason).unwrap(), json);
            assert_eq!(serde_json::from_value::<FinishReason>(json).unwrap(), reason);
        }
    }
}
