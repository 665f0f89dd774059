//! Times on one GPU that all ranks share: medians of many replays, every kernel alternating with its baselines.
//!
//! Calls are captured in a graph and timed together by two events, which hides launch latency. They cycle through more
//! memory than the caches hold. Bytes are those of `semmoe_reference::moved`; the bound is the time of a
//! device-to-device copy of as many bytes on the same GPU.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::{
    AllReduce, Allgather, Argsort, Buffer, Grid, Launch, ReduceScatter, ReduceScatterNorm, RowOrder, Rows, Shuffle,
    Split,
};
use semmoe_reference::moved::{Call, Moved, fan_out};
use serde_json::{Map, Value, json};

use crate::exchange::{EXPERTS, Exchange, TOP_K};
use crate::machine::{Machine, Memory, Prepared, buffers, text};
use crate::measure::{Plan, Report, in_turns};
use crate::options::Options;
use crate::world::{World, elements, order};
use crate::{attention, product, reshard};

const FULL: Plan = Plan { tokens: 4096, hidden: 2048, warm_up: 5, runs: 50, at_once: 10 };
/// A smoke test on the shim.
const SMALL: Plan = Plan { tokens: 16, hidden: 16, warm_up: 0, runs: 1, at_once: 1 };

pub(crate) fn report(machine: &Machine, options: &Options) -> Report {
    let plan = if options.cpu || options.small { SMALL } else { FULL };
    let copied = machine.copied()?;
    let mut collectives = Vec::new();
    let mut reshards = Vec::new();
    for ranks in [2, 4, 8] {
        collectives.push(collective(machine, options.seed, plan, ranks, copied)?);
        reshards.push(reshard::times(machine, options.cpu || options.small, ranks, copied)?);
    }
    let document = json!({
        "machine": machine.name()?, "seed": options.seed, "copy_gb_per_s": copied / 1000.0,
        "tokens": plan.tokens, "hidden": plan.hidden, "dtype": "bf16", "experts": EXPERTS, "top_k": TOP_K, "runs": plan.runs,
        "collectives": collectives, "reshard": reshards, "argsort": argsort(machine, options.seed, plan)?,
        "products": product::times(machine, options, plan, copied)?,
        "attention": attention::times(machine, options, plan, copied)?,
    });
    Ok((document, true))
}

/// The timed operations, in the order of [`Set::sequences`].
const NAMES: [&str; 10] = [
    "srs",
    "reduce_scatter",
    "unfused_reduce_scatter",
    "sag",
    "allgather",
    "unfused_allgather",
    "srs_norm",
    "all_reduce",
    "dispatch",
    "combine",
];

/// Memory of one setting: parts, shuffled parts, sums, gathered rows, and the norm's operands.
struct Set {
    rows: Rows,
    parts: Vec<Memory>,
    shuffled: Vec<Memory>,
    sums: Vec<Memory>,
    gathered: Vec<Memory>,
    weight: Memory,
    permutation: Vec<Buffer>,
    offsets: Vec<Buffer>,
    _order: [Memory; 2],
    exchange: Exchange<bf16>,
}

