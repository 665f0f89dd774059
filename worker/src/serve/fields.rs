//! Every parameter of every route: honoured, without effect by its nature, or refused unless it asks for nothing. What is
//! not in the table is refused by name, so that none is ignored in silence. docs/worker.md shows the table.

use serde_json::Value;

use super::error::ApiError;

/// Where a parameter may stand; sums are several places.
pub(super) const CHAT: u8 = 1;
pub(super) const COMPLETIONS: u8 = 2;
pub(super) const GENERATE: u8 = 4;
/// `sampling_params` of `/generate`.
pub(super) const PARAMS: u8 = 8;
pub(super) const TOKENIZE: u8 = 16;
const OPENAI: u8 = CHAT | COMPLETIONS;

#[derive(Clone, Copy)]
enum Use {
    Honoured,
    /// It asks for nothing that this worker could do otherwise.
    NoEffect,
    /// Refused, unless it has a value that asks for nothing.
    Unless(Neutral),
}

#[derive(Clone, Copy)]
enum Neutral {
    Number(f64),
    Bool(bool),
    /// An empty string, list or object.
    Empty,
    Words(&'static [&'static str]),
}

use Use::{Honoured, NoEffect, Unless};

const FIELDS: [(&str, u8, Use); 66] = [
    ("model", OPENAI, Honoured),
    ("messages", CHAT | TOKENIZE, Honoured),
    ("tools", CHAT | TOKENIZE, Honoured),
    ("chat_template_kwargs", CHAT | TOKENIZE, Honoured),
    ("add_generation_prompt", CHAT | TOKENIZE, Honoured),
    ("prompt", COMPLETIONS | TOKENIZE, Honoured),
    ("text", GENERATE, Honoured),
    ("input_ids", GENERATE, Honoured),
    ("sampling_params", GENERATE, Honoured),
    ("stream", OPENAI | GENERATE, Honoured),
    ("stream_options", OPENAI, Honoured),
    ("max_tokens", OPENAI, Honoured),
    ("max_completion_tokens", OPENAI, Honoured),
    ("max_new_tokens", PARAMS, Honoured),
    ("min_tokens", OPENAI | PARAMS, Honoured),
    ("min_new_tokens", OPENAI | PARAMS, Honoured),
    ("temperature", OPENAI | PARAMS, Honoured),
    ("top_p", OPENAI | PARAMS, Honoured),
    ("top_k", OPENAI | PARAMS, Honoured),
    ("seed", OPENAI | PARAMS, Honoured),
    ("sampling_seed", OPENAI | PARAMS, Honoured),
    ("stop", OPENAI | PARAMS, Honoured),
    ("stop_token_ids", OPENAI | PARAMS, Honoured),
    ("ignore_eos", OPENAI | PARAMS, Honoured),
    ("skip_special_tokens", OPENAI | PARAMS, Honoured),
    ("logprobs", OPENAI, Honoured),
    ("top_logprobs", CHAT, Honoured),
    ("return_logprob", GENERATE, Honoured),
    ("top_logprobs_num", GENERATE, Honoured),
    ("rid", GENERATE, Honoured),
    ("return_routed_experts", OPENAI | GENERATE, Honoured),
    ("routed_experts_start_len", OPENAI | GENERATE, Honoured),
    ("return_prompt_token_ids", GENERATE, Honoured),
    ("return_input_ids_in_sglext", OPENAI, Honoured),
    ("return_output_ids_in_sglext", OPENAI, Honoured),
    ("routed_dp_rank", OPENAI | GENERATE, Honoured),
    ("data_parallel_rank", OPENAI | GENERATE, Honoured),
    ("response_format", OPENAI, Honoured),
    // Words about the client or the conversation.
    ("user", OPENAI, NoEffect),
    ("metadata", OPENAI, NoEffect),
    ("safety_identifier", OPENAI, NoEffect),
    ("prompt_cache_key", OPENAI, NoEffect),
    ("service_tier", OPENAI, Unless(Neutral::Words(&["auto", "default"]))),
    ("store", OPENAI, Unless(Neutral::Bool(false))),
    // For gateways with several models.
    ("model", GENERATE | TOKENIZE, NoEffect),
    // Answers are text: they hold no calls.
    ("parallel_tool_calls", CHAT, NoEffect),
    ("tool_choice", CHAT, Unless(Neutral::Words(&["none", "auto"]))),
    ("n", OPENAI | PARAMS, Unless(Neutral::Number(1.0))),
    ("best_of", OPENAI, Unless(Neutral::Number(1.0))),
    ("frequency_penalty", OPENAI | PARAMS, Unless(Neutral::Number(0.0))),
    ("presence_penalty", OPENAI | PARAMS, Unless(Neutral::Number(0.0))),
    ("repetition_penalty", OPENAI | PARAMS, Unless(Neutral::Number(1.0))),
    ("min_p", OPENAI | PARAMS, Unless(Neutral::Number(0.0))),
    ("logit_bias", OPENAI | PARAMS, Unless(Neutral::Empty)),
    ("echo", COMPLETIONS, Unless(Neutral::Bool(false))),
    ("suffix", COMPLETIONS, Unless(Neutral::Empty)),
    ("logprob_start_len", GENERATE, Unless(Neutral::Number(-1.0))),
    ("return_text_in_logprobs", GENERATE, Unless(Neutral::Bool(false))),
    ("json_schema", OPENAI | PARAMS, Unless(Neutral::Empty)),
    ("regex", OPENAI | PARAMS, Unless(Neutral::Empty)),
    ("ebnf", OPENAI | PARAMS, Unless(Neutral::Empty)),
    ("structural_tag", PARAMS, Unless(Neutral::Empty)),
    ("no_stop_trim", OPENAI | PARAMS, Unless(Neutral::Bool(false))),
    ("spaces_between_special_tokens", PARAMS, Unless(Neutral::Bool(true))),
    ("custom_params", PARAMS, Unless(Neutral::Empty)),
    ("lora_path", OPENAI | GENERATE, Unless(Neutral::Empty)),
];

