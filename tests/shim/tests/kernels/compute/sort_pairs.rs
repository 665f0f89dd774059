//! The pairs of row and expert, by expert.

use fastrand::Rng;
use semmoe_kernels_cuda::compute::{Pairs, SortPairs, TILE_ROWS, Tile, Tiles};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::run;
use crate::support::{holding, read, shim};

const UNWRITTEN: u32 = 0x7777_7777;

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) rows: usize,
    pub(super) top_k: usize,
    pub(super) experts: usize,
    /// The others are chosen by no row.
    pub(super) chosen: usize,
}

/// The lists that a sort writes.
struct Lists {
    row_of: Vec<u32>,
    /// As bits.
    weights: Vec<u32>,
    first_pair: Vec<u32>,
    pair_of: Vec<u32>,
    tiles: Vec<Tile>,
}

impl Lists {
    fn of(shim: &Shim, from: Pairs, weights: &[f32], case: Case, seed: u64) -> Result<Self, String> {
        let Case { rows, top_k, experts, .. } = case;
        let pairs = rows * top_k;
        // Poison looks like the mark of unused pairs.
        let unwritten = holding(&vec![UNWRITTEN; pairs]);
        let [row_of, sorted, first_pair] = [pairs, pairs, rows + 1].map(|words| HostBuffer::poisoned(words * 4));
        let lists = [row_of, sorted, first_pair, unwritten];
        let tiles = HostBuffer::poisoned(case.tiles(from).count as usize * size_of::<Tile>());
        let weights = holding(weights);
        let [row_of, sorted, first_pair, pair_of] = lists.each_ref().map(HostBuffer::buffer);
        let call = SortPairs {
            from,
            weights: weights.buffer(),
            row_of,
            sorted,
            first_pair,
            pair_of,
            tiles: tiles.buffer(),
            rows: rows as u64,
            top_k: top_k as u64,
            num_experts: experts as u64,
        };
        run(shim, &[call.launch().unwrap()], seed)?;
        let [row_of, weights, first_pair, pair_of] = lists.each_ref().map(read);
        Ok(Self { row_of, weights, first_pair, pair_of, tiles: read(&tiles) })
    }

    /// Compares what does not depend on where pairs came from: `order` is the sorted pairs.
    fn check(&self, order: &[usize], weights: &[f32], case: Case) -> Result<(), String> {
        let Case { rows, top_k, .. } = case;
        let row_of: Vec<u32> = order.iter().map(|pair| (pair / top_k) as u32).collect();
        same("rows", &self.row_of[..order.len()], &row_of)?;
        let weights: Vec<u32> = order.iter().map(|&pair| weights[pair].to_bits()).collect();
        same("weights", &self.weights[..order.len()], &weights)?;
        same("first pairs", &self.first_pair, &(0..=rows as u32).map(|row| row * top_k as u32).collect::<Vec<u32>>())
    }
}

impl Case {
    fn tiles(self, from: Pairs) -> Tiles {
        let slots = match from {
            Pairs::Chosen { .. } => self.experts as u64,
            Pairs::Arrived { slots, .. } => slots,
        };
        Tiles::of((self.rows * self.top_k) as u64, slots)
    }
}

pub(super) fn sort_pairs(shim: &Shim, case: Case, seed: u64) -> Result<(), String> {
    let Case { rows, top_k, experts, chosen } = case;
    let mut rng = Rng::with_seed(seed);
    let mut ids: Vec<u16> = Vec::new();
    for _ in 0..rows {
        let mut of_row: Vec<u16> = (0..chosen as u16).map(|id| id + (experts - chosen) as u16).collect();
        rng.shuffle(&mut of_row);
        ids.extend(&of_row[..top_k]);
    }
    let weights: Vec<f32> = ids.iter().map(|_| rng.f32()).collect();
    let of_pairs = holding(&ids);
    let from = Pairs::Chosen { experts: of_pairs.buffer() };
    let found = Lists::of(shim, from, &weights, case, seed)?;
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&pair| (ids[pair], pair));
    found.check(&order, &weights, case)?;
    // The sorted pairs come by expert, and so do a row's.
    let mut of_rows: Vec<u32> = (0..ids.len() as u32).collect();
    of_rows.sort_by_key(|&place| order[place as usize] / top_k);
    same("pairs of rows", &found.pair_of, &of_rows)?;
    let counts: Vec<u32> =
        (0..experts).map(|id| ids.iter().filter(|&&of| usize::from(of) == id).count() as u32).collect();
    check_tiles(&found.tiles, &counts, case.tiles(from).rows as u32)
}

