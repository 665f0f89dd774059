//! Sem-MoE: experts and the tokens that activate them on the same device.

mod layer;
mod predict;
mod recorded;
mod solved;

use super::Verdict::{Corrected, NeedsGpu, Reproduced};
use super::{Bench, By, Row};

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "figure-1",
        at: "Figure 1",
        claim: "EP communication up to 59.2% of an MoE layer, DeepSeek-V2-Lite, 8 GPUs",
        verdict: NeedsGpu,
        why: "bench/e2e's shares are set by its links",
        by: By::Run(|_| layer::figure_1()),
    },
    Row {
        id: "table-1",
        at: "Table 1",
        claim: "a token's hottest k experts predict its routing: median F1 .83 to 1.00, their share .83 to 1.00",
        verdict: Corrected,
        why: "of the bundled model; counted on itself a token seen once is always right",
        by: By::Run(predict::table_1),
    },
    Row {
        id: "figure-6a",
        at: "Figure 6a",
        claim: "requests of similar topics activate similar experts",
        verdict: Reproduced,
        why: "direction: over 3 times chance",
        by: By::Run(predict::figure_6a),
    },
    Row {
        id: "figure-6b",
        at: "Figure 6b, A.2",
        claim: "kurtosis of most tokens over 8; hottest k of 25% predict 75%: precision 96.3%, F1 78.8%",
        verdict: Corrected,
        why: "bundled model: top-4 of 32; with always the same experts kurtosis is 6.1, of the paper's top-6 of 64 8.8",
        by: By::Run(predict::figure_6b),
    },
    Row {
        id: "figure-6c",
        at: "Figure 6c, A.2",
        claim: "the next layer follows from those before: about 70% looking back 5",
        verdict: Reproduced,
        why: "within .07 and rising: the group of most of a token's experts, 4 groups",
        by: By::Run(predict::figure_6c),
    },
    Row {
        id: "neighbours",
        at: "3.2",
        claim: "tokens never seen by the nearest neighbour in embedding space",
        verdict: Reproduced,
        why: "direction; a regression on embeddings is better",
        by: By::Run(solved::neighbours),
    },
    Row {
        id: "objective",
        at: "3.3",
        claim: "L(theta) = uneven tokens + remote activations: Algorithm 1 finds balanced solutions",
        verdict: Corrected,
        why: "the solver's L is below at every theta; Algorithm 1's tokens are uneven by a fifth of S",
        by: By::Run(solved::l_theta),
    },
    Row {
        id: "algorithm-1",
        at: "Algorithm 1",
        claim: "alternating greedy passes: a balanced placement of tokens and experts",
        verdict: Corrected,
        why: "as printed it caps units: groups get up to 1.9 times the mean tokens; exact steps are better",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-placement -- domains PROFILE...",
            document: "bench/placement/README.md",
            figures: &[
                "| Algorithm 1, its own T | 0.4315 | 0.3424 | 0.3934 | 0.3891 | 1.456 |",
                "| semmoe + best T | 0.4749 | 0.3697 | 0.4578 | 0.4341 | 1.089 |",
            ],
            ours: "OLMoE, 4 groups: local .389, semmoe .434; expert load 1.46 and 1.09 of the mean",
        }),
    },
    Row {
        id: "algorithm-2",
        at: "Algorithm 2",
        claim: "requests to the rank with most of their experts, balanced by a mask",
        verdict: Corrected,
        why: "the printed mask bans the free ranks; corrected it reaches half of the bound's gain",
        by: By::Bench(Bench {
            command: "semmoe evaluate",
            document: "bench/README.md",
            figures: &[
                "| `affinity_paper`: Algorithm 2 of the Sem-MoE paper, mask corrected | .336 (1.27, 1.03) | .54 |",
                "| **`affinity`** | **.395** (1.03, 1.08) | .90 |",
            ],
            ours: "4 ranks: local .336 with the mask corrected, .395 by prices and backlog, bound .410",
        }),
    },
    Row {
        id: "algorithm-3",
        at: "Algorithm 3, B.1",
        claim: "T or A, whichever is surer, foretells a token's device better than T",
        verdict: Reproduced,
        why: "direction; with the solver's tables A gains as little, tempered",
        by: By::Run(solved::algorithm_3),
    },
    Row {
        id: "shuffling",
        at: "3.4",
        claim: "shuffling adds about 1% to the reduce-scatter; its argsort beats PyTorch's by 25%",
        verdict: Reproduced,
        why: "within the paper's figures, on one H100",
        by: By::Bench(Bench {
            command: "bench/gpu/run --quick",
            document: "bench/gpu/README.md",
            figures: &[
                "| ... over plain reduce-scatter (aim at most 1.05) | 1.008 | .995 | .993 |",
                "Argsort of 8,192 keys over 8 ranks: 9.8 us, torch.argsort 45.3",
            ],
            ours: "SRS over plain reduce-scatter .993 to 1.008; argsort 9.8 us, PyTorch 45.3",
        }),
    },
    Row {
        id: "table-memory",
        at: "B.2",
        claim: "T of DeepSeek-V2 takes 11.72 MB",
        verdict: Reproduced,
        why: "exactly, in MiB, for T's labels alone",
        by: By::Model(solved::table_memory),
    },
    Row {
        id: "figure-5b",
        at: "Figure 5b, 4.6",
        claim: "local activation rate 15.4% above the best baseline, loads even",
        verdict: Corrected,
        why: "the gain holds, the loads are not even",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-placement -- domains PROFILE...",
            document: "bench/placement/README.md",
            figures: &[
                "| MoETuner + best T | 0.1791 | 0.1905 | 0.1617 | 0.1771 | 1.000 |",
                "| Algorithm 1, its own T | 0.2605 | 0.1855 | 0.2467 | 0.2309 | 1.999 |",
            ],
            ours: "OLMoE, 8 groups: .231, MoETuner .177; fullest group 2.0 and 1.0 of the mean",
        }),
    },
    Row {
        id: "figure-4",
        at: "Figure 4, 4.4",
        claim: "attention dp: throughput within 5 times the lightest latency up by 31 to 278%",
        verdict: Reproduced,
        why: "direction: goodput within the same limit 1.35 to 3.3 times the baseline's, on limited links",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run",
            document: "bench/e2e/README.md",
            figures: &[
                "| 2780 Mbit/s | 217 | 21.9 (20.7 to 23.1) | 29.6 (25.8 to 33.3) |",
                "| 458 Mbit/s | 487 | 3.2 (2.7 to 3.8) | 10.6 (10.4 to 10.7) |",
            ],
            ours: "goodput 22 to 30, 7.8 to 17, 3.2 to 11 requests/s at 17, 42, 61% communication",
        }),
    },
    Row {
        id: "table-2",
        at: "Table 2, 4.4",
        claim: "attention tp, light load: p99 TTFT 3.8 to 24.9% below the best baseline",
        verdict: Reproduced,
        why: "direction and size at .6 of capacity, the lightest load measured; 1 request/s was not run",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run",
            document: "bench/e2e/README.md",
            figures: &[
                "| 7052 Mbit/s | 0.6 | 33.5 | tp, E, SRS and SAG | 0.543 (0.543 to 0.544) | 39.4 (35.4 to 43.4) | 256.8 (234.0 to 279.7) |",
                "| 1742 Mbit/s | 0.6 | 23.2 | tp, E, SRS and SAG | 0.541 (0.541 to 0.541) | 87.9 (87.7 to 88.2) | 327.5 (314.0 to 341.0) |",
                "| 771 Mbit/s | 0.6 | 14.2 | tp, E, SRS and SAG | 0.542 (0.542 to 0.542) | 72.1 (69.9 to 74.4) | 414.6 (401.0 to 428.1) |",
            ],
            ours: "p99 TTFT 4, 17, 7% lower at 17, 39, 61% communication",
        }),
    },
    Row {
        id: "figure-5a",
        at: "Figure 5a, 4.5",
        claim: "37 and 43% more local activations make an MoE layer 41.8 and 46.6% faster",
        verdict: Corrected,
        why: "more than its communication cannot be saved; measured 17 to 19% at 42 and 61% communication with 49% more (bench/e2e)",
        by: By::Model(layer::figure_5a),
    },
    Row {
        id: "figure-6d",
        at: "Figure 6d, A.2",
        claim: "all-to-all and all-reduce get faster from local rates .2 to .9",
        verdict: Reproduced,
        why: "direction, from .25 to .37 on limited links; not swept to .9",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run",
            document: "bench/e2e/README.md",
            figures: &[
                "all-to-all time against local share (figure 6d)",
                "| 458 Mbit/s | 0.731 (0.729 to 0.732) | 1.183 (1.159 to 1.206) | 0.61 (0.60 to 0.61) |",
            ],
            ours: "exchanged bytes .73, throughput 1.18 times at 61% communication",
        }),
    },
    Row {
        id: "tables-3-4",
        at: "Tables 3-4, C.1",
        claim: "solved on one data set, still 1.3 to 1.7 times the baseline's local rate on others",
        verdict: Reproduced,
        why: "direction and size: 1.15 to 1.35 by requests, 1.34 to 2.35 by tokens",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-placement -- --groups 4 transfer",
            document: "bench/placement/README.md",
            figures: &[
                "| code | 0.3991 | 0.2957 | 0.3229 | 0.3088 | 0.3019 |",
                "| mathematics | 0.4847 | 0.6178 | 0.5392 | 0.3550 | 0.5084 |",
                "| multilingual | 0.2828 | 0.2962 | 0.2873 | 0.4409 | 0.2865 |",
            ],
            ours: "bundled model, 5 kinds of prompts, 4 groups: .28 to .34 by requests, .36 to .59 by tokens, random .25",
        }),
    },
    Row {
        id: "tables-5-6",
        at: "Tables 5-6, C.2",
        claim: "Moonlight-16B: throughput 1.10 to 1.14 times SGLang's and MoETuner's under latency limits",
        verdict: NeedsGpu,
        why: "Moonlight-16B was not run",
        by: By::Model(layer::tables_5_6),
    },
];
