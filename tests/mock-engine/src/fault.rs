//! The faults of engines.

use serde::Deserialize;
use serde_json::json;

/// A fault, or a behaviour that a test controls. Its text form, a word with at most one argument after a space, is used
/// in a request's header `x-mock`: `hang`, `plain 503`, `503`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    // Faults of routed experts.
    FewerRows,
    MoreRows,
    ForeignExpert,
    SameExpertTwice,
    NoExpert,
    Truncated,
    NoRoutes,
    /// Replaces the ids.
    NotBase64,
    /// A surplus comma after them.
    Malformed,
    /// This many of a token's experts are on the rank that runs it, the rest on the next one.
    Local(String),
    /// Refuses requests for routed experts.
    RefusesRoutes,
    AllAlike,
    WrongShape,
    // Faults of the rest of an answer.
    OtherPrompt,
    OtherPromptCount,
    NothingGenerated,
    Aborted,
    /// The stream stops without an end, and the connection stays open.
    FallsSilent,
    // Faults that replace an answer.
    TooLong,
    NotJson,
    /// This status, with the engine's error body.
    #[serde(skip)]
    Status(u16),
    /// 503 for the first two requests.
    BusyTwice,
    /// Waits until a prompt with [`Fault::Releases`] has arrived.
    Waits,
    Releases,
    /// Never answers; notifies [`crate::Engine::hanging`].
    Hang,
    /// Answers when the test releases it ([`crate::Engine::release`]).
    Late,
    /// An endless body.
    Flood,
    /// Three events, each when the test releases it, and the end of the stream; the variants below instead close the
    /// connection between two events, close it inside one, or keep it open.
    Stream,
    DieBetween,
    DieInside,
    Silent,
    /// Half a document, and the connection closes when the test releases it.
    DieJson,
    /// This status as sent by a proxy whose engine has gone.
    Plain(String),
    Overloaded,
    /// Redirects to other places.
    Redirects,
    /// Allows every origin, like SGLang's middleware.
    EveryOrigin,
    /// Reports this many tokens.
    Generated(String),
    Usage(String),
    UsageEvents(String),
    /// Answers like vLLM 0.30 with a dead engine core.
    Dead,
    DeadStream,
    DeadLate,
    /// Ends generations like a vLLM that is shutting down.
    Abort,
    AbortStream,
    AbortLate,
    /// Answers like vLLM with --enable-return-routed-experts, here with a text of this many bytes.
    Experts(String),
    /// This document, whole or as an event.
    Say(String),
    SayEvent(String),
}

impl Fault {
    /// The fault that a header or a test specifies.
    pub fn named(text: &str) -> Self {
        if let Ok(status) = text.parse() {
            return Self::Status(status);
        }
        let value = text.split_once(' ').map_or_else(|| json!(text), |(kind, argument)| json!({ kind: argument }));
        serde_json::from_value(value).unwrap_or_else(|error| panic!("no fault is named {text:?}: {error}"))
    }
}