impl Neutral {
    fn holds(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Number(neutral), value) => value.as_f64() == Some(neutral),
            (Self::Bool(neutral), value) => value.as_bool() == Some(neutral),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Empty, Value::Object(map)) => map.is_empty(),
            (Self::Empty, Value::Array(list)) => list.is_empty(),
            (Self::Empty, _) => false,
            (Self::Words(words), value) => value.as_str().is_some_and(|found| words.contains(&found)),
        }
    }
}

/// Refuses members of `body` that a place does not have, or that ask for what this worker does not do. Null is absent.
pub(super) fn check(body: &Value, place: u8) -> Result<(), ApiError> {
    let members = body.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    for (name, value) in members {
        let known = FIELDS.iter().find(|(field, places, _)| field == name && places & place != 0);
        match known {
            Some((_, _, Honoured | NoEffect)) => {}
            Some((_, _, Unless(neutral))) if neutral.holds(value) => {}
            Some(_) => {
                let message = format!("{name} {} is not supported by this worker", shortened(&value.to_string()));
                return Err(ApiError::bad(message).about(name));
            }
            None => {
                let message = format!("{} is no parameter that this worker knows here", shortened(name));
                return Err(ApiError::bad(message).about(name));
            }
        }
    }
    Ok(())
}

/// A part of a request, short enough for a message.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_parameter_is_known_refused_or_unknown_by_name() {
        let told = |body: Value, place| check(&body, place).err().map(|error| error.json()["error"]["param"].clone());
        for (body, place) in [
            (json!({"messages": [], "user": "x", "n": 1, "logit_bias": {}, "made_up": null}), CHAT),
            (json!({"prompt": "", "echo": false, "best_of": 1.0, "stop": null}), COMPLETIONS),
            (json!({"text": "", "logprob_start_len": -1, "model": "m"}), GENERATE),
            (json!({"min_p": 0, "repetition_penalty": 1.0, "regex": null, "json_schema": ""}), PARAMS),
        ] {
            assert_eq!(told(body, place), None);
        }
        for (body, place, name) in [
            (json!({"made_up": 1}), CHAT, "made_up"),
            (json!({"prompt": "a"}), CHAT, "prompt"),
            (json!({"tool_choice": {"type": "function"}}), CHAT, "tool_choice"),
            (json!({"n": 2}), COMPLETIONS, "n"),
            (json!({"prompt": "a", "add_special_tokens": true}), TOKENIZE, "add_special_tokens"),
            (json!({"echo": true}), COMPLETIONS, "echo"),
            (json!({"temperature": 1}), GENERATE, "temperature"),
            (json!({"min_p": 0.1}), PARAMS, "min_p"),
            (json!({"json_schema": {"a": 1}}), PARAMS, "json_schema"),
        ] {
            assert_eq!(told(body, place), Some(json!(name)));
        }
    }

    #[test]
    fn no_parameter_is_in_the_table_twice() {
        for (index, (name, places, _)) in FIELDS.iter().enumerate() {
            let again = FIELDS[..index].iter().find(|(other, others, _)| other == name && others & places != 0);
            assert!(again.is_none(), "{name}");
        }
    }
}
