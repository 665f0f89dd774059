//! Request body members that are not simply forwarded, and how each is handled, by route.
//!
//! Based on the request classes of SGLang 0.5.23 and vLLM 0.33.0. `request/engines/FIELDS.md` lists all of their
//! fields, including those that are forwarded, and a test compares it with this table; `tests/engines/fields.py`
//! detects fields that newer versions add.

mod check;

use crate::Route;
use crate::dialect::{DATA_PARALLEL_RANK, ROUTED_DP_RANK};
use crate::json::ids::Form;
use crate::json::is_key;

pub use check::{Fault, Rules};

/// How to treat a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// The member is removed, since it is a pin or part of a protocol between routers and engines. Clients could use it
    /// to choose a rank, make an engine connect to a host, or claim cached content.
    Removed,
    /// The request is rejected, since removing the member would change its meaning.
    Refused,
    /// The member names LoRA adapters, which the configuration may restrict.
    Adapters,
    /// The member contains token ids, which must be in the vocabulary.
    Ids(Form),
    /// The member is an object, or a list of objects, whose members become engine arguments. Members that would be
    /// removed from the body are rejected in these objects.
    Arguments,
}

/// A named member of a request body.
#[derive(Debug, PartialEq, Eq)]
pub struct Field {
    /// The member's key.
    pub name: &'static str,
    /// How to treat it.
    pub treatment: Treatment,
    /// Routes on which an engine interprets the member this way.
    routes: &'static [Route],
}

impl Field {
    /// Returns whether the field applies on the route. On extra routes every field does, since their bodies are
    /// unknown.
    pub fn is_on(&self, route: Route) -> bool {
        route == Route::Extra || self.routes.contains(&route)
    }
}

const fn field(name: &'static str, treatment: Treatment, routes: &'static [Route]) -> Field {
    Field { name, treatment, routes }
}

/// Removes a member on all engines, versions and routes, since removing an unused member is harmless.
const fn removed(name: &'static str) -> Field {
    field(name, Treatment::Removed, &Route::ALL)
}

const fn ids(name: &'static str, routes: &'static [Route]) -> Field {
    field(name, Treatment::Ids(Form::Ids), routes)
}

const fn ids_or_text(name: &'static str, routes: &'static [Route]) -> Field {
    field(name, Treatment::Ids(Form::IdsOrText), routes)
}

/// Routes with the OpenAI API's sampling parameters.
const SAMPLING: &[Route] = &[Route::Chat, Route::Completions, Route::Responses];

/// All treated members.
pub const FIELDS: [Field; 46] = [
    // Ranks, and hosts that an engine fetches keys and values from.
    removed(ROUTED_DP_RANK),
    removed(DATA_PARALLEL_RANK),
    removed("disagg_prefill_dp_rank"),
    removed("bootstrap_host"),
    removed("bootstrap_port"),
    removed("bootstrap_room"),
    removed("bootstrap_pair_key"),
    removed("decode_tp_size"),
    removed("kv_transfer_params"),
    removed("ec_transfer_params"),
    removed("encoder_urls"),
    removed("need_wait_for_mm_inputs"),
    removed("num_items_assigned"),
    // Members reserved for trusted routers and for an engine's own processes.
    removed("kv_hints"),
    removed("kv_router_hint"),
    removed("http_worker_ipc"),
    removed("mm_hashes"),
    removed("mm_content_hashes"),
    removed("external_trace_header"),
    removed("received_time"),
    // Python objects, which JSON cannot represent faithfully.
    field("positional_embed_overrides", Treatment::Refused, &[Route::Generate]),
    field("decision_layout", Treatment::Refused, &[]),
    field("lora_id", Treatment::Refused, &[Route::Chat, Route::Completions, Route::Embeddings, Route::Generate]),
    field("lora_path", Treatment::Adapters, &[Route::Chat, Route::Completions, Route::Embeddings, Route::Generate]),
    field(
        "vllm_xargs",
        Treatment::Arguments,
        &[Route::Chat, Route::Completions, Route::Responses, Route::Messages, Route::CountTokens],
    ),
    field("sampling_params", Treatment::Arguments, &[Route::Generate]),
    field("extra_args", Treatment::Arguments, &[]),
    field("instances", Treatment::Arguments, &[]),
    field("parameters", Treatment::Arguments, &[]),
    ids_or_text("prompt", &[Route::Completions]),
    ids_or_text("input", &[Route::Embeddings]),
    field("query", Treatment::Ids(Form::IdsOrPrompt), &[]),
    ids_or_text("items", &[]),
    ids("input_ids", &[Route::Chat, Route::Generate]),
    ids("token_ids", &[]),
    ids("label_token_ids", &[]),
    ids("tokens", &[Route::Detokenize]),
    ids("embed_override_token_id", &[Route::Embeddings]),
    ids("token_ids_logprob", &[Route::Generate]),
    ids("logprob_token_ids", SAMPLING),
    ids("allowed_token_ids", SAMPLING),
    ids("prompt_logprob_token_ids", &[]),
    ids("trace_decode_token_ids", &[]),
    ids("score_extraction_token_id", &[]),
    ids("stop_token_ids", &[Route::Chat, Route::Completions, Route::Responses, Route::Generate]),
    ids("logit_bias", &[Route::Chat, Route::Completions, Route::Responses, Route::Generate]),
];

/// For each first letter of a name, modulo 32, the lengths of such names as a bit set.
const LENGTHS: [u64; 32] = {
    let mut lengths = [0; 32];
    let mut at = 0;
    while at < FIELDS.len() {
        let name = FIELDS[at].name.as_bytes();
        assert!(name.len() < 64);
        lengths[(name[0] & 31) as usize] |= 1 << name.len();
        at += 1;
    }
    lengths
};

/// Returns the field for a raw key with unresolved escapes. Most keys match no field and are ruled out cheaply.
pub fn field_of(key: &[u8]) -> Option<&'static Field> {
    if key.contains(&b'\\') {
        return FIELDS.iter().find(|field| is_key(key, field.name));
    }
    let first = usize::from(*key.first()? & 31);
    let may_be = key.len() < 64 && LENGTHS[first] >> key.len() & 1 == 1;
    FIELDS.iter().filter(|_| may_be).find(|field| field.name.as_bytes() == key)
}

/// Iterates over the names of members that are removed from every body.
pub fn removed_names() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().filter(|field| field.treatment == Treatment::Removed).map(|field| field.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_in_every_spelling() {
        for field in &FIELDS {
            let found = |key: &str| field_of(key.as_bytes()).map(|field| field.name);
            assert_eq!(found(field.name), Some(field.name));
            let escaped: String = field.name.bytes().map(|byte| format!("\\u{byte:04x}")).collect();
            assert_eq!(found(&escaped), Some(field.name));
            assert_eq!(found(&field.name[1..]), None);
            assert_eq!(found(&format!("{}x", field.name)), None);
            assert_eq!(found(&field.name.to_uppercase()), None);
            assert!(field.is_on(Route::Extra));
        }
        for other in ["", "model", "messages", "\\", "é", &"r".repeat(1 << 20)] {
            assert_eq!(field_of(other.as_bytes()), None);
        }
    }

    #[test]
    fn a_name_stands_for_one_field() {
        for (at, field) in FIELDS.iter().enumerate() {
            assert!(FIELDS[..at].iter().all(|other| other.name != field.name), "{}", field.name);
        }
    }
}
