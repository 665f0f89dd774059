//! Argsort by rank, and rows in local memory.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::{RankOrder, argsort_by_rank};
use semmoe_kernels_cuda::{Argsort, Grid, Rows, Shuffle};
use semmoe_kernels_shim::{HostBuffer, Mutant, Shim, Step};
use semmoe_reference::data::{elements, same};

use crate::support::{Run, World, holding, poisoned, read, run_all, shim};

/// Sorts `items` items over `ranks` destinations, with u16 or u32 keys.
pub(crate) fn argsort(
    shim: &Shim,
    items: usize,
    ranks: usize,
    threads: u32,
    wide: bool,
    run: Run,
) -> Result<(), String> {
    let mut rng = Rng::with_seed(run.seed);
    let destinations: Vec<u16> = (0..items).map(|_| rng.u16(0..ranks as u16)).collect();
    let keys = match wide {
        true => holding(&destinations.iter().map(|&d| u32::from(d)).collect::<Vec<_>>()),
        false => holding(&destinations),
    };
    let world = World::new(1);
    // Without its barriers the sort counts items twice, and writes past its end.
    let room = if run.mutant == Mutant::None { items } else { 4 * items };
    let memory = [poisoned::<u32>(1, room), poisoned::<u32>(1, items), poisoned::<u32>(1, ranks + 1)];
    let [permutation, inverse, offsets] = memory.each_ref().map(|memory| [memory[0].buffer()]);
    let call = Argsort {
        destinations: &[keys.buffer()],
        destination_bytes: if wide { 4 } else { 2 },
        items: items as u64,
        ranks: ranks as u64,
        permutation: &permutation,
        inverse: &inverse,
        offsets: &offsets,
    };
    let launch = call.launch(&world.team(0).unwrap(), Grid { blocks: 1, threads }).unwrap();
    run_all(shim, &[vec![Step::Launch(&launch)]], run, &world)?;
    let mut expected = RankOrder::default();
    argsort_by_rank(&destinations, ranks, &mut expected).unwrap();
    same("offsets", &read::<u32>(&memory[2][0]), expected.offsets())?;
    same("permutation", &read::<u32>(&memory[0][0])[..items], expected.permutation())?;
    same("inverse", &read::<u32>(&memory[1][0]), expected.inverse())
}

#[test]
fn argsort_equals_the_stable_sort() {
    let Some(shim) = shim() else { return };
    for (seed, (items, ranks, threads)) in
        [(0, 1, 32), (1, 3, 32), (31, 2, 64), (64, 4, 64), (333, 8, 128), (700, 64, 96), (1100, 5, 1024)]
            .iter()
            .enumerate()
    {
        let run = Run { seed: seed as u64 + 1, mutant: Mutant::None };
        argsort(shim, *items, *ranks, *threads, seed % 2 == 0, run)
            .unwrap_or_else(|error| panic!("{items} items, {ranks} ranks, {threads} threads: {error}"));
    }
}

#[test]
fn a_shuffle_and_back_gives_the_rows_again() {
    let Some(shim) = shim() else { return };
    let mut rng = Rng::with_seed(5);
    for (tokens, hidden) in [(7, 24), (12, 5), (1, 8)] {
        let rows: Vec<bf16> = elements(&mut rng, tokens * hidden);
        let mut order: Vec<u32> = (0..tokens as u32).collect();
        rng.shuffle(&mut order);
        let (from, permutation, world) = (holding(&rows), holding(&order), World::new(1));
        let bytes = tokens * hidden * 2;
        let (shuffled, back) = (HostBuffer::poisoned(bytes), HostBuffer::poisoned(bytes));
        let shape = Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: semmoe_kernels::Dtype::Bf16 };
        let launch = |from: &HostBuffer, to: &HostBuffer, back| {
            let (from, to, permutation) = ([from.buffer()], [to.buffer()], [permutation.buffer()]);
            let call = Shuffle { from: &from, to: &to, permutation: &permutation, rows: shape, back };
            call.launch(&world.team(0).unwrap(), Grid { blocks: 2, threads: 64 }).unwrap()
        };
        let launches = [launch(&from, &shuffled, false), launch(&shuffled, &back, true)];
        run_all(shim, &[launches.iter().map(Step::Launch).collect()], Run::of(3), &world).unwrap();
        let expected: Vec<bf16> =
            order.iter().flat_map(|&token| rows[token as usize * hidden..][..hidden].to_vec()).collect();
        same("shuffled", &read(&shuffled), &expected).unwrap();
        same("back", &read(&back), &rows).unwrap();
    }
}
