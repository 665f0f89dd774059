//! Layout switches: one launch per layer, whose ends are the barriers between layers; keys and values in one launch.

use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::kv::{Balance, KvMove, KvPage, KvPlan, KvPool, KvSequence, KvShape};
use semmoe_kernels::reshard::{ExpertShape, Hosts, Layout, Move, Part, Pool, Side, Switch};
use semmoe_kernels_cuda::{Buffer, DeviceMove, Grid, Launch, Reshard, Stopped};
use semmoe_kernels_shim::{HostBuffer, Shim, Step};
use semmoe_reference::data::same;

use crate::support::{Run, World, buffers, holding, poisoned, read, run_all, shim};

const LAYERS: usize = 3;
const RANKS: usize = 3;
const EXPERTS: usize = 4;
const GRID: Grid = Grid { blocks: 2, threads: 32 };
const POISON: u8 = 0xff;

/// Slices of 5, 4 and 4 columns: rows of gate and up are whole vectors, those of down are not.
fn pool() -> Pool {
    let shape = ExpertShape::rows(8, 13, 2).unwrap();
    Pool::new(shape, NodeGrid::of_nodes(1, RANKS).unwrap(), EXPERTS, LAYERS, 2).unwrap()
}

fn ep() -> Layout {
    const NONE: u16 = semmoe_kernels::reshard::NO_HOST;
    let layers = vec![vec![3, 1, 0, NONE, 2, 1], vec![0, 1, 2, NONE, 3, NONE], vec![2, 3, 1, NONE, 0, 3]];
    Layout::Ep(Hosts::new(EXPERTS, RANKS, layers).unwrap())
}

