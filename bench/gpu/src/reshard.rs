//! Layout switches on one GPU: every rank's experts after EP -> TP -> EP, and the cost of switching one layer.

use fastrand::Rng;
use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::{ExpertShape, Hosts, Layout, Move, Part, Pool, Side, Switch};
use semmoe_kernels_cuda::{Buffer, DeviceMove, Grid, Launch, MOVE_BYTES, Reshard};
use serde_json::{Value, json};

use crate::machine::{Machine, Memory, POISON, buffers, text};
use crate::setting::Setting;
use crate::world::World;
use semmoe_reference::data::same;

/// Experts per rank with expert parallelism.
const OWN_EXPERTS: usize = 2;
const LAYERS: usize = 3;

fn byte(part: &Part, row: usize, at: usize) -> u8 {
    let piece = part.piece;
    let words = [piece.layer, piece.expert.into(), piece.slice.into(), part.array, row, at];
    let hash =
        words.iter().fold(7u64, |hash, &word| (hash ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23));
    // Never the poison value.
    (hash % 251) as u8
}

/// A rank's buffer, filled with a layout on one side and poison elsewhere; and which bytes are the layout's.
struct Filled {
    bytes: Vec<u8>,
    used: Vec<bool>,
}

impl Filled {
    fn new(pool: &Pool, layout: &Layout, side: Side, rank: usize) -> Self {
        let mut filled = Self { bytes: vec![POISON; pool.bytes()], used: vec![false; pool.bytes()] };
        let mut parts = Vec::new();
        for layer in 0..pool.layers() {
            pool.parts(layout, side, layer, rank, &mut parts);
            for part in &parts {
                for row in 0..part.rows {
                    let start = part.place.offset + row * part.place.stride;
                    for at in 0..part.bytes {
                        filled.bytes[start + at] = byte(part, row, at);
                        filled.used[start + at] = true;
                    }
                }
            }
        }
        filled
    }

    /// The layout's bytes of a buffer.
    fn live(&self, bytes: &[u8]) -> Vec<u8> {
        bytes.iter().zip(&self.used).filter(|(_, used)| **used).map(|(byte, _)| *byte).collect()
    }
}

/// One layer's switch for all ranks in one launch, with its lists of moves.
struct Layer {
    launch: Launch,
    moved_bytes: usize,
    _moves: Vec<Memory>,
}

impl Layer {
    fn new(
        machine: &Machine,
        world: &World,
        switch: &Switch<'_>,
        step: usize,
        experts: &[Memory],
        grid: Grid,
    ) -> Result<Self, String> {
        let mut moves: Vec<Move> = Vec::new();
        switch.moves(switch.layer(step), &mut moves);
        let list = |rank: usize| -> Vec<u8> {
            moves
                .iter()
                .filter(|moved| moved.to.rank == rank)
                .flat_map(|moved| DeviceMove::from(moved).to_bytes())
                .collect()
        };
        let lists: Vec<Vec<u8>> = (0..experts.len()).map(list).collect();
        let memory: Vec<Memory> = lists.iter().map(|list| machine.holding(list)).collect::<Result<_, _>>()?;
        let counts: Vec<u64> = lists.iter().map(|list| list.len() as u64 / MOVE_BYTES).collect();
        let all: Vec<Buffer> = buffers(experts);
        let call = Reshard {
            from: &all,
            to: &all,
            moves: &buffers(&memory),
            counts: &counts,
            digest: switch.digest(),
            step: step as u64,
        };
        let launch = call.launch(&world.team, grid).map_err(text)?;
        Ok(Self { launch, moved_bytes: moves.iter().map(Move::total_bytes).sum(), _moves: memory })
    }
}

