//! Progress of long operations: a bar on a terminal, plain lines elsewhere; always on standard error.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress interface that libraries report to.
pub(crate) use semmoe_profiler::Progress as Steps;

/// Interval between plain lines if there is no terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Progress display of one long operation, removed on drop.
#[derive(Debug)]
pub(crate) struct Progress {
    title: &'static str,
    sink: Sink,
    began: Instant,
}

#[derive(Debug)]
enum Sink {
    Bar(ProgressBar),
    Lines(Mutex<Lines>),
}

#[derive(Debug)]
struct Lines {
    total: u64,
    done: u64,
    /// The last remark.
    remark: String,
    printed: Instant,
}

impl Progress {
    /// Starts an operation; `total` is in any unit, or 0 while unknown.
    pub(crate) fn start(title: &'static str, total: u64) -> Self {
        let began = Instant::now();
        let sink = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.set_style(style(total));
            bar.set_prefix(title);
            bar.enable_steady_tick(Duration::from_millis(120));
            Sink::Bar(bar)
        } else {
            say(&format!("{title} ..."));
            Sink::Lines(Mutex::new(Lines { total, done: 0, remark: String::new(), printed: began }))
        };
        Self { title, sink, began }
    }

    /// Sets the number of completed steps.
    pub(crate) fn set_done(&self, done: u64) {
        self.update(|bar| bar.set_position(done), |before| *before = done);
    }

    fn update(&self, bar_to: impl FnOnce(&ProgressBar), count_to: impl FnOnce(&mut u64)) {
        let lines = match &self.sink {
            Sink::Bar(bar) => return bar_to(bar),
            Sink::Lines(lines) => lines,
        };
        let mut lines = lock(lines);
        count_to(&mut lines.done);
        if lines.printed.elapsed() >= PLAIN_INTERVAL {
            lines.printed = Instant::now();
            let comma = if lines.remark.is_empty() { "" } else { ", " };
            say(&format!("{}: {} of {}{comma}{}", self.title, lines.done, lines.total, lines.remark));
        }
    }

    /// Ends the operation and leaves `summary` on the screen.
    pub(crate) fn finish(self, summary: &str) {
        let line = format!("{}: {summary} ({:.1} s)", self.title, self.began.elapsed().as_secs_f64());
        // Clears the bar.
        drop(self);
        say(&line);
    }
}

impl Steps for Progress {
    fn set_total(&self, total: u64) {
        match &self.sink {
            Sink::Bar(bar) => {
                bar.set_style(style(total));
                bar.set_length(total);
            }
            Sink::Lines(lines) => lock(lines).total = total,
        }
    }

    fn advance(&self, by: u64) {
        self.update(|bar| bar.inc(by), |done| *done += by);
    }

    /// Shows a short message next to the bar, or in the next plain line.
    fn message(&self, text: &str) {
        match &self.sink {
            Sink::Bar(bar) => bar.set_message(text.to_owned()),
            Sink::Lines(lines) => text.clone_into(&mut lock(lines).remark),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Sink::Bar(bar) = &self.sink {
            bar.finish_and_clear();
        }
    }
}

fn style(total: u64) -> ProgressStyle {
    let template = if total == 0 {
        "{prefix:>24} {spinner} {elapsed} {msg}"
    } else {
        "{prefix:>24} [{bar:32}] {pos}/{len} {per_sec} eta {eta} {msg}"
    };
    // The template is a valid constant; the fallback is never reached.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

fn lock(lines: &Mutex<Lines>) -> std::sync::MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Prints one line to standard error and ignores write errors.
pub(crate) fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}
