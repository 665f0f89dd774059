//! Rank 0's HTTP API: the OpenAI routes, SGLang's `/generate` and the routes that describe the unit.
//!
//! | module | what |
//! |---|---|
//! | `admin` | admin routes and their access control |
//! | `app` | state shared by all routes |
//! | `listen` | connections and bodies, with their limits |
//! | `switch` | switches to another layout or expert placement |
//! | `error` | mapping of errors to status and JSON |
//! | `validated` | a validated request in any dialect |
//! | `fields` | every known parameter: honoured, without effect, or rejected |
//! | `params` | sampling fields shared by both dialects |
//! | `logprobs` | token log-probabilities |
//! | `answer` | collects the tokens of a request's sequences |
//! | `reply` | complete responses and event streams, for any dialect |
//! | `generate`, `openai` | the dialects |
//! | `info`, `metrics` | routes that describe the unit |

mod admin;
mod answer;
mod app;
mod error;
mod fields;
mod generate;
mod info;
mod listen;
mod logprobs;
mod metrics;
mod openai;
mod params;
mod reply;
mod switch;
mod validated;

use std::future::Future;
use std::io;
use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};
use tokio::net::TcpListener;

pub(crate) use admin::Gate;
pub(crate) use app::{App, Defaults, ServedModel};

/// Serves until `stop` resolves and all open requests have finished.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    listen::serve(listener, router(app), stop).await
}

fn router(app: Arc<App>) -> Router {
    let admin = Router::new()
        .route("/drain", post(admin::drain))
        .route("/flush_cache", post(admin::flush_cache))
        .route("/switch", get(switch::status).post(switch::switch))
        .route_layer(axum::middleware::from_fn_with_state(Arc::clone(&app), admin::guard));
    Router::new()
        .merge(admin)
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::completions))
        .route("/generate", post(generate::generate))
        .route("/tokenize", post(info::tokenize))
        .route("/health", get(info::health))
        .route("/health_generate", get(generate::health))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/model_info", get(info::model_info))
        .route("/get_model_info", get(info::model_info))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/loads", get(info::loads))
        .route("/metrics", get(metrics::metrics))
        .fallback(error::not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(app)
}
