//! Requests the routed experts of a prompt and reads the response, in any engine's dialect.
//!
//! | engine | route | request fields | response fields |
//! |---|---|---|---|
//! | sglang, semmoe | `/generate` | `return_routed_experts`, `return_prompt_token_ids` | `meta_info.routed_experts`, `output_ids`, `prompt_token_ids` (in either place) |
//! | sglang 0.5.23 | completions | `return_routed_experts`, `return_token_ids` | `sglext.routed_experts` of the response; `choices[0].token_ids`, `.prompt_token_ids` |
//! | sglang 0.5.23 | chat | `return_routed_experts`, `return_input_ids_in_sglext`, `return_output_ids_in_sglext` | `sglext` of the response; `output_ids` is one list per choice |
//! | sglang 0.5.16 | chat | `return_routed_experts`, `return_prompt_token_ids` | `sglext.routed_experts`; `choices[0].prompt_token_ids`; no output ids |
//! | sglang 0.5.16 | completions | `return_routed_experts` | `sglext.routed_experts`; no ids |
//! | older sglang | chat, completions | as the row above | `sgl_ext` of the choice |
//! | semmoe | chat, completions | as chat of sglang 0.5.23 | `sglext` of the response; `output_ids` is one list |
//! | vllm | chat, completions | `return_token_ids` (the experts come from a server flag) | `choices[0].routed_experts` and `.token_ids`; `prompt_token_ids` of the response or of the choice |
//!
//! The experts are base64-encoded raw little-endian i32 (SGLang) or a base64-encoded `.npy` file (vLLM); both are
//! accepted from any engine, since they cannot be confused.

mod answer;
mod encoding;
mod error;
mod question;
mod routes;

pub use answer::{ReportedAnswer, read};
pub use encoding::{Encoding, decode_bytes, encode_npy};
pub use error::RecordingError;
pub use question::{Asked, Question, Sampling, ask, uncached};
pub use routes::{ReportedRoutes, decode};