/// The rank of each expert of a layer: equally many per rank, assigned at random.
fn hosts(rng: &mut Rng, ranks: usize) -> Result<Layout, String> {
    let experts = ranks * OWN_EXPERTS;
    let layer = |_| {
        let mut order: Vec<u16> = (0..experts as u16).collect();
        rng.shuffle(&mut order);
        order
    };
    Hosts::new(experts, ranks, (0..LAYERS).map(layer).collect()).map(Layout::Ep).map_err(text)
}

pub(crate) fn check(setting: Setting<'_>, rng: &mut Rng, element_bytes: usize) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    // Whole vectors and odd widths, by the shapes of the other checks.
    let shape = ExpertShape::rows(hidden.min(512), tokens.clamp(ranks, 96), element_bytes).map_err(text)?;
    let grid = NodeGrid::of_nodes(1, ranks).map_err(text)?;
    let pool = Pool::new(shape, grid, ranks * OWN_EXPERTS, LAYERS, OWN_EXPERTS).map_err(text)?;
    let (ep, world) = (hosts(rng, ranks)?, World::new(machine, ranks)?);
    let there = Switch::new(&pool, &ep, &Layout::Tp, Side::High).map_err(text)?;
    for switch in [there, there.inverse()] {
        let experts: Vec<Memory> = (0..ranks)
            .map(|rank| machine.holding(&Filled::new(&pool, switch.from(), switch.side(), rank).bytes))
            .collect::<Result<_, _>>()?;
        let layers: Vec<Layer> = (0..LAYERS)
            .map(|step| Layer::new(machine, &world, &switch, step, &experts, setting.grid()))
            .collect::<Result<_, _>>()?;
        let launches: Vec<Launch> = layers.iter().map(|layer| layer.launch).collect();
        machine.run(&launches).map_err(|error| world.explain(error))?;
        for (rank, found) in experts.iter().enumerate() {
            let expected = Filled::new(&pool, switch.to(), switch.side().other(), rank);
            same("experts", &expected.live(&found.read()?), &expected.live(&expected.bytes))?;
        }
    }
    Ok(())
}

/// A layer of Qwen3-30B-A3B (128 experts of 3 x 768 x 2,048 in bf16), from EP to TP.
pub(crate) fn times(machine: &Machine, small: bool, ranks: usize, copied: f64) -> Result<Value, String> {
    let (experts, hidden, intermediate, runs) = if small { (2 * ranks, 16, 16, 1) } else { (128, 2048, 768, 20) };
    let shape = ExpertShape::rows(hidden, intermediate, 2).map_err(text)?;
    let grid = NodeGrid::of_nodes(1, ranks).map_err(text)?;
    let pool = Pool::new(shape, grid, experts, 1, experts / ranks).map_err(text)?;
    let ep = Layout::Ep(Hosts::contiguous(experts, ranks, 1).map_err(text)?);
    let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High).map_err(text)?;
    let world = World::new(machine, ranks)?;
    let memory = machine.each(ranks, pool.bytes())?;
    let mut best: Option<(f64, u32)> = None;
    let mut moved_bytes = 0;
    for grid in machine.grids(ranks) {
        let layer = Layer::new(machine, &world, &switch, 0, &memory, grid)?;
        if !machine.fits(&layer.launch) {
            continue;
        }
        moved_bytes = layer.moved_bytes;
        let prepared = machine.prepare(vec![layer.launch])?;
        let times: Result<Vec<f64>, String> = (0..=runs).map(|_| machine.time(&prepared)).collect();
        // The first run warms up.
        let us = crate::machine::median(times.map_err(|error| world.explain(error))?.split_off(1));
        if best.is_none_or(|(fastest, _)| us < fastest) {
            best = Some((us, grid.blocks));
        }
    }
    let (us, blocks) = best.ok_or("no grid fits this GPU")?;
    Ok(json!({
        "ranks": ranks, "experts": experts, "hidden": hidden, "intermediate": intermediate, "dtype": "bf16",
        "moved_bytes": moved_bytes, "us": us, "blocks": blocks, "share_of_copy_bound": 2.0 * moved_bytes as f64 / copied / us,
    }))
}
