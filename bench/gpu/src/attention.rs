//! Paged attention within a tolerance of the reference, bit-identical for every shape of call; and times of the compute
//! kernels between two matrix products.

use std::ops::Range;

use fastrand::Rng;
use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::compute::{
    AddRows, Attend, Embed, HeadNorms, HeadRows, Norm, PAGE_TOKENS, PagedHeads, ProjectedHeads, RotaryAngles,
    RotaryLayout, Route, Scoring, SumPairs,
};
use semmoe_kernels_cuda::{Buffer, Launch, LaunchError};
use semmoe_reference::attention::{Case, LAYER, LAYERS, Paged};
use semmoe_reference::data::same;
use semmoe_reference::product::rounding;
use serde_json::{Value, json};

use crate::exchange::{EXPERTS, TOP_K};
use crate::machine::{Machine, Memory, POISON, text};
use crate::measure::{Plan, in_turns};
use crate::options::Options;
use crate::setting::{Outcome, Setting};

/// A test case in device memory.
struct World<T> {
    of: Paged<T>,
    queries: Memory,
    pool: Memory,
    positions: Memory,
    sequence_of: Memory,
    table: Memory,
}

impl<T: Element> World<T> {
    fn new(machine: &Machine, case: &Case, seed: u64) -> Result<Self, String> {
        let of = Paged::<T>::new(case, seed);
        let [positions, sequence_of] = [&of.positions, &of.sequence_of].map(|list| bytemuck::cast_slice(list));
        // As many sequences as rows, because blocks may be limited to one row.
        let table: Vec<u32> = of.table.iter().copied().chain(vec![u32::MAX; of.table_width * case.rows()]).collect();
        Ok(Self {
            queries: machine.holding(bytemuck::cast_slice(&of.queries))?,
            pool: machine.holding(bytemuck::cast_slice(&of.pool))?,
            positions: machine.holding(positions)?,
            sequence_of: machine.holding(sequence_of)?,
            table: machine.holding(bytemuck::cast_slice(&table))?,
            of,
        })
    }

    fn heads(&self) -> PagedHeads {
        let Case { kv_heads, group, dim, .. } = self.of.case;
        PagedHeads {
            pool: self.pool.buffer(),
            pages: self.of.pages() as u64,
            layer: LAYER as u64,
            layers: LAYERS as u64,
            kv_heads: kv_heads as u64,
            group: group as u64,
            dim: dim as u64,
            dtype: T::DTYPE,
        }
    }

    /// All rows, in calls of `rows_of_call`; `apart` puts each row in its own block.
    fn run(&self, machine: &Machine, rows_of_call: usize, apart: bool) -> Result<Vec<T>, String> {
        let rows = self.of.case.rows();
        let longest = self.of.positions.iter().max().copied().unwrap_or_default().into();
        let scratch = machine.filled(self.heads().scratch_bytes(rows as u64, longest) as usize, POISON)?;
        let row_bytes = self.of.case.width() * size_of::<T>();
        let out = machine.filled(rows * row_bytes, POISON)?;
        let call = |rows: Range<usize>| {
            let from = |buffer: Buffer, bytes: usize| buffer.from_offset((rows.start * bytes) as u64);
            let call = Attend {
                heads: self.heads(),
                scale: self.of.case.scale(),
                queries: from(self.queries.buffer(), row_bytes),
                positions: from(self.positions.buffer(), 4),
                sequence_of: from(self.sequence_of.buffer(), 4),
                page_table: self.table.buffer(),
                sequences: if apart { self.of.case.rows() } else { self.of.case.sequences.len() } as u64,
                table_width: self.of.table_width as u64,
                longest,
                scratch: scratch.buffer(),
                out: from(out.buffer(), row_bytes),
                rows: rows.len() as u64,
            };
            call.launch().map_err(text)
        };
        let calls = (0..rows).step_by(rows_of_call).map(|first| call(first..rows.min(first + rows_of_call)));
        machine.run(&calls.collect::<Result<Vec<_>, _>>()?.concat())?;
        out.read()
    }
}

/// Prompts and decodes of several lengths.
pub(crate) fn check<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Outcome {
    if T::DTYPE == Dtype::F16 {
        return Outcome::NotRun("not computed in this type, only in f32 and bf16".to_owned());
    }
    // Heads of Qwen3's families, without groups, and an odd width where rows are not whole vectors.
    let (kv_heads, group, dim) = match (setting.hidden % 8, setting.ranks) {
        (0, 2) => (4, 8, 128),
        (0, 4) => (2, 16, 64),
        (0, _) => (4, 1, 128),
        _ => (2, 2, 20),
    };
    let sequences: &[(usize, usize)] = match setting.tokens < 1000 {
        true => &[(70, 3), (1, 1)],
        // More rows than get their own splits.
        false => &[(131, 131), (700, 9), (600, 1), (257, 2), (64, 1), (1, 1)],
    };
    near::<T>(setting.machine, &Case::new(kv_heads, group, dim, sequences), rng.u64(..)).into()
}

