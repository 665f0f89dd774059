//! How an engine renders chats: the token ids that it produces for a chat, without running the model.
//!
//! | engine | route | since | reads |
//! | --- | --- | --- | --- |
//! | vLLM | `/v1/chat/completions/render` | started with `--enable-scale-out`; 403 without it | the whole request |
//! | vLLM | `/tokenize` with `messages` | always | not `tool_choice`, `documents`, `reasoning_effort` |
//! | SGLang | `/tokenize` with `messages` | 0.5.23 has it, 0.5.16 has not | the whole request; a chat's `add_generation_prompt` has no meaning there |
//! | semmoe's worker | `/tokenize` with `messages` | always | its own fields |
//!
//! Other engines have no such route, so their rendering is unverified.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::Value;

use crate::Engine;
use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// Maximum size of an answer, in bytes: the built-in chats are short, but templates may add a lot.
const ANSWER_BYTES: usize = 256 << 10;

/// The answer to one chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Token ids of the prompt.
    Ids(Vec<u32>),
    /// The engine would reject such a request as well, or cannot render it.
    Refused {
        /// Status of the answer.
        status: u16,
    },
    /// The route ignores a part of it, or no answer arrived.
    NotAsked,
}

/// The answers of one engine.
#[derive(Clone, Debug)]
pub struct Rendering {
    /// The route used; `None` if the engine has none.
    pub route: Option<&'static str>,
    /// One answer per chat.
    pub shown: Vec<Shown>,
    /// Why some chats were not sent.
    pub cause: Option<String>,
    /// Whether a retry may succeed, because no answer arrived or it had another form.
    pub failed: bool,
    /// Time of the request: templates may write the date.
    pub unix_seconds: i64,
}

/// Compares the answers, not their time.
impl PartialEq for Rendering {
    fn eq(&self, other: &Self) -> bool {
        let all = |it: &Self| (it.route, it.cause.clone(), it.failed);
        all(self) == all(other) && self.shown == other.shown
    }
}

/// The route by which engines tokenize texts, and most of them chats.
const TOKENIZE: &str = "/tokenize";

/// A route that renders chats to token ids.
#[derive(Clone, Copy)]
struct Route {
    path: &'static str,
    /// Members of a chat's body that it ignores, although they affect real requests.
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

/// Answers of both routes of vLLM, and of `/tokenize` elsewhere.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Rendered { token_ids: Vec<u32> },
    Tokenized { tokens: Vec<u32> },
}

/// Sends an engine each chat or completion text to render, for at most `within` in total. Generates nothing.
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
        // An engine without this route, or one that takes no messages here, already rejects the plain chat.
        if let Some(Shown::Refused { status }) = rendering.shown.first() {
            rendering.failed = !is_about_the_request(*status);
            rendering.cause =
                Some(format!("no route of the engine shows its token ids: {} answered {status}", route.path));
            rendering.shown.fill(Shown::NotAsked);
            continue;
        }
        rendering.route = Some(route.path);
        rendering.failed = asked.is_err();
        rendering.cause = asked.err().map(|error| error.reason_without_body());
        break;
    }
    rendering
}

/// Sends chats on one route until one gets no answer.
async fn ask_on(
    client: &HttpClient,
    url: &BaseUrl,
    route: &Route,
    chats: &[&Value],
    until: Instant,
    shown: &mut [Shown],
) -> Result<(), HttpError> {
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
            Err(error) => return Err(error),
        };
    }
    Ok(())
}

/// Whether this status is about the request, rather than the engine's state or its key: a template that raises an error
/// may yield 500.
fn is_about_the_request(status: u16) -> bool {
    (400..=501).contains(&status) && !matches!(status, 401 | 403 | 408 | 429)
}
