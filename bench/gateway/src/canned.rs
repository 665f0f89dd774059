//! The answers that the mock engine sends and the client expects.

use std::fmt::Write as _;

/// Events of a stream before `[DONE]`.
pub(crate) const EVENTS: usize = 64;

/// The mock's answer to a chat that is not streamed.
pub(crate) fn chat() -> Vec<u8> {
    let words = "The order of tokens decides which experts compute them, and the gateway decides where. ".repeat(4);
    format!(
        "{{\"id\":\"chatcmpl-5d3f\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench\",\"choices\":[\
         {{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{words}\",\"reasoning_content\":null,\"tool_calls\":null}},\
         \"logprobs\":null,\"finish_reason\":\"length\",\"matched_stop\":null}}],\
         \"usage\":{{\"prompt_tokens\":1000,\"total_tokens\":1064,\"completion_tokens\":64,\"prompt_tokens_details\":null}}}}"
    )
    .into_bytes()
}

/// The events of a stream, each as SGLang writes one, `[DONE]` last.
pub(crate) fn events() -> Vec<Vec<u8>> {
    let event = |index: usize| {
        let word = ["The", " order", " of", " tokens", " decides", " which", " experts", " compute"][index % 8];
        format!(
            "data: {{\"id\":\"chatcmpl-5d3f\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"bench\",\
             \"choices\":[{{\"index\":0,\"delta\":{{\"role\":null,\"content\":\"{word}\",\"reasoning_content\":null,\"tool_calls\":null}},\
             \"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}}],\"usage\":null}}\n\n"
        )
        .into_bytes()
    };
    (0..EVENTS).map(event).chain(std::iter::once(b"data: [DONE]\n\n".to_vec())).collect()
}

/// A piece of a body in chunked coding.
pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    let mut size = String::new();
    // Writing into a String cannot fail.
    let _ = write!(size, "{:x}\r\n", data.len());
    [size.as_bytes(), data, b"\r\n"].concat()
}
