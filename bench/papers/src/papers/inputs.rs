//! Models and clusters of the papers. Models are their published `config.json`; clusters use the rates that the papers
//! print, for one direction of one GPU, and the latencies of the constants' fit (`python/rows.py`).

use semmoe_planner::cluster::Cluster;
use semmoe_planner::layout::Layout;
use semmoe_planner::shape::{Dtype, ModelShape, Precision};

use crate::Outcome;

const QWEN3_235B: &str = include_str!("../../published/models/qwen3-235b.json");
const QWEN3_30B: &str = include_str!("../../published/models/qwen3-30b.json");
const DEEPSEEK_V3: &str = include_str!("../../published/models/deepseek-r1.json");
const DEEPSEEK_V2: &str = include_str!("../../published/models/deepseek-v2.json");
const DEEPSEEK_V2_LITE: &str = include_str!("../../published/models/deepseek-v2-lite.json");

fn shape(file: &str, text: &str) -> Outcome<ModelShape> {
    Ok(ModelShape::from_config(file, text)?)
}

pub(super) fn qwen3_235b() -> Outcome<ModelShape> {
    shape("qwen3-235b.json", QWEN3_235B)
}

pub(super) fn qwen3_30b() -> Outcome<ModelShape> {
    shape("qwen3-30b.json", QWEN3_30B)
}

/// DeepSeek-R1 has DeepSeek-V3's shape; FP8, as published.
pub(super) fn deepseek_v3() -> Outcome<ModelShape> {
    let fp8 = Dtype::of("fp8").ok_or("fp8")?;
    Ok(ModelShape { precision: Precision::uniform(fp8), ..shape("deepseek-r1.json", DEEPSEEK_V3)? })
}

pub(super) fn deepseek_v2() -> Outcome<ModelShape> {
    shape("deepseek-v2.json", DEEPSEEK_V2)
}

pub(super) fn deepseek_v2_lite() -> Outcome<ModelShape> {
    shape("deepseek-v2-lite.json", DEEPSEEK_V2_LITE)
}

/// A cluster of two levels, or of one node.
pub(super) fn cluster(text: &str) -> Outcome<Cluster> {
    Ok(Cluster::from_toml("cluster.toml", text)?)
}

/// Servers of 8 H200: NVLink, and 3,200 Gbit/s per server (ParaSMoE, 4.1), shared by its GPUs.
pub(super) fn h200(nodes: u64) -> Outcome<Cluster> {
    let inside =
        "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n";
    let between = "[[levels]]\nname = \"rdma\"\nbandwidth_gb_per_second = 50\nlatency_us = 12\n";
    match nodes {
        1 => cluster(inside),
        _ => cluster(&format!("{inside}{between}count = {nodes}\n")),
    }
}

/// Degrees without pipeline stages: TP and DP of attention, TP and EP of experts.
pub(super) fn layout(attention: [u64; 2], experts: [u64; 2]) -> Layout {
    let ([attention_tp, attention_dp], [expert_tp, expert_ep]) = (attention, experts);
    Layout { pipeline: 1, attention_tp, attention_dp, expert_tp, expert_ep }
}
