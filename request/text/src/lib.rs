//! Tokenizers, chat templates, and scoring of prompts with T.
//!
//! The crate uses no sockets, clock, environment or randomness. [`Prompt::from_json`] and [`prompt_ids`] convert a
//! request body to token ids, which a [`Scorer`] scores; [`IncrementalDecoder`] converts an engine's output ids back to
//! text.

mod chat;
mod encoder;
mod error;
mod fast;
mod half_rows;
mod identity;
mod jinja;
mod oracle;
mod pieces;
mod preparation;
mod prompt;
mod prompt_lines;
mod score;
mod segments;
mod self_check;
mod shapes;
mod slices;
mod stream;
mod template;
mod tokenizer;

pub use chat::PlainChat;
pub use encoder::PromptEncoder;
pub use error::{Fault, TextError};
pub use fast::NoFastEncoder;
pub use jinja::{Budget, SyntaxError};
pub use pieces::SPACE_MARK;
pub use preparation::{ChatOptions, Preparation};
pub use prompt::{Limits, Prompt, Route, chat_body_ids, chat_ids_while, prompt_ids, prompt_ids_while};
pub use prompt_lines::{BadLine, LineForm, LinePrompt, PromptLineError, PromptLines};
pub use score::Scorer;
pub use segments::SegmentCache;
pub use semmoe_tables::Score;
pub use shapes::{BuiltInChat, Shapes, built_in_chats};
pub use stream::IncrementalDecoder;
pub use template::{ChatTemplate, Clock, Given};
pub use tokenizer::{Tokenizer, tokenizer_file};
