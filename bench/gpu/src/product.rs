//! Matrix products: within a tolerance of the reference, and timed against the time to read their weights.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::Launch;
use semmoe_kernels_cuda::compute::{Activation, MatMul, MatMulRows, Tile, Variant, tiles};
use semmoe_reference::data::same;
use semmoe_reference::product::{Product, rounding};
use serde_json::{Value, json};

use crate::exchange::{EXPERTS, TOP_K};
use crate::machine::{Machine, Memory, POISON, text};
use crate::measure::{Plan, in_turns};
use crate::options::Options;
use crate::setting::{Outcome, Setting};
use crate::world::elements;

/// The shape of a product.
#[derive(Clone, Copy)]
struct Shape {
    inputs: usize,
    outputs: usize,
    groups: usize,
    silu: bool,
}

impl Shape {
    /// Elements of one group's weights.
    fn group(&self) -> usize {
        self.inputs * self.outputs * if self.silu { 2 } else { 1 }
    }
}

/// The operands of a product in device memory.
#[derive(Clone, Copy)]
struct Places<'a> {
    x: &'a Memory,
    weights: &'a Memory,
    out: &'a Memory,
    /// Tiles, and the row of x for each row of `out`.
    tiles: Option<(&'a Memory, &'a [Tile])>,
    row_of: Option<&'a Memory>,
    /// `None`: the product's own choice.
    variant: Option<Variant>,
}

fn launch(shape: Shape, dtype: Dtype, rows: usize, places: Places<'_>) -> Result<Launch, String> {
    let rows = match places.tiles {
        None => MatMulRows::Dense { rows: rows as u64 },
        Some((memory, tiles)) => MatMulRows::Grouped {
            tiles: memory.buffer(),
            count: tiles.len() as u64,
            most: tiles.iter().map(|tile| tile.rows).max().unwrap_or(0).into(),
            groups: shape.groups as u64,
            rows: rows as u64,
        },
    };
    let call = MatMul {
        x: places.x.buffer(),
        weights: places.weights.buffer(),
        out: places.out.buffer(),
        bias: None,
        inputs: shape.inputs as u64,
        outputs: shape.outputs as u64,
        x_stride: shape.inputs as u64,
        dtype,
        out_f32: false,
        rows,
        row_of: places.row_of.map(Memory::buffer),
        activation: if shape.silu { Activation::SiluProduct } else { Activation::None },
    };
    call.launch_as(places.variant.unwrap_or(call.variant())).map_err(text)
}

/// Output features of a check: multiples of neither a block nor a cache line.
const OUTPUTS: usize = 52;

/// A dense product, and a grouped one with SiLU; rows are as wide as the setting's.
pub(crate) fn check<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Outcome {
    if T::DTYPE == Dtype::F16 {
        return Outcome::NotRun("not computed in this type, only in f32 and bf16".to_owned());
    }
    let rows = setting.tokens.min(if setting.small { 20 } else { 150 });
    let dense = Shape { inputs: setting.hidden, outputs: OUTPUTS, groups: 1, silu: false };
    let grouped = Shape { groups: 5, silu: true, ..dense };
    // One to nine rows for few tokens, and full tiles: each variant of the kernel, in each of its sizes.
    let checks = [1, 5, 9, 17, 33, rows].into_iter().map(|rows| (dense, vec![rows as u32]));
    let counts = [&[0, 3, 8, 0, 1][..], &[2, 0, 13, 1, 16], &[0, 0, 70, 30, 40]];
    let counts = counts.iter().filter(|counts| counts.iter().sum::<u32>() as usize <= rows);
    for (shape, counts) in checks.chain(counts.map(|counts| (grouped, counts.to_vec()))) {
        if let Err(difference) = near::<T>(setting.machine, rng, shape, &counts) {
            return Outcome::Differs(format!("{counts:?} rows: {difference}"));
        }
    }
    Outcome::Equal
}

/// Operands of a check, with rows of x in any order.
struct Operands<T> {
    x: Vec<T>,
    weights: Vec<T>,
    row_of: Vec<u32>,
    x_memory: Memory,
    weight_memory: Memory,
}

