//! Moves of weights and cache, and their memory reads.

use std::cell::Cell;

use crate::Outcome;
use crate::papers::Verdict::{Corrected, Refuted, Reproduced};
use crate::papers::inputs::qwen3_235b;
use crate::papers::{Found, Verdict};

/// Rows of the gate projection whose row of the up projection is on the same rank: `cut` maps a row of the concatenated
/// gate and up to its rank.
fn together(width: usize, cut: impl Fn(usize) -> usize) -> usize {
    (0..width).filter(|&row| cut(row) == cut(width + row)).count()
}

pub(super) fn fused_rows() -> Outcome<Found> {
    let width = qwen3_235b()?.expert_width as usize;
    let ranks = 8;
    let printed = together(width, |row| row / (2 * width / ranks));
    let halves = together(width, |row| row % width / (width / ranks));
    let ours = format!("of {width} rows {printed} have gate and up on one rank; with both cut alike {halves}");
    let verdict = if halves == width { Verdict::of(printed == width, Corrected) } else { Refuted };
    Ok(Found::new(verdict, ours))
}

pub(super) fn heads() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let [one, whole] = [shape.kv_bytes_per_token(8), shape.kv_bytes_per_token(1)];
    let verdict = Verdict::of(one == whole / 8.0, Corrected);
    Ok(Found::new(verdict, format!("{one:.0} bytes of a token on each rank, not {:.0}", whole / 8.0)))
}

/// Load of the fullest rank if the longest go first, each to the emptiest rank.
fn longest_first_load(lengths: &[u32], ranks: usize) -> u32 {
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut loads = vec![0; ranks];
    for length in sorted {
        if let Some(least) = loads.iter_mut().min() {
            *least += length;
        }
    }
    loads.into_iter().max().unwrap_or(0)
}

/// The optimal load of the fullest rank, by exhaustive search.
fn best_load(lengths: &[u32], loads: &mut [u32]) -> u32 {
    let Some((length, others)) = lengths.split_first() else { return loads.iter().copied().max().unwrap_or(0) };
    let mut best = u32::MAX;
    for rank in 0..loads.len() {
        loads[rank] += length;
        best = best.min(best_load(others, loads));
        loads[rank] -= length;
        // Empty ranks are interchangeable.
        if loads[rank] == 0 {
            break;
        }
    }
    best
}

pub(super) fn longest_first() -> Outcome<Found> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut worst = [0.0f64; 2];
    for (ranks, worst) in [2usize, 3].into_iter().zip(&mut worst) {
        // Graham's example, which attains the bound, and random ones.
        let graham: Vec<u32> = (ranks..2 * ranks).flat_map(|length| [length as u32; 2]).chain([ranks as u32]).collect();
        let drawn = (0..300).map(|_| (0..7).map(|_| random.u32(1..20)).collect());
        for lengths in std::iter::once(graham).chain(drawn) {
            let best = best_load(&lengths, &mut vec![0; ranks]);
            *worst = worst.max(f64::from(longest_first_load(&lengths, ranks)) / f64::from(best));
        }
    }
    let bound = |ranks: f64| 4.0 / 3.0 - 1.0 / (3.0 * ranks);
    let reached = (worst[0] - bound(2.0)).abs() < 1e-9 && (worst[1] - bound(3.0)).abs() < 1e-9;
    let ours = format!(
        "worst of the fullest rank over the best: {:.4} with 2 ranks, {:.4} with 3, as the bound",
        worst[0], worst[1]
    );
    Ok(Found::new(if reached { Corrected } else { Refuted }, ours))
}

/// An element that counts its reads and writes.
struct Counted {
    data: Vec<u32>,
    reads: Cell<u64>,
    writes: u64,
}

impl Counted {
    fn new(data: Vec<u32>) -> Self {
        Self { data, reads: Cell::new(0), writes: 0 }
    }

    fn empty(size: usize) -> Self {
        Self::new(vec![u32::MAX; size])
    }

    fn read(&self, at: usize) -> u32 {
        self.reads.set(self.reads.get() + 1);
        self.data[at]
    }

    fn write(&mut self, at: usize, value: u32) {
        self.writes += 1;
        self.data[at] = value;
    }
}