fn near<T: Element>(machine: &Machine, case: &Case, seed: u64) -> Result<(), String> {
    let world = World::<T>::new(machine, case, seed)?;
    let rows = case.rows();
    let found = world.run(machine, rows, false)?;
    for row in 0..rows {
        let expected = world.of.row(row);
        let differs = |(found, expected): (&T, &f64)| {
            let found = f64::from(found.widen());
            found.is_nan() || (found - expected).abs() > rounding::<T>() * expected.abs().max(0.5)
        };
        let of_row = &found[row * case.width()..][..case.width()];
        if let Some(at) = of_row.iter().zip(&expected).position(differs) {
            return Err(format!("row {row}, value {at}: found {:?}, expected {}", of_row[at], expected[at]));
        }
    }
    same("rows in calls of seven", &world.run(machine, 7, false)?, &found)?;
    same("rows apart", &world.run(machine, rows, true)?, &found)
}

/// Dimensions of a layer of Qwen3-30B-A3B.
struct Layer {
    hidden: u64,
    kv_heads: u64,
    group: u64,
    dim: u64,
}

/// Memory that all calls of a layer share. Its values do not matter; its index lists are 0.
struct Shared {
    rows: u64,
    any: Memory,
    out: Memory,
    zeros: Memory,
    /// `[rows + 1]`
    first_pair: Memory,
    /// `[rows x k]`
    pair_of: Memory,
}

impl Shared {
    fn new(machine: &Machine, layer: &Layer, rows: u64) -> Result<Self, String> {
        let list = |of: Vec<u32>| machine.holding(bytemuck::cast_slice(&of));
        let (count, top_k) = (rows as u32, TOP_K as u32);
        let widest = layer.dim * layer.kv_heads * (layer.group + 2);
        let bytes = (rows * widest.max(layer.hidden * TOP_K as u64) * 2).max(layer.dim * layer.kv_heads * 256);
        Ok(Self {
            rows,
            any: machine.filled(bytes as usize, 0x3c)?,
            out: machine.filled(bytes as usize, 0x3c)?,
            zeros: machine.filled(rows as usize * 4, 0)?,
            first_pair: list((0..=count).map(|row| row * top_k).collect())?,
            pair_of: list((0..count * top_k).collect())?,
        })
    }

    fn heads(&self, layer: &Layer) -> PagedHeads {
        let Layer { kv_heads, group, dim, .. } = *layer;
        let pool = self.out.buffer();
        PagedHeads { pool, pages: 1, layer: 0, layers: 1, kv_heads, group, dim, dtype: Dtype::Bf16 }
    }

    fn head_rows(&self, layer: &Layer) -> HeadRows {
        let heads = self.heads(layer);
        let any = self.any.buffer();
        HeadRows {
            heads,
            qkv: any,
            projected: ProjectedHeads {
                queries: heads.query_width(),
                keys: heads.key_width(),
                first_query: 0,
                first_key: 0,
            },
            norms: Some(HeadNorms { query: any, key: any, whole: false, epsilon: 1e-6 }),
            clip: None,
            angles: RotaryAngles {
                cos: any,
                sin: any,
                positions: 1,
                elements: layer.dim,
                layout: RotaryLayout::Halves,
            },
            positions: self.zeros.buffer(),
            page_of: self.zeros.buffer(),
            queries: self.out.buffer(),
            rows: self.rows,
        }
    }

    /// One call of each kernel.
    fn calls(&self, layer: &Layer) -> Result<Vec<(&'static str, Launch)>, LaunchError> {
        let Self { rows, .. } = *self;
        let (any, out, zeros) = (self.any.buffer(), self.out.buffer(), self.zeros.buffer());
        let (hidden, dtype) = (layer.hidden, Dtype::Bf16);
        let norm = Norm {
            residual: out,
            added: Some(any),
            row_of: None,
            weight: any,
            out,
            rows,
            hidden,
            epsilon: 1e-6,
            dtype,
        };
        let route = Route {
            ids: None,
            logits: any,
            correction: None,
            scoring: Scoring::Softmax,
            normalise: true,
            scale: 1.0,
            groups: None,
            experts: out,
            weights: out,
            rows,
            num_experts: EXPERTS as u64,
            top_k: TOP_K as u64,
        };
        let pairs = rows * TOP_K as u64;
        let [first_pair, pair_of] = [&self.first_pair, &self.pair_of].map(Memory::buffer);
        let sums = SumPairs { y: any, first_pair, pair_of, weights: any, out, pairs, rows, hidden, dtype };
        Ok(vec![
            ("embed", Embed { table: any, tokens: zeros, out, rows, hidden, vocab: 1, dtype }.launch()?),
            ("norm", norm.launch()?),
            ("add_rows", AddRows { residual: out, added: any, gate: None, rows, hidden, dtype }.launch()?),
            ("head_rows", self.head_rows(layer).launch()?),
            ("route", route.launch()?),
            ("sum_pairs", sums.launch()?),
        ])
    }
}

