//! Follows the endpoints of a Kubernetes service in one task: lists them once, then watches them.
//!
//! The API server may be unavailable, lose the version that a watch resumes from (410), or refuse (403). The task then
//! lists everything again, after a wait that grows with every failure. Until that succeeds the answer is a failure, and
//! the known backends stay. All requests use one HTTP client; [`api`] contains the requests, [`slices`] the responses.

mod api;
mod slices;

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::KubernetesConfig;

use super::answer::Answer;
use api::Api;
pub(super) use api::ApiError;
use slices::Slices;

/// Initial and maximum wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Number of consecutive expired versions that do not yet count as a failure.
const MAX_GONE: u32 = 3;
/// A watch that ends normally before this time, without an event, counts as failed.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// A Kubernetes service that is followed until this is dropped.
pub(super) struct Followed {
    latest: Arc<LatestAnswer>,
    _stop: DropGuard,
}

/// The task's state.
struct LatestAnswer {
    answer: Mutex<Option<Result<Answer, Arc<ApiError>>>>,
    changed: AtomicBool,
    wake: Arc<Notify>,
}

impl Followed {
    /// Starts following a service; `wake` is notified at every change.
    pub(super) fn start(config: KubernetesConfig, wake: Arc<Notify>) -> Self {
        let latest = Arc::new(LatestAnswer { answer: Mutex::new(None), changed: AtomicBool::new(false), wake });
        let stop = CancellationToken::new();
        let (task, stopped) = (follow(config, Arc::clone(&latest)), stop.clone());
        tokio::spawn(stopped.run_until_cancelled_owned(task));
        Self { latest, _stop: stop.drop_guard() }
    }

    /// Whether the answer has changed since the last call.
    pub(super) fn changed(&self) -> bool {
        self.latest.changed.swap(false, Ordering::AcqRel)
    }

    /// Returns the latest answer; `None` until the first one arrives.
    pub(super) fn answer(&self) -> Option<Result<Answer, Arc<ApiError>>> {
        self.latest.answer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl LatestAnswer {
    fn publish(&self, answer: Result<Answer, ApiError>) {
        let mut latest = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        // Report every failure, because each is counted.
        if matches!((&answer, &*latest), (Ok(now), Some(Ok(before))) if now == before) {
            return;
        }
        *latest = Some(answer.map_err(Arc::new));
        drop(latest);
        self.changed.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

async fn follow(config: KubernetesConfig, latest: Arc<LatestAnswer>) {
    let (mut wait, mut too_old) = (FIRST_WAIT, 0);
    loop {
        let began = Instant::now();
        let mut saw_event = false;
        let Err(error) = list_and_watch(&config, &latest, &mut saw_event).await;
        match error {
            // Keep the last answer, which is still the best, and list again.
            ApiError::Gone if too_old < MAX_GONE => {
                tracing::debug!(service = config.service, "the watch has expired, listing all endpoints again");
                too_old += 1;
            }
            error => {
                too_old = 0;
                latest.publish(Err(error));
            }
        }
        if saw_event || began.elapsed() >= MAX_WAIT {
            (wait, too_old) = (FIRST_WAIT, 0);
        }
        // Add jitter, so that several gateways do not reconnect at once.
        tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        wait = (wait * 2).min(MAX_WAIT);
    }
}

/// Lists and watches until something fails. `saw_event`: a watch delivered an event.
async fn list_and_watch(
    config: &KubernetesConfig,
    latest: &LatestAnswer,
    saw_event: &mut bool,
) -> Result<Infallible, ApiError> {
    let api = Api::open(config).await?;
    let mut slices = Slices::default();
    let mut version = api.list(&mut slices).await?;
    let publish = |slices: &Slices| latest.publish(slices.answer(config.port.as_deref()));
    publish(&slices);
    loop {
        let began = Instant::now();
        let mut watch = api.watch(&version).await?;
        let mut events = 0u64;
        while let Some(event) = watch.next().await? {
            if let Some(newer) = slices.apply(event)? {
                version = newer;
            }
            (events, *saw_event) = (events + 1, true);
            publish(&slices);
        }
        if events == 0 && began.elapsed() < SHORTEST_WATCH {
            return Err(ApiError::Answer("the API server ends watches immediately".to_owned()));
        }
    }
}
