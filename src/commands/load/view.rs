//! Live view of a run, on standard error: two updating lines on a terminal, an occasional plain line elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use semmoe_load::{LatencySummary, Snapshot};

use crate::progress::say;

/// Without a terminal, one in this many snapshots is printed. Snapshots arrive about once per second.
const PLAIN_EVERY: u64 = 5;

#[derive(Debug)]
pub(super) struct View {
    line: Option<ProgressBar>,
    shown: AtomicU64,
    /// The counts at the previous snapshot.
    before: Mutex<Before>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Before {
    elapsed: Duration,
    ok: u64,
    output_tokens: u64,
}

impl View {
    pub(super) fn start() -> Self {
        let line = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            // The template is a valid constant; the fallback is never reached.
            bar.set_style(
                ProgressStyle::with_template("{spinner} {wide_msg}\n  {prefix}")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner()),
            );
            bar.set_message("connecting");
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { line, shown: AtomicU64::new(0), before: Mutex::default() }
    }

    pub(super) fn show(&self, now: &Snapshot) {
        let shown = self.shown.fetch_add(1, Ordering::Relaxed) + 1;
        if self.line.is_none() && !shown.is_multiple_of(PLAIN_EVERY) {
            return;
        }
        let (counts, latencies) = {
            let mut before = self.before.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let text = describe(now, *before);
            let elapsed = now.elapsed.unwrap_or_default();
            *before = Before { elapsed, ok: now.ok, output_tokens: now.output_tokens };
            text
        };
        match &self.line {
            Some(bar) => {
                bar.set_message(counts);
                bar.set_prefix(latencies);
            }
            None if latencies.is_empty() => say(&counts),
            None => say(&format!("{counts}, {latencies}")),
        }
    }

    pub(super) fn finish(self) {
        if let Some(bar) = self.line {
            bar.finish_and_clear();
        }
    }
}

/// Formats counts and latencies. Rates cover the time since the previous snapshot.
fn describe(now: &Snapshot, before: Before) -> (String, String) {
    let block = if now.block.1 > 1 { format!("block {} of {}, ", now.block.0, now.block.1) } else { String::new() };
    let Some(elapsed) = now.elapsed else {
        return (format!("{block}warm-up, {} in flight", now.in_flight), String::new());
    };
    // Starts over if the previous snapshot belongs to another block.
    let before = if elapsed < before.elapsed || now.ok < before.ok { Before::default() } else { before };
    let seconds = elapsed.saturating_sub(before.elapsed).as_secs_f64().max(1e-3);
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let latency = |name: &str, summary: Option<LatencySummary>| {
        summary.map(|s| format!("{name} p50 {:.1} p99 {:.1} ms", s.p50, s.p99))
    };
    let latencies: Vec<_> = [latency("first token", now.ttft), latency("end", now.e2e)].into_iter().flatten().collect();
    let counts = format!(
        "{block}{:.0} s: {} ok, {} failed, {} in flight, {:.1} requests/s, {:.0} tokens/s",
        elapsed.as_secs_f64(),
        now.ok,
        now.failed,
        now.in_flight,
        rate(now.ok, before.ok),
        rate(now.output_tokens, before.output_tokens),
    );
    (counts, latencies.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let warm = Snapshot {
            block: (1, 1),
            elapsed: None,
            ok: 0,
            failed: 0,
            in_flight: 3,
            output_tokens: 0,
            ttft: None,
            e2e: None,
        };
        assert_eq!(describe(&warm, Before::default()), ("warm-up, 3 in flight".to_owned(), String::new()));
        let e2e = LatencySummary { count: 1, mean: 1.0, p50: 1.0, p90: 1.0, p99: 2.0, p999: 2.0, max: 2.0 };
        let now =
            Snapshot { elapsed: Some(Duration::from_secs(4)), ok: 30, output_tokens: 100, e2e: Some(e2e), ..warm };
        let next = Snapshot { block: (2, 6), ..now.clone() };
        let earlier = Before { elapsed: Duration::from_secs(9), ok: 90, output_tokens: 500 };
        assert!(
            describe(&next, earlier)
                .0
                .starts_with("block 2 of 6, 4 s: 30 ok, 0 failed, 3 in flight, 7.5 requests/s, 25 ")
        );
        let before = Before { elapsed: Duration::from_secs(2), ok: 10, output_tokens: 0 };
        assert_eq!(
            describe(&now, before),
            (
                "4 s: 30 ok, 0 failed, 3 in flight, 10.0 requests/s, 50 tokens/s".to_owned(),
                "end p50 1.0 p99 2.0 ms".to_owned()
            )
        );
    }
}