/// P ranks with R rows each, in P parts: every rank gives each other rank one part of every row (experts cut into
/// slices, or tokens cut into heads).
const RANKS: usize = 4;
const ROWS: usize = 6;
const SIZE: usize = RANKS * ROWS;

/// Element `part` of row `row` of rank `rank` before the move; its number identifies its destination.
fn before() -> Vec<Counted> {
    let of = |rank: usize| (0..SIZE).map(|at| (rank * SIZE + at) as u32).collect();
    (0..RANKS).map(|rank| Counted::new(of(rank))).collect()
}

/// The position of an element from rank `from` to rank `to`, before the move and after it.
fn place(from: usize, to: usize, row: usize) -> [usize; 2] {
    [row * RANKS + to, from * ROWS + row]
}

/// Directly from source to destination.
fn direct() -> Vec<[Counted; 2]> {
    let sources = before();
    let mut targets: Vec<Counted> = (0..RANKS).map(|_| Counted::empty(SIZE)).collect();
    for (to, target) in targets.iter_mut().enumerate() {
        for (from, source) in sources.iter().enumerate() {
            for row in 0..ROWS {
                let [at, then] = place(from, to, row);
                target.write(then, source.read(at));
            }
        }
    }
    sources.into_iter().zip(targets).map(|(source, target)| [source, target]).collect()
}

/// Through a collective, which needs contiguous data: `copies` on each side pack and unpack it. Returns all memories on
/// the way.
fn staged(copies: usize) -> Vec<Vec<Counted>> {
    let mut all: Vec<Vec<Counted>> = before().into_iter().map(|memory| vec![memory]).collect();
    for copy in 0..copies {
        for memories in &mut all {
            let mut next = Counted::empty(SIZE);
            let last = &memories[memories.len() - 1];
            for to in 0..RANKS {
                for row in 0..ROWS {
                    // The first copy sorts by destination rank; a second one moves sorted data.
                    let at = if copy == 0 { place(0, to, row)[0] } else { to * ROWS + row };
                    next.write(to * ROWS + row, last.read(at));
                }
            }
            memories.push(next);
        }
    }
    let mut arrived: Vec<Counted> = (0..RANKS).map(|_| Counted::empty(SIZE)).collect();
    for (to, target) in arrived.iter_mut().enumerate() {
        for (from, memories) in all.iter().enumerate() {
            let sent = &memories[memories.len() - 1];
            (0..ROWS).for_each(|row| target.write(from * ROWS + row, sent.read(to * ROWS + row)));
        }
    }
    for (memories, arrived) in all.iter_mut().zip(arrived) {
        memories.push(arrived);
        for _ in 0..copies {
            let mut next = Counted::empty(SIZE);
            let last = &memories[memories.len() - 1];
            (0..SIZE).for_each(|at| next.write(at, last.read(at)));
            memories.push(next);
        }
    }
    all
}

/// Reads of each element on the way; an error unless all of them arrive where they belong.
fn reads(ranks: &[Vec<Counted>]) -> Outcome<f64> {
    for (to, memories) in ranks.iter().enumerate() {
        let last = memories.last().ok_or("no memory")?;
        for (from, row) in (0..RANKS).flat_map(|from| (0..ROWS).map(move |row| (from, row))) {
            let [at, then] = place(from, to, row);
            if last.data[then] as usize != from * SIZE + at {
                return Err(format!("row {row} of rank {from} did not reach rank {to}").into());
            }
        }
    }
    let count = |of: fn(&Counted) -> u64| ranks.iter().flatten().map(of).sum::<u64>();
    let (reads, writes) = (count(|memory| memory.reads.get()), count(|memory| memory.writes));
    if reads != writes {
        return Err(format!("{reads} reads, but {writes} writes").into());
    }
    Ok(reads as f64 / (RANKS * SIZE) as f64)
}

pub(super) fn passes() -> Outcome<Found> {
    // Weights with NCCL: packed, sent, unpacked. The cache is also gathered from pages before and scattered to pages
    // after.
    let direct: Vec<Vec<Counted>> = direct().into_iter().map(Vec::from).collect();
    let [weights, cache, direct] = [reads(&staged(1))?, reads(&staged(2))?, reads(&direct)?];
    let verdict = if [weights, cache, direct] == [3.0, 5.0, 1.0] { Reproduced } else { Refuted };
    Ok(Found::new(verdict, format!("{weights}, {cache} and {direct}; writes are as many")))
}
