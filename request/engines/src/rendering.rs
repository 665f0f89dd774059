//! Chats as an engine reads them: the token ids that it makes of a chat, without running the model.
//!
//! | engine | route | since | reads |
//! | --- | --- | --- | --- |
//! | vLLM | `/v1/chat/completions/render` | started with `--enable-scale-out`; 403 without it | the whole request |
//! | vLLM | `/tokenize` with `messages` | always | not `tool_choice`, `documents`, `reasoning_effort` |
//! | SGLang | `/tokenize` with `messages` | 0.5.23 has it, 0.5.16 has not | the whole request; a chat's `add_generation_prompt` has no meaning there |
//! | semmoe's worker | `/tokenize` with `messages` | always | its own fields |
//!
//! Others have no such route: what they make of chats is unproven.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::Value;

use crate::Engine;
use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// Longest answer, in bytes: the built-in chats are short, but templates may write much around them.
const ANSWER_BYTES: usize = 256 << 10;

/// The answer to one chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Its token ids.
    Ids(Vec<u32>),
    /// The engine would not answer such a request either, or cannot show it.
    Refused {
        /// Of the answer.
        status: u16,
    },
    /// The route does not read all of it, or no answer came.
    NotAsked,
}

/// The answers of one engine.
#[derive(Clone, Debug)]
pub struct Rendering {
    /// Where it was asked; `None` where it has no such route.
    pub route: Option<&'static str>,
    /// One answer for each chat.
    pub shown: Vec<Shown>,
    /// Why not every chat was asked.
    pub cause: Option<String>,
    /// Whether a later try may fare better, as no answer came or one of another form.
    pub failed: bool,
    /// When it was asked: templates may write the date.
    pub unix_seconds: i64,
}

/// The same answers at any time are the same.
impl PartialEq for Rendering {
    fn eq(&self, other: &Self) -> bool {
        let all = |it: &Self| (it.route, it.cause.clone(), it.failed);
        all(self) == all(other) && self.shown == other.shown
    }
}

/// Where engines make token ids of texts, and most of them of chats.
const TOKENIZE: &str = "/tokenize";

/// A route that makes token ids of chats.
#[derive(Clone, Copy)]
struct Route {
    path: &'static str,
    /// Members of a chat's body that it ignores, though they change what the engine makes of a request.
    ignores: &'static [&'static str],
}

fn routes(engine: Engine) -> &'static [Route] {
    match engine {
        Engine::Vllm => &[
            Route { path: "/v1/chat/completions/render", ignores: &[] },
            Route { path: TOKENIZE, ignores: &["tool_choice", "documents", "reasoning_effort"] },
        ],
        Engine::Sglang => &[Route { path: TOKENIZE, ignores: &["add_generation_prompt"] }],
        Engine::Semmoe => &[Route { path: TOKENIZE, ignores: &[] }],
        Engine::Openai => &[],
    }
}

/// Both routes of vLLM, and `/tokenize` of the others.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Rendered { token_ids: Vec<u32> },
    Tokenized { tokens: Vec<u32> },
}

/// Asks an engine what it makes of each chat, or of a completion's text, for `within` at most. Nothing is generated.
pub async fn ask(client: &HttpClient, engine: Engine, url: &BaseUrl, chats: &[&Value], within: Duration) -> Rendering {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut rendering = Rendering {
        route: None,
        shown: vec![Shown::NotAsked; chats.len()],
        cause: Some("no route of the engine shows its token ids".to_owned()),
        failed: false,
        unix_seconds: since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0)),
    };
    let until = Instant::now() + within;
    for route in routes(engine) {
        let asked = ask_on(client, url, route, chats, until, &mut rendering.shown).await;
        // An engine without this route, or that takes no messages here, refuses the plain chat already.
        if let Some(Shown::Refused { status }) = rendering.shown.first() {
            rendering.failed = !is_about_the_request(*status);
            rendering.cause =
                Some(format!("no route of the engine shows its token ids: {} answered {status}", route.path));
            rendering.shown.fill(Shown::NotAsked);
            continue;
        }
        rendering.route = Some(route.path);
        rendering.failed = asked.is_err();
        rendering.cause = asked.err();
        break;
    }
    rendering
}

/// Asks on one route, until an answer is none.
async fn ask_on(
    client: &HttpClient,
    url: &BaseUrl,
    route: &Route,
    chats: &[&Value],
    until: Instant,
    shown: &mut [Shown],
) -> Result<(), String> {
    for (at, (chat, shown)) in chats.iter().zip(shown).enumerate() {
        if route.ignores.iter().any(|member| chat.get(member).is_some()) {
            continue;
        }
        let limits = AnswerLimits { timeout: until.saturating_duration_since(Instant::now()), max_bytes: ANSWER_BYTES };
        let path = if chat.get("prompt").is_some() { TOKENIZE } else { route.path };
        *shown = match client.post_json(url, path, *chat, &limits).await {
            Ok(Answer::Rendered { token_ids } | Answer::Tokenized { tokens: token_ids }) => Shown::Ids(token_ids),
            Err(HttpError::Status { status, .. }) if at == 0 || is_about_the_request(status) => {
                Shown::Refused { status }
            }
            Err(error) => return Err(error.reason_without_body()),
        };
    }
    Ok(())
}

/// Whether this status is about the request, and not about the engine's state or its key: a template that raises an
/// error may give 500.
fn is_about_the_request(status: u16) -> bool {
    (400..=501).contains(&status) && !matches!(status, 401 | 403 | 408 | 429)
}
