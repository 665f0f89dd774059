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
        why: "direction and size: 42 to 58% over both baselines, ten rates on limited links",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run --figure 4 --rates 458",
            document: "bench/e2e/README.md",
            figures: &[
                "| first token | 2280 (1839 to 2720) | 2442 (2130 to 2753) | 3432 (3247 to 3616) | 1.55 (1.33 to 1.77) | 1.42 (1.31 to 1.52) |",
                "| end to end | 1777 (1714 to 1839) | 1826 (1747 to 1904) | 2821 (2397 to 3244) | 1.58 (1.40 to 1.76) | 1.54 (1.37 to 1.70) |",
            ],
            ours: "tokens/s by first token 2280, MoETuner 2442, 3432; end to end 1777, 1826, 2821",
        }),
    },
    Row {
        id: "table-2",
        at: "Table 2, 4.4",
        claim: "attention tp, light load: p99 TTFT 3.8 to 24.9% below the best baseline",
        verdict: Corrected,
        why: "lower at 256 tokens; at 512 and 1024 the intervals of ours and the baselines overlap",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run --figure table-2 --rates 1742",
            document: "bench/e2e/README.md",
            figures: &[
                "| 256 | tp, MoETuner, no shuffle | 99.9 (78.3 to 105.1) | 117.1 (94.3 to 136.2) | 200.1 (139.6 to 220.9) |",
                "| 256 | tp, E, SRS and SAG | 64.2 (57.3 to 65.4) | 89.1 (77.5 to 108.3) | 147.7 (134.9 to 158.6) |",
                "| 512 | tp, contiguous, no shuffle | 126.0 (120.0 to 126.2) | 139.9 (132.0 to 216.7) | 200.9 (195.3 to 213.1) |",
                "| 512 | tp, E, SRS and SAG | 127.2 (121.4 to 222.8) | 183.5 (161.3 to 277.0) | 213.9 (206.4 to 464.5) |",
                "| 1024 | tp, E, SRS and SAG | 253.1 (224.0 to 364.9) | 284.2 (254.1 to 439.9) | 354.2 (312.0 to 485.5) |",
            ],
            ours: "over the better baseline .76, 1.31, .97 at 256, 512, 1024 tokens; E2E .97, 1.06, 1.00",
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
        claim: "all-to-all gets faster from local rates .2 to .9",
        verdict: Reproduced,
        why: "2.4 times as fast, falling at each of 8 rates; an all-reduce moves all rows at any rate",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run --figure 6d --rates 458",
            document: "bench/e2e/README.md",
            figures: &[
                "| 0.2 | 0.199 (0.199 to 0.200) | 30875 (30873 to 30889) | 14.110 (13.980 to 14.261) |",
                "| 0.9 | 0.900 (0.899 to 0.900) | 5512 (5501 to 5521) | 5.893 (5.589 to 6.712) |",
                "| all-reduce | 1.000 (1.000 to 1.000) | 43555 (43555 to 43555) | 19.924 (19.502 to 22.206) |",
            ],
            ours: "a layer's collectives 14.1 to 5.9 ms, its all-reduce 19.9 ms",
        }),
    },
    Row {
        id: "tables-3-4",
        at: "Tables 3-4, C.1",
        claim: "solved on one data set, still 1.3 to 1.7 times the baseline's local rate on others",
        verdict: Reproduced,
        why: "direction, most of the size: 1.24 to 1.64, Algorithm 1 1.16 to 1.57; bundled model, by requests, 1.13 to 1.35",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-placement -- --groups 4 domains A B",
            document: "bench/placement/README.md",
            figures: &[
                "| arxiv, github | 0.3407 | 0.3915 | 0.2848 |",
                "| github, arxiv | 0.4092 | 0.3565 | 0.2907 |",
                "| book, github | 0.3991 | 0.3168 | 0.2740 |",
                "| arxiv, wikipedia | 0.3095 | 0.2900 | 0.3186 |",
                "| wikipedia, book | 0.3965 | 0.3272 | 0.3682 |",
                "| code | 0.3991 | 0.2957 | 0.3229 | 0.3088 | 0.3019 |",
                "| multilingual | 0.2828 | 0.2962 | 0.2873 | 0.4409 | 0.2865 |",
            ],
            ours: "4 groups, random .25, pairs of domains: OLMoE .34 to .41, Mixtral .31 to .40",
        }),
    },
    Row {
        id: "tables-5-6",
        at: "Tables 5-6, C.2",
        claim: "Moonlight-16B: throughput 1.10 to 1.22 times SGLang's and MoETuner's under latency limits",
        verdict: Reproduced,
        why: "direction, on another model; printed means are of ratios, throughputs have 1.18 and 1.03",
        by: By::Bench(Bench {
            command: "sudo bench/e2e/run --figure 4 --rates 458",
            document: "bench/e2e/README.md",
            figures: &[
                "| 1.55 (1.33 to 1.77) | 1.42 (1.31 to 1.52) |",
                "| 1.58 (1.40 to 1.76) | 1.54 (1.37 to 1.70) |",
            ],
            ours: "bundled model: 1.55 and 1.42 times by first token, 1.58 and 1.54 end to end",
        }),
    },
];
