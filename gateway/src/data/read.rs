//! What a request says: which model, how many tokens, and how local they would be on each rank.
//!
//! The body is parsed here and nowhere else, and it is never written again. What is plainly the client's fault is told
//! (400); a prompt that merely cannot be scored is routed by load, counted by reason and left to the engine to judge.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use semmoe_engines::Route;
use semmoe_engines::json;
use semmoe_engines::pin::{self, Stripped};
use semmoe_routing::{Needs, Policy, block_hashes};
use semmoe_tables::RankId;
use semmoe_text::{Limits, Prompt, TextError};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::error::RequestError;
use crate::snapshot::{Model, Snapshot, Text};
use crate::state::Core;
use crate::trust::Caller;

/// Names the model where the body cannot.
const MODEL_HEADER: &str = "x-semmoe-model";
/// A body of this size, if it is one word, takes a tenth of a second and more to encode.
const HUGE_BYTES: usize = 256 << 10;
/// Tokens of a prompt that was not tokenized, as a share of its bytes.
const BYTES_PER_TOKEN: u64 = 4;
/// Fields that carry a prompt in a form that only the engine reads.
const OTHER_PROMPTS: [&str; 4] = ["input_embeds", "prompt_embeds", "input_ids", "image_data"];

/// A request, read.
pub(crate) struct Job {
    /// The state that the request goes by, from here to its end.
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) model: Arc<Model>,
    pub(crate) body: Stripped,
    /// Prompt tokens, estimated where the prompt was not tokenized.
    pub(crate) tokens: u64,
    /// Prompt tokens where all of the prompt was tokenized, to compare with the engine's count.
    pub(crate) counted: Option<u64>,
    /// Expected local share per slot of the model's pool; `None` without evidence.
    pub(crate) share: Option<Vec<f64>>,
    /// Names of the prompt's whole blocks, where the model's policies want them.
    pub(crate) blocks: Vec<u64>,
    /// Hash of what the client wants kept together.
    pub(crate) key: Option<u64>,
    /// Whether the answer comes piece by piece.
    pub(crate) streams: bool,
    /// What this request is placed by, now and when it is tried again.
    pub(crate) policy: Arc<dyn Policy>,
    /// A pin of the client, where clients are trusted.
    pub(crate) client_pin: Option<RankId>,
}

/// Why a prompt was not scored.
enum Unscored {
    /// The client's fault.
    Client(RequestError),
    /// Nobody's, or ours: routed by load.
    Open { reason: &'static str, cause: String },
}

/// What a prompt says.
struct Scored {
    tokens: u64,
    counted: Option<u64>,
    share: Option<Vec<f64>>,
    blocks: Vec<u64>,
}

impl Scored {
    /// Of a prompt that was not tokenized.
    fn unseen(body: &[u8]) -> Self {
        Self { tokens: (body.len() as u64 / BYTES_PER_TOKEN).max(1), counted: None, share: None, blocks: Vec::new() }
    }
}

pub(crate) async fn read(
    core: &Arc<Core>,
    route: Route,
    headers: &HeaderMap,
    caller: Caller,
    body: Bytes,
) -> Result<Job, RequestError> {
    let snapshot = core.snapshot();
    let headers = headers.clone();
    let offload = body.len() >= snapshot.config.routing.offload_bytes;
    let body_is_huge = body.len() >= HUGE_BYTES;
    let core_too = Arc::clone(core);
    let work = move || read_now(&core_too, snapshot, route, &headers, &caller, &body);
    if !offload {
        return work();
    }
    // No end can fail: the semaphores are never closed, and `read_now` lets no panic out of scoring.
    let lane = if body_is_huge { &core.scoring_huge } else { &core.scoring };
    let permit = Arc::clone(lane).acquire_owned().await;
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    done.await.unwrap_or_else(|error| Err(RequestError::BodyRead { cause: error.to_string() }))
}

fn read_now(
    core: &Core,
    snapshot: Arc<Snapshot>,
    route: Route,
    headers: &HeaderMap,
    caller: &Caller,
    body: &Bytes,
) -> Result<Job, RequestError> {
    let stripped = Stripped::new(body)?;
    let routing = &snapshot.config.routing;
    let model = permitted(core, &snapshot, model_name(route, headers, body)?.as_deref(), caller)?;
    let client_pin = if routing.trust_client_pins { trusted_pin(model, route, headers, body)? } else { None };
    let block_tokens = routing.prefix.block_tokens;
    let Scored { tokens, counted, share, blocks } = match score(model, route, body, block_tokens) {
        Ok(scored) => scored,
        Err(Unscored::Client(error)) => return Err(error),
        Err(Unscored::Open { reason, cause }) => {
            core.metrics.score_failure(reason);
            tracing::warn!(model = model.name, %route, reason, cause, "prompt not scored, routed by load");
            Scored::unseen(body)
        }
    };
    let key = headers.get(&routing.sticky_header).filter(|_| model.plan.needs().key);
    Ok(Job {
        tokens,
        counted,
        share,
        blocks,
        client_pin,
        key: key.map(|value| semmoe_routing::hash_key(value.as_bytes())),
        // The body was seen to be JSON.
        streams: matches!(json::top_level(body, "stream"), Ok(Some(b"true"))),
        policy: model.plan.next(),
        model: Arc::clone(model),
        body: stripped,
        snapshot,
    })
}

/// The model, if there is one of that name and the caller may use it. To a caller that may not use all models, those that it
/// may not use are as if they were not there.
fn permitted<'a>(
    core: &Core,
    snapshot: &'a Snapshot,
    name: Option<&str>,
    caller: &Caller,
) -> Result<&'a Arc<Model>, RequestError> {
    let found = snapshot.model(name);
    let Some(allowed) = caller.models() else { return found };
    match (found, name) {
        (Ok(model), _) if caller.may_use(&model.name) => Ok(model),
        (_, Some(name)) => {
            core.metrics.trust.auth_failure("model");
            Err(RequestError::unknown_model(name, allowed.join(", ")))
        }
        (_, None) => Err(RequestError::NoModel { known: allowed.join(", ") }),
    }
}

