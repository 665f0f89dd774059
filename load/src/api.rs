//! The routes that can be load-tested, and the request bodies for them.

use semmoe_engines::Route;
use semmoe_text::LinePrompt;
use serde_json::{Map, Value, json};

use crate::LoadOptions;

/// A route that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/generate` (SGLang, semmoe's worker)
    Generate,
}

impl Api {
    /// The route's path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => Route::Chat.path(),
            Self::Completions => Route::Completions.path(),
            Self::Generate => Route::Generate.path(),
        }
    }

    /// Whether the request body contains the model's name.
    pub fn names_model(self) -> bool {
        !matches!(self, Self::Generate)
    }
}

impl LoadOptions {
    /// Builds the body for a prompt; `None` if the route does not support that prompt.
    pub(crate) fn body(&self, prompt: LinePrompt) -> Option<Map<String, Value>> {
        let (name, value, tools) = match (self.api, prompt) {
            (Api::Chat, LinePrompt::Messages { messages, tools }) => ("messages", messages, tools),
            (Api::Chat, LinePrompt::Text(text)) => ("messages", json!([{ "role": "user", "content": text }]), None),
            (Api::Completions, LinePrompt::Text(text)) => ("prompt", text.into(), None),
            (Api::Completions, LinePrompt::Ids(ids)) => ("prompt", ids.into(), None),
            (Api::Generate, LinePrompt::Text(text)) => ("text", text.into(), None),
            (Api::Generate, LinePrompt::Ids(ids)) => ("input_ids", ids.into(), None),
            (Api::Chat, LinePrompt::Ids(_)) | (_, LinePrompt::Messages { .. }) => return None,
        };
        let mut body = Map::new();
        if let Some(model) = self.model.as_deref().filter(|_| self.api.names_model()) {
            body.insert("model".into(), model.into());
        }
        body.insert(name.into(), value);
        if let Some(tools) = tools {
            body.insert("tools".into(), tools);
        }
        let (name, limit) = match self.api {
            Api::Generate => ("sampling_params", json!({ "max_new_tokens": self.max_tokens })),
            Api::Chat | Api::Completions => ("max_tokens", self.max_tokens.into()),
        };
        body.insert(name.into(), limit);
        if self.stream {
            body.insert("stream".into(), true.into());
            if self.api.names_model() {
                // With this option, the last event reports the number of tokens.
                body.insert("stream_options".into(), json!({ "include_usage": true }));
            }
        }
        body.extend(self.extra.clone());
        Some(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, Pace};

    #[test]
    fn bodies_of_all_routes() {
        let messages = json!([{"role": "user", "content": "a"}]);
        let talk = LinePrompt::Messages { messages: messages.clone(), tools: Some(json!([1])) };
        let text = LinePrompt::Text("a".into());
        let ids = LinePrompt::Ids(vec![1, 2]);
        let (none, extra) = (Map::new(), json!({"max_tokens": 9, "temperature": 0}));
        let usage = json!({"include_usage": true});
        for (api, stream, extra, prompt, expected) in [
            (
                Api::Chat,
                false,
                &none,
                talk.clone(),
                Some(json!({"model": "m", "messages": messages, "tools": [1], "max_tokens": 3})),
            ),
            (
                Api::Chat,
                true,
                &none,
                text.clone(),
                Some(
                    json!({"model": "m", "messages": messages, "max_tokens": 3, "stream": true, "stream_options": usage}),
                ),
            ),
            (Api::Chat, false, &none, ids.clone(), None),
            (Api::Completions, false, &none, talk.clone(), None),
            (
                Api::Completions,
                false,
                extra.as_object().unwrap(),
                text.clone(),
                Some(json!({"model": "m", "prompt": "a", "max_tokens": 9, "temperature": 0})),
            ),
            (
                Api::Completions,
                false,
                &none,
                ids.clone(),
                Some(json!({"model": "m", "prompt": [1, 2], "max_tokens": 3})),
            ),
            (
                Api::Generate,
                true,
                &none,
                ids,
                Some(json!({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "stream": true})),
            ),
            (Api::Generate, false, &none, talk, None),
        ] {
            let pace = Pace::Closed { concurrency: 1 };
            let mut options = LoadOptions::new("http://a".parse().unwrap(), "p".into(), pace, Limit::Requests(1));
            options.model = Some("m".into());
            (options.api, options.max_tokens, options.stream, options.extra) = (api, 3, stream, extra.clone());
            assert_eq!(options.body(prompt).map(Value::Object), expected, "{api:?}");
        }
    }
}
