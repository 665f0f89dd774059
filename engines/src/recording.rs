//! Asking an engine for the routed experts of a prompt, and reading what it tells, whatever its dialect.
//!
//! | engine | route | asked with | told in |
//! |---|---|---|---|
//! | sglang, semmoe | `/generate` | `return_routed_experts`, `return_prompt_token_ids` | `meta_info.routed_experts`, `output_ids`, `prompt_token_ids` (in either place) |
//! | sglang, semmoe | chat, completions | `return_routed_experts`, `return_input_ids_in_sglext`, `return_output_ids_in_sglext` | `sglext` of the answer; `sgl_ext` of the choice in older builds |
//! | vllm | chat, completions | `return_token_ids` (the experts come from a server flag) | `choices[0].routed_experts` and `.token_ids`; `prompt_token_ids` of the answer or of the choice |
//!
//! The experts are base64, of raw little-endian i32 (SGLang) or of a `.npy` file (vLLM); both are read from any engine, as the
//! two cannot be confused.

mod answer;
mod encoding;
mod question;

pub use answer::{Told, read};
pub use encoding::{Encoding, decode_bytes, encode_npy};
pub use question::{Asked, Question, Sampling, ask};
