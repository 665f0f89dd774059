//! HybridEP: send experts to tokens where that is cheaper than sending tokens to experts.
//!
//! `stream` has the stream model, its optimum, and domain sizes over levels (sections III and IV-A).
//!
//! The paper is about training. In serving, weights do not change: an expert that was gathered once stays
//! ([`Use::Resident`]: replicas under a limit on memory, what `semmoe solve --redundant --nodes` places), or is read
//! again every step because memory is short ([`Use::Streamed`]). Gradients, the shared expert's all-reduce and
//! compression fused with the optimizer are for training only. Compression to 1/50 is off unless the output error was
//! measured: see `README.md`.

mod stream;

pub use stream::{Choice, HybridLevel, Stream, Use, best_domains, domain_choices};