impl<T: Element> Operands<T> {
    fn new(machine: &Machine, rng: &mut Rng, shape: Shape, rows: usize) -> Result<Self, String> {
        let x: Vec<T> = elements(rng, rows * shape.inputs);
        // Small sums keep SiLU nonlinear.
        let small = |value: T| T::round(value.widen() * 0.05);
        let weights: Vec<T> = elements(rng, shape.groups * shape.group()).into_iter().map(small).collect();
        let row_of = (0..rows).map(|_| rng.u32(0..rows as u32)).collect();
        let x_memory = machine.holding(bytemuck::cast_slice(&x))?;
        let weight_memory = machine.holding(bytemuck::cast_slice(&weights))?;
        Ok(Self { x, weights, row_of, x_memory, weight_memory })
    }

    /// The outputs for rows of x, `counts` in each group.
    fn computed(
        &self,
        machine: &Machine,
        shape: Shape,
        counts: &[u32],
        row_of: &[u32],
        variant: Variant,
    ) -> Result<Vec<T>, String> {
        let list = tiles(counts.iter().copied());
        let row_memory = machine.holding(bytemuck::cast_slice(row_of))?;
        let tile_memory = machine.holding(bytemuck::cast_slice(&list))?;
        let out = machine.filled(row_of.len() * shape.outputs * size_of::<T>(), POISON)?;
        let places = Places {
            x: &self.x_memory,
            weights: &self.weight_memory,
            out: &out,
            tiles: (shape.groups > 1).then_some((&tile_memory, &list[..])),
            row_of: Some(&row_memory),
            variant: Some(variant),
        };
        machine.run(&[launch(shape, T::DTYPE, row_of.len(), places)?])?;
        out.read()
    }
}

/// Checks the tolerance; that both variants give the same bits; and that the last row does not depend on the others.
fn near<T: Element>(machine: &Machine, rng: &mut Rng, shape: Shape, counts: &[u32]) -> Result<(), String> {
    let rows = counts.iter().sum::<u32>() as usize;
    let operands = Operands::<T>::new(machine, rng, shape, rows)?;
    let product = Product {
        x: &operands.x,
        stride: shape.inputs,
        weights: &operands.weights,
        inputs: shape.inputs,
        outputs: shape.outputs,
        bias: None,
        silu: shape.silu,
    };
    let found = operands.computed(machine, shape, counts, &operands.row_of, Variant::FewRows)?;
    let groups = (0..).zip(counts).flat_map(|(group, &count)| (0..count).map(move |_| group));
    for (row, group) in groups.enumerate() {
        for feature in 0..shape.outputs {
            let near = product.output(operands.row_of[row] as usize, group, feature);
            let found = f64::from(found[row * shape.outputs + feature].widen());
            if !near.is(found, rounding::<T>()) {
                return Err(format!("row {row}, feature {feature}: found {found}, expected {near:?}"));
            }
        }
    }
    let many = operands.computed(machine, shape, counts, &operands.row_of, Variant::ManyRows)?;
    same("the variant for many rows", &many, &found)?;
    let last = counts.iter().rposition(|&count| count > 0);
    let alone: Vec<u32> = (0..counts.len()).map(|group| u32::from(last == Some(group))).collect();
    let alone = operands.computed(machine, shape, &alone, &operands.row_of[rows - 1..], Variant::FewRows)?;
    same("the last row without the others", &alone, &found[(rows - 1) * shape.outputs..])
}

/// A product of a layer of Qwen3-30B-A3B, or its head.
struct Timed {
    name: &'static str,
    shape: Shape,
    /// Whether x has one row for each token rather than for each pair of token and expert.
    by_token: bool,
}

fn timed(small: bool) -> Vec<Timed> {
    let part = if small { 64 } else { 1 };
    let dense = |name, inputs: usize, outputs: usize| Timed {
        name,
        shape: Shape { inputs: inputs / part, outputs: outputs / part, groups: 1, silu: false },
        by_token: true,
    };
    let [hidden, width] = [2048 / part, 768 / part];
    let experts = |name, inputs, outputs, silu| Timed {
        name,
        shape: Shape { inputs, outputs, groups: EXPERTS, silu },
        by_token: silu,
    };
    vec![
        dense("queries, keys, values", 2048, 5120),
        dense("attention's output", 4096, 2048),
        experts("experts' gate and up", hidden, width, true),
        experts("experts' down", width, hidden, false),
        dense("head", 2048, 151_936),
    ]
}

