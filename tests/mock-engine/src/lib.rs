//! The mock engine: SGLang and vLLM in several versions, semmoe's worker and plain OpenAI servers as far as recording
//! and the gateway see them, around a made-up router, with faults on request. What it answers is compared with what
//! real engines answered (`tests/conformity`).
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
mod stream;
mod wire;
mod worker;

pub use canned::{Render, canned, canned_as};
pub use dialect::*;
pub use engine::{Engine, Ran, Seen, Settings, Texts, router};
pub use fault::Fault;
pub use mock::{Mock, Server};
pub use routes::{experts, generated};
pub use wire::{RawRequest, Reply, Step, Wire, chunk, close, document, send};
pub use worker::{Script, SwitchFault, Worker};
