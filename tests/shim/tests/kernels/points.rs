//! Every barrier of the sources, block or warp, left out one at a time: a comparison must notice, or a line here says
//! why none can.
//!
//! A kernel without a barrier may write anywhere, so each is run in a process of its own.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::process::Command;

use semmoe_kernels_cuda::{HEADERS, SOURCES};
use semmoe_kernels_shim::Shim;

use crate::mutants::{SEEDS, noticed};
use crate::support::{Run, SANITIZED, shim};

/// File, line of a barrier.
type Point = (&'static str, u32);

/// The step the child leaves out, and the library it opens.
const CHILD: &str = "SEMMOE_SHIM_LEFT_OUT";
const LIBRARY: &str = "SEMMOE_SHIM_LIBRARY";

/// The n-th barrier of a file, from 0 on, that this model does not miss. Behind most of them the next warp operation,
/// at which the shim's lanes meet as well, comes before anybody can go wrong; on a GPU that operation orders no memory,
/// and the barrier does.
const NOT_NOTICED: &[(&str, usize)] = &[
    // Counts are zeroed; the lanes meet in __match_any_sync before the first is counted.
    ("argsort.cu", 0),
    // One destination was counted; the same before the next.
    ("argsort.cu", 1),
    ("argsort.cu", 3),
    // Counts are zeroed, or one was counted; the lanes meet in __ballot_sync.
    ("dispatch_plan.cu", 0),
    ("dispatch_plan.cu", 2),
    // All lanes look at the limits before any row is pushed: only a call that is about to stop shows it.
    ("pack.cu", 0),
    // Scores go to shared memory, then to their largest: one that is read too early only shifts all weights of a query,
    // which their sum takes back, until numbers overflow.
    ("attend.cu", 3),
];

fn points() -> Vec<(Point, usize)> {
    let mut found = Vec::new();
    for source in HEADERS.iter().chain(SOURCES) {
        let lines = source.text.lines().enumerate().filter(|(_, line)| {
            let code = line.split("//").next().unwrap_or_default();
            code.contains("__syncthreads()") || code.contains("__syncwarp(")
        });
        found.extend(lines.enumerate().map(|(nth, (at, _))| ((source.name, at as u32 + 1), nth)));
    }
    found
}

/// Whether a child that leaves it out sees anything; `None` leaves out nothing.
fn is_noticed(library: &Path, point: Option<Point>) -> bool {
    let point = point.map_or_else(|| "nothing:0".to_owned(), |(file, line)| format!("{file}:{line}"));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "points::left_out", "--include-ignored"])
        .env(CHILD, point)
        .env(LIBRARY, library)
        .output()
        .unwrap();
    // A child that was killed by a signal has noticed, too.
    if output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("1 passed"), "the child ran no test: {text}");
    }
    !output.status.success()
}

#[test]
fn every_barrier_that_is_left_out_is_noticed() {
    let Some(shim) = shim() else { return };
    if std::env::var_os(SANITIZED).is_some() {
        return;
    }
    let points = points();
    assert!(points.len() >= 16, "the sources have barriers: {points:?}");
    assert!(!is_noticed(shim.path(), None), "without a defect nothing is noticed");
    let wrong: Vec<String> = points
        .into_iter()
        .filter(|&(point, nth)| is_noticed(shim.path(), Some(point)) == NOT_NOTICED.contains(&(point.0, nth)))
        .map(|((file, line), nth)| format!("{file}:{line}, its barrier {nth}"))
        .collect();
    assert!(wrong.is_empty(), "left out, and not as expected: {wrong:?}");
}

/// The child: ends well if nothing was noticed.
#[test]
#[ignore = "run by the test above"]
fn left_out() {
    let (Ok(point), Some(library)) = (std::env::var(CHILD), std::env::var_os(LIBRARY)) else { return };
    // SAFETY: the parent built it and waits.
    let shim = unsafe { Shim::open(Path::new(&library)) }.unwrap();
    let (file, line) = point.split_once(':').unwrap();
    let file: &'static CStr = Box::leak(CString::new(file).unwrap().into_boxed_c_str());
    shim.leave_out(file, line.parse().unwrap());
    for seed in SEEDS {
        let found = noticed(&shim, Run::of(seed));
        assert!(found.is_empty(), "noticed: {found:?}");
    }
}