/// Timed in bf16.
pub(crate) fn times(machine: &Machine, options: &Options, plan: Plan, copied: f64) -> Result<Value, String> {
    let mut rng = Rng::with_seed(options.seed);
    let mut rows = Vec::new();
    for timed in timed(options.cpu || options.small) {
        // Few tokens, where reading weights dominates, and a prefill; the head has at most one row per sequence.
        let most = if timed.name == "head" { 64 } else { 2048 };
        let tokens = [1, 16, 64, 2048].into_iter().filter(|&tokens| tokens <= most);
        for tokens in tokens.filter(|&tokens| plan.runs > 1 || tokens <= 64) {
            rows.push(time(machine, &mut rng, plan, copied, &timed, tokens)?);
        }
    }
    Ok(Value::Array(rows))
}

/// Rows of one call by expert.
struct Routed {
    tiles: Vec<Tile>,
    tile_memory: Memory,
    row_memory: Memory,
    /// Groups with any rows.
    busy: usize,
}

impl Routed {
    fn new(machine: &Machine, rng: &mut Rng, tokens: usize) -> Result<Self, String> {
        let mut by_expert = vec![Vec::new(); EXPERTS];
        let mut all: Vec<usize> = (0..EXPERTS).collect();
        for token in 0..tokens as u32 {
            rng.shuffle(&mut all);
            all[..TOP_K].iter().for_each(|&expert| by_expert[expert].push(token));
        }
        let list = tiles(by_expert.iter().map(|rows| rows.len() as u32));
        let (tile_memory, rows) = (machine.holding(bytemuck::cast_slice(&list))?, by_expert.concat());
        let busy = by_expert.iter().filter(|rows| !rows.is_empty()).count();
        Ok(Self { tiles: list, tile_memory, row_memory: machine.holding(bytemuck::cast_slice(&rows))?, busy })
    }
}

fn time(
    machine: &Machine,
    rng: &mut Rng,
    plan: Plan,
    copied: f64,
    timed: &Timed,
    tokens: usize,
) -> Result<Value, String> {
    let shape = timed.shape;
    let grouped = shape.groups > 1;
    let rows = if grouped { tokens * TOP_K } else { tokens };
    // Enough weights to evict one call's from the caches before it runs again; each call uses other experts.
    let touched = shape.group() * 2 * if grouped { TOP_K } else { 1 };
    let copies = (machine.cold_bytes()? / touched).clamp(1, 24);
    let weights: Vec<Memory> = (0..if grouped { 1 } else { copies })
        .map(|_| machine.filled(shape.groups * shape.group() * 2, 0x3c))
        .collect::<Result<_, _>>()?;
    let x = machine.filled(rows * shape.inputs * 2, 0x3c)?;
    let out = machine.filled(rows * shape.outputs * 2, POISON)?;
    let routed: Vec<Routed> = (0..copies).map(|_| Routed::new(machine, rng, tokens)).collect::<Result<_, _>>()?;
    let one = |(index, routed): (usize, &Routed)| {
        let places = Places {
            x: &x,
            weights: &weights[index % weights.len()],
            out: &out,
            tiles: grouped.then_some((&routed.tile_memory, &routed.tiles[..])),
            row_of: (grouped && timed.by_token).then_some(&routed.row_memory),
            variant: None,
        };
        launch(shape, bf16::DTYPE, rows, places)
    };
    let launches: Vec<Launch> = routed.iter().enumerate().map(one).collect::<Result<_, _>>()?;
    let rounds = plan.at_once.div_ceil(copies);
    let prepared = [machine.prepare(launches.repeat(rounds))?];
    let us = in_turns(machine, plan, &prepared)?[0] / (rounds * copies) as f64;
    let busy = routed.iter().map(|routed| routed.busy).sum::<usize>() as f64 / copies as f64;
    let bytes = (shape.group() * 2) as f64 * if grouped { busy } else { 1.0 };
    Ok(json!({
        "product": timed.name, "inputs": shape.inputs, "outputs": shape.outputs, "tokens": tokens, "us": us,
        "weight_bytes": bytes, "share_of_weight_bound": bytes / copied / us,
        "tflops": (2 * shape.group() * rows) as f64 / us / 1e6,
    }))
}
