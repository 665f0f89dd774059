//! Figures of the CPU backend.
//!
//! All candidates alternate within the same rounds, so a busy machine slows all of them; a ratio is the median of the
//! rounds' ratios. Reduce-scatter is compared with a copy that moves as many bytes on as many threads: (P + 1) x N, of
//! which P x N are read and N written.
#![allow(clippy::expect_used, reason = "a rank that fails ends the program")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::bf16;
use semmoe_kernels::{Element, RankOrder, RowSplit, argsort_by_rank, even_offsets};
use semmoe_ranks::{Communicator, Norm, Span, threads};

use crate::measure::Outcome;

const TOKENS: usize = 4096;
const HIDDEN: usize = 2048;
const RANKS: usize = 4;
const ITEMS: usize = 8192;

/// Prints the collectives and the argsort with their bounds.
pub(crate) fn run(rounds: usize) -> Outcome<()> {
    collectives(rounds);
    argsorts(rounds * 5);
    Ok(())
}

/// Seconds of each candidate in each round.
type Rounds<const N: usize> = Vec<[f64; N]>;

fn collectives(rounds: usize) {
    let destinations = destinations(TOKENS);
    let mut order = RankOrder::default();
    argsort_by_rank(&destinations, RANKS, &mut order).expect("destinations in range");
    let even = even_offsets(TOKENS, RANKS).expect("few tokens");
    let bytes = TOKENS * HIDDEN * size_of::<bf16>();
    let comms = threads(RANKS, 2 * bytes, Duration::from_secs(60)).expect("memory");
    let begin = Instant::now();
    let all: Vec<Vec<[Spell; 6]>> = std::thread::scope(|scope| {
        let (order, even) = (&order, &even);
        let ranks: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(move || one_rank(comm, order, even, rounds, begin))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    // From the first rank's start to the last one's end: a rank may wake up when others have nearly finished.
    let span = |round: usize, index: usize| {
        let spells = all.iter().map(|rank| rank[round][index]);
        let start = spells.clone().map(|spell| spell.0).fold(f64::INFINITY, f64::min);
        spells.map(|spell| spell.1).fold(0.0, f64::max) - start
    };
    let times: Rounds<6> = (0..rounds).map(|round| std::array::from_fn(|index| span(round, index))).collect();
    println!("{TOKENS} x {HIDDEN} bf16, P = {RANKS}, {} cores; medians of {rounds} rounds", cores());
    let moved = ((RANKS + 1) * bytes) as f64;
    let names =
        ["copy of the same bytes", "plain reduce-scatter", "SRS", "SRS + residual + norm", "plain allgather", "SAG"];
    for (index, name) in names.iter().enumerate() {
        let median = median(times.iter().map(|round| round[index]));
        let least = times.iter().map(|round| round[index]).fold(f64::INFINITY, f64::min);
        let (median, rate) = (median * 1e3, moved / median / 1e9);
        println!("{name:<24} {median:8.3} ms {rate:8.1} GB/s   least {:8.3} ms", least * 1e3);
    }
    let ratio = |a: usize, b: usize| median(times.iter().map(|round| round[a] / round[b]));
    println!("plain reduce-scatter, share of the copy bound (bar: 0.70 or more)  {:.2}", ratio(0, 1));
    println!("SRS over plain reduce-scatter (bar: 1.05 or less)                  {:.3}", ratio(2, 1));
    println!("SAG over plain allgather                                           {:.3}", ratio(5, 4));
}

/// Start and end of one candidate on one rank, in seconds.
type Spell = (f64, f64);

fn one_rank(mut comm: Communicator, order: &RankOrder, even: &[u32], rounds: usize, begin: Instant) -> Vec<[Spell; 6]> {
    let rank = comm.rank().index();
    let elements = TOKENS * HIDDEN;
    let part = Span::<bf16>::new(0, elements).expect("a span");
    let whole = Span::<bf16>::new(part.next(), elements).expect("a span");
    for (i, value) in comm.view_mut(part).expect("in the buffer").iter_mut().enumerate() {
        *value = Element::round((i % 1000) as f32 - 500.0);
    }
    comm.view_mut(whole).expect("in the buffer").fill(bf16::ZERO);
    let (plain, shuffled) = (RowSplit::contiguous(even).expect("even"), RowSplit::from(order));
    let rows = |split: RowSplit<'_>| vec![bf16::ZERO; split.positions(rank).len() * HIDDEN];
    let (mut plain_out, mut out) = (rows(plain), rows(shuffled));
    let (mut residual_out, residual, weight) = (rows(shuffled), vec![bf16::ONE; elements], vec![bf16::ONE; HIDDEN]);
    // Half of the bytes are read, half written, in this rank's share of the whole.
    let half = (RANKS + 1) * elements * size_of::<bf16>() / 2 / RANKS;
    let (from, mut to) = (vec![1u8; half], vec![2u8; half]);
    let mut times = Vec::new();
    for _ in 0..rounds + 3 {
        let mut round = [(0.0, 0.0); 6];
        round[0] = timed(&mut comm, begin, |comm| {
            black_box(&mut to).copy_from_slice(black_box(&from));
            comm.barrier()
        });
        round[1] = timed(&mut comm, begin, |comm| comm.reduce_scatter(part, HIDDEN, plain, &mut plain_out));
        round[2] = timed(&mut comm, begin, |comm| comm.reduce_scatter(part, HIDDEN, shuffled, &mut out));
        round[3] = timed(&mut comm, begin, |comm| {
            let (residual, weight) = (&residual[..], &weight[..]);
            let norm = Norm { residual, weight, epsilon: 1e-6, residual_out: &mut residual_out };
            comm.reduce_scatter_norm(part, HIDDEN, shuffled, norm, &mut out)
        });
        round[4] = timed(&mut comm, begin, |comm| comm.allgather(&plain_out, HIDDEN, plain, whole));
        round[5] = timed(&mut comm, begin, |comm| comm.allgather(&out, HIDDEN, shuffled, whole));
        times.push(round);
    }
    // The first rounds fault pages in.
    times.split_off(3)
}

/// Starts once all ranks have arrived, and ends once all have finished.
fn timed(
    comm: &mut Communicator,
    begin: Instant,
    run: impl FnOnce(&mut Communicator) -> Result<(), semmoe_ranks::RankError>,
) -> Spell {
    comm.barrier().expect("all ranks");
    let start = begin.elapsed().as_secs_f64();
    run(comm).expect("all ranks");
    (start, begin.elapsed().as_secs_f64())
}

fn argsorts(rounds: usize) {
    let destinations = destinations(ITEMS);
    let mut times: Rounds<3> = Vec::new();
    let mut order = RankOrder::default();
    let mut sorted: Vec<u32> = Vec::new();
    for _ in 0..rounds + 3 {
        let start = Instant::now();
        argsort_by_rank(black_box(&destinations), RANKS, &mut order).expect("destinations in range");
        let counting = start.elapsed().as_secs_f64();
        let mut compared = [false, true].map(|stable| {
            let start = Instant::now();
            sorted.clear();
            sorted.extend(0..ITEMS as u32);
            let keys = black_box(&destinations);
            if stable {
                sorted.sort_by_key(|&item| keys[item as usize]);
            } else {
                // The index as second key makes an unstable sort stable.
                sorted.sort_unstable_by_key(|&item| (keys[item as usize], item));
            }
            // The collectives also need the inverse.
            let mut inverse = vec![0u32; ITEMS];
            for (position, &item) in sorted.iter().enumerate() {
                inverse[item as usize] = position as u32;
            }
            black_box(&inverse);
            start.elapsed().as_secs_f64()
        });
        assert_eq!(sorted, order.permutation());
        compared.sort_by(f64::total_cmp);
        times.push([counting, compared[0], compared[1]]);
    }
    let times = times.split_off(3);
    println!("argsort of {ITEMS} destinations on {RANKS} ranks, with its inverse");
    for (index, name) in ["by counting", "by comparison, the faster", "by comparison, the slower"].iter().enumerate() {
        println!("{name:<26} {:8.1} us", median(times.iter().map(|round| round[index])) * 1e6);
    }
    println!(
        "argsort, speedup over the faster comparison sort (bar: 5 or more)   {:.1}",
        median(times.iter().map(|round| round[1] / round[0]))
    );
}

fn destinations(count: usize) -> Vec<u16> {
    let mut random = fastrand::Rng::with_seed(7);
    (0..count).map(|_| random.u16(0..RANKS as u16)).collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    crate::measure::median(values.collect())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
