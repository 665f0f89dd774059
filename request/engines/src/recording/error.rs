//! Why an answer, or the routes in it, cannot be used.

/// An answer without the routes that were requested, or with other ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// Not the JSON of its route.
    #[error("the answer is not what was expected: {cause}")]
    Answer {
        /// The parser's.
        cause: String,
    },
    /// More choices than were requested, or none.
    #[error("the answer has {found} choices, expected 1")]
    Choices {
        /// Choices in the answer.
        found: usize,
    },
    /// Text that is no base64.
    #[error("routed experts are not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// Damaged, or of a kind that engines do not send.
    #[error("routed experts are not an array in C order as NumPy saves it")]
    Array,
    /// Elements other than unsigned bytes and words.
    #[error("routed experts are an array of another type, expected |u1 or <u2")]
    ArrayType,
    /// Fewer or more bytes than the array's shape says.
    #[error("routed experts of the shape {shape:?} hold {found} bytes, expected {expected}")]
    ArrayBytes {
        /// By the header.
        shape: Vec<usize>,
        /// Bytes behind the header.
        found: usize,
        /// Bytes of that shape.
        expected: usize,
    },
    /// An array of another shape than the tokens and the model have.
    #[error("routed experts have the shape {found:?}, expected [{rows}, {hidden} or {moe}, {top_k}]")]
    Shape {
        /// By the header.
        found: Vec<usize>,
        /// Tokens.
        rows: usize,
        /// All layers.
        hidden: usize,
        /// MoE layers.
        moe: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// Another number of values than the tokens and the model have.
    #[error("routed experts hold {found} values, expected {rows} rows x {layers} layers x {top_k} experts")]
    Values {
        /// Values in the answer.
        found: usize,
        /// Tokens.
        rows: usize,
        /// All layers.
        layers: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// A token that an MoE layer sent nowhere.
    #[error("token {token} has no expert in MoE layer {layer}, expected {top_k}")]
    NoExpert {
        /// Its row.
        token: usize,
        /// As the checkpoint numbers layers.
        layer: u16,
        /// Experts per token.
        top_k: u16,
    },
    /// An id that is no expert.
    #[error("token {token} names expert {found} in layer {layer}, expected ids below {experts}")]
    UnknownExpert {
        /// Its row.
        token: usize,
        /// The id.
        found: i32,
        /// As the checkpoint numbers layers.
        layer: u16,
        /// Experts per layer.
        experts: u16,
    },
}
