//! HybridEP: moves experts instead of tokens where that is fewer bytes.

mod experts;
mod stream;

use super::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use super::{Bench, By, Row};

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "figure-6",
        at: "Figure 6, eqs 8-12",
        claim: "the best share of data is 0 if 2D >= G P_E, else 1 - B PE / (P_E (G - 1))",
        verdict: Reproduced,
        why: "no p of a grid is better; the share must be cut at 0",
        by: By::Model(stream::figure_6),
    },
    Row {
        id: "figure-8",
        at: "Figure 8, algorithm 1",
        claim: "which pairs of GPUs communicate at each level",
        verdict: Corrected,
        why: "outer levels must agree, too",
        by: By::Model(experts::figure_8),
    },
    Row {
        id: "figure-9",
        at: "Figure 9",
        claim: "experts less their mean are concentrated near 0",
        verdict: Refuted,
        why: "on the bundled model: its experts have next to nothing in common",
        by: By::Model(experts::figure_9),
    },
    Row {
        id: "figure-10",
        at: "Figure 10",
        claim: "experts travel while what comes before them is computed",
        verdict: Reproduced,
        why: "all that the stream model allows to hide, in 20 cases",
        by: By::Bench(Bench {
            command: "cargo run --release -p semmoe-bench-parts -- stream",
            document: "bench/worker/README.md",
            figures: &[
                "| 204 MB | 128 | 19.3 | 36.9 | 37.0 | 36.9 | 0.55, 0.52 |",
                "All reading that the model allows to hide is hidden, in all 20 cases of the run.",
            ],
            ours: "experts read ahead of their layer: a layer takes max(PE, F), 37.0 ms measured and 36.9 by the model",
        }),
    },
    Row {
        id: "figure-11",
        at: "Figure 11",
        claim: "the model's times are close to measured ones",
        verdict: Reproduced,
        why: "within 20%: three of the five layouts within 5%",
        by: By::Bench(Bench {
            command: "sudo bench/hybrid/run",
            document: "bench/hybrid/README.md",
            figures: &[
                "| `ep` | 803 | 174 (148) | 774 | 175 (148) | 801 | 176 (148) |",
                "| `ep`, domains of 2 | 1408 | 100 (100) | 1489 | 100 (100) | 1412 | 100 (100) |",
            ],
            ours: "a layer's exchange, measured and planned: EP 174 and 148 ms (rows are uneven), domains of 2 100 and 100 ms",
        }),
    },
    Row {
        id: "table-4",
        at: "Table IV, Figure 12",
        claim: "p = 0.75, 0.5, 0, 0 are best",
        verdict: Corrected,
        why: "ten times the printed Lat_PE gives the paper's within .03: a misprint",
        by: By::Model(stream::table_4),
    },
    Row {
        id: "figure-13",
        at: "Figure 13",
        claim: "1.18 to 2.57 times as fast; more, the smaller the experts",
        verdict: NeedsGpu,
        why: "end-to-end training on 16 and 32 A800; the direction holds",
        by: By::Model(stream::figure_13),
    },
    Row {
        id: "table-5",
        at: "Table V",
        claim: "1.03 to 5.60 times as fast from 6 to 192 MB of data",
        verdict: NeedsGpu,
        why: "end-to-end training; computation, which is not printed, bounds the gain",
        by: By::Model(stream::table_5),
    },
    Row {
        id: "table-6",
        at: "Table VI",
        claim: "smaller experts by migration: 1.25 to 2.82 times as fast",
        verdict: NeedsGpu,
        why: "end-to-end training",
        by: By::Model(stream::table_6),
    },
    Row {
        id: "figure-14",
        at: "Figure 14, V-E",
        claim: "experts compressed 50 times on a shared expert keep the loss",
        verdict: Refuted,
        why: "on the bundled model, in serving; training with compressed experts was not tried",
        by: By::Run(experts::figure_14),
    },
    Row {
        id: "figure-15",
        at: "Figure 15",
        claim: "fusing saves 30% of encoding and 45% of decoding",
        verdict: NeedsGpu,
        why: "decoded on a CPU only, not fused",
        by: By::Run(experts::figure_15),
    },
    Row {
        id: "figure-16",
        at: "Figure 16",
        claim: "EP's traffic grows with the tokens, that of domains is bounded",
        verdict: Reproduced,
        why: "EP linear, one domain constant",
        by: By::Model(stream::figure_16),
    },
    Row {
        id: "table-7",
        at: "Table VII",
        claim: "pairs that communicate, G = 8, 16, 32, all sizes of domains",
        verdict: Reproduced,
        why: "exactly",
        by: By::Model(experts::table_7),
    },
    Row {
        id: "figure-17",
        at: "Figure 17",
        claim: "1000 centres: 1.05 to 1.45 times as fast with domains of one size, 1.31 to 3.76 with one share of data; the second grows with the centres",
        verdict: Corrected,
        why: "by its eq 10 a fixed share gains no more with more centres",
        by: By::Model(stream::figure_17),
    },
];
