//! Reduce-scatter, fused norm, allgather, all-reduce, plain and shuffled, in all element types.

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::{Element, RankOrder, ResidualNorm, RowSplit, even_offsets};
use semmoe_kernels_cuda::{
    AllReduce, Allgather, Buffer, Grid, Launch, NORM_THREADS, ReduceScatter, ReduceScatterNorm, RowOrder, Rows, Split,
    Team,
};
use semmoe_kernels_shim::{HostBuffer, Shim, Step};
use semmoe_reference as reference;
use semmoe_reference::data::{elements, same};

use crate::support::{Case, Run, Spread, World, buffers, cases, holding, order, poisoned, read, run_all, shim};

/// The split of one round, in device memory.
struct RoundSplit {
    order: RankOrder,
    even: Vec<u32>,
    shuffled: bool,
    permutation: HostBuffer,
    offsets: HostBuffer,
}

impl RoundSplit {
    fn new(rng: &mut Rng, case: &Case) -> Self {
        let order = order(rng, case);
        let even = even_offsets(case.tokens, case.ranks).unwrap();
        let (permutation, offsets) = (holding(order.permutation()), holding(order.offsets()));
        Self { order, even, shuffled: case.spread != Spread::Plain, permutation, offsets }
    }

    fn split(&self) -> RowSplit<'_> {
        if self.shuffled { (&self.order).into() } else { RowSplit::contiguous(&self.even).unwrap() }
    }

    fn rows_of(&self, rank: usize) -> usize {
        self.split().positions(rank).len()
    }

    /// Calls `launch` with this split for a launch of `local` ranks.
    fn with<R>(&self, local: usize, launch: impl FnOnce(Split<'_>) -> R) -> R {
        let (permutation, offsets) = (vec![self.permutation.buffer(); local], vec![self.offsets.buffer(); local]);
        let shuffled = Split { permutation: Some(&permutation), offsets: Some(&offsets) };
        launch(if self.shuffled { shuffled } else { Split::default() })
    }
}

/// One launch for each rank, or one for all of them.
fn launches(world: &World, case: &Case, launch: impl Fn(&Team, std::ops::Range<usize>) -> Launch) -> Vec<Launch> {
    if case.together {
        return vec![launch(&world.team_of_all().unwrap(), 0..case.ranks)];
    }
    (0..case.ranks).map(|rank| launch(&world.team(rank).unwrap(), rank..rank + 1)).collect()
}

/// The steps of one round: those before the kernel on each rank, the kernel, those after it.
fn add_round<'a>(
    streams: &mut [Vec<Step<'a>>],
    case: &Case,
    launches: &'a [Launch],
    before: &[Vec<Step<'a>>],
    after: &[Vec<Step<'a>>],
) {
    if case.together {
        streams[0].extend(before.iter().flatten());
        streams[0].push(Step::Launch(&launches[0]));
        streams[0].extend(after.iter().flatten());
        return;
    }
    for (rank, stream) in streams.iter_mut().enumerate() {
        if case.held == Some(rank) {
            stream.push(Step::Hold { ticks: 3 });
        }
        stream.extend(&before[rank]);
        stream.push(Step::Launch(&launches[rank]));
        stream.extend(&after[rank]);
    }
}

const POISON: u8 = 0xff;

fn copy(from: &HostBuffer, to: &HostBuffer) -> Step<'static> {
    Step::Copy { from: from.buffer(), to: to.buffer() }
}

fn fill(to: &HostBuffer) -> Step<'static> {
    Step::Fill { to: to.buffer(), byte: POISON }
}

fn rows<T: Element>(case: &Case) -> Rows {
    Rows { tokens: case.tokens as u64, hidden: case.hidden as u64, dtype: T::DTYPE }
}

/// The memory of one round of a reduction, kept until it has run.
struct Reduction<T> {
    split: RoundSplit,
    parts: Vec<Vec<T>>,
    inputs: Vec<HostBuffer>,
    results: Vec<HostBuffer>,
    second_results: Vec<HostBuffer>,
}

impl<T: Element> Reduction<T> {
    fn new(rng: &mut Rng, case: &Case) -> Self {
        let split = RoundSplit::new(rng, case);
        let parts: Vec<Vec<T>> = (0..case.ranks).map(|_| elements(rng, case.tokens * case.hidden)).collect();
        let inputs = parts.iter().map(|part| holding(part)).collect();
        let result = |rank| HostBuffer::poisoned(split.rows_of(rank) * case.hidden * size_of::<T>());
        let results = (0..case.ranks).map(result).collect();
        let second_results = (0..case.ranks).map(result).collect();
        Self { split, parts, inputs, results, second_results }
    }