/// Rows that all attend to as many keys; each row has its own sequence, or all share one.
#[derive(Clone, Copy)]
struct Timed {
    rows: usize,
    keys: usize,
    prompt: bool,
}

/// Calls of one setting, each with its own pages.
struct Attended {
    lists: Vec<Memory>,
    queries: Memory,
    pool: Memory,
    scratch: Memory,
    out: Memory,
}

fn attended(machine: &Machine, layer: &Layer, timed: Timed, copies: usize) -> Result<(Attended, Vec<Launch>), String> {
    let Timed { rows, keys, prompt } = timed;
    let Layer { kv_heads, group, dim, .. } = *layer;
    let (sequences, width) = (if prompt { 1 } else { rows }, keys.div_ceil(PAGE_TOKENS as usize));
    let (pages, longest) = (copies * sequences * width, keys as u64 - 1);
    let list = |of: Vec<u32>| machine.holding(bytemuck::cast_slice(&of));
    let heads =
        |pool| PagedHeads { pool, pages: pages as u64, layer: 0, layers: 1, kv_heads, group, dim, dtype: Dtype::Bf16 };
    let row_bytes = (kv_heads * group * dim * 2) as usize;
    let none = heads(Buffer::default());
    let places = Attended {
        lists: vec![
            list((0..rows).map(|row| if prompt { keys - rows + row } else { keys - 1 } as u32).collect())?,
            list((0..rows).map(|row| if prompt { 0 } else { row as u32 }).collect())?,
            list((0..pages as u32).collect())?,
        ],
        queries: machine.filled(rows * row_bytes, 0x3c)?,
        pool: machine.filled(pages * none.page_bytes() as usize, 0x3c)?,
        scratch: machine.filled(none.scratch_bytes(rows as u64, longest) as usize, POISON)?,
        out: machine.filled(rows * row_bytes, POISON)?,
    };
    let call = |copy: usize| {
        let call = Attend {
            heads: heads(places.pool.buffer()),
            scale: 0.1,
            queries: places.queries.buffer(),
            positions: places.lists[0].buffer(),
            sequence_of: places.lists[1].buffer(),
            page_table: places.lists[2].buffer().from_offset((copy * sequences * width * 4) as u64),
            sequences: sequences as u64,
            table_width: width as u64,
            longest,
            scratch: places.scratch.buffer(),
            out: places.out.buffer(),
            rows: rows as u64,
        };
        call.launch().map_err(text)
    };
    let launches: Vec<[Launch; 2]> = (0..copies).map(call).collect::<Result<_, _>>()?;
    Ok((places, launches.concat()))
}

/// bf16 attention with cold caches in every call, and the kernels around it.
pub(crate) fn times(machine: &Machine, options: &Options, plan: Plan, copied: f64) -> Result<Value, String> {
    let small = options.cpu || options.small;
    let layer = match small {
        true => Layer { hidden: 16, kv_heads: 1, group: 2, dim: 8 },
        false => Layer { hidden: 2048, kv_heads: 4, group: 8, dim: 128 },
    };
    let decode = |rows, keys| Timed { rows, keys, prompt: false };
    let timed = match small {
        true => vec![decode(2, 70)],
        false => [1, 16, 64].into_iter().flat_map(|rows| [decode(rows, 1024), decode(rows, 8192)]).collect(),
    };
    let prompt = if small { 5 } else { 2048 };
    let mut found = Vec::new();
    for timed in timed.into_iter().chain([Timed { rows: prompt, keys: prompt, prompt: true }]) {
        let sequences = if timed.prompt { 1 } else { timed.rows };
        let bytes = sequences * timed.keys * (layer.kv_heads * layer.dim) as usize * 4;
        let copies = (machine.cold_bytes()? / bytes).clamp(1, 64);
        let (_places, launches) = attended(machine, &layer, timed, copies)?;
        let rounds = plan.at_once.div_ceil(copies);
        let prepared = [machine.prepare(launches.repeat(rounds))?];
        let us = in_turns(machine, plan, &prepared)?[0] / (rounds * copies) as f64;
        found.push(json!({
            "kernel": "attend", "rows": timed.rows, "keys": timed.keys, "prompt": timed.prompt, "us": us,
            "key_and_value_bytes": bytes, "share_of_read_bound": bytes as f64 / copied / us,
        }));
    }
    for rows in if small { vec![2] } else { vec![1, 64, 2048] } {
        let shared = Shared::new(machine, &layer, rows)?;
        for (kernel, launch) in shared.calls(&layer).map_err(text)? {
            let prepared = [machine.prepare(vec![launch; plan.at_once])?];
            let us = in_turns(machine, plan, &prepared)?[0] / plan.at_once as f64;
            found.push(json!({ "kernel": kernel, "rows": rows, "us": us }));
        }
    }
    Ok(Value::Array(found))
}
