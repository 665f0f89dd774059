//! The request for one prompt's routed experts.

use serde_json::{Map, Value, json};

use crate::{Engine, Route, sglang};

/// A prompt in one of the supported forms.
#[derive(Clone, Copy, Debug)]
pub enum Asked<'a> {
    /// Text, which the engine tokenizes.
    Text(&'a str),
    /// Token ids.
    Ids(&'a [u32]),
    /// A conversation in OpenAI's format, to which the engine applies the model's template.
    Messages {
        /// The turns.
        messages: &'a Value,
        /// The tools that the model may call.
        tools: Option<&'a Value>,
    },
}

/// The sampling parameters of a request.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Tokens to generate, at least 1.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Sampling seed, unless greedy.
    pub seed: Option<u64>,
}

/// A request: its route and body.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The route.
    pub route: Route,
    /// The JSON body.
    pub body: Value,
}

/// Builds the request for the routed experts of a prompt. Texts and ids are sent to `/generate` if the engine has it
/// and `openai` is false, otherwise to completions; conversations are sent to chat.
pub fn ask(engine: Engine, openai: bool, model: &str, prompt: Asked<'_>, sampling: Sampling) -> Question {
    let native = engine.speaks_sglang() && !openai;
    match prompt {
        Asked::Text(text) if native => generate(Some(text.to_owned()), None, sampling),
        Asked::Ids(ids) if native => generate(None, Some(ids.to_vec()), sampling),
        Asked::Messages { messages, tools } => {
            let mut body = openai_body(engine, model, sampling);
            body.insert("messages".into(), messages.clone());
            if let Some(tools) = tools {
                body.insert("tools".into(), tools.clone());
            }
            Question { route: Route::Chat, body: body.into() }
        }
        Asked::Text(text) => completions(engine, model, json!(text), sampling),
        Asked::Ids(ids) => completions(engine, model, json!(ids), sampling),
    }
}

/// Cache namespace of [`uncached`] requests.
const OWN_PREFIXES: &str = "semmoe-self-check";

/// Returns the request in a separate prefix cache namespace, so that its routes are computed anew and not reused.
/// semmoe's worker needs no such field, since its results are the same in every batch.
pub fn uncached(engine: Engine, mut question: Question) -> Question {
    let field = match (engine, question.route) {
        (Engine::Sglang, Route::Generate) => "extra_key",
        (Engine::Sglang | Engine::Vllm, _) => "cache_salt",
        (Engine::Semmoe | Engine::Openai, _) => return question,
    };
    question.body[field] = json!(OWN_PREFIXES);
    question
}

fn generate(text: Option<String>, input_ids: Option<Vec<u32>>, sampling: Sampling) -> Question {
    let sampling_params = sglang::SamplingParams {
        temperature: sampling.temperature,
        sampling_seed: sampling.seed,
        ..sglang::SamplingParams::greedy(sampling.max_tokens)
    };
    let request = sglang::GenerateRequest {
        text,
        input_ids,
        sampling_params,
        return_routed_experts: true,
        return_prompt_token_ids: true,
        ..sglang::GenerateRequest::default()
    };
    // The request's fields are strings, numbers and lists of numbers, which always serialize.
    Question { route: Route::Generate, body: serde_json::to_value(request).unwrap_or(Value::Null) }
}

fn completions(engine: Engine, model: &str, prompt: Value, sampling: Sampling) -> Question {
    let mut body = openai_body(engine, model, sampling);
    body.insert("prompt".into(), prompt);
    Question { route: Route::Completions, body: body.into() }
}

fn openai_body(engine: Engine, model: &str, sampling: Sampling) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("model".into(), json!(model));
    body.insert("max_tokens".into(), json!(sampling.max_tokens));
    body.insert("temperature".into(), json!(sampling.temperature));
    if let Some(seed) = sampling.seed {
        body.insert("seed".into(), json!(seed));
    }
    let switches: &[&str] = match engine {
        Engine::Semmoe => &["return_routed_experts", "return_input_ids_in_sglext", "return_output_ids_in_sglext"],
        // The id fields that SGLang supports depend on its version and the route; it ignores the others.
        Engine::Sglang => &[
            "return_routed_experts",
            "return_token_ids",
            "return_prompt_token_ids",
            "return_input_ids_in_sglext",
            "return_output_ids_in_sglext",
        ],
        Engine::Vllm | Engine::Openai => &["return_token_ids"],
    };
    body.extend(switches.iter().map(|switch| ((*switch).to_owned(), json!(true))));
    body
}
