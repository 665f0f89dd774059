//! The table of request fields: OpenAI's chat and completions routes, SGLang 0.5.23 with its `/generate` and
//! `/tokenize`, and vLLM 0.32.

use super::Harmless::{Bool, Empty, List, NullOnly, Number, Type, Words};
use super::Use::{Honoured, NoEffect, Unless};
use super::{CHAT, COMPLETIONS, GENERATE, OPENAI, PARAMS, STREAM, TOKENIZE, Use};

const FALSE: Use = Unless(Bool(false));
const TRUE: Use = Unless(Bool(true));
const ZERO: Use = Unless(Number(0.0));
const ONE: Use = Unless(Number(1.0));
const EMPTY: Use = Unless(Empty);
const NULL: Use = Unless(NullOnly);

const fn words(words: &'static [&'static str]) -> Use {
    Unless(Words(words))
}

/// One row: fields that are treated alike in all `places` where they may occur.
pub(super) struct Row {
    pub(super) places: u8,
    pub(super) usage: Use,
    pub(super) names: &'static [&'static str],
}

const fn row(places: u8, usage: Use, names: &'static [&'static str]) -> Row {
    Row { places, usage, names }
}

pub(super) const ROWS: &[Row] = &[
    // Honoured.
    row(CHAT | TOKENIZE, Honoured, &["messages", "tools", "chat_template_kwargs", "add_generation_prompt"]),
    row(COMPLETIONS | TOKENIZE, Honoured, &["prompt"]),
    row(GENERATE, Honoured, &["text", "input_ids", "sampling_params", "rid"]),
    row(GENERATE, Honoured, &["return_logprob", "top_logprobs_num", "return_prompt_token_ids"]),
    row(OPENAI, Honoured, &["model", "stream_options", "max_tokens", "max_completion_tokens", "logprobs"]),
    row(OPENAI, Honoured, &["return_input_ids_in_sglext", "return_output_ids_in_sglext"]),
    row(CHAT, Honoured, &["top_logprobs"]),
    row(OPENAI | GENERATE, Honoured, &["stream", "return_routed_experts", "routed_experts_start_len"]),
    row(OPENAI | GENERATE, Honoured, &["routed_dp_rank", "data_parallel_rank", "priority"]),
    row(PARAMS, Honoured, &["max_new_tokens"]),
    row(OPENAI | PARAMS, Honoured, &["min_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "seed"]),
    row(OPENAI | PARAMS, Honoured, &["sampling_seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"]),
    row(STREAM, Honoured, &["include_usage", "continuous_usage_stats"]),
    // Metadata about the client, conversation or logging, and hints that do not change the output.
    row(OPENAI, NoEffect, &["user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]),
    row(OPENAI, NoEffect, &["prediction", "rid", "request_id"]),
    row(OPENAI | GENERATE, NoEffect, &["session_id", "custom_labels"]),
    row(GENERATE, NoEffect, &["log_metrics", "no_logs", "routing_key", "conversation_id", "external_trace_header"]),
    // Used by gateways that serve several models.
    row(GENERATE | TOKENIZE, NoEffect, &["model"]),
    // The output is plain text: it contains no tool calls and does not separate reasoning.
    row(CHAT, NoEffect, &["parallel_tool_calls", "separate_reasoning", "stream_reasoning"]),
    // Selects an encoding for a field that is rejected below.
    row(CHAT | GENERATE, NoEffect, &["return_flat_raw_top_logprobs_b64"]),
    row(OPENAI, words(&["auto", "default"]), &["service_tier"]),
    row(OPENAI, FALSE, &["store"]),
    row(STREAM, FALSE, &["include_obfuscation"]),
    // Tools and formats.
    row(CHAT | TOKENIZE, words(&["none", "auto"]), &["tool_choice"]),
    row(CHAT, words(&["none", "auto"]), &["function_call"]),
    row(CHAT, EMPTY, &["functions"]),
    row(OPENAI, Unless(Type("text")), &["response_format"]),
    row(OPENAI | PARAMS, EMPTY, &["json_schema", "regex", "ebnf", "structural_tag"]),
    row(OPENAI, EMPTY, &["structured_outputs"]),
    row(PARAMS, FALSE, &["ebnf_full_assistant"]),
    row(CHAT, words(&["medium"]), &["verbosity"]),
    row(CHAT | TOKENIZE, NULL, &["reasoning_effort"]),
    row(CHAT, NULL, &["thinking", "task", "web_search_options"]),
    row(OPENAI, NULL, &["thinking_token_budget"]),
    row(CHAT, TRUE, &["include_reasoning"]),
    row(GENERATE, FALSE, &["require_reasoning"]),
    row(GENERATE, NULL, &["max_thinking_tokens"]),
    // Sampling.
    row(OPENAI | PARAMS, ONE, &["n", "repetition_penalty", "stream_interval"]),
    row(OPENAI | PARAMS, ZERO, &["frequency_penalty", "presence_penalty", "min_p"]),
    row(OPENAI | PARAMS, EMPTY, &["logit_bias", "stop_regex", "custom_params", "watermark"]),
    row(COMPLETIONS, ONE, &["best_of"]),
    row(OPENAI, ONE, &["length_penalty"]),
    row(OPENAI, FALSE, &["use_beam_search", "include_stop_str_in_output", "watermarking"]),
    row(OPENAI, EMPTY, &["bad_words", "repetition_detection", "vllm_xargs"]),
    row(OPENAI, NULL, &["allowed_token_ids"]),
    row(PARAMS, NULL, &["beam_width"]),
    row(OPENAI | PARAMS, FALSE, &["no_stop_trim"]),
    row(OPENAI | PARAMS, TRUE, &["spaces_between_special_tokens"]),
    row(OPENAI | GENERATE, EMPTY, &["lora_path", "custom_logit_processor", "session_params"]),
    row(GENERATE, EMPTY, &["lora_id"]),
    // The prompt.
    row(OPENAI, FALSE, &["echo"]),
    row(COMPLETIONS, EMPTY, &["suffix", "prompt_embeds"]),
    row(CHAT | TOKENIZE, FALSE, &["continue_final_message"]),
    row(CHAT, FALSE, &["add_special_tokens"]),
    row(COMPLETIONS | TOKENIZE, TRUE, &["add_special_tokens"]),
    row(OPENAI, NULL, &["truncate_prompt_tokens", "truncation_side"]),
    row(CHAT, NULL, &["chat_template", "input_ids"]),
    row(CHAT, EMPTY, &["documents"]),
    row(GENERATE, EMPTY, &["input_embeds"]),
    row(GENERATE, NULL, &["positional_embed_overrides"]),
    row(GENERATE, EMPTY, &["multi_item_delimiter_indices", "token_indices_to_pool"]),
    // Images, audio and video.
    row(CHAT, Unless(List(&["text"])), &["modalities"]),
    row(GENERATE, EMPTY, &["modalities"]),
    row(CHAT, NULL, &["audio"]),
    row(GENERATE, EMPTY, &["image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes", "encoder_urls"]),
    row(OPENAI | GENERATE, EMPTY, &["images_config", "mm_processor_kwargs"]),
    row(CHAT | GENERATE, EMPTY, &["video_config"]),
    row(CHAT, EMPTY, &["media_io_kwargs"]),
    row(CHAT | GENERATE, NULL, &["max_dynamic_patch", "min_dynamic_patch"]),
    row(GENERATE, NULL, &["image_max_dynamic_patch", "video_max_dynamic_patch"]),
    row(CHAT | GENERATE, FALSE, &["use_audio_in_video"]),
    row(OPENAI, words(&["tensors"]), &["mm_payload"]),
    row(OPENAI, FALSE, &["return_mm_kwargs"]),
    // Additional output.
    row(OPENAI | GENERATE, FALSE, &["return_hidden_states"]),
    row(OPENAI, FALSE, &["return_cached_tokens_details", "return_spec_tokens_details", "return_token_ids"]),
    row(OPENAI, FALSE, &["return_tokens_as_token_ids", "return_token_offsets"]),
    row(CHAT, FALSE, &["return_prompt_token_ids", "return_prompt_text", "return_meta_info"]),
    row(CHAT | GENERATE, FALSE, &["return_sampling_mask", "return_flat_raw_output_top_logprobs"]),
    row(CHAT | GENERATE, NULL, &["sampling_logprobs_mode"]),
    row(OPENAI, NULL, &["prompt_logprobs"]),
    row(OPENAI, EMPTY, &["logprob_token_ids"]),
    row(OPENAI, ZERO, &["routed_experts_prompt_start"]),
    row(GENERATE, Unless(Number(-1.0)), &["logprob_start_len"]),
    row(GENERATE, EMPTY, &["token_ids_logprob"]),
    row(GENERATE, FALSE, &["return_text_in_logprobs", "return_flat_raw_top_logprobs", "return_indexer_topk"]),
    row(GENERATE, FALSE, &["return_bytes", "return_entropy", "background"]),
    row(TOKENIZE, FALSE, &["return_token_strs"]),
    // How and where the request runs. A salt isolates cached prefixes, so ignoring it would share prefixes that a
    // client wants isolated.
    row(OPENAI | GENERATE, EMPTY, &["cache_salt", "extra_key"]),
    row(OPENAI | GENERATE, NULL, &["bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"]),
    row(GENERATE, NULL, &["bootstrap_pair_key", "decode_tp_size", "kv_hints"]),
    row(OPENAI, EMPTY, &["kv_transfer_params", "ec_transfer_params"]),
];
