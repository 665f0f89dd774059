//! ParaSMoE: a unit switches between whole experts (EP) and slices (TP).

mod reshard;
mod rollouts;
mod speed;

use super::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use super::{By, Row};

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "figure-1",
        at: "Figure 1",
        claim: "2x8 H200, DeepSeek-V2.5: two TP8 units beat EP16 at small batches in throughput and latency, EP16 beats them at large ones",
        verdict: Reproduced,
        why: "both directions, by the model with constants fitted to vLLM's published rows",
        by: By::Run(|_| speed::figure_1()),
    },
    Row {
        id: "equations-1-4",
        at: "eqs 1-4",
        claim: "allgather, permute, all-to-all, permute give TP's slices of U",
        verdict: Reproduced,
        why: "bit by bit",
        by: By::Model(reshard::up),
    },
    Row {
        id: "equations-9-12",
        at: "eqs 9-12",
        claim: "the same for D",
        verdict: Reproduced,
        why: "bit by bit",
        by: By::Model(reshard::down),
    },
    Row {
        id: "figure-3",
        at: "Figure 3, 3.3",
        claim: "the allgather between nodes hides permuting and the all-to-all of the layer before",
        verdict: Reproduced,
        why: "the pipeline within 5% of the allgather alone",
        by: By::Model(speed::pipeline),
    },
    Row {
        id: "equation-5",
        at: "eqs 5-6, 4.2",
        claim: "Qwen3-235B on 2x8 H200: 0.6 s in theory; 0.7 s is above 80% of it",
        verdict: Reproduced,
        why: "within 5%",
        by: By::Model(speed::switch_time),
    },
    Row {
        id: "equation-6",
        at: "eq 6",
        claim: "the time of a switch is invariant with the size of the cluster",
        verdict: Corrected,
        why: "it is bounded: the limit is twice the time of two nodes",
        by: By::Model(speed::invariance),
    },
    Row {
        id: "equations-7-8",
        at: "eqs 7-8",
        claim: "the switch needs 1 + 2/K of TP's expert memory, less than 5% more with over 50 layers",
        verdict: Reproduced,
        why: "the maximum of eq 7 over all layers, 2 to 16 nodes",
        by: By::Model(speed::memory),
    },
    Row {
        id: "figure-4",
        at: "Figure 4",
        claim: "restart and offloading take tens of seconds, a switch less than one",
        verdict: NeedsGpu,
        why: "the model's time is that of equation-5",
        by: By::Model(speed::figure_4),
    },
    Row {
        id: "a100",
        at: "4.2",
        claim: "the allgather hides all other steps (eq 5); on 8 A100 the pipeline was slower than the sequence",
        verdict: Refuted,
        why: "inside one server both exchanges share NVLink, so eq 5 counts two fifths of the time",
        by: By::Model(speed::one_node),
    },
    Row {
        id: "figure-5",
        at: "Figure 5",
        claim: "16,382 answers of DAPO: most end within 2k tokens, few reach 16k",
        verdict: NeedsGpu,
        why: "no data; the policy behind the answers is not named",
        by: By::Run(|_| speed::figure_5()),
    },
    Row {
        id: "figure-6",
        at: "Figure 6",
        claim: "rollouts 1.41 to 3.75 times as fast as EP or TP alone",
        verdict: Corrected,
        why: "3.75 is at no ratio with 1.41: the cost depends on L_max / L_maj alone",
        by: By::Model(rollouts::figure_6),
    },
    Row {
        id: "appendix-c",
        at: "appendix C",
        claim: "EP is best where both lengths are long, TP where both are short",
        verdict: Refuted,
        why: "with the printed speeds the better one depends on the ratio of the lengths, not on their size",
        by: By::Model(rollouts::which_is_better),
    },
];
