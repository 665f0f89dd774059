//! Errors in a response or in the routes that it contains.

use crate::SharedError;

/// The response lacks the requested routes, or its routes are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// The response is not the JSON expected on its route.
    #[error("unexpected response: {0}")]
    Answer(#[source] SharedError),
    /// There are more choices than requested, or none.
    #[error("the response has {0} choices, expected 1")]
    Choices(usize),
    /// The text is not base64.
    #[error("routed experts are not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// The array is corrupt, or of a kind that engines do not send.
    #[error("routed experts are not a NumPy array in C order")]
    Array,
    /// The array's elements are not unsigned bytes or 16-bit words.
    #[error("routed experts have an unexpected array type, expected |u1 or <u2")]
    ArrayType,
    /// The array has fewer or more bytes than its shape requires.
    #[error("routed experts of shape {shape:?} have {found} bytes, expected {expected}")]
    ArrayBytes {
        /// Shape according to the header.
        shape: Vec<usize>,
        /// Bytes after the header.
        found: usize,
        /// Number of bytes that the shape requires.
        expected: usize,
    },
    /// The array's shape does not match the tokens and the model.
    #[error("routed experts have shape {found:?}, expected [{rows}, {hidden} or {moe}, {top_k}]")]
    Shape {
        /// Shape according to the header.
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
    #[error("routed experts have {found} values, expected {rows} rows x {layers} layers x {top_k} experts")]
    Values {
        /// Number of values in the response.
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
    /// An id is not a valid expert.
    #[error("token {token} is routed to expert {found} in layer {layer}, expected ids below {experts}")]
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
