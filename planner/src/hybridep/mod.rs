//! HybridEP: moves experts to tokens where that is cheaper than sending tokens to experts.
//!
//! `stream` contains the stream model, its optimum, and domain sizes over levels (sections III and IV-A).
//!
//! The paper covers training. In serving, weights do not change: a gathered expert is either kept ([`Use::Resident`]:
//! replicas within a memory limit, placed by `semmoe solve --redundant --nodes`), or gathered again in every step
//! because memory is short ([`Use::Streamed`]). Gradients, the shared expert's all-reduce and compression fused with
//! the optimizer only apply to training. Compression to 1/50 is disabled unless the output error was measured: see
//! `README.md`.

mod stream;

pub use stream::{Choice, HybridLevel, Stream, Use, best_domains, domain_choices};
