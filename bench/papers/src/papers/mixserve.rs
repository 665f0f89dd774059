//! MixServe: layouts over nodes, and an exchange on both levels of links at once.

mod links;
mod memory;

use super::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use super::{Bench, By, Row};

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "figure-3",
        at: "Figure 3, II-B",
        claim: "4x8 910B: beyond 8 NPUs communication grows sharply; at 32 TP's all-reduce takes longer than EP's all-to-all",
        verdict: Corrected,
        why: "the growth is that of one ring over all NPUs; level by level it is small. TP behind EP at 32 holds",
        by: By::Model(links::figure_3),
    },
    Row {
        id: "figure-4",
        at: "Figure 4, II-C",
        claim: "TP inside nodes takes most of the exchange off EP between them",
        verdict: Corrected,
        why: "with slices, as engines send, EP sends as much: the gain is the baseline's redundancy",
        by: By::Model(links::figure_4),
    },
    Row {
        id: "table-1",
        at: "Table I, eqs 1-3",
        claim: "AR = RS(x/d) + AG(x/d)",
        verdict: Corrected,
        why: "eq 2 divides by d twice",
        by: By::Model(links::table_1),
    },
    Row {
        id: "figure-6",
        at: "Figure 6, eq 5",
        claim: "three cases of d_DP and d_EP: min(d_DP, d_EP) devices exchange b / max(d_DP, d_EP) requests",
        verdict: Reproduced,
        why: "exactly, counted token by token",
        by: By::Model(links::figure_6),
    },
    Row {
        id: "equations-4-11",
        at: "eqs 4-11",
        claim: "waiting, memory and throughput of a layout",
        verdict: Corrected,
        why: "eq 8 lacks bytes and shared key heads; eq 7 needs rates of one unit; eq 11 is one request's rate, not throughput",
        by: By::Model(memory::equations_4_11),
    },
    Row {
        id: "equations-12-13",
        at: "eqs 12-13",
        claim: "hybrid TP-EP's exchange takes a quarter of EP's",
        verdict: Corrected,
        why: "eq 12 sends every copy from each GPU of a server; with slices little of the gain is left",
        by: By::Model(links::equations_12_13),
    },
    Row {
        id: "figure-9",
        at: "Figures 8-9, algorithms 1-2",
        claim: "both levels at once: little longer than the exchange between nodes",
        verdict: Reproduced,
        why: "measured on limited links: where both levels take as long, the fused exchange takes .58 of their sum (at best half)",
        by: By::Bench(Bench {
            command: "sudo bench/hybrid/run",
            document: "bench/hybrid/README.md",
            figures: &["**0.58** of their sum", "0.70, 0.67", "0.58, 0.56", "0.84, 0.82"],
            ours: "fused over the sum of both levels .70, .58, .84 at link ratios 1, 2, 8; planned .67, .56, .82",
        }),
    },
    Row {
        id: "table-2",
        at: "Table II",
        claim: "eight layouts run DeepSeek-R1 and Qwen3-235B on 2x8 H20 and 4x8 910B",
        verdict: Reproduced,
        why: "weights and the cache of 16 sequences of 4,096 tokens fit",
        by: By::Model(memory::table_2),
    },
    Row {
        id: "figure-10",
        at: "Figure 10",
        claim: "hybrid TP-EP: throughput 43.5 to 50.3% above TP8+PP2 on H20, 22.0 to 32.2% above TP8+PP4 on 910B",
        verdict: NeedsGpu,
        why: "all predictions: `semmoe-bench-papers published`",
        by: By::Run(|_| links::figure_10()),
    },
    Row {
        id: "figure-11",
        at: "Figure 11",
        claim: "best TTFT with d_DP = d_EP on 910B, d_DP < d_EP on H20, as the model of communication says",
        verdict: Refuted,
        why: "by eq 5 both skewed cases halve the exchange on both clusters, so it explains no order on 910B",
        by: By::Model(links::figure_11),
    },
    Row {
        id: "figure-12",
        at: "Figure 12",
        claim: "fused communication takes slightly longer than that between nodes; TTFT, ITL, throughput gain",
        verdict: Reproduced,
        why: "direction, without TTFT and ITL; over the exchange between nodes alone 1.19, 1.18, 1.06 times",
        by: By::Bench(Bench {
            command: "sudo bench/hybrid/run",
            document: "bench/hybrid/README.md",
            figures: &[
                "| `hybrid:2x2` | 478 | 301 (299) | 716 | 200 (199) | 1131 | 124 (124) |",
                "| `hybrid:2x2:4` (fused) | 678 | 212 (199) | 1214 | 116 (112) | 1343 | 104 (103) |",
            ],
            ours: "1.42, 1.70, 1.19 times the throughput of the same exchange unfused at link ratios 1, 2, 8",
        }),
    },
];
