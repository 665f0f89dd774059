//! The faults of engines.

use serde::Deserialize;
use serde_json::json;

/// A fault, or a way to answer that a test controls. As a word, and at most one argument after a space, it stands in
/// the header `x-mock` of a request: `hang`, `plain 503`, `503`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    // Of routed experts.
    FewerRows,
    MoreRows,
    ForeignExpert,
    SameExpertTwice,
    NoExpert,
    Truncated,
    NoRoutes,
    /// In place of the ids.
    NotBase64,
    /// A comma too many after them.
    Malformed,
    /// So many of a token's experts are on the rank that runs it, and the rest on the next one.
    Local(String),
    /// Refuses who asks for them.
    RefusesRoutes,
    AllAlike,
    WrongShape,
    // Of the rest of an answer.
    OtherPrompt,
    OtherPromptCount,
    NothingGenerated,
    Aborted,
    /// Its stream ends nowhere, and its connection stays.
    FallsSilent,
    // In place of one.
    TooLong,
    NotJson,
    /// This status, in the engine's form.
    #[serde(skip)]
    Status(u16),
    /// The first two times 503.
    BusyTwice,
    /// Waits until a prompt with [`Fault::Releases`] came.
    Waits,
    Releases,
    /// Never answers; [`crate::Engine::hanging`] is notified.
    Hang,
    /// Answers when the test lets it go ([`crate::Engine::release`]).
    Late,
    /// Bytes without end.
    Flood,
    /// Three events, each when the test lets it go, and the end of a stream; or no end, with the connection closed
    /// between two events, inside of one, or held.
    Stream,
    DieBetween,
    DieInside,
    Silent,
    /// Half a document, and when the test lets it go the end of the connection.
    DieJson,
    /// This status as a proxy before an engine that is gone says it.
    Plain(String),
    Overloaded,
    /// Headers that name other places.
    Redirects,
    /// As SGLang, which has a middleware for that.
    EveryOrigin,
    /// Reports so many tokens.
    Generated(String),
    Usage(String),
    UsageEvents(String),
    /// As vLLM 0.30 answers when an engine core is dead.
    Dead,
    DeadStream,
    DeadLate,
    /// As vLLM ends the generations of an engine that it shuts down.
    Abort,
    AbortStream,
    AbortLate,
    /// As vLLM answers when it is started with --enable-return-routed-experts, here with a text of so many bytes.
    Experts(String),
    /// A document of its own, whole or as an event.
    Say(String),
    SayEvent(String),
}

impl Fault {
    /// The fault that a header or a test names.
    pub fn named(text: &str) -> Self {
        if let Ok(status) = text.parse() {
            return Self::Status(status);
        }
        let value = text.split_once(' ').map_or_else(|| json!(text), |(kind, argument)| json!({ kind: argument }));
        serde_json::from_value(value).unwrap_or_else(|error| panic!("no fault is named {text:?}: {error}"))
    }
}
