//! Queries how an engine renders chats to token ids, without running the model.
//!
//! | engine | route | since | reads |
//! | --- | --- | --- | --- |
//! | vLLM | `/v1/chat/completions/render` | if started with `--enable-scale-out`; otherwise 403 | the whole request |
//! | vLLM | `/tokenize` with `messages` | always | not `tool_choice`, `documents`, `reasoning_effort` |
//! | SGLang | `/tokenize` with `messages` | present in 0.5.23, absent in 0.5.16 | the whole request; `add_generation_prompt` has no effect on chats |
//! | semmoe's worker | `/tokenize` with `messages` | always | its own fields |
//!
//! Other engines have no such route, so their rendering cannot be verified.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::Value;

use crate::Engine;
use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// Maximum size of a response, in bytes: the built-in chats are short, but templates may add a lot of text.
const ANSWER_BYTES: usize = 256 << 10;

/// The result for one chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Token ids of the prompt.
    Ids(Vec<u32>),
    /// The engine cannot render the chat, or would reject such a request too.
    Refused {
        /// Status of the answer.
        status: u16,
    },
    /// The route ignores a part of the chat, or no response arrived.
    NotAsked,
}

/// The results of one engine.
#[derive(Clone, Debug)]
pub struct Rendering {
    /// The route that was used; `None` if the engine has no such route.
    pub route: Option<&'static str>,
    /// One result per chat.
    pub shown: Vec<Shown>,
    /// The reason why some chats were not sent, if any.
    pub cause: Option<String>,
    /// Whether a retry may succeed, because no response arrived or it had an unexpected form.
    pub failed: bool,
    /// Unix time of the request, since templates may include the date.
    pub unix_seconds: i64,
}

/// Compares the results, but not their time.
impl PartialEq for Rendering {
    fn eq(&self, other: &Self) -> bool {
        let all = |it: &Self| (it.route, it.cause.clone(), it.failed);
        all(self) == all(other) && self.shown == other.shown
    }
}

/// The route on which engines tokenize texts and most engines also tokenize chats.
const TOKENIZE: &str = "/tokenize";

/// A route that renders chats to token ids.
#[derive(Clone, Copy)]
struct Route {
    path: &'static str,
    /// Members of a chat's body that the route ignores although they affect real requests.
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

/// Responses of both vLLM routes, and of `/tokenize` on other engines.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Rendered { token_ids: Vec<u32> },
    Tokenized { tokens: Vec<u32> },
}

/// Asks an engine to render each chat or completion text, within `within` in total. Generates no tokens.
pub async fn ask(client: &HttpClient, engine: Engine, url: &BaseUrl, chats: &[&Value], within: Duration) -> Rendering {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut rendering = Rendering {
        route: None,
        shown: vec![Shown::NotAsked; chats.len()],
        cause: Some("no route of the engine returns token ids".to_owned()),
        failed: false,
        unix_seconds: since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0)),
    };
    let until = Instant::now() + within;
    for route in routes(engine) {
        let asked = ask_on(client, url, route, chats, until, &mut rendering.shown).await;
        // An engine that lacks this route, or does not accept messages on it, already rejects the plain chat.
        if let Some(Shown::Refused { status }) = rendering.shown.first() {
            rendering.failed = !is_about_the_request(*status);
            rendering.cause =
                Some(format!("no route of the engine returns token ids: {} answered {status}", route.path));
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

/// Sends chats on one route until one receives no response.
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

/// Returns whether this status concerns the request rather than the engine's state or key. A template that raises an
/// error may yield 500.
fn is_about_the_request(status: u16) -> bool {
    (400..=501).contains(&status) && !matches!(status, 401 | 403 | 408 | 429)
}