    fn slices(&self) -> Vec<&[T]> {
        self.parts.iter().map(Vec::as_slice).collect()
    }
}

/// Several rounds on the same memory, each with new rows; parts are poisoned as soon as a rank's kernel has finished.
pub(crate) fn reduce_scatter<T: Element>(shim: &Shim, case: &Case, run: Run, multicast: bool) -> Result<(), String> {
    let mut rng = Rng::with_seed(run.seed);
    let world = World::new(case.ranks);
    let parts = poisoned::<T>(case.ranks, case.tokens * case.hidden);
    let out = poisoned::<T>(case.ranks, case.tokens * case.hidden);
    let rounds: Vec<Reduction<T>> = (0..case.rounds).map(|_| Reduction::new(&mut rng, case)).collect();
    let calls: Vec<Vec<Launch>> = rounds
        .iter()
        .map(|round| {
            launches(&world, case, |team, local| {
                round.split.with(local.len(), |split| {
                    let call = ReduceScatter {
                        parts: &buffers(&parts),
                        out: &buffers(&out[local]),
                        order: RowOrder {
                            rows: rows::<T>(case),
                            split,
                            capacity: case.tokens as u64,
                            // The shim's kernels never use this address: there is no switch.
                            multicast: multicast.then_some(parts[0].buffer()),
                        },
                    };
                    call.launch(team, case.grid).unwrap()
                })
            })
        })
        .collect();
    let mut streams = vec![Vec::new(); if case.together { 1 } else { case.ranks }];
    for (round, calls) in rounds.iter().zip(&calls) {
        let before: Vec<_> = (0..case.ranks).map(|r| vec![copy(&round.inputs[r], &parts[r])]).collect();
        let after: Vec<_> =
            (0..case.ranks).map(|r| vec![fill(&parts[r]), copy(&out[r], &round.results[r]), fill(&out[r])]).collect();
        add_round(&mut streams, case, calls, &before, &after);
    }
    run_all(shim, &streams, run, &world)?;
    for round in &rounds {
        let expected = reference::reduce_scatter(&round.slices(), case.hidden, round.split.split()).unwrap();
        for (result, expected) in round.results.iter().zip(&expected) {
            same("sums", &read::<T>(result), expected)?;
        }
    }
    Ok(())
}

pub(crate) fn reduce_scatter_norm<T: Element>(shim: &Shim, case: &Case, run: Run) -> Result<(), String> {
    let mut rng = Rng::with_seed(run.seed);
    let grid = Grid { threads: NORM_THREADS, ..case.grid };
    let world = World::new(case.ranks);
    let count = case.tokens * case.hidden;
    let parts = poisoned::<T>(case.ranks, count);
    let (out, residual_out) = (poisoned::<T>(case.ranks, count), poisoned::<T>(case.ranks, count));
    let (residual, weight) = (elements::<T>(&mut rng, count), elements::<T>(&mut rng, case.hidden));
    let (residual_memory, weight_memory) = (holding(&residual), holding(&weight));
    let rounds: Vec<Reduction<T>> = (0..case.rounds).map(|_| Reduction::new(&mut rng, case)).collect();
    let epsilon = 1e-6;
    let calls: Vec<Vec<Launch>> = rounds
        .iter()
        .map(|round| {
            launches(&world, case, |team, local| {
                let all = |memory: &HostBuffer| -> Vec<Buffer> { vec![memory.buffer(); local.len()] };
                round.split.with(local.len(), |split| {
                    let reduce = ReduceScatter {
                        parts: &buffers(&parts),
                        out: &buffers(&out[local.clone()]),
                        order: RowOrder { rows: rows::<T>(case), split, capacity: case.tokens as u64, multicast: None },
                    };
                    let (residual, weight) = (all(&residual_memory), all(&weight_memory));
                    let residual_out = buffers(&residual_out[local.clone()]);
                    let call = ReduceScatterNorm {
                        reduce,
                        residual: &residual,
                        weight: &weight,
                        residual_out: &residual_out,
                        epsilon,
                    };
                    call.launch(team, grid).unwrap()
                })
            })
        })
        .collect();
    let mut streams = vec![Vec::new(); if case.together { 1 } else { case.ranks }];
    for (round, calls) in rounds.iter().zip(&calls) {
        let before: Vec<_> = (0..case.ranks).map(|r| vec![copy(&round.inputs[r], &parts[r])]).collect();
        let after: Vec<_> = (0..case.ranks)
            .map(|r| {
                let results = [copy(&out[r], &round.results[r]), copy(&residual_out[r], &round.second_results[r])];
                [vec![fill(&parts[r])], results.to_vec(), vec![fill(&out[r]), fill(&residual_out[r])]].concat()
            })
            .collect();
        add_round(&mut streams, case, calls, &before, &after);
    }
    run_all(shim, &streams, run, &world)?;
    for round in &rounds {
        let norm = ResidualNorm { residual: &residual, weight: &weight, epsilon };
        let slices = round.slices();
        let expected = reference::reduce_scatter_norm(&slices, case.hidden, round.split.split(), norm).unwrap();
        for (rank, expected) in expected.iter().enumerate() {
            same("residual", &read::<T>(&round.second_results[rank]), &expected.residual)?;
            same("normed", &read::<T>(&round.results[rank]), &expected.normed)?;
        }
    }
    Ok(())
}

