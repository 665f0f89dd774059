//! Why an answer, or the routes in it, cannot be used.

use crate::SharedError;

/// The answer lacks the requested routes, or has different ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// The answer is not the JSON of its route.
    #[error("the answer is not what was expected: {0}")]
    Answer(#[source] SharedError),
    /// There are more choices than requested, or none.
    #[error("the answer has {0} choices, expected 1")]
    Choices(usize),
    /// The text is not base64.
    #[error("routed experts are not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// The array is damaged, or of a kind that engines do not send.
    #[error("routed experts are not an array in C order as NumPy saves it")]
    Array,
    /// Its elements are not unsigned bytes or words.
    #[error("routed experts are an array of another type, expected |u1 or <u2")]
    ArrayType,
    /// It has fewer or more bytes than its shape requires.
    #[error("routed experts of the shape {shape:?} hold {found} bytes, expected {expected}")]
    ArrayBytes {
        /// According to the header.
        shape: Vec<usize>,
        /// Bytes after the header.
        found: usize,
        /// Bytes that the shape requires.
        expected: usize,
    },
    /// The array's shape does not match the tokens and the model.
    #[error("routed experts have the shape {found:?}, expected [{rows}, {hidden} or {moe}, {top_k}]")]
    Shape {
        /// According to the header.
        found: Vec<usize>,
        /// Number of tokens.
        rows: usize,
        /// Number of all layers.
        hidden: usize,
        /// Number of MoE layers.
        moe: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// The number of values does not match the tokens and the model.
    #[error("routed experts hold {found} values, expected {rows} rows x {layers} layers x {top_k} experts")]
    Values {
        /// Number of values in the answer.
        found: usize,
        /// Number of tokens.
        rows: usize,
        /// Number of all layers.
        layers: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// A token has no expert in an MoE layer.
    #[error("token {token} has no expert in MoE layer {layer}, expected {top_k}")]
    NoExpert {
        /// Row of the token.
        token: usize,
        /// Layer number in the checkpoint.
        layer: u16,
        /// Experts per token.
        top_k: u16,
    },
    /// An id is not an expert.
    #[error("token {token} names expert {found} in layer {layer}, expected ids below {experts}")]
    UnknownExpert {
        /// Row of the token.
        token: usize,
        /// The id.
        found: i32,
        /// Layer number in the checkpoint.
        layer: u16,
        /// Experts per layer.
        experts: u16,
    },
}