/// Routes that arrived in a dispatch: `arrived` of `case.rows` rows, each with up to `top_k` experts of this rank.
pub(super) fn sort_arrived(shim: &Shim, case: Case, arrived: usize, seed: u64) -> Result<(), String> {
    let Case { rows, top_k, experts, chosen } = case;
    let mut rng = Rng::with_seed(seed);
    // This rank has the last experts.
    let here = experts - chosen..experts;
    let slot = |id: usize| id.checked_sub(here.start).map_or(0xffff, |slot| slot as u32);
    let slot_of: Vec<u32> = (0..experts).map(slot).collect();
    let mut ids = vec![-1; rows * top_k];
    for row in ids.chunks_exact_mut(top_k).take(arrived) {
        let mut of_row: Vec<i32> = here.clone().map(|id| id as i32).collect();
        rng.shuffle(&mut of_row);
        let used = rng.usize(1..=top_k.min(chosen));
        row[..used].copy_from_slice(&of_row[..used]);
    }
    // Left behind by an earlier dispatch.
    ids[arrived * top_k..].fill(experts as i32 - 1);
    let weights: Vec<f32> = ids.iter().map(|_| rng.f32()).collect();
    let given = [holding(&ids), holding(&[arrived as u32]), holding(&slot_of)];
    let [of_pairs, count, slots] = given.each_ref().map(HostBuffer::buffer);
    let from = Pairs::Arrived { experts: of_pairs, count, slot_of: slots, slots: chosen as u64 };
    let found = Lists::of(shim, from, &weights, case, seed)?;
    let mut order: Vec<usize> = (0..arrived * top_k).filter(|&pair| ids[pair] >= 0).collect();
    order.sort_by_key(|&pair| (ids[pair], pair));
    found.check(&order, &weights, case)?;
    let mut of_rows = vec![u32::MAX; ids.len()];
    for row in 0..arrived {
        let sorted = (0..order.len() as u32).filter(|&place| order[place as usize] / top_k == row);
        of_rows[row * top_k..].iter_mut().zip(sorted).for_each(|(place, pair)| *place = pair);
    }
    same("pairs of rows", &found.pair_of, &of_rows)?;
    let counts: Vec<u32> = here.map(|id| order.iter().filter(|&&pair| ids[pair] == id as i32).count() as u32).collect();
    check_tiles(&found.tiles, &counts, case.tiles(from).rows as u32)
}

/// Each expert's rows, and nothing behind them.
fn check_tiles(found: &[Tile], counts: &[u32], rows: u32) -> Result<(), String> {
    let (mut expected, mut first) = (Vec::new(), 0);
    for (group, &count) in (0..).zip(counts) {
        for done in (0..count).step_by(rows as usize) {
            expected.push(Tile { group, first: first + done, rows: rows.min(count - done) });
        }
        first += count;
    }
    expected.resize(found.len().max(expected.len()), Tile { group: 0, first: 0, rows: 0 });
    match found == expected {
        true => Ok(()),
        false => Err(format!("tiles {found:?}, expected {expected:?}")),
    }
}

pub(super) const CASES: [Case; 7] = [
    Case { rows: 1, top_k: 1, experts: 1, chosen: 1 },
    Case { rows: 1, top_k: 8, experts: 128, chosen: 128 },
    Case { rows: 13, top_k: 3, experts: 37, chosen: 5 },
    Case { rows: 70, top_k: 2, experts: 8, chosen: 3 },
    Case { rows: 33, top_k: 6, experts: 64, chosen: 64 },
    Case { rows: 5, top_k: 32, experts: 1024, chosen: 40 },
    Case { rows: 0, top_k: 4, experts: 9, chosen: 9 },
];

#[test]
fn pairs_are_sorted_by_expert_and_then_by_row() {
    let Some(shim) = shim() else { return };
    for (seed, case) in CASES.into_iter().enumerate() {
        sort_pairs(shim, case, seed as u64).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

#[test]
fn what_arrived_is_sorted_by_expert_and_then_by_row() {
    let Some(shim) = shim() else { return };
    for (seed, case) in CASES.into_iter().enumerate() {
        for arrived in [0, case.rows / 3, case.rows] {
            let sorted = sort_arrived(shim, case, arrived, seed as u64);
            sorted.unwrap_or_else(|error| panic!("{case:?}, {arrived} rows: {error}"));
        }
    }
}

#[test]
fn tiles_fit_however_pairs_fall() {
    for (pairs, experts) in [(1_u64, 1_u64), (8, 128), (512, 128), (513, 128), (1024, 128), (1025, 128), (70_000, 64)] {
        let tiles = Tiles::of(pairs, experts);
        assert!(tiles.rows <= u64::from(TILE_ROWS) && tiles.count <= Tiles::most(pairs, experts), "{pairs}, {experts}");
        // Worst: one pair for every expert but one, which has the others; and all the same.
        let lone = pairs.min(experts) - 1;
        assert!(lone + (pairs - lone).div_ceil(tiles.rows) <= tiles.count, "{pairs}, {experts}: {tiles:?}");
        let each = pairs.div_ceil(experts);
        assert!((pairs / each) * each.div_ceil(tiles.rows) <= tiles.count, "{pairs}, {experts}: {tiles:?}");
    }
}