/// The receiving memory is poisoned before a rank's kernel, so that data that arrived too early is lost.
pub(crate) fn allgather<T: Element>(shim: &Shim, case: &Case, run: Run, multicast: bool) -> Result<(), String> {
    struct Round<T> {
        split: RoundSplit,
        rows: Vec<Vec<T>>,
        inputs: Vec<HostBuffer>,
        results: Vec<HostBuffer>,
    }
    let mut rng = Rng::with_seed(run.seed);
    let world = World::new(case.ranks);
    let out = poisoned::<T>(case.ranks, case.tokens * case.hidden);
    let new_round = |rng: &mut Rng| {
        let split = RoundSplit::new(rng, case);
        let rows: Vec<Vec<T>> = (0..case.ranks).map(|r| elements(rng, split.rows_of(r) * case.hidden)).collect();
        let inputs = rows.iter().map(|rows| holding(rows)).collect();
        Round { split, rows, inputs, results: poisoned::<T>(case.ranks, case.tokens * case.hidden) }
    };
    let rounds: Vec<Round<T>> = (0..case.rounds).map(|_| new_round(&mut rng)).collect();
    let calls: Vec<Vec<Launch>> = rounds
        .iter()
        .map(|round| {
            let most = (0..case.ranks).map(|rank| round.split.rows_of(rank)).max().unwrap();
            launches(&world, case, |team, local| {
                let capacity = if case.together { most } else { round.split.rows_of(local.start) };
                let from: Vec<Buffer> = round.inputs[local.clone()]
                    .iter()
                    // All ranks of a launch have one capacity; the kernel must not read a shorter rank's memory past
                    // its rows.
                    .map(|input| Buffer { bytes: (capacity * case.hidden * size_of::<T>()) as u64, ..input.buffer() })
                    .collect();
                round.split.with(local.len(), |split| {
                    let call = Allgather {
                        from: &from,
                        out: &buffers(&out),
                        order: RowOrder {
                            rows: rows::<T>(case),
                            split,
                            capacity: capacity as u64,
                            multicast: multicast.then_some(out[0].buffer()),
                        },
                    };
                    call.launch(team, case.grid).unwrap()
                })
            })
        })
        .collect();
    let mut streams = vec![Vec::new(); if case.together { 1 } else { case.ranks }];
    for (round, calls) in rounds.iter().zip(&calls) {
        let before: Vec<_> = (0..case.ranks).map(|r| vec![fill(&out[r])]).collect();
        let after: Vec<_> =
            (0..case.ranks).map(|r| vec![copy(&out[r], &round.results[r]), fill(&round.inputs[r])]).collect();
        add_round(&mut streams, case, calls, &before, &after);
    }
    run_all(shim, &streams, run, &world)?;
    for round in &rounds {
        let slices: Vec<&[T]> = round.rows.iter().map(Vec::as_slice).collect();
        let expected = reference::allgather(&slices, case.hidden, round.split.split()).unwrap();
        for result in &round.results {
            same("gathered", &read::<T>(result), &expected)?;
        }
    }
    Ok(())
}

