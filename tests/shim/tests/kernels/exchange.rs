//! Dispatch and combine: uneven ranks, unused slots, one send per rank.

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::Element;
use semmoe_kernels_cuda::{Combine, Dispatch, Grid, Launch, Received};
use semmoe_kernels_shim::{HostBuffer, Shim, Step};
use semmoe_reference::data::{Tokens, elements, same};
use semmoe_reference::{self as reference, Dispatched};

use crate::support::{Run, World, buffers, holding, poisoned, read, run_all, shim};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    /// Maximum tokens per rank; the number is random, and in every third case rank 0 has none.
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) rounds: usize,
    pub(crate) held: Option<usize>,
    /// All experts on this rank.
    pub(crate) all_on: Option<usize>,
}

/// A rank's input for one round.
struct Sent<T> {
    tokens: Tokens<T>,
    memory: [HostBuffer; 3],
}

impl<T: Element> Sent<T> {
    fn new(rng: &mut Rng, case: &Case, tokens: usize) -> Self {
        let tokens = Tokens::random(rng, tokens, case.hidden, case.experts, case.top_k);
        let memory = [holding(&tokens.x), holding(&tokens.experts), holding(&tokens.weights)];
        Self { tokens, memory }
    }

    fn tokens(&self, case: &Case) -> usize {
        self.tokens.experts.len() / case.top_k
    }
}

/// A rank's own output of one round, and copies of the rows it received.
struct Results {
    sent_rows: HostBuffer,
    source_offsets: HostBuffer,
    /// Rows, tokens, experts, weights.
    received: [HostBuffer; 4],
    out: HostBuffer,
}

/// Memory that all ranks use, in all rounds.
struct Symmetric {
    received: [Vec<HostBuffer>; 4],
    sums: Vec<HostBuffer>,
}

struct Round<T> {
    sent: Vec<Sent<T>>,
    expected: Vec<Dispatched<T>>,
    sums: Vec<Vec<T>>,
    sums_memory: Vec<HostBuffer>,
    results: Vec<Results>,
}

impl<T: Element> Round<T> {
    fn new(rng: &mut Rng, case: &Case, rank_of_expert: &[u32], capacity: usize) -> Self {
        let tokens = |rank: usize, rng: &mut Rng| match rank == 0 && case.tokens.is_multiple_of(3) {
            true => 0,
            false => rng.usize(0..=case.tokens),
        };
        let sent: Vec<Sent<T>> = (0..case.ranks)
            .map(|rank| {
                let tokens = tokens(rank, rng);
                Sent::new(rng, case, tokens)
            })
            .collect();
        let routed: Vec<_> = sent.iter().map(|sent| sent.tokens.routed()).collect();
        let expected = reference::dispatch(&routed, case.hidden, case.top_k, rank_of_expert).unwrap();
        let sums: Vec<Vec<T>> = (0..case.ranks).map(|_| elements(rng, capacity * case.hidden)).collect();
        let sums_memory = sums.iter().map(|sums| holding(sums)).collect();
        let results = sent.iter().map(|sent| Results::new::<T>(case, sent.tokens(case), capacity)).collect();
        Self { sent, expected, sums, sums_memory, results }
    }
}

impl Results {
    fn new<T>(case: &Case, tokens: usize, capacity: usize) -> Self {
        Self {
            sent_rows: HostBuffer::poisoned(tokens * case.ranks * 4),
            source_offsets: HostBuffer::poisoned((case.ranks + 1) * 4),
            received: received_sizes::<T>(case, capacity).map(HostBuffer::poisoned),
            out: HostBuffer::poisoned(tokens * case.hidden * size_of::<T>()),
        }
    }
}

fn received_sizes<T>(case: &Case, capacity: usize) -> [usize; 4] {
    [case.hidden * size_of::<T>(), 4, case.top_k * 4, case.top_k * 4].map(|bytes| bytes * capacity)
}

fn launches<T: Element>(
    world: &World,
    case: &Case,
    round: &Round<T>,
    symmetric: &Symmetric,
    rank_of_expert: &HostBuffer,
    rank: usize,
) -> [Launch; 3] {
    let grid = Grid { blocks: 2, threads: 64 };
    let (sent, results) = (&round.sent[rank], &round.results[rank]);
    let team = world.team(rank).unwrap();
    let capacity = (case.ranks * case.tokens) as u64;
    let [rows, tokens, experts, weights] = symmetric.received.each_ref().map(|memory| buffers(memory));
    let dispatch = Dispatch {
        tokens: &[sent.tokens(case) as u64],
        hidden: case.hidden as u64,
        dtype: T::DTYPE,
        top_k: case.top_k as u64,
        experts_in_all: case.experts as u64,
        rank_of_expert: Some(&[rank_of_expert.buffer()]),
        x: &[sent.memory[0].buffer()],
        experts: &[sent.memory[1].buffer()],
        weights: &[sent.memory[2].buffer()],
        sent_rows: &[results.sent_rows.buffer()],
        source_offsets: &[results.source_offsets.buffer()],
        received: Received { capacity, rows: &rows, tokens: &tokens, experts: &experts, weights: &weights },
    };
    let combine = Combine {
        tokens: &[sent.tokens(case) as u64],
        hidden: case.hidden as u64,
        dtype: T::DTYPE,
        capacity,
        sums: &buffers(&symmetric.sums),
        sent_rows: &[results.sent_rows.buffer()],
        out: &[results.out.buffer()],
    };
    let [plan, exchange] = dispatch.launches(&team, grid, 96).unwrap();
    [plan, exchange, combine.launch(&team, grid).unwrap()]
}

