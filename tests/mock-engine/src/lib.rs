//! The mock engine: SGLang and vLLM in several versions, semmoe's worker and plain OpenAI servers, as far as recording
//! and the gateway use them, around a synthetic router and with faults on request. `tests/conformity` compares its
//! answers with recorded answers of real engines.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test double")]

mod about;
mod answer;
mod canned;
mod dialect;
mod engine;
mod fault;
mod mock;
mod refusal;
mod routes;
mod serve;
mod stream;
mod wire;
mod worker;

pub use dialect::*;
pub use engine::{Engine, Ran, Render, Seen, Settings, Texts};
pub use fault::Fault;
pub use mock::{Mock, Server, canned, canned_as};
pub use routes::{experts, generated};
pub use serve::router;
pub use wire::{RawRequest, Reply, Step, Wire, chunk, close, document, send};
pub use worker::{Script, SwitchFault, Worker};
