//! What an engine says about itself: health, and for SGLang's dialect its server information.

use crate::Engine;
use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};
use crate::sglang::{self, ServerInfo};

/// Where an engine answers whether it can serve.
pub fn health_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang | Engine::Semmoe | Engine::Vllm => sglang::HEALTH,
        // The only GET route that every server with the OpenAI routes has.
        Engine::Openai => "/v1/models",
    }
}

/// Asks for health alone; any 2xx answer is good.
pub async fn health(
    client: &HttpClient,
    engine: Engine,
    base: &BaseUrl,
    limits: &AnswerLimits,
) -> Result<(), HttpError> {
    client.get_text(base, health_path(engine), limits).await.map(|_| ())
}

/// What a probe found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// Server information, where the engine gives any.
    pub server: Option<ServerInfo>,
    /// Attention-DP ranks a request can be pinned to. A plain OpenAI server is one rank; vLLM does not tell.
    pub dp_size: Option<u16>,
}

/// Health, then server information. `/server_info` is tried first, then its older name.
pub async fn probe(
    client: &HttpClient,
    engine: Engine,
    base: &BaseUrl,
    limits: &AnswerLimits,
) -> Result<Probe, HttpError> {
    health(client, engine, base, limits).await?;
    match engine {
        Engine::Sglang | Engine::Semmoe => {
            let info = server_info(client, base, limits).await?;
            let dp_size = info.dp_size;
            Ok(Probe { server: Some(info), dp_size })
        }
        Engine::Vllm => Ok(Probe::default()),
        Engine::Openai => Ok(Probe { server: None, dp_size: Some(1) }),
    }
}

/// Server information of an engine that speaks SGLang's dialect, under whichever name this version has it.
pub async fn server_info(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<ServerInfo, HttpError> {
    match client.get_json(base, sglang::SERVER_INFO, limits).await {
        Err(error) if error.status() == Some(404) => client.get_json(base, sglang::GET_SERVER_INFO, limits).await,
        answer => answer,
    }
}