/// Every second round runs in place.
pub(crate) fn all_reduce<T: Element>(shim: &Shim, case: &Case, run: Run) -> Result<(), String> {
    let mut rng = Rng::with_seed(run.seed);
    let world = World::new(case.ranks);
    let count = case.tokens * case.hidden;
    let (parts, out) = (poisoned::<T>(case.ranks, count), poisoned::<T>(case.ranks, count));
    let rounds: Vec<Reduction<T>> = (0..case.rounds).map(|_| Reduction::new(&mut rng, case)).collect();
    let results: Vec<Vec<HostBuffer>> = rounds.iter().map(|_| poisoned::<T>(case.ranks, count)).collect();
    let target = |round: usize| if round.is_multiple_of(2) { &out } else { &parts };
    let calls: Vec<Vec<Launch>> = (0..case.rounds)
        .map(|round| {
            launches(&world, case, |team, _| {
                let (parts, out) = (buffers(&parts), buffers(target(round)));
                let call = AllReduce { parts: &parts, out: &out, elements: count as u64, dtype: T::DTYPE };
                call.launch(team, case.grid).unwrap()
            })
        })
        .collect();
    let mut streams = vec![Vec::new(); if case.together { 1 } else { case.ranks }];
    for (index, (round, calls)) in rounds.iter().zip(&calls).enumerate() {
        let before: Vec<_> = (0..case.ranks).map(|r| vec![fill(&out[r]), copy(&round.inputs[r], &parts[r])]).collect();
        let after: Vec<_> =
            (0..case.ranks).map(|r| vec![copy(&target(index)[r], &results[index][r]), fill(&parts[r])]).collect();
        add_round(&mut streams, case, calls, &before, &after);
    }
    run_all(shim, &streams, run, &world)?;
    for (round, results) in rounds.iter().zip(&results) {
        let expected = reference::all_reduce(&round.slices()).unwrap();
        for result in results {
            same("sum", &read::<T>(result), &expected)?;
        }
    }
    Ok(())
}

/// Runs every case, each with another element type and seed.
fn check(mut run_case: impl FnMut(&Shim, &Case, Run, usize) -> Result<(), String>) {
    let Some(shim) = shim() else { return };
    for (index, case) in cases().iter().enumerate() {
        let run = Run::of(index as u64 + 1);
        run_case(shim, case, run, index % 3).unwrap_or_else(|error| panic!("{case:?} {run:?}: {error}"));
    }
}

#[test]
fn reduce_scatter_equals_the_reference() {
    check(|shim, case, run, kind| match kind {
        0 => reduce_scatter::<bf16>(shim, case, run, false),
        1 => reduce_scatter::<f16>(shim, case, run, false),
        _ => reduce_scatter::<f32>(shim, case, run, false),
    });
}

#[test]
fn the_scalar_path_of_nvls_equals_the_reference() {
    check(|shim, case, run, kind| match kind {
        _ if !case.hidden.is_multiple_of(8) => Ok(()),
        0 => reduce_scatter::<bf16>(shim, case, run, true).and_then(|()| allgather::<f32>(shim, case, run, true)),
        1 => reduce_scatter::<f16>(shim, case, run, true),
        _ => reduce_scatter::<f32>(shim, case, run, true).and_then(|()| allgather::<f16>(shim, case, run, true)),
    });
}

#[test]
fn the_fused_norm_equals_the_reference() {
    let Some(shim) = shim() else { return };
    for (index, (ranks, tokens, hidden)) in
        [(1, 2, 2048), (2, 3, 2056), (3, 2, 333), (4, 3, 64), (8, 9, 24), (2, 21, 40), (4, 11, 2048)].iter().enumerate()
    {
        let grid = Grid { blocks: 1 + index as u32 % 2, threads: NORM_THREADS };
        let held = (index % 2 == 1).then_some(0);
        let case = Case { grid, held, together: *ranks == 4, ..Case::new(*ranks, *tokens, *hidden) };
        let run = Run::of(index as u64 + 1);
        let result = match index % 3 {
            0 => reduce_scatter_norm::<bf16>(shim, &case, run),
            1 => reduce_scatter_norm::<f32>(shim, &case, run),
            _ => reduce_scatter_norm::<f16>(shim, &case, run),
        };
        result.unwrap_or_else(|error| panic!("{case:?} {run:?}: {error}"));
    }
    // Rows that span more than one set of registers.
    let case = Case { rounds: 1, ..Case::new(2, 1, 5000) };
    reduce_scatter_norm::<bf16>(shim, &case, Run::of(9)).unwrap();
}

#[test]
fn allgather_equals_the_reference() {
    check(|shim, case, run, kind| match kind {
        0 => allgather::<bf16>(shim, case, run, false),
        1 => allgather::<f16>(shim, case, run, false),
        _ => allgather::<f32>(shim, case, run, false),
    });
}

#[test]
fn all_reduce_equals_the_reference() {
    check(|shim, case, run, kind| match kind {
        0 => all_reduce::<bf16>(shim, case, run),
        1 => all_reduce::<f16>(shim, case, run),
        _ => all_reduce::<f32>(shim, case, run),
    });
}
