//! Moebius: a unit switches between TP and EP while it serves. Only a review of the paper was available; references are
//! to the review.

mod counts;
mod moves;
mod roofline;

use super::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use super::{Bench, By, Row};

const SIMULATED: &str = "bench/switch/README.md";
const SWITCH: &str = "cargo run -p semmoe-bench-switch -- --no-oracle";

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "equations-6-11",
        at: "eqs 6-11",
        claim: "E 2I H / P elements of a layer on a GPU; 60 GB of experts on each of 8; 188 ms",
        verdict: Corrected,
        why: "eqs 6-8 omit the down projection; eq 10 has another model's H and I and evaluates to 132.5 GB",
        by: By::Model(counts::volumes),
    },
    Row {
        id: "algorithms-1-2",
        at: "3.1, 3.2",
        claim: "rank r gets rows r 2I/P to (r + 1) 2I/P of the fused gate and up projections",
        verdict: Corrected,
        why: "gate and up must be cut one by one: a SwiGLU row needs both",
        by: By::Model(moves::fused_rows),
    },
    Row {
        id: "algorithm-3",
        at: "4.1",
        claim: "each of P ranks has H_kv / P heads of the cache",
        verdict: Corrected,
        why: "4 heads over 8 ranks: each is held twice",
        by: By::Model(moves::heads),
    },
    Row {
        id: "algorithm-4",
        at: "4.2",
        claim: "longest first is a 4/3 - 1/(3B) approximation of bin packing",
        verdict: Corrected,
        why: "it is the bound of the makespan on P ranks, 4/3 - 1/(3P)",
        by: By::Model(moves::longest_first),
    },
    Row {
        id: "equation-12",
        at: "eq 12, 5.3",
        claim: "one spare slot: 1.05%; 2.4% in all, of 2.8 GB",
        verdict: Reproduced,
        why: "within 0.1 points, of the experts and of the 0.85 of the GPU that the engine uses",
        by: By::Model(counts::spare_slot),
    },
    Row {
        id: "table-1",
        at: "Table 1",
        claim: "reads of HBM for each byte moved: weights 3 with NCCL, KV 5; 1 directly",
        verdict: Reproduced,
        why: "exactly, counted on arrays",
        by: By::Model(moves::passes),
    },
    Row {
        id: "section-6",
        at: "6",
        claim: "weights 1.49 times as fast as NCCL, KV over 2 times, over 70% of NVLink",
        verdict: NeedsGpu,
        why: "no two linked GPUs here",
        by: By::Bench(Bench {
            command: "bench/gpu/run --quick",
            document: "bench/gpu/README.md",
            figures: &["| EP to TP, one layer of Qwen3-30B-A3B (aim at least 85%) | 866, 94% | 876, 92% | 900, 90% |"],
            ours: "one H100, 2 to 8 ranks: a direct move at 90 to 94% of a copy's bound",
        }),
    },
    Row {
        id: "section-7",
        at: "7, abstract",
        claim: "one threshold of 256 requests matches the better static layout at every operating point",
        verdict: Refuted,
        why: "over 63 rows of three engines' step times and seven traces, simulated",
        by: By::Bench(Bench {
            command: SWITCH,
            document: SIMULATED,
            figures: &["| Moebius | -3.7 / -10.0 | -29.0 / -74.9 | 37 | 237 |"],
            ours: "goodput 3.7%, TPOT 10.0% below the better static on average; 37 rows lose over 0.5%",
        }),
    },
    Row {
        id: "section-9-2",
        at: "9.2",
        claim: "bursts: p99 TTFT 6.0 s, TP 90 s; TPOT in the quiet 37 ms, EP 52 ms; 4 switches",
        verdict: Corrected,
        why: "half of TP's p99 where EP prefills faster, nothing where it does not; static EP is as good. 4 switches hold",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-switch -- --traces bursty --no-oracle --json",
            document: "bench/switch/README.md",
            figures: &[
                "| vllm | 28/28 | 12.0 / 67.8 | 12.0 / 72.2 | 12.3 / 67.7 | 12.0 / 67.8 |",
                "| vllm | 28/45 | 12.0 / 67.8 | 5.6 / 57.2 | 6.4 / 53.9 | 5.8 / 53.3 |",
            ],
            ours: "simulated, vLLM's step times: p99 TTFT 12.0 s TP, 5.6 s EP, 6.4 s Moebius; all 12 s with equal prefill",
        }),
    },
    Row {
        id: "section-9-3",
        at: "9.3",
        claim: "rollouts 1.16 to 1.25 times as fast as the better static",
        verdict: Refuted,
        why: "depends on the engine's step times: SGLang's never cross",
        by: By::Bench(Bench {
            command: "cargo run -p semmoe-bench-switch -- --no-oracle --traces rollout",
            document: "bench/switch/README.md",
            figures: &[
                "| rollout | trtllm | 28/45 | 0 / 100 | 4839.62 / 105.3 | 4206.71 / 73.7 | +8.7 / -0.1, 1.0 |",
                "| rollout | vllm | 28/28 | 4 / 88 | 5136.24 / 97.2 | 3925.94 / 93.6 | +0.5 / +0.2, 1.0 |",
                "| rollout | sglang | 28/28 | 100 / 0 | 5283.05 / 97.3 | 3844.37 / 106.4 | -4.7 / -9.0, 1.0 |",
            ],
            ours: "simulated: 1.07 to 1.09 on TensorRT-LLM's step times, 1.01 to 1.02 on vLLM's, .95 to .97 on SGLang's",
        }),
    },
    Row {
        id: "section-9-4",
        at: "9.4",
        claim: "a switch takes 215 to 434 ms, 152 ms without KV",
        verdict: NeedsGpu,
        why: "no NVLink here; the model's times beside",
        by: By::Model(counts::switch_times),
    },
    Row {
        id: "section-9-5",
        at: "9.5",
        claim: "the same weights for TP, EP and Moebius; 2.8 GB for both layouts at once",
        verdict: Refuted,
        why: "attention is whole on every GPU with EP, so weights are not the same; 2.8 GB is near a slot and the second attention",
        by: By::Model(counts::memory),
    },
    Row {
        id: "appendix-a",
        at: "A1-A4",
        claim: "B* = ridge P E / k = 75,648 by the roofline, 128 to 256 measured",
        verdict: Refuted,
        why: "A1 and A2 drop k and divide by P twice: both are B k / E, so nothing crosses; B* depends on the engine",
        by: By::Model(roofline::crossings),
    },
];
