//! One answer with routed experts, believed only as far as it agrees with the request and with the model.

use std::panic::{AssertUnwindSafe, catch_unwind};

use semmoe_engines::Route;
use semmoe_engines::sglang::{FinishReason, GenerateResponse, RoutedExpertsError, decode_routes};
use semmoe_tables::{ModelInfo, RankId};
use semmoe_text::{Limits, Prompt, TextError};
use serde::Deserialize;

use super::Seen;
use super::local::Hosted;
use crate::data::text_route;

/// What a sample shows.
pub(super) struct Observed {
    /// As counted in the tables, with the number of layers.
    pub(super) model: ModelInfo,
    /// The prompt, then what was generated as far as its routes are told.
    pub(super) ids: Vec<u32>,
    /// How many of `ids` are the prompt's.
    pub(super) prompt: usize,
    /// [n, L, k] of the MoE layers.
    pub(super) routes: Vec<u16>,
    /// Local activations on the rank that ran it, of the prompt's tokens and of the others.
    pub(super) local: [u64; 2],
    /// All activations, likewise.
    pub(super) all: [u64; 2],
    /// Expected local share of the same tokens by T; `None` without evidence.
    pub(super) predicted: Option<f64>,
}

/// Reads an answer, or says in one word why it is not believed.
pub(super) fn observe(seen: &Seen, answer: &[u8]) -> Result<Observed, &'static str> {
    let told = Told::read(seen.route, answer)?;
    let rank = rank(seen, told.dp_rank)?;
    let model = model(seen);
    let mut ids = prompt(seen)?;
    if told.prompt_tokens != ids.len() as u64 {
        return Err("other_prompt");
    }
    let (prompt, generated) = (ids.len(), usize::try_from(told.generated).map_err(|_| "wrong_rows")?);
    // The token that was generated last has been through no layer.
    let rows = prompt.saturating_add(generated).saturating_sub(1);
    let mut routes = decode_routes(&told.experts, rows, &model).map_err(|error| match error {
        RoutedExpertsError::Length { .. } => "wrong_rows",
        _ => "bad_experts",
    })?;
    if told.output_ids.len() == generated {
        ids.extend_from_slice(&told.output_ids);
    }
    // A stream may tell only its newest ids, the OpenAI routes tell none; then the prompt's tokens are known alone.
    ids.truncate(rows);
    let per_token = model.layers() * usize::from(model.top_k);
    routes.truncate(ids.len() * per_token);
    if ids.is_empty() || routes.len() != ids.len() * per_token {
        return Err("wrong_rows");
    }
    check(&model, &ids, &routes)?;
    let prompt = prompt.min(ids.len());
    let hosted = Hosted::on(&seen.tables.tables, rank);
    let (of_prompt, of_rest) = routes.split_at(prompt * per_token);
    let score = seen.tables.scorer.score(&ids).share();
    Ok(Observed {
        local: [of_prompt, of_rest].map(|routes| hosted.count(routes, model.top_k)),
        all: [of_prompt, of_rest].map(|routes| routes.len() as u64),
        predicted: score.and_then(|share| share.get(usize::from(rank.get())).copied()),
        model,
        ids,
        prompt,
        routes,
    })
}

/// What an answer says, on any route.
struct Told {
    prompt_tokens: u64,
    generated: u64,
    /// What was generated, as far as it is told.
    output_ids: Vec<u32>,
    dp_rank: Option<u32>,
    /// Base64.
    experts: String,
}

/// An answer of the OpenAI routes.
#[derive(Deserialize)]
struct OpenAi {
    usage: Usage,
    sglext: Extension,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

#[derive(Deserialize)]
struct Extension {
    routed_experts: String,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

impl Told {
    fn read(route: Route, answer: &[u8]) -> Result<Self, &'static str> {
        if route != Route::Generate {
            let answer: OpenAi = serde_json::from_slice(answer).map_err(|_| "malformed")?;
            if answer.choices.iter().any(|choice| choice.finish_reason.as_deref() == Some("abort")) {
                return Err("aborted");
            }
            let OpenAi { usage: Usage { prompt_tokens, completion_tokens }, sglext, .. } = answer;
            let experts = sglext.routed_experts;
            return Ok(Self {
                prompt_tokens,
                generated: completion_tokens,
                output_ids: Vec::new(),
                dp_rank: None,
                experts,
            });
        }
        let answer: GenerateResponse = serde_json::from_slice(answer).map_err(|_| "malformed")?;
        let meta = answer.meta_info;
        if matches!(meta.finish_reason, Some(FinishReason::Abort { .. })) {
            return Err("aborted");
        }
        Ok(Self {
            prompt_tokens: meta.prompt_tokens,
            generated: meta.completion_tokens,
            output_ids: answer.output_ids,
            dp_rank: meta.dp_rank,
            experts: meta.routed_experts.ok_or("missing")?,
        })
    }
}

/// The rank that ran it: as the answer tells, or else the one it was pinned to.
fn rank(seen: &Seen, told: Option<u32>) -> Result<RankId, &'static str> {
    let ranks = seen.tables.tables.dp_ranks();
    let rank = match told {
        Some(told) => (0..ranks).map(RankId::new).find(|rank| seen.dialect.wire_rank(*rank) == told),
        None if ranks <= 1 => Some(RankId::new(0)),
        None => seen.rank.filter(|rank| rank.get() < ranks && !seen.backend.pins.are_ignored()),
    };
    rank.ok_or("no_rank")
}

fn model(seen: &Seen) -> ModelInfo {
    let mut model = seen.tables.tables.model().clone();
    if model.num_hidden_layers == 0 {
        model.num_hidden_layers = seen.backend.live.hidden_layers();
    }
    model
}

/// The prompt's ids, made anew from the body that the client sent.
fn prompt(seen: &Seen) -> Result<Vec<u32>, &'static str> {
    let body = serde_json::from_slice(&seen.body).map_err(|_| "unread")?;
    let prompt = Prompt::from_json(text_route(seen.route).ok_or("unread")?, &body).map_err(|_| "unread")?;
    if !prompt.is_text_only() {
        return Err("unread");
    }
    let mut prompts = match (prompt, seen.model.text.as_deref()) {
        (Prompt::Ids(prompts), _) => prompts,
        (prompt, Some(text)) => {
            let ids = || semmoe_text::prompt_ids(&prompt, &text.tokenizer, text.template.as_ref(), Limits::default());
            let encode = || match ids() {
                // This is no network thread.
                Err(TextError::OracleAway) => text.tokenizer.load_oracle().and_then(|()| ids()),
                ids => ids,
            };
            // The libraries beneath see text of any kind.
            catch_unwind(AssertUnwindSafe(encode)).map_err(|_| "unread")?.map_err(|_| "unread")?
        }
        (_, None) => return Err("unread"),
    };
    match (prompts.pop(), prompts.is_empty()) {
        (Some(ids), true) => Ok(ids),
        _ => Err("unread"),
    }
}

/// Ids are the vocabulary's, and no token has an expert twice in a layer. That they are experts was seen before.
fn check(model: &ModelInfo, ids: &[u32], routes: &[u16]) -> Result<(), &'static str> {
    if ids.iter().any(|id| *id >= model.vocab_size) {
        return Err("other_prompt");
    }
    let repeats = |route: &[u16]| route.iter().enumerate().any(|(at, expert)| route[..at].contains(expert));
    if routes.chunks_exact(usize::from(model.top_k)).any(repeats) { Err("bad_experts") } else { Ok(()) }
}
