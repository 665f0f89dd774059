//! Layouts that fit, and the formulas for waiting time, memory and throughput.

use semmoe_bench_papers::mixserve::request_rate;
use semmoe_planner::cluster::Cluster;
use semmoe_planner::layout::Layout;
use semmoe_planner::memory::Memory;
use semmoe_planner::mixserve::waiting;
use semmoe_planner::shape::{Dtype, ModelShape, Precision};

use super::links::{ascend, h20};
use crate::Outcome;
use crate::papers::Verdict::{Corrected, Refuted};
use crate::papers::inputs::{deepseek_v3, layout, qwen3_235b};
use crate::papers::{Found, Verdict};

/// vLLM's default share of memory, and its prefill chunk.
const USABLE: f64 = 0.9;
const CHUNK: f64 = 2048.0;
/// IV-B: requests of a batch, and tokens of a sequence.
const TOKENS: f64 = 16.0 * 4096.0;

fn staged(pipeline: u64, layout: Layout) -> Layout {
    Layout { pipeline, ..layout }
}

/// GB of weights on a GPU if the layout fits with the cache of a full batch.
fn fits(shape: &ModelShape, cluster: &Cluster, layout: Layout) -> Option<f64> {
    layout.check(shape).ok()?;
    let memory = Memory::of(shape, &layout, cluster.gpu.memory * USABLE, CHUNK).ok()?;
    (memory.unit_tokens(&layout) >= TOKENS).then(|| memory.weight_bytes() / 1e9)
}

pub(super) fn table_2() -> Outcome<Found> {
    let bf16 = Dtype::of("bf16").ok_or("bf16")?;
    // The 910B has no FP8: DeepSeek-R1 as bf16 there.
    let r1 = deepseek_v3()?;
    let wide = ModelShape { precision: Precision::uniform(bf16), ..r1.clone() };
    let qwen = qwen3_235b()?;
    let on_h20 = [
        staged(2, layout([8, 1], [8, 1])),
        layout([8, 2], [1, 16]),
        layout([4, 4], [1, 16]),
        layout([8, 2], [8, 2]),
        layout([4, 4], [4, 4]),
    ];
    let on_ascend = [staged(4, layout([8, 1], [8, 1])), layout([8, 4], [1, 32]), layout([4, 8], [1, 32])];
    let (h20, ascend) = (h20()?, ascend()?);
    let mut table = String::from("cluster   model   layout                 GB of weights a GPU\n");
    let (mut fit, mut all) = (0, 0);
    for (name, shape, cluster, layouts) in [
        ("H20", &qwen, &h20, &on_h20[..]),
        ("H20", &r1, &h20, &on_h20[..]),
        ("910B", &qwen, &ascend, &on_ascend[..]),
        ("910B", &wide, &ascend, &on_ascend[..]),
    ] {
        for &layout in layouts {
            let found = fits(shape, cluster, layout);
            all += 1;
            fit += usize::from(found.is_some());
            let shown = found.map_or_else(|| "does not fit".to_owned(), |gb| format!("{gb:.1}"));
            let model = if std::ptr::eq(shape, &raw const qwen) { "Qwen3" } else { "R1" };
            table += &format!("{name:<9} {model:<7} {:<22} {shown}\n", layout.name());
        }
    }
    let ours = format!("{fit} of {all} model and layout pairs fit with a full batch (R1 in FP8 on H20, bf16 on 910B)");
    Ok(Found::new(Verdict::of(fit == all, Corrected), ours).with_table(table))
}

pub(super) fn equations_4_11() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    // Eq 8: 2 b s h l elements of cache. It omits the bytes per element and that there are fewer KV heads than query
    // heads.
    let printed = 2.0 * shape.hidden as f64 * shape.layers as f64 * 2.0;
    let right = shape.kv_bytes_per_token(1);
    let wait = waiting(8.0, 10.0, "tokens/s")?;
    let unstable = waiting(10.0, 10.0, "tokens/s").is_err();
    let rate = request_rate([512.0, 128.0], wait, 0.5, 0.02);
    let holds = (printed - right).abs() < 0.01 * right;
    let ours = format!(
        "cache of a token {:.0} kB by eq 8, right {:.0}; eq 7 {wait:.1} s at 8 of 10 tokens/s; eq 11 {rate:.0} tokens/s",
        printed / 1e3,
        right / 1e3
    );
    Ok(Found::new(if unstable { Verdict::of(holds, Corrected) } else { Refuted }, ours))
}
