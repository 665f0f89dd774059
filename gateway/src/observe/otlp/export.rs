//! The queue of finished traces, and the task that sends them.
//!
//! Requests never wait: if the queue is full, their spans are dropped and counted. Sending to an unavailable collector
//! is retried a few times, while the queue fills up.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use semmoe_engines::http::{self as client, AnswerLimits, HttpClient, HttpError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::config::TracingConfig;
use crate::observe::metrics::SpanMetrics;

use super::document::{Span, encode};

/// Maximum number of traces waiting to be sent, at a few hundred bytes per span.
const WAITING: usize = 2048;
/// Maximum number of traces per document.
const BATCH: usize = 256;
/// Time after which a partial document is sent.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Delays before sending to a collector is retried.
const AGAIN_AFTER: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];
const LIMITS: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(5), max_bytes: 64 << 10 };
/// Time limit for the remaining work at shutdown.
const GRACE: Duration = Duration::from_secs(3);
const PATH: &str = "/v1/traces";

/// Decides which requests are traced, and queues their spans.
pub(crate) struct Tracer {
    queue: mpsc::Sender<Vec<Span>>,
    metrics: SpanMetrics,
    /// The sampled fraction, scaled to 2^63.
    threshold: u64,
}

impl Tracer {
    /// Whether a trace that begins here is sampled: decided by its id alone, so that all services agree.
    pub(super) fn takes(&self, trace: u128) -> bool {
        (trace as u64) >> 1 < self.threshold
    }

    /// Queues the spans; if the queue is full they are dropped and counted.
    pub(super) fn submit(&self, spans: Vec<Span>) {
        if let Err(mpsc::error::TrySendError::Full(spans) | mpsc::error::TrySendError::Closed(spans)) =
            self.queue.try_send(spans)
        {
            self.metrics.count("queue_full", spans.len());
        }
    }
}

/// Scales a sampling ratio to 2^63.
fn threshold(ratio: f64) -> u64 {
    // The cast saturates; a ratio of 1 covers all 63 bits compared.
    (ratio * (1u64 << 63) as f64) as u64
}

/// The exporting task, which runs until it is stopped.
pub(crate) struct Exporter {
    task: JoinHandle<()>,
    stop: tokio_util::sync::CancellationToken,
}

impl Exporter {
    /// Starts the exporter if the configuration enables tracing.
    pub(crate) fn start(config: &TracingConfig, metrics: &SpanMetrics) -> Option<(Arc<Tracer>, Self)> {
        let collector = config.otlp.clone()?;
        let (queue, waiting) = mpsc::channel(WAITING);
        let stop = tokio_util::sync::CancellationToken::new();
        let work = Work {
            client: HttpClient::default(),
            collector,
            service: config.service_name.clone(),
            metrics: metrics.clone(),
            failing: false,
        };
        let task = tokio::spawn(work.run(waiting, stop.clone()));
        let tracer = Tracer { queue, metrics: metrics.clone(), threshold: threshold(config.ratio) };
        Some((Arc::new(tracer), Self { task, stop }))
    }

    /// Stops the task after it has sent the remaining spans, within a few seconds.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        let abort = self.task.abort_handle();
        if tokio::time::timeout(GRACE, self.task).await.is_err() {
            abort.abort();
        }
    }
}

struct Work {
    client: HttpClient,
    collector: client::BaseUrl,
    service: String,
    metrics: SpanMetrics,
    /// Whether the last document failed.
    failing: bool,
}

impl Work {
    async fn run(mut self, mut waiting: mpsc::Receiver<Vec<Span>>, stop: tokio_util::sync::CancellationToken) {
        let mut ending = false;
        while !ending {
            let mut batch = Vec::new();
            tokio::select! {
                // 0 means that no request can submit spans any more; earlier traces are still received.
                received = waiting.recv_many(&mut batch, BATCH) => ending = received == 0,
                () = stop.cancelled() => ending = true,
            }
            if !ending {
                let more = tokio::time::timeout(MAX_WAIT, fill(&mut waiting, &mut batch));
                tokio::select! {
                    _ = more => {}
                    () = stop.cancelled() => ending = true,
                }
            }
            while let Ok(trace) = waiting.try_recv() {
                batch.push(trace);
                if batch.len() >= BATCH && !ending {
                    break;
                }
            }
            for batch in batch.chunks(BATCH) {
                self.export(&batch.concat()).await;
            }
        }
    }