impl Set {
    fn new(machine: &Machine, rng: &mut Rng, plan: Plan, ranks: usize) -> Result<Self, String> {
        let Plan { tokens, hidden, .. } = plan;
        let order = order(rng, tokens, ranks);
        let parts: Vec<Memory> = (0..ranks)
            .map(|_| machine.holding(bytemuck::cast_slice(&elements::<bf16>(rng, tokens * hidden))))
            .collect::<Result<_, _>>()?;
        let permutation = machine.holding(bytemuck::cast_slice(order.permutation()))?;
        let offsets = machine.holding(bytemuck::cast_slice(order.offsets()))?;
        let bytes = tokens * hidden * 2;
        Ok(Self {
            rows: Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: Dtype::Bf16 },
            parts,
            shuffled: machine.each(ranks, bytes)?,
            sums: machine.each(ranks, bytes)?,
            gathered: machine.each(ranks, bytes)?,
            weight: machine.holding(bytemuck::cast_slice(&elements::<bf16>(rng, hidden)))?,
            permutation: vec![permutation.buffer(); ranks],
            offsets: vec![offsets.buffer(); ranks],
            _order: [permutation, offsets],
            exchange: Exchange::new(machine, rng, [ranks, tokens, hidden])?,
        })
    }

    fn order(&self, shuffled: bool) -> RowOrder<'_> {
        let split = Split { permutation: shuffled.then_some(&self.permutation[..]), offsets: Some(&self.offsets) };
        RowOrder { rows: self.rows, split, capacity: self.rows.tokens, multicast: None }
    }

    fn reduce(&self, world: &World, grid: Grid, parts: &[Memory], shuffled: bool) -> Result<Launch, String> {
        let (parts, out) = (buffers(parts), buffers(&self.sums));
        let call = ReduceScatter { parts: &parts, out: &out, order: self.order(shuffled) };
        call.launch(&world.team, grid).map_err(text)
    }

    fn reduce_norm(&self, world: &World, grid: Grid) -> Result<Launch, String> {
        let (parts, out) = (buffers(&self.parts), buffers(&self.sums));
        let reduce = ReduceScatter { parts: &parts, out: &out, order: self.order(true) };
        let weight = vec![self.weight.buffer(); self.parts.len()];
        let (residual, residual_out) = (buffers(&self.shuffled), buffers(&self.gathered));
        let call = ReduceScatterNorm {
            reduce,
            residual: &residual,
            weight: &weight,
            residual_out: &residual_out,
            epsilon: 1e-6,
        };
        call.launch(&world.team, grid.for_norm()).map_err(text)
    }

    fn gather(&self, world: &World, grid: Grid, out: &[Memory], shuffled: bool) -> Result<Launch, String> {
        let (from, out) = (buffers(&self.sums), buffers(out));
        let call = Allgather { from: &from, out: &out, order: self.order(shuffled) };
        call.launch(&world.team, grid).map_err(text)
    }

    fn shuffle(&self, world: &World, grid: Grid, [from, to]: [&[Memory]; 2], back: bool) -> Result<Launch, String> {
        let (from, to) = (buffers(from), buffers(to));
        Shuffle { from: &from, to: &to, permutation: &self.permutation, rows: self.rows, back }
            .launch(&world.team, grid)
            .map_err(text)
    }

    /// Shuffled; plain; unfused, with a separate shuffle of all rows before or after the plain collective; then the
    /// others.
    fn sequences(&self, machine: &Machine, world: &World, grid: Grid) -> Result<Vec<Vec<Launch>>, String> {
        let Self { parts, shuffled, gathered, .. } = self;
        let (parts_at, gathered_at) = (buffers(parts), buffers(gathered));
        let elements = self.rows.tokens * self.rows.hidden;
        let all = AllReduce { parts: &parts_at, out: &gathered_at, elements, dtype: self.rows.dtype };
        let [plan, dispatch, combine] = self.exchange.launches(&world.team, grid, machine.sort_threads())?;
        Ok(vec![
            vec![self.reduce(world, grid, parts, true)?],
            vec![self.reduce(world, grid, parts, false)?],
            vec![self.shuffle(world, grid, [parts, shuffled], false)?, self.reduce(world, grid, shuffled, false)?],
            vec![self.gather(world, grid, gathered, true)?],
            vec![self.gather(world, grid, gathered, false)?],
            vec![self.gather(world, grid, shuffled, false)?, self.shuffle(world, grid, [shuffled, gathered], true)?],
            vec![self.reduce_norm(world, grid)?],
            vec![all.launch(&world.team, grid).map_err(text)?],
            // Combine needs dispatch's results, so it is timed with one more dispatch.
            vec![plan, dispatch],
            vec![combine],
        ])
    }
}

/// The minimum bytes that each moves, in the order of [`NAMES`].
fn moved(plan: Plan, ranks: usize) -> [Moved; 10] {
    let call = Call::new(ranks, plan.tokens, plan.hidden, 2);
    let fan_out = fan_out(ranks, EXPERTS, TOP_K);
    let (reduce, gather) = (call.reduce_scatter(), call.allgather());
    let (norm, all) = (call.reduce_scatter_norm(), call.all_reduce());
    let (dispatch, combine) = (call.dispatch(plan.tokens, fan_out, TOP_K), call.combine(fan_out));
    [reduce, reduce, reduce, gather, gather, gather, norm, all, dispatch, combine]
}

/// The best grid for each operation.
#[derive(Clone)]
struct Best {
    blocks: u32,
    us: f64,
}

