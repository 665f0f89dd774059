//! Tokenizers, chat templates, and the score of a prompt with T.
//!
//! Pure: no sockets, clock, environment or randomness. A request body goes through [`Prompt::from_json`] to token ids with
//! [`prompt_ids`], and from there to a [`Scorer`]; an engine's answer goes back to text with [`IncrementalDecoder`].

mod error;
mod fast;
mod identity;
mod pieces;
mod prompt;
mod prompt_lines;
mod score;
mod self_check;
mod slices;
mod stream;
mod template;
mod tokenizer;

pub use error::{Fault, TextError};
pub use fast::SegmentCache;
pub use pieces::SPACE_MARK;
pub use prompt::{Limits, Prompt, Route, prompt_ids, prompt_ids_while};
pub use prompt_lines::{LineForm, LinePrompt, PromptLineError, PromptLines};
pub use score::Scorer;
pub use semmoe_tables::Score;
pub use stream::IncrementalDecoder;
pub use template::ChatTemplate;
pub use tokenizer::{Encoder, Tokenizer};
