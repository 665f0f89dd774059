//! The bytes that the README and the model state for each kernel equal those that the shim counts in 16-byte accesses.

use half::bf16;
use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::{Grid, Rows, Shuffle};
use semmoe_kernels_shim::{Shim, Step};
use semmoe_reference::moved::{Call, Moved};

use crate::collectives::{all_reduce, allgather, reduce_scatter, reduce_scatter_norm};
use crate::exchange::{self, dispatch_and_combine};
use crate::support::{Case, Run, Spread, World, holding, poisoned, run_all, shim};

/// Even parts of whole vectors, once, as the model assumes.
fn even(ranks: usize) -> Case {
    Case { spread: Spread::Plain, rounds: 1, ..Case::new(ranks, 8 * ranks, 64) }
}

fn assert_moved(what: &str, shim: &Shim, ranks: usize, expected: Moved) {
    let found = shim.moved();
    assert_eq!(found, (expected.read as u64, expected.written as u64), "{what} of {ranks} ranks");
}

#[test]
fn kernels_move_what_the_model_says() {
    let Some(shim) = shim() else { return };
    for ranks in [1, 2, 3, 4, 8] {
        let (case, run) = (even(ranks), Run::of(1));
        let call = Call::new(ranks, case.tokens, case.hidden, 2);
        for (multicast, name) in [(false, "reduce-scatter"), (true, "nvls' scalar reduce-scatter")] {
            reduce_scatter::<bf16>(shim, &case, run, multicast).unwrap();
            assert_moved(name, shim, ranks, call.reduce_scatter());
        }
        allgather::<bf16>(shim, &case, run, false).unwrap();
        assert_moved("allgather", shim, ranks, call.allgather());
        all_reduce::<bf16>(shim, &case, run).unwrap();
        assert_moved("all-reduce", shim, ranks, call.all_reduce());
        reduce_scatter_norm::<bf16>(shim, &case, run).unwrap();
        let weight = (case.tokens * case.hidden * 2) as f64;
        let norm = call.reduce_scatter_norm();
        // Plus the norm's weight once per row, which a cache serves.
        assert_moved("reduce-scatter with norm", shim, ranks, Moved { read: norm.read + weight, ..norm });
    }
}

#[test]
fn a_shuffle_reads_and_writes_each_row_once() {
    let Some(shim) = shim() else { return };
    let (tokens, hidden) = (6, 24);
    let order = holding(&[5u32, 0, 3, 1, 4, 2]);
    let (world, memory) = (World::new(1), poisoned::<bf16>(2, tokens * hidden));
    let (from, to, permutation) = ([memory[0].buffer()], [memory[1].buffer()], [order.buffer()]);
    let rows = Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: Dtype::Bf16 };
    let call = Shuffle { from: &from, to: &to, permutation: &permutation, rows, back: false };
    let launch = call.launch(&world.team(0).unwrap(), Grid { blocks: 2, threads: 64 }).unwrap();
    run_all(shim, &[vec![Step::Launch(&launch)]], Run::of(1), &world).unwrap();
    assert_moved("shuffle", shim, 1, Call::new(1, tokens, hidden, 2).shuffle());
}

/// Routing data uses smaller accesses, which the shim does not count.
#[test]
fn dispatch_and_combine_move_each_row_once_per_rank() {
    let Some(shim) = shim() else { return };
    for ranks in [1, 2, 4] {
        let case = exchange::Case { rounds: 1, ..exchange::Case::new(ranks, 7, 16) };
        let [tokens, sent] = dispatch_and_combine::<bf16>(shim, &case, Run::of(2)).unwrap().map(|count| count as u64);
        let row = (case.hidden * 2) as u64;
        // Tokens are read once and rows sent once; rows are returned once, and each token is written once.
        assert_eq!(shim.moved(), ((tokens + sent) * row, (sent + tokens) * row), "{ranks} ranks");
    }
}