fn byte(part: &Part, row: usize, at: usize) -> u8 {
    let words = [part.piece.layer, part.piece.expert.into(), part.piece.slice.into(), part.array, row, at];
    // Never the poison value.
    (words.iter().fold(7u64, |hash, &word| (hash ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        % 251) as u8
}

/// A rank's buffer with a layout on one side and poison elsewhere; and which bytes are the layout's.
fn filled(pool: &Pool, layout: &Layout, side: Side, rank: usize) -> (Vec<u8>, Vec<bool>) {
    let (mut bytes, mut used, mut parts) = (vec![POISON; pool.bytes()], vec![false; pool.bytes()], Vec::new());
    for layer in 0..LAYERS {
        pool.parts(layout, side, layer, rank, &mut parts);
        for part in &parts {
            for (row, at) in (0..part.rows).flat_map(|row| (0..part.bytes).map(move |at| (row, at))) {
                let place = part.place.offset + row * part.place.stride + at;
                (bytes[place], used[place]) = (byte(part, row, at), true);
            }
        }
    }
    (bytes, used)
}

fn device_moves(moves: impl Iterator<Item = DeviceMove>) -> (HostBuffer, u64) {
    let bytes: Vec<u8> = moves.flat_map(DeviceMove::to_bytes).collect();
    (HostBuffer::holding(&bytes), bytes.len() as u64 / semmoe_kernels_cuda::MOVE_BYTES)
}

/// EP -> TP -> EP over three ranks, of which one may be late for every layer; a rank's buffer is poisoned when it has
/// finished.
pub(crate) fn weights(shim: &Shim, grid: Grid, held: Option<usize>, run: Run) -> Result<(), String> {
    let (pool, ep, world) = (pool(), ep(), World::new(RANKS));
    let there = Switch::new(&pool, &ep, &Layout::Tp, Side::High).map_err(|error| error.to_string())?;
    for switch in [there, there.inverse()] {
        let inputs: Vec<HostBuffer> =
            (0..RANKS).map(|rank| holding(&filled(&pool, switch.from(), switch.side(), rank).0)).collect();
        let (experts, results) = (poisoned::<u8>(RANKS, pool.bytes()), poisoned::<u8>(RANKS, pool.bytes()));
        let mut moves = Vec::new();
        let mut lists: Vec<Vec<(HostBuffer, u64)>> = Vec::new();
        for step in 0..LAYERS {
            switch.moves(switch.layer(step), &mut moves);
            let of =
                |rank: usize| moves.iter().filter(move |moved: &&Move| moved.to.rank == rank).map(DeviceMove::from);
            lists.push((0..RANKS).map(|rank| device_moves(of(rank))).collect());
        }
        let launch = |step: usize, rank: usize| {
            let (list, count) = &lists[step][rank];
            let all = buffers(&experts);
            let call = Reshard {
                from: &all,
                to: &all[rank..=rank],
                moves: &[list.buffer()],
                counts: &[*count],
                digest: switch.digest(),
                step: step as u64,
            };
            call.launch(&world.team(rank).unwrap(), grid).unwrap()
        };
        let launches: Vec<Vec<Launch>> =
            (0..RANKS).map(|rank| (0..LAYERS).map(|step| launch(step, rank)).collect()).collect();
        let steps = |rank: usize| {
            let (own, hold) =
                (experts[rank].buffer(), held.filter(|&held| held == rank).map(|_| Step::Hold { ticks: 3 }));
            let mut steps: Vec<Step<'_>> = hold.into_iter().collect();
            steps.push(Step::Copy { from: inputs[rank].buffer(), to: own });
            for launch in &launches[rank] {
                steps.extend(hold);
                steps.push(Step::Launch(launch));
            }
            steps.extend([Step::Copy { from: own, to: results[rank].buffer() }, Step::Fill { to: own, byte: POISON }]);
            steps
        };
        run_all(shim, &(0..RANKS).map(steps).collect::<Vec<_>>(), run, &world)?;
        for (rank, result) in results.iter().enumerate() {
            let (expected, used) = filled(&pool, switch.to(), switch.side().other(), rank);
            let live = |bytes: Vec<u8>| bytes.into_iter().zip(&used).filter(|(_, used)| **used).map(|(byte, _)| byte);
            same("experts", &live(read(result)).collect::<Vec<_>>(), &live(expected).collect::<Vec<_>>())?;
        }
    }
    Ok(())
}

#[test]
fn every_rank_has_its_experts_after_a_switch() {
    let Some(shim) = shim() else { return };
    for (seed, held) in [None, Some(0), Some(1), Some(2)].into_iter().enumerate() {
        weights(shim, GRID, held, Run::of(seed as u64)).unwrap();
    }
}

#[test]
fn slices_of_whole_vectors_are_read_and_written_once() {
    let Some(shim) = shim() else { return };
    let pool =
        Pool::new(ExpertShape::slice_major(2, 640).unwrap(), NodeGrid::of_nodes(1, 2).unwrap(), 4, 1, 2).unwrap();
    let ep = Layout::Ep(Hosts::contiguous(4, 2, 1).unwrap());
    let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High).unwrap();
    let (world, experts) = (World::new(2), poisoned::<u8>(2, pool.bytes()));
    let mut moves = Vec::new();
    switch.moves(0, &mut moves);
    let lists: Vec<_> = (0..2)
        .map(|rank| device_moves(moves.iter().filter(|moved| moved.to.rank == rank).map(DeviceMove::from)))
        .collect();
    let all = buffers(&experts);
    // Both ranks in one launch, as on a single GPU.
    let lists_at: Vec<Buffer> = lists.iter().map(|list| list.0.buffer()).collect();
    let counts: Vec<u64> = lists.iter().map(|list| list.1).collect();
    let call = Reshard { from: &all, to: &all, moves: &lists_at, counts: &counts, digest: 1, step: 0 };
    let launch = call.launch(&world.team_of_all().unwrap(), GRID).unwrap();
    run_all(shim, &[vec![Step::Launch(&launch)]], Run::of(3), &world).unwrap();
    assert_eq!(shim.moved(), (4 * 2 * 640, 4 * 2 * 640));
}

/// A sequence on each of two ranks with a common first page: to TP in one launch, and back in another.
#[test]
fn keys_and_values_follow_their_plan() {
    let Some(shim) = shim() else { return };
    let shape = KvShape::grouped(2, 2, 16, 2).unwrap();
    let page = |before, token| KvPage { before, tokens: vec![token], sealed: before.is_none() };
    let pool = |rank: u32| KvPool {
        pages: vec![page(None, 7), page(Some(0), rank)],
        sequences: vec![KvSequence { id: rank.into(), pages: vec![0, 1], promised: 0, shares: Vec::new() }],
        idle: Vec::new(),
    };
    // A byte determined by the last token of the page, layer and head.
    let bytes = |pool: &KvPool, heads: std::ops::Range<usize>| -> Vec<u8> {
        let tokens = pool.pages.iter().map(|page| page.tokens[0] as u8);
        let places = move |token: u8| {
            let heads = heads.clone();
            (0..2).flat_map(move |layer| heads.clone().flat_map(move |head| [token * 16 + layer * 4 + head as u8; 16]))
        };
        tokens.flat_map(places).collect()
    };
    let move_all = |plan: &KvPlan, from: &[Vec<u8>], from_page: usize, to_page: usize| -> Vec<Vec<u8>> {
        let (world, from) = (World::new(2), from.iter().map(|bytes| holding(bytes)).collect::<Vec<_>>());
        let mut moves: Vec<KvMove> = Vec::new();
        let mut list = |rank: usize| {
            plan.moves(rank, &mut moves);
            device_moves(moves.iter().map(|moved| DeviceMove::of_page(moved, from_page, to_page)))
        };
        let lists = [list(0), list(1)];
        let to: Vec<HostBuffer> =
            (0..2).map(|rank| HostBuffer::poisoned(plan.pool(rank).sources.len() * to_page)).collect();
        let launch = |rank: usize| {
            let (moves, count) = &lists[rank];
            let (from, to) = (buffers(&from), [to[rank].buffer()]);
            let call =
                Reshard { from: &from, to: &to, moves: &[moves.buffer()], counts: &[*count], digest: 5, step: 0 };
            call.launch(&world.team(rank).unwrap(), GRID).unwrap()
        };
        let launches = [launch(0), launch(1)];
        let streams: Vec<_> = launches.iter().map(|launch| vec![Step::Launch(launch)]).collect();
        run_all(shim, &streams, Run::of(4), &world).unwrap();
        to.iter().map(|to| to.bytes().to_vec()).collect()
    };
    let (whole, share) = (shape.page_bytes(&(0..2)), shape.page_bytes(&(0..1)));
    let pools = [pool(0), pool(1)];
    let before: Vec<Vec<u8>> = pools.iter().map(|pool| bytes(pool, 0..2)).collect();
    let tp = KvPlan::gather(shape, &pools, 9).unwrap();
    let under_tp = move_all(&tp, &before, whole, share);
    let union = &tp.pool(0).pool;
    assert_eq!(union.pages.len(), 3, "the first page once");
    assert_eq!(under_tp, [0, 1].map(|rank| bytes(union, shape.heads_of(rank))));
    let dp = KvPlan::scatter(shape, union, Balance { capacity: 9, full: 9, slack: 0 }).unwrap();
    let after = move_all(&dp, &under_tp, share, whole);
    assert_eq!(after, [0, 1].map(|rank| bytes(&dp.pool(rank).pool, 0..2)));
}

/// Moves out of bounds by one byte, by overflow, or from a nonexistent rank: memory outside is untouched, and the rank
/// names the move.
#[test]
fn moves_out_of_range_stop_the_kernel() {
    let Some(shim) = shim() else { return };
    let move_of = |from: u64, stride: u64, to: u64, bytes: u64, rows: u32, rank: u32| {
        let words = [from, stride, to, stride, bytes, u64::from(rows) | u64::from(rank) << 32];
        words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>()
    };
    let good = move_of(0, 16, 32, 16, 2, 0);
    for bad in [
        move_of(49, 0, 0, 16, 1, 0),
        move_of(0, 0, 49, 16, 1, 0),
        move_of(0, 17, 0, 16, 4, 0),
        move_of(u64::MAX, 0, 0, 16, 1, 0),
        move_of(0, u64::MAX, 0, 16, 2, 0),
        move_of(0, 0, 0, u64::MAX, 1, 0),
        move_of(0, 16, 0, 16, 0, 0),
        move_of(0, 16, 0, 0, 1, 0),
        move_of(0, 16, 0, 16, 1, 1),
    ] {
        let (world, memory) = (World::new(1), HostBuffer::zeroed(64));
        let (list, own) = (HostBuffer::holding(&[good.clone(), bad].concat()), [memory.buffer()]);
        let call = Reshard { from: &own, to: &own, moves: &[list.buffer()], counts: &[2], digest: 1, step: 0 };
        let launch = call.launch(&world.team(0).unwrap(), GRID).unwrap();
        assert!(run_all(shim, &[vec![Step::Launch(&launch)]], Run::of(1), &world).is_err());
        assert_eq!(world.stopped(0), Some(Stopped::Move { rank: 0, index: 1 }));
    }
    let (world, memory) = (World::new(1), [HostBuffer::zeroed(64).buffer()]);
    let call = Reshard { from: &memory, to: &memory, moves: &memory, counts: &[2], digest: 1, step: 0 };
    let refused = call.launch(&world.team(0).unwrap(), GRID).unwrap_err().to_string();
    assert_eq!(refused, "moves 0 has 64 bytes, expected at least 96");
}
