//! The supported engines and routes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kind of server behind a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// SGLang; its capabilities depend on its version.
    Sglang,
    /// semmoe's own worker, which speaks SGLang's dialect and reports more about itself.
    Semmoe,
    /// vLLM.
    Vllm,
    /// Any other server with the OpenAI routes; one rank per URL.
    Openai,
}

/// An engine name that is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown engine '{found}' (known: sglang, semmoe, vllm, openai)")]
pub struct UnknownEngine {
    /// As given.
    pub found: String,
}

impl Engine {
    /// All engines.
    pub const ALL: [Self; 4] = [Self::Sglang, Self::Semmoe, Self::Vllm, Self::Openai];

    /// Returns the engine's name in configuration files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Semmoe => "semmoe",
            Self::Vllm => "vllm",
            Self::Openai => "openai",
        }
    }

    /// Returns whether the engine supports SGLang's native routes in addition to the OpenAI ones.
    pub fn speaks_sglang(self) -> bool {
        matches!(self, Self::Sglang | Self::Semmoe)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<Self, UnknownEngine> {
        Self::ALL
            .into_iter()
            .find(|engine| engine.name() == name)
            .ok_or_else(|| UnknownEngine { found: name.to_owned() })
    }
}

/// A data plane route. All other routes are rejected, since engines have some that, for example, replace weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/embeddings`
    Embeddings,
    /// `/generate` (SGLang)
    Generate,
    /// `/tokenize`
    Tokenize,
    /// `/v1/messages`: a chat in Anthropic's format
    Messages,
    /// `/detokenize`
    Detokenize,
    /// `/v1/messages/count_tokens`: counts the tokens of a chat in Anthropic's format
    CountTokens,
    /// Another path allowed by the configuration, whose bodies only the engine interprets.
    Extra,
}

impl Route {
    /// All routes with a fixed path.
    pub const ALL: [Self; 9] = [
        Self::Chat,
        Self::Completions,
        Self::Responses,
        Self::Embeddings,
        Self::Generate,
        Self::Tokenize,
        Self::Messages,
        Self::Detokenize,
        Self::CountTokens,
    ];

    /// Returns the path, which is the same at the gateway and at the engine. An extra route uses the request's path
    /// instead.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Embeddings => "/v1/embeddings",
            Self::Generate => "/generate",
            Self::Tokenize => "/tokenize",
            Self::Messages => "/v1/messages",
            Self::Detokenize => "/detokenize",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Extra => "",
        }
    }

    /// Returns the path, or `extra` for an extra route.
    pub fn name(self) -> &'static str {
        if self == Self::Extra { "extra" } else { self.path() }
    }

    /// Returns whether the body names the model in a field `model`.
    pub fn names_model(self) -> bool {
        !matches!(self, Self::Generate)
    }

    /// Returns whether requests on this route run the model and so count as load.
    pub fn runs_model(self) -> bool {
        !matches!(self, Self::Tokenize | Self::Detokenize | Self::CountTokens)
    }

    /// Returns whether responses contain generated tokens.
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Responses | Self::Generate | Self::Messages)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for engine in Engine::ALL {
            assert_eq!(engine.name().parse(), Ok(engine));
            assert_eq!(serde_json::to_value(engine).unwrap(), engine.name());
        }
        assert!("SGLang".parse::<Engine>().unwrap_err().to_string().contains("known: sglang, semmoe, vllm, openai"));
    }
}