fn collective(machine: &Machine, seed: u64, plan: Plan, ranks: usize, copied: f64) -> Result<Value, String> {
    let mut rng = Rng::with_seed(seed + ranks as u64);
    let world = World::new(machine, ranks)?;
    // Touches enough bytes to evict one call's from the caches before it runs again.
    let touched = (ranks + 1) * plan.tokens * plan.hidden * 2;
    let sets: Vec<Set> = (0..(machine.cold_bytes()? / touched).clamp(1, 16))
        .map(|_| Set::new(machine, &mut rng, plan, ranks))
        .collect::<Result<_, _>>()?;
    let rounds = plan.at_once.div_ceil(sets.len());
    let calls = (rounds * sets.len()) as f64;
    let mut best: Vec<Option<Best>> = vec![None; NAMES.len()];
    let mut how = String::new();
    for grid in machine.grids(ranks) {
        let by_set: Vec<Vec<Vec<Launch>>> =
            sets.iter().map(|set| set.sequences(machine, &world, grid)).collect::<Result<_, _>>()?;
        if !by_set.iter().flatten().flatten().all(|launch| machine.fits(launch)) {
            continue;
        }
        let prepare = |name: usize| {
            let once: Vec<Launch> = by_set.iter().flat_map(|sequences| sequences[name].clone()).collect();
            machine.prepare(once.repeat(rounds))
        };
        let prepared: Vec<Prepared> = (0..NAMES.len()).map(prepare).collect::<Result<_, _>>()?;
        how = prepared[0].how();
        let times = in_turns(machine, plan, &prepared).map_err(|error| world.explain(error))?;
        for (best, us) in best.iter_mut().zip(times) {
            let us = us / calls;
            if best.as_ref().is_none_or(|best| us < best.us) {
                *best = Some(Best { blocks: grid.blocks, us });
            }
        }
    }
    let best: Vec<Best> = best.into_iter().collect::<Option<_>>().ok_or("no grid fits this GPU")?;
    Ok(row(plan, ranks, copied, &best, how, sets.len()))
}

fn row(plan: Plan, ranks: usize, copied: f64, best: &[Best], how: String, sets: usize) -> Value {
    let mut row = Map::new();
    row.insert("ranks".to_owned(), json!(ranks));
    row.insert("how".to_owned(), json!(how));
    row.insert("sets".to_owned(), json!(sets));
    let moved = moved(plan, ranks);
    for ((name, Best { blocks, us }), moved) in NAMES.iter().zip(best).zip(moved) {
        row.insert(format!("{name}_us"), json!(us));
        row.insert(format!("{name}_blocks"), json!(blocks));
        if !name.starts_with("unfused") {
            row.insert(format!("{name}_share_of_copy_bound"), json!(moved.total() / copied / us));
        }
    }
    let [srs, plain, unfused, sag, plain_gather, unfused_gather] = [0, 1, 2, 3, 4, 5].map(|index| best[index].us);
    for (name, ratio) in [
        ("srs_over_plain", srs / plain),
        ("unfused_over_srs", unfused / srs),
        ("sag_over_plain", sag / plain_gather),
        ("unfused_over_sag", unfused_gather / sag),
        ("pair_over_plain", (srs + sag) / (plain + plain_gather)),
        ("unfused_over_pair", (unfused + unfused_gather) / (srs + sag)),
    ] {
        row.insert(name.to_owned(), json!(ratio));
    }
    Value::Object(row)
}

/// Only this kernel: PyTorch and cub are timed on such keys by separate programs.
fn argsort(machine: &Machine, seed: u64, plan: Plan) -> Result<Value, String> {
    let mut rows = Vec::new();
    for (items, ranks) in [(1024usize, 8usize), (4096, 8), (8192, 8), (8192, 64)] {
        let world = World::new(machine, 1)?;
        let mut rng = Rng::with_seed(seed + items as u64);
        let keys: Vec<u32> = (0..items).map(|_| rng.u32(0..ranks as u32)).collect();
        let keys = machine.holding(bytemuck::cast_slice(&keys))?;
        let (permutation, inverse) = (machine.each(1, items * 4)?, machine.each(1, items * 4)?);
        let offsets = machine.each(1, (ranks + 1) * 4)?;
        let call = Argsort {
            destinations: &[keys.buffer()],
            destination_bytes: 4,
            items: items as u64,
            ranks: ranks as u64,
            permutation: &buffers(&permutation),
            inverse: &buffers(&inverse),
            offsets: &buffers(&offsets),
        };
        let grid = Grid { blocks: 1, threads: machine.sort_threads() };
        let launch = call.launch(&world.team, grid).map_err(text)?;
        let prepared = [machine.prepare(vec![launch; 2 * plan.at_once])?];
        let times = in_turns(machine, plan, &prepared).map_err(|error| world.explain(error))?;
        let us = times[0] / (2 * plan.at_once) as f64;
        rows.push(json!({ "items": items, "ranks": ranks, "us": us, "how": prepared[0].how() }));
    }
    Ok(Value::Array(rows))
}
