//! Streams of chats and completions, event by event as real engines send them.

use serde_json::{Value, json};

use crate::answer::{Run, SAID, extension, is_set, named};
use crate::dialect::Extras;
use crate::engine::Engine;

/// All events except the last, `[DONE]`.
pub(crate) fn documents(engine: &Engine, body: &Value, run: &Run, chat: bool) -> Vec<Value> {
    let vllm = engine.dialect.is_vllm();
    let stream = Stream { engine, body, run, chat, vllm };
    let mut documents = Vec::new();
    if chat {
        documents.push(stream.role());
    }
    for (at, token) in run.output.iter().enumerate() {
        documents.push(stream.token(at, *token));
    }
    if chat && !vllm {
        // The finish reason is an event of its own.
        let choice =
            json!({ "index": 0, "delta": {}, "logprobs": null, "finish_reason": "length", "matched_stop": null });
        documents.push(stream.event(json!([choice])));
    }
    let extension = extension(engine, body, run, chat);
    if !vllm && !extension.is_empty() {
        let mut event = stream.event(json!([]));
        event["usage"] = Value::Null;
        event["sglext"] = extension.into();
        documents.push(event);
    }
    if is_set(&body["stream_options"], "include_usage") {
        let mut event = stream.event(json!([]));
        event["usage"] = run.usage();
        documents.push(event);
    }
    documents
}

struct Stream<'a> {
    engine: &'a Engine,
    body: &'a Value,
    run: &'a Run,
    chat: bool,
    vllm: bool,
}

impl Stream<'_> {
    fn event(&self, choices: Value) -> Value {
        let object = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        json!({
            "id": "0af7651916cd43dd8448eb211c80319c", "object": object, "created": 1_767_225_600,
            "model": named(self.engine, self.body), "choices": choices,
        })
    }

    /// Sent before the first token of a chat.
    fn role(&self) -> Value {
        let delta = json!({ "role": "assistant", "content": "" });
        let mut event = self.event(json!([{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": null }]));
        if self.vllm {
            event["prompt_token_ids"] = json!(self.wants_ids().then(|| self.run.seen_prompt()));
        }
        event
    }

    fn token(&self, at: usize, token: u32) -> Value {
        let last = at + 1 == self.run.output.len();
        let finished = last && (self.vllm || !self.chat);
        let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": finished.then_some("length") });
        match self.chat {
            true => choice["delta"] = json!({ "content": SAID }),
            false => choice["text"] = json!(SAID),
        }
        let prompt = || (at == 0).then(|| self.run.seen_prompt());
        if self.vllm {
            choice["token_ids"] = json!(self.wants_ids().then_some([token]));
            if !self.chat {
                choice["prompt_token_ids"] = json!(self.wants_ids().then(prompt).flatten());
            }
        } else if !self.chat && self.wants_ids() && self.engine.dialect.extras == Extras::Sglext {
            choice["token_ids"] = json!([token]);
            if let Some(prompt) = prompt() {
                choice["prompt_token_ids"] = json!(prompt);
            }
        }
        let mut event = self.event(json!([choice]));
        if !self.vllm && !self.chat {
            event["usage"] = Value::Null;
        }
        event
    }

    fn wants_ids(&self) -> bool {
        is_set(self.body, "return_token_ids")
    }
}