/// The name in the body, or else in the header.
fn model_name<'a>(route: Route, headers: &'a HeaderMap, body: &'a [u8]) -> Result<Option<Cow<'a, str>>, RequestError> {
    let by_header = || headers.get(MODEL_HEADER).and_then(|value| value.to_str().ok()).map(Cow::Borrowed);
    if !route.names_model() {
        return Ok(by_header());
    }
    match json::top_level(body, "model")? {
        None | Some(b"null") => Ok(by_header()),
        Some(value) => serde_json::from_slice::<String>(value)
            .map(|name| Some(Cow::Owned(name)))
            .map_err(|_| RequestError::Field { cause: "model must be a string".to_owned() }),
    }
}

fn trusted_pin(model: &Model, route: Route, headers: &HeaderMap, body: &[u8]) -> Result<Option<RankId>, RequestError> {
    for member in &model.members {
        let pin = pin::client_pin(member.backend.engine, route, headers, body);
        if let Some(pin) = pin.map_err(|error| RequestError::Field { cause: error.to_string() })? {
            return Ok(Some(pin));
        }
    }
    Ok(None)
}

/// Tokens, the expected share per slot, and blocks. A body that no policy wants read is only checked to be JSON.
fn score(model: &Model, route: Route, body: &[u8], block_tokens: u32) -> Result<Scored, Unscored> {
    let not_json = |cause: String| Unscored::Client(RequestError::BodyJson { cause });
    // Values that are skipped are not looked at closely enough by the parser to see that they are no text.
    let body = std::str::from_utf8(body).map_err(|error| not_json(error.to_string()))?;
    let Needs { share, cached, .. } = model.plan.needs();
    let text = model.text.as_deref().filter(|_| share || cached);
    let (Some(text), Some(route)) = (text, text_route(route)) else {
        let checked = serde_json::from_str::<IgnoredAny>(body);
        return checked.map(|_| Scored::unseen(body.as_bytes())).map_err(|error| not_json(error.to_string()));
    };
    let value: Value = serde_json::from_str(body).map_err(|error| not_json(error.to_string()))?;
    // The libraries beneath see text of any kind; a panic in them must cost no more than the score.
    let scored = catch_unwind(AssertUnwindSafe(|| score_prompt(model, text, route, &value, block_tokens)));
    match scored {
        Ok(Ok(scored)) => Ok(scored),
        Ok(Err(error)) => Err(unscored(error, &value)),
        Err(_) => Err(Unscored::Open { reason: "panic", cause: "the tokenizer or template panicked".to_owned() }),
    }
}

/// Routes whose prompts can be read.
pub(crate) fn text_route(route: Route) -> Option<semmoe_text::Route> {
    match route {
        Route::Chat => Some(semmoe_text::Route::Chat),
        Route::Completions => Some(semmoe_text::Route::Completions),
        Route::Generate => Some(semmoe_text::Route::Generate),
        Route::Responses | Route::Embeddings | Route::Tokenize => None,
    }
}

fn score_prompt(
    model: &Model,
    text: &Text,
    route: semmoe_text::Route,
    body: &Value,
    block_tokens: u32,
) -> Result<Scored, TextError> {
    let prompt = Prompt::from_json(route, body)?;
    let prompts = semmoe_text::prompt_ids(&prompt, &text.tokenizer, text.template.as_ref(), Limits::default())?;
    // Several prompts of one request run on one rank: they are scored as one.
    let ids = prompts.concat();
    let tokens = ids.len() as u64;
    // Engines count the prompt once for each of several answers, and images by a rule of their own.
    let counted = Some(tokens).filter(|_| prompts.len() == 1 && prompt.is_text_only());
    let Needs { share, cached, .. } = model.plan.needs();
    let mut blocks = Vec::new();
    if cached {
        block_hashes(&ids, block_tokens, &mut blocks);
    }
    let share = if share { shares(model, &ids) } else { None };
    Ok(Scored { tokens: tokens.max(1), counted, share, blocks })
}

/// One share per slot, backend after backend; backends that run the same tables are scored once.
fn shares(model: &Model, ids: &[u32]) -> Option<Vec<f64>> {
    let mut scored: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut all = Vec::new();
    for member in &model.members {
        let loaded = member.tables.as_ref()?;
        let digest = loaded.tables.digest();
        let known = scored.iter().position(|(other, _)| *other == digest);
        let at = match known {
            Some(at) => at,
            None => {
                scored.push((digest, loaded.scorer.score(ids).share()?));
                scored.len() - 1
            }
        };
        all.extend_from_slice(&scored[at].1);
    }
    Some(all)
}

fn unscored(error: TextError, body: &Value) -> Unscored {
    let reason = match &error {
        TextError::Field { .. } if !OTHER_PROMPTS.iter().any(|field| body.get(field).is_some()) => {
            return Unscored::Client(RequestError::Field { cause: error.to_string() });
        }
        TextError::Field { .. } => "other_prompt",
        TextError::TooLarge { .. } => "too_large",
        TextError::NoTemplate => "no_template",
        TextError::TemplateRender { .. } => "template",
        _ => "tokenizer",
    };
    Unscored::Open { reason, cause: error.to_string() }
}