/// Rounds of dispatch, a stand-in expert, and combine; returns all ranks' tokens and the number of rows sent.
pub(crate) fn dispatch_and_combine<T: Element>(shim: &Shim, case: &Case, run: Run) -> Result<[usize; 2], String> {
    let mut rng = Rng::with_seed(run.seed);
    let world = World::new(case.ranks);
    let host = |rng: &mut Rng| case.all_on.unwrap_or_else(|| rng.usize(0..case.ranks)) as u32;
    let rank_of_expert: Vec<u32> = (0..case.experts).map(|_| host(&mut rng)).collect();
    let hosts = holding(&rank_of_expert);
    let capacity = case.ranks * case.tokens;
    let symmetric = Symmetric {
        received: received_sizes::<T>(case, capacity).map(|bytes| poisoned::<u8>(case.ranks, bytes)),
        sums: poisoned::<T>(case.ranks, capacity * case.hidden),
    };
    let rounds: Vec<Round<T>> =
        (0..case.rounds).map(|_| Round::new(&mut rng, case, &rank_of_expert, capacity)).collect();
    let calls: Vec<Vec<[Launch; 3]>> = rounds
        .iter()
        .map(|round| (0..case.ranks).map(|rank| launches(&world, case, round, &symmetric, &hosts, rank)).collect())
        .collect();
    let mut streams = vec![Vec::new(); case.ranks];
    for (round, calls) in rounds.iter().zip(&calls) {
        for (rank, stream) in streams.iter_mut().enumerate() {
            let [plan, dispatch, combine] = &calls[rank];
            let received = symmetric.received.each_ref().map(|memory| memory[rank].buffer());
            if case.held == Some(rank) {
                stream.push(Step::Hold { ticks: 3 });
            }
            stream.extend(received.map(|to| Step::Fill { to, byte: 0xff }));
            stream.extend([Step::Launch(plan), Step::Launch(dispatch)]);
            let results = &round.results[rank].received;
            stream.extend(received.iter().zip(results).map(|(&from, to)| Step::Copy { from, to: to.buffer() }));
            let sums = symmetric.sums[rank].buffer();
            stream.push(Step::Copy { from: round.sums_memory[rank].buffer(), to: sums });
            stream.push(Step::Launch(combine));
            stream.push(Step::Fill { to: sums, byte: 0xff });
        }
    }
    run_all(shim, &streams, run, &world)?;
    rounds.iter().try_for_each(|round| compare(case, round))?;
    let tokens = rounds.iter().flat_map(|round| &round.sent).map(|sent| sent.tokens(case)).sum();
    let sent = rounds.iter().flat_map(|round| &round.expected).map(|expected| expected.tokens.len()).sum();
    Ok([tokens, sent])
}

fn compare<T: Element>(case: &Case, round: &Round<T>) -> Result<(), String> {
    for (results, expected) in round.results.iter().zip(&round.expected) {
        let rows = expected.tokens.len();
        let [found_rows, tokens, experts, weights] = &results.received;
        same("source offsets", &read::<u32>(&results.source_offsets), &expected.source_offsets)?;
        same("sent rows", &read::<i32>(&results.sent_rows), &expected.sent_rows)?;
        same("rows", &read::<T>(found_rows)[..rows * case.hidden], &expected.rows)?;
        same("tokens", &read::<u32>(tokens)[..rows], &expected.tokens)?;
        same("experts", &read::<i32>(experts)[..rows * case.top_k], &expected.experts)?;
        same("weights", &read::<f32>(weights)[..rows * case.top_k], &expected.weights)?;
        // Nothing may be written past the last row.
        if read::<u8>(found_rows)[rows * case.hidden * size_of::<T>()..].iter().any(|&byte| byte != 0xff) {
            return Err("rows were written past the last one".to_owned());
        }
    }
    let sums: Vec<&[T]> = round.sums.iter().map(Vec::as_slice).collect();
    let sent: Vec<&[i32]> = round.expected.iter().map(|expected| expected.sent_rows.as_slice()).collect();
    let combined = reference::combine(&sums, &sent, case.hidden).unwrap();
    for (results, expected) in round.results.iter().zip(&combined) {
        same("combined", &read::<T>(&results.out), expected)?;
    }
    Ok(())
}

impl Case {
    pub(crate) fn new(ranks: usize, tokens: usize, hidden: usize) -> Self {
        Self { ranks, tokens, hidden, experts: 12, top_k: 4, rounds: 2, held: None, all_on: None }
    }
}

#[test]
fn dispatch_and_combine_equal_the_reference() {
    let Some(shim) = shim() else { return };
    for (index, ranks) in [1usize, 2, 3, 4, 8].into_iter().enumerate() {
        let cases = [
            Case { held: Some(ranks - 1), ..Case::new(ranks, 7, 16) },
            Case { all_on: Some(ranks / 2), top_k: 1, ..Case::new(ranks, 6, 5) },
            Case { experts: 40, top_k: 35, rounds: 1, ..Case::new(ranks, 3, 8) },
        ];
        for case in &cases {
            let run = Run::of(index as u64 + 1);
            let result = match index % 3 {
                0 => dispatch_and_combine::<bf16>(shim, case, run),
                1 => dispatch_and_combine::<f32>(shim, case, run),
                _ => dispatch_and_combine::<f16>(shim, case, run),
            };
            result.unwrap_or_else(|error| panic!("{case:?} {run:?}: {error}"));
        }
    }
}