    async fn export(&mut self, spans: &[Span]) {
        let sent = self.send(encode(&self.service, spans).into()).await;
        match &sent {
            Ok(rejected) => {
                let rejected = usize::try_from(*rejected).unwrap_or(usize::MAX).min(spans.len());
                self.metrics.count("rejected", rejected);
                self.metrics.count("exported", spans.len() - rejected);
            }
            Err(error) => {
                self.metrics.count("failed", spans.len());
                if !self.failing {
                    tracing::warn!(%error, "traces cannot be exported");
                }
            }
        }
        if self.failing && sent.is_ok() {
            tracing::info!("exporting traces again");
        }
        self.failing = sent.is_err();
    }

    /// Sends a document; returns how many spans the collector rejected.
    async fn send(&self, body: bytes::Bytes) -> Result<u64, HttpError> {
        let mut waits = AGAIN_AFTER.into_iter();
        loop {
            let request = client::request(Method::POST, &self.collector, PATH, Some(body.clone()))?;
            match (self.client.whole(request, &LIMITS).await, waits.next()) {
                (Ok((_, answer)), _) => return Ok(rejected(&answer)),
                (Err(error), Some(wait)) if may_help(&error) => {
                    tracing::debug!(%error, "sending traces again");
                    tokio::time::sleep(wait).await;
                }
                (Err(error), _) => return Err(error),
            }
        }
    }
}

/// Collects traces until a document is full; the caller limits the wait.
async fn fill(waiting: &mut mpsc::Receiver<Vec<Span>>, batch: &mut Vec<Vec<Span>>) {
    while batch.len() < BATCH {
        let room = BATCH - batch.len();
        if waiting.recv_many(batch, room).await == 0 {
            return;
        }
    }
}

/// Whether retrying the document may succeed (OTLP, "retryable response codes").
fn may_help(error: &HttpError) -> bool {
    error.status().is_none_or(|status| matches!(status, 429 | 502 | 503 | 504))
}

/// Parses `partialSuccess.rejectedSpans`, a number in text form.
fn rejected(answer: &[u8]) -> u64 {
    let answer: serde_json::Value = serde_json::from_slice(answer).unwrap_or_default();
    let rejected = &answer["partialSuccess"]["rejectedSpans"];
    rejected.as_u64().or_else(|| rejected.as_str()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, _waiting) = mpsc::channel(2);
        let tracer = Arc::new(Tracer { queue, metrics: SpanMetrics::default(), threshold: threshold(1.0) });
        for _ in 0..5 {
            let trace = super::super::RequestTrace::begin(&tracer, &http::HeaderMap::new(), "/generate").unwrap();
            trace.finish(200);
        }
        assert_eq!(tracer.metrics.counted("queue_full"), 3);
    }

    #[test]
    fn shares_of_traces() {
        let (queue, _waiting) = mpsc::channel(1);
        let mut tracer = Tracer { queue, metrics: SpanMetrics::default(), threshold: 0 };
        for (ratio, low, high) in [(0.0, 0, 0), (0.25, 2200, 2800), (1.0, 10_000, 10_000)] {
            tracer.threshold = threshold(ratio);
            let mut random = fastrand::Rng::with_seed(7);
            let taken = (0..10_000).filter(|_| tracer.takes(random.u128(1..))).count();
            assert!((low..=high).contains(&taken), "{ratio}: {taken}");
        }
    }

    #[test]
    fn what_collectors_say_of_rejected_spans() {
        for (answer, expected) in [
            ("{}", 0),
            ("", 0),
            ("{\"partialSuccess\":{\"rejectedSpans\":\"3\",\"errorMessage\":\"x\"}}", 3),
            ("{\"partialSuccess\":{\"rejectedSpans\":4}}", 4),
            ("{\"partialSuccess\":{}}", 0),
        ] {
            assert_eq!(rejected(answer.as_bytes()), expected, "{answer}");
        }
    }
}
