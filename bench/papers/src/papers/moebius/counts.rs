//! Volumes and memory.

use semmoe_planner::layout::Layout;
use semmoe_planner::memory::Memory;

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu, Refuted};
use crate::papers::inputs::{layout, qwen3_235b};
use crate::papers::{Found, Verdict, near};

const GPUS: f64 = 8.0;

/// Eq 10 as printed: E, I, H and layers of another model; eq 11: bytes per second.
const PRINTED_GB: f64 = 128.0 * 3.0 * 2048.0 * 7168.0 * 94.0 / 8.0 * 2.0 / 1e9;
const NVLINK_SHARE: f64 = 280e9;

pub(super) fn volumes() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let rank = shape.routed_parameters() as f64 * 2.0 / GPUS;
    let slot = rank / shape.moe_layers as f64;
    let printed_slot = shape.experts as f64 * 2.0 * shape.expert_width as f64 * shape.hidden as f64 * 2.0 / GPUS;
    let seconds = rank * 7.0 / 8.0 / NVLINK_SHARE;
    let table = format!(
        "slot of a layer: {:.1} MB, as printed {:.1} MB\nexperts of a GPU: {:.2} GB, eq 10 evaluates to {PRINTED_GB:.1} GB\n\
         eq 11: {:.1} ms, with the printed 60 GB {:.1} ms\n",
        slot / 1e6,
        printed_slot / 1e6,
        rank / 1e9,
        seconds * 1e3,
        60e9 * 7.0 / 8.0 / NVLINK_SHARE * 1e3
    );
    let holds = near(slot, printed_slot, 0.01) && near(PRINTED_GB, 60.0, 0.01);
    let ours = format!(
        "{:.1} MB a layer (printed {:.1}); {:.1} GB, {:.0} ms",
        slot / 1e6,
        printed_slot / 1e6,
        rank / 1e9,
        seconds * 1e3
    );
    Ok(Found::new(Verdict::of(holds, Corrected), ours).with_table(table))
}

pub(super) fn spare_slot() -> Outcome<Found> {
    let layers = qwen3_235b()?.moe_layers as f64;
    // H200 of 141 GB, memory fraction 0.85 (9.1); 2.8 GB (5.3).
    let [slot, all] = [1.0 / layers, 2.8 / (0.85 * 141.0)];
    let holds = (slot - 0.0105).abs() < 0.001 && (all - 0.024).abs() < 0.001;
    let ours = format!("1/94 = {:.2}%; 2.8 GB of 119.85 = {:.2}%", slot * 1e2, all * 1e2);
    Ok(Found::new(Verdict::of(holds, Corrected), ours))
}

/// 70% of NVLink's 450 GB/s (section 6).
const MOVED: f64 = 0.7 * 450e9;

pub(super) fn switch_times() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let weights = shape.routed_parameters() as f64 * 2.0 / GPUS * (GPUS - 1.0) / GPUS / MOVED;
    // KV cache capacity under TP: 0.85 of 141 GB less its weights.
    let tokens = (0.85 * 141e9 - shape.parameters() as f64 * 2.0 / GPUS) / shape.kv_bytes_per_token(8);
    let cache = tokens * shape.kv_moved_to_tp(8) / GPUS / MOVED;
    let ours = format!(
        "model at 70% of NVLink: weights {:.0} ms, a full cache {:.0} ms more (printed 219)",
        weights * 1e3,
        cache * 1e3
    );
    Ok(Found::new(NeedsGpu, ours))
}

pub(super) fn memory() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let weights = |layout: Layout| {
        // With unlimited memory: only weights matter here.
        Memory::of(&shape, &layout, 1e12, 1.0).map(|memory| memory.weight_bytes() / 1e9).map_err(|why| why.to_string())
    };
    let [tp, ep] = [layout([8, 1], [8, 1]), layout([1, 8], [1, 8])].map(weights);
    let (tp, ep) = (tp?, ep?);
    // One slot, and the other layout's attention.
    let slot = shape.routed_parameters() as f64 * 2.0 / GPUS / shape.moe_layers as f64 / 1e9;
    let attention = shape.layers as f64 * shape.attention.parameters(shape.hidden, 8) as f64 * 2.0 / 1e9;
    let dual = slot + attention;
    let ours =
        format!("weights of a GPU {tp:.1} GB with TP, {ep:.1} GB with EP; a slot and TP's attention {dual:.1} GB");
    Ok(Found::new(Verdict::of(near(tp, ep, 0.05), Refuted), ours))
}
