//! A switch, by an operator's service, of an engine without a hook: one POST, whose response must name the layout that
//! runs afterwards.

use std::time::Instant;

use semmoe_engines::http::{AnswerLimits, HttpClient};
use semmoe_planner::policy::Layout;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{Move, Outcome};
use crate::config::{SwitchConfig, Webhook};

/// Maximum size of the response, which needs only one word.
const ANSWER_BYTES: usize = 64 << 10;

#[derive(Serialize)]
struct Request<'a> {
    backend: &'a str,
    from: Layout,
    to: Layout,
}

#[derive(Deserialize)]
struct Answered {
    /// The layout that runs now.
    layout: Layout,
}

/// Requests a switch and waits for it to end. A failed switch is not retried here: the policy waits, and decides again.
pub(super) async fn switch(
    hook: &Webhook,
    rules: &SwitchConfig,
    backend: &str,
    requested: Move,
    stop: &CancellationToken,
) -> Outcome {
    let server = hook.server.clone();
    // For https this loads the system's CA certificates.
    let client = tokio::task::spawn_blocking(move || HttpClient::for_url(&server)).await;
    let client = match client {
        Ok(Ok(client)) => client,
        Ok(Err(error)) => return Outcome::Lost { cause: error.reason() },
        Err(error) => return Outcome::Lost { cause: error.to_string() },
    };
    let limits = AnswerLimits { timeout: rules.commit, max_bytes: ANSWER_BYTES };
    let (began, body) = (Instant::now(), Request { backend, from: requested.from, to: requested.to });
    let answer = tokio::select! {
        answer = client.post_json::<_, Answered>(&hook.server, &hook.path, &body, &limits) => answer,
        () = stop.cancelled() => return Outcome::Stopped,
    };
    match answer {
        Ok(Answered { layout }) if layout == requested.to => {
            Outcome::Committed { seconds: began.elapsed().as_secs_f64() }
        }
        Ok(Answered { layout }) => {
            Outcome::Refused { cause: format!("the webhook reports that {} is running", layout.name()) }
        }
        Err(error) if error.status().is_some() => Outcome::Refused { cause: error.reason() },
        Err(error) => Outcome::Lost { cause: error.reason() },
    }
}
