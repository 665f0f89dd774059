//! Compares requests in flight with the engine's loads, for answers that do not tell their rank.
//!
//! A request that was in flight before the engine counted, and still is when its count has arrived, must be in the count
//! of its rank. Nothing is asked while nothing is pinned; often while the verdict is open, and once in a health interval
//! when pins are known to be honoured.

use std::sync::Arc;
use std::time::Duration;

use semmoe_engines::verify::{Pins, loads_agree};
use semmoe_engines::{Engine, loads};
use tokio_util::sync::CancellationToken;

use crate::backend::Backend;
use crate::state::Core;

/// From a request's departure until the engine has it on a rank.
const SETTLE: Duration = Duration::from_millis(20);
/// While the verdict is open, comparisons are so much more frequent than health checks.
const EAGER: u32 = 50;

/// Watches a backend until `stop`.
pub(crate) async fn watch(core: Arc<Core>, backend: Arc<Backend>, stop: CancellationToken) {
    let compare_for_ever = async {
        loop {
            backend.loads_wanted().await;
            if let Some(agrees) = compare(&core, &backend).await {
                core.note_pin(&backend, agrees);
            }
            let interval = core.config().health.interval;
            let rest = if backend.pins().pins == Pins::Honoured { interval } else { interval / EAGER };
            tokio::time::sleep(rest).await;
        }
    };
    // The worker names the rank in every answer, and plain OpenAI servers have no loads.
    if matches!(backend.engine, Engine::Sglang | Engine::Vllm) && backend.urls.len() == 1 {
        tokio::select! {
            () = stop.cancelled() => {}
            () = compare_for_ever => {}
        }
    }
}

/// One comparison; `None` when it tells nothing.
async fn compare(core: &Core, backend: &Arc<Backend>) -> Option<bool> {
    let snapshot = core.snapshot();
    let (model, member) = snapshot.position(backend)?;
    let pool = &snapshot.models[model].pool;
    let before = pool.turnover(member);
    tokio::time::sleep(SETTLE).await;
    let ranks = u16::try_from(before.len()).ok()?;
    let url = backend.url(None)?;
    let theirs = loads::in_flight(&backend.client, backend.engine, url, ranks, &core.probe_limits()).await.ok()??;
    // Some of what ended since may have begun since, so this may be too few, never too many.
    let stayed = |((in_flight, finished), (_, now)): (&(u64, u64), &(u64, u64))| {
        in_flight.saturating_sub(now.saturating_sub(*finished))
    };
    let ours: Vec<u64> = before.iter().zip(&pool.turnover(member)).map(stayed).collect();
    loads_agree(&ours, &theirs)
}
