//! Evaluates a response that reports routed experts; it counts only if it is consistent with the request and the model.

use std::panic::{AssertUnwindSafe, catch_unwind};

use semmoe_engines::recording;
use semmoe_tables::{ModelInfo, RankId};
use semmoe_text::{Limits, Prompt, TextError};

use super::local::Hosted;
use super::seen::{MISSING, Seen};

/// The evaluated content of a sample.
pub(super) struct Observed {
    /// The model as described by the tables, including its layer count.
    pub(super) model: ModelInfo,
    /// The prompt's ids, then those of the generated tokens whose routes are known.
    pub(super) ids: Vec<u32>,
    /// Number of `ids` that belong to the prompt.
    pub(super) prompt: u32,
    /// Routed experts [n, L, k] in the MoE layers.
    pub(super) routes: Vec<u16>,
    /// Local activations on the rank that ran the request: for the prompt, and for the generated tokens.
    pub(super) local: [u64; 2],
    /// All activations: for the prompt, and for the generated tokens.
    pub(super) all: [u64; 2],
    /// T's expected local share of these tokens; `None` without evidence.
    pub(super) predicted: Option<f64>,
}

/// Evaluates a response; on error, returns a one-word reason not to trust it.
pub(super) fn observe(seen: &Seen, answer: &[u8]) -> Result<Observed, &'static str> {
    let answer_ = recording::read(seen.route, answer).map_err(|_| "malformed")?;
    if answer_.aborted.is_some() {
        return Err("aborted");
    }
    let experts = answer_.routed_experts.ok_or(MISSING)?;
    let prompt_tokens = answer_.prompt_tokens.ok_or("malformed")?;
    let rank = rank(seen, answer_.dp_rank)?;
    let model = model(seen);
    let sent = prompt(seen)?;
    let mut ids = match answer_.prompt_ids {
        Some(ids) => ids,
        None => encode(seen, sent)?,
    };
    if prompt_tokens != ids.len() as u64 {
        return Err("other_prompt");
    }
    let (prompt, generated) = (ids.len(), answer_.output_tokens.unwrap_or(0));
    let generated = usize::try_from(generated).map_err(|_| "wrong_rows")?;
    // The last generated token has not passed through any layer.
    let rows = prompt.saturating_add(generated).saturating_sub(1);
    let routes = recording::decode(&experts, rows, &model).map_err(|_| "wrong_rows")?;
    let mut routes = routes.experts(&model).map_err(|_| "bad_experts")?;
    if let Some(output_ids) = answer_.output_ids.filter(|ids| ids.len() == generated) {
        ids.extend_from_slice(&output_ids);
    }
    // A stream may contain only its newest ids. SGLang's OpenAI routes return none, in which case only the prompt's ids
    // are known.
    ids.truncate(rows);
    let per_token = model.layers() * usize::from(model.top_k);
    routes.truncate(ids.len() * per_token);
    if ids.is_empty() || routes.len() != ids.len() * per_token {
        return Err("wrong_rows");
    }
    check(&model, &ids, &routes)?;
    let prompt = prompt.min(ids.len());
    let hosted = Hosted::on(&seen.tables, rank);
    let (of_prompt, of_rest) = routes.split_at(prompt * per_token);
    let score = seen.scorer.score(&ids).share();
    Ok(Observed {
        local: [of_prompt, of_rest].map(|routes| hosted.count(routes, model.top_k)),
        all: [of_prompt, of_rest].map(|routes| routes.len() as u64),
        predicted: score.and_then(|share| share.get(usize::from(rank.get())).copied()),
        model,
        ids,
        prompt: u32::try_from(prompt).unwrap_or(u32::MAX),
        routes,
    })
}

/// Returns the tables' rank that ran the request: from the response, or else the pinned rank. Ranks that share a group
/// of the tables count as one.
fn rank(seen: &Seen, reported: Option<u32>) -> Result<RankId, &'static str> {
    let ranks = seen.tables.dp_ranks().saturating_mul(seen.group_ranks);
    let rank = match reported {
        Some(reported) => (0..ranks).map(RankId::new).find(|rank| seen.dialect.wire_rank(*rank) == reported),
        None if ranks <= 1 => Some(RankId::new(0)),
        None => seen.rank.filter(|rank| rank.get() < ranks && (seen.is_pinned)()),
    };
    rank.map(|rank| RankId::new(rank.get() / seen.group_ranks)).ok_or("no_rank")
}

fn model(seen: &Seen) -> ModelInfo {
    let mut model = seen.tables.model().clone();
    if model.num_hidden_layers == 0 {
        model.num_hidden_layers = seen.backend.hidden_layers();
    }
    model
}

/// Returns the client's prompt, except with images, whose tokens no text represents.
fn prompt(seen: &Seen) -> Result<Prompt, &'static str> {
    let body = serde_json::from_slice(&seen.body).map_err(|_| "unread")?;
    let route = seen.text_route.ok_or("unread")?;
    let prompt = Prompt::read(seen.preparation, route, &body).map_err(|_| "unread")?;
    if prompt.is_text_only() { Ok(prompt) } else { Err("unread") }
}

/// Tokenizes a prompt whose ids are missing from the response.
fn encode(seen: &Seen, prompt: Prompt) -> Result<Vec<u32>, &'static str> {
    let mut prompts = match (prompt, seen.tokenizer.as_deref()) {
        (Prompt::Ids(prompts), _) => prompts,
        (prompt, Some(tokenizer)) => {
            let ids = || semmoe_text::prompt_ids(&prompt, tokenizer, seen.template.as_deref(), Limits::default());
            let encode = || match ids() {
                // Loading is allowed here: this is not a network thread.
                Err(TextError::OracleAway) => tokenizer.load_oracle().and_then(|()| ids()),
                ids => ids,
            };
            // Catch panics: the tokenizer and template libraries receive arbitrary text.
            catch_unwind(AssertUnwindSafe(encode)).map_err(|_| "unread")?.map_err(|_| "unread")?
        }
        (_, None) => return Err("unread"),
    };
    match (prompts.pop(), prompts.is_empty()) {
        (Some(ids), true) => Ok(ids),
        _ => Err("unread"),
    }
}

/// Checks that all ids are in the vocabulary, and that no token uses an expert twice in a layer. Expert ranges have
/// already been checked.
fn check(model: &ModelInfo, ids: &[u32], routes: &[u16]) -> Result<(), &'static str> {
    if ids.iter().any(|id| *id >= model.vocab_size) {
        return Err("other_prompt");
    }
    let repeats = |route: &[u16]| route.iter().enumerate().any(|(at, expert)| route[..at].contains(expert));
    if routes.chunks_exact(usize::from(model.top_k)).any(repeats) { Err("bad_experts") } else { Ok(()) }
}
