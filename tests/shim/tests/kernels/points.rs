//! Omits every block and warp barrier of the sources, one at a time: a comparison must notice, or a line here says why
//! none can.
//!
//! A kernel without a barrier may write anywhere, so each runs in its own process.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::process::Command;

use semmoe_kernels_cuda::{HEADERS, SOURCES};
use semmoe_kernels_shim::Shim;

use crate::mutants::{SEEDS, noticed};
use crate::support::{Run, SANITIZED, shim};

/// File and line of a barrier.
type Point = (&'static str, u32);

/// Environment variable with the barrier that the child omits and the library that it opens.
const CHILD: &str = "SEMMOE_SHIM_LEFT_OUT";
const LIBRARY: &str = "SEMMOE_SHIM_LIBRARY";

/// The n-th barrier of a file, from 0, whose absence this model does not notice. Most are followed by a warp operation
/// at which the shim's lanes also synchronise before anything can go wrong; on a GPU that operation does not order
/// memory, and the barrier does.
const NOT_NOTICED: &[(&str, usize)] = &[
    // Counts are zeroed; the lanes synchronise in __match_any_sync before the first is counted.
    ("argsort.cu", 0),
    // One destination was counted; the lanes synchronise in __match_any_sync before the next.
    ("argsort.cu", 1),
    ("argsort.cu", 3),
    // Counts are zeroed, or one was counted; the lanes synchronise in __ballot_sync.
    ("dispatch_plan.cu", 0),
    ("dispatch_plan.cu", 2),
    // All lanes check the limits before any row is pushed: only a call that is about to stop shows a difference.
    ("pack.cu", 0),
    // Scores go to shared memory, then their maximum: one that is read too early only shifts all weights of a query,
    // which dividing by their sum undoes unless numbers overflow.
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

/// Whether a child that omits the barrier notices anything; `None` omits nothing.
fn is_noticed(library: &Path, point: Option<Point>) -> bool {
    let point = point.map_or_else(|| "nothing:0".to_owned(), |(file, line)| format!("{file}:{line}"));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "points::left_out", "--include-ignored"])
        .env(CHILD, point)
        .env(LIBRARY, library)
        .output()
        .unwrap();
    // A child that was killed by a signal counts as noticing.
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
    assert!(!is_noticed(shim.path(), None), "noticed something without a defect");
    let wrong: Vec<String> = points
        .into_iter()
        .filter(|&(point, nth)| is_noticed(shim.path(), Some(point)) == NOT_NOTICED.contains(&(point.0, nth)))
        .map(|((file, line), nth)| format!("{file}:{line}, its barrier {nth}"))
        .collect();
    assert!(wrong.is_empty(), "omitted barriers with unexpected results: {wrong:?}");
}

/// The child: succeeds if nothing was noticed.
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
