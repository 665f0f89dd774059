//! Kernels with one piece of their synchronisation omitted: the comparisons must notice each.

use half::bf16;
use semmoe_kernels_cuda::Grid;
use semmoe_kernels_shim::{Mutant, Shim};

use crate::collectives::{all_reduce, allgather, reduce_scatter, reduce_scatter_norm};
use crate::compute;
use crate::exchange::{self, dispatch_and_combine};
use crate::reshard;
use crate::sort::argsort;
use crate::support::{Case, Run, Spread, shim};

pub(crate) const SEEDS: std::ops::Range<u64> = 0..6;

/// Runs every comparison of the other tests with a seed; returns the differences by collective.
pub(crate) fn noticed(shim: &Shim, run: Run) -> Vec<(&'static str, String)> {
    let grid = Grid { blocks: 2, threads: 64 };
    // A rank without rows finishes at once, and another arrives late: without a wait, data is read too early or too
    // late.
    let uneven = Case { spread: Spread::AllOn(1), held: Some(0), grid, ..Case::new(3, 9, 64) };
    let late = Case { held: Some(2), grid, ..Case::new(3, 12, 64) };
    // Threads of one block drift apart over many rows.
    let long = Case { spread: Spread::AllOn(1), grid: Grid { blocks: 1, threads: 64 }, ..Case::new(3, 32, 64) };
    let routed = exchange::Case { held: Some(1), ..exchange::Case::new(3, 7, 16) };
    let exchanged = match run.mutant {
        // Wrong offsets would write past the ends of its arrays.
        Mutant::NoSortBarrier => Ok(()),
        _ => dispatch_and_combine::<bf16>(shim, &routed, run).map(|_| ()),
    };
    // Columns for several warps, and many rows for one block.
    let block = Grid { blocks: 1, threads: 256 };
    let normed = Case { spread: Spread::AllOn(1), grid: block, rounds: 1, ..Case::new(2, 12, 1024) };
    let results = [
        ("reduce-scatter", reduce_scatter::<bf16>(shim, &uneven, run, false)),
        ("reduce-scatter", reduce_scatter::<bf16>(shim, &late, run, false)),
        ("reduce-scatter", reduce_scatter::<bf16>(shim, &long, run, false)),
        ("allgather", allgather::<bf16>(shim, &uneven, run, false)),
        ("allgather", allgather::<bf16>(shim, &late, run, false)),
        ("dispatch and combine", exchanged),
        ("norm", reduce_scatter_norm::<bf16>(shim, &normed, run)),
        ("all-reduce", all_reduce::<bf16>(shim, &late, run)),
        ("switch", reshard::weights(shim, grid, Some(0), run)),
        ("switch", reshard::weights(shim, Grid { blocks: 1, threads: 128 }, Some(2), run)),
        // Two of the four warps have nothing to count.
        ("argsort", argsort(shim, 40, 5, 128, false, run)),
        // Fewer destinations than warps, so that warps are far apart after the counts.
        ("argsort", argsort(shim, 300, 2, 256, false, run)),
        ("argsort", argsort(shim, 300, 9, 256, true, run)),
    ];
    // They contain no synchronisation between ranks.
    let computed = if run.mutant == Mutant::None { compute::results(shim, run.seed) } else { Vec::new() };
    results.into_iter().chain(computed).filter_map(|(what, result)| result.err().map(|error| (what, error))).collect()
}

/// The test that must notice each fault of the ranks' synchronisation.
const ALL: [&str; 5] = ["reduce-scatter", "allgather", "all-reduce", "dispatch and combine", "switch"];

fn check(mutant: Mutant, collectives: &[&str]) {
    let Some(shim) = shim() else { return };
    let found: Vec<_> = SEEDS.flat_map(|seed| noticed(shim, Run { seed, mutant })).collect();
    for expected in collectives {
        assert!(found.iter().any(|(what, _)| what == expected), "{mutant:?} was not noticed by {expected}: {found:?}");
    }
}

#[test]
fn the_kernels_as_they_are_show_nothing() {
    let Some(shim) = shim() else { return };
    let found: Vec<_> = SEEDS.flat_map(|seed| noticed(shim, Run::of(seed))).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_missing_wait_for_the_entry_is_noticed() {
    check(Mutant::NoEntryWait, &ALL);
}

#[test]
fn a_missing_barrier_behind_the_entry_is_noticed() {
    check(Mutant::NoEntryBarrier, &ALL);
}

#[test]
fn a_missing_wait_for_the_exit_is_noticed() {
    check(Mutant::NoExitWait, &ALL);
}

#[test]
fn a_missing_barrier_before_the_exit_is_noticed() {
    check(Mutant::NoExitBarrier, &ALL);
}

#[test]
fn the_signals_of_the_call_before_are_noticed() {
    check(Mutant::PreviousEpoch, &ALL);
}

#[test]
fn one_word_for_entry_and_exit_is_noticed() {
    check(Mutant::OneWord, &ALL);
}

#[test]
fn a_signal_that_releases_nothing_is_noticed() {
    // Only pushed data needs the release.
    check(Mutant::RelaxedExit, &["allgather", "dispatch and combine"]);
}

#[test]
fn a_missing_barrier_in_the_sort_is_noticed() {
    check(Mutant::NoSortBarrier, &["argsort"]);
}
