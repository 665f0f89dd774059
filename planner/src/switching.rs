//! Switching a running unit between TP and EP layouts: how long it takes, what it needs, when it pays (Moebius,
//! ParaSMoE).

use serde::Serialize;

use crate::PlanError;
use crate::cluster::Cluster;
use crate::error::positive;
use crate::layout::{Infeasible, Layout};
use crate::policy::{ByLayout, SettingsError};
use crate::search::Question;
use crate::step::{decoding, step};

/// Both layouts are compared at powers of two of requests in flight, up to this exponent.
const MAX_SEQUENCES: u32 = 12;

/// Spare memory of a switch relative to the memory of the experts: `slots` spare slots of one layer each, over `layers`
/// (Moebius 1 / K with one, ParaSMoE 2 / K with two).
pub fn memory_overhead(slots: u64, layers: u64) -> f64 {
    slots as f64 / layers.max(1) as f64
}

/// Seconds of a decoding step by number of sequences, in both layouts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepPair {
    /// Sequences of the unit.
    pub sequences: f64,
    /// Seconds with slices of experts.
    pub tp: f64,
    /// Seconds with whole experts.
    pub ep: f64,
}

/// The number of sequences at which the layouts cost the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Crossing {
    /// TP is faster below, EP above this many sequences (B*).
    At(f64),
    /// TP is faster at all points.
    AboveAll,
    /// EP is faster at all points.
    BelowAll,
}

/// B*, interpolated linearly between measured points in ascending order; the last crossing counts.
///
/// # Errors
/// [`PlanError::Value`] without points, for an invalid time, or if they do not ascend.
pub fn crossing(points: &[StepPair]) -> Result<Crossing, PlanError> {
    let wrong =
        |found| PlanError::Value { what: "a measured step", found, expected: "times above 0, sequences rising" };
    let Some(last) = points.last() else { return Err(wrong(0.0)) };
    for point in points {
        positive("the sequences of a step", point.sequences)?;
        positive("the seconds of a step", point.tp.min(point.ep))?;
    }
    if let Some(pair) = points.windows(2).find(|pair| pair[0].sequences >= pair[1].sequences) {
        return Err(wrong(pair[1].sequences));
    }
    let gap = |point: &StepPair| point.ep - point.tp;
    let falls = points.windows(2).rev().find(|pair| gap(&pair[0]) > 0.0 && gap(&pair[1]) <= 0.0);
    if gap(last) > 0.0 {
        return Ok(Crossing::AboveAll);
    }
    let Some(pair) = falls else { return Ok(Crossing::BelowAll) };
    let share = gap(&pair[0]) / (gap(&pair[0]) - gap(&pair[1]));
    Ok(Crossing::At(pair[0].sequences + share * (pair[1].sequences - pair[0].sequences)))
}

/// A unit that switches between EP over all of its GPUs and independent TP groups that each have all experts. One group
/// is Moebius's case, several groups are ParaSMoE's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SwitchUnit {
    /// N: groups in TP.
    pub groups: u64,
    /// P: GPUs of a group.
    pub group_gpus: u64,
}

impl SwitchUnit {
    /// Returns the unit of the innermost level, as a single group.
    pub fn innermost(cluster: &Cluster) -> Self {
        Self { groups: 1, group_gpus: cluster.levels.first().map_or(1, |level| level.count) }
    }

    /// Returns every unit of one or more levels in every division into several groups. Groups have at least two GPUs,
    /// all on the innermost links.
    pub fn divided(cluster: &Cluster) -> Vec<Self> {
        let innermost = Self::innermost(cluster).group_gpus;
        let units = cluster.levels.iter().scan(1, |gpus, level| {
            *gpus *= level.count;
            Some(*gpus)
        });
        let divide = |gpus: u64| {
            let sizes = (2..=innermost.min(gpus / 2)).filter(move |size| gpus.is_multiple_of(*size));
            sizes.map(move |group_gpus| Self { groups: gpus / group_gpus, group_gpus })
        };
        units.filter(|gpus| *gpus > 1).flat_map(divide).collect()
    }

    /// Returns the number of GPUs of the unit.
    pub fn gpus(self) -> u64 {
        self.groups * self.group_gpus
    }

    /// Returns the layouts of a group (TP) and of the whole unit (EP).
    pub(crate) fn layouts(self) -> ByLayout<Layout> {
        let (group, gpus) = (self.group_gpus, self.gpus());
        ByLayout {
            tp: Layout { pipeline: 1, attention_tp: group, attention_dp: 1, expert_tp: group, expert_ep: 1 },
            ep: Layout { pipeline: 1, attention_tp: 1, attention_dp: gpus, expert_tp: 1, expert_ep: gpus },
        }
    }

    /// Returns the seconds that a GPU needs to receive its slices of all experts when leaving EP. Levels transfer
    /// concurrently, so the slowest one counts. With one level this is `(P - 1) / P W / B`, with one group per node
    /// ParaSMoE's equation 6.
    fn weight_seconds(self, question: &Question<'_>) -> f64 {
        let gpus = self.gpus();
        let slices = expert_bytes(question) / self.group_gpus as f64;
        let mut inside = 1;
        let seconds = question.cluster.levels.iter().map(|level| {
            let reach = (inside * level.count).min(gpus);
            let received = slices * (reach - inside) as f64 / gpus as f64;
            inside = reach;
            received / (level.bytes_per_second * question.constants.link_bandwidth_share)
        });
        seconds.fold(0.0, f64::max)
    }

    /// Returns the KV tokens that the whole unit can hold in each layout. In both, a GPU's expert buffer has the size
    /// that groups need, plus one spare slot.
    pub(crate) fn room(self, question: &Question<'_>) -> Result<ByLayout<f64>, NoSwitch> {
        let slot = expert_bytes(question) / self.gpus() as f64 / question.shape.moe_layers.max(1) as f64;
        let buffer = expert_bytes(question) / self.group_gpus as f64 + slot;
        let room = |layout: Layout, copies: f64| {
            let infeasible = |reason| NoSwitch::Infeasible { layout: layout.name(), reason };
            layout.check(question.shape).map_err(infeasible)?;
            let memory = question.memory(&layout).map_err(infeasible)?;
            let cache = memory.cache_bytes - (buffer - memory.expert_bytes);
            if cache <= 0.0 {
                return Err(NoSwitch::Buffer { layout: layout.name(), missing_gb: -cache / 1e9 });
            }
            Ok(cache / memory.cache_bytes * memory.unit_tokens(&layout) * copies)
        };
        let layouts = self.layouts();
        Ok(ByLayout { tp: room(layouts.tp, self.groups as f64)?, ep: room(layouts.ep, 1.0)? })
    }
}

/// Returns the bytes of one copy of all routed experts.
fn expert_bytes(question: &Question<'_>) -> f64 {
    question.shape.routed_parameters() as f64 * question.shape.precision.experts.bytes()
}

/// The effect of switching for a unit under a load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Switching {
    /// The unit.
    #[serde(flatten)]
    pub unit: SwitchUnit,
    /// GPUs of the unit.
    pub gpus: u64,
    /// Modelled steps of both layouts.
    pub steps: Vec<StepPair>,
    /// The batch at which both take equally long.
    pub crossing: Crossing,
    /// Seconds of a switch to slices with the load's cache, without synchronisation.
    pub seconds: f64,
    /// The part of `seconds` spent moving experts; all of it if the cache is empty.
    pub weight_seconds: f64,
    /// Memory for experts beyond what EP needs, relative to that: the copies of further groups, and one spare slot.
    pub memory_overhead: f64,
    /// KV tokens that the unit holds in each layout.
    pub room_tokens: ByLayout<f64>,
}

/// Reasons why switching is impossible.
#[derive(Debug, thiserror::Error)]
pub enum NoSwitch {
    /// One of the layouts cannot run.
    #[error("{layout} does not run: {reason}")]
    Infeasible {
        /// The layout.
        layout: String,
        /// The reason.
        reason: Infeasible,
    },
    /// The expert buffer shared by both layouts leaves no memory for a KV cache.
    #[error("{layout} does not run: with the expert buffer for switching, {missing_gb:.1} GB per GPU are missing")]
    Buffer {
        /// The layout.
        layout: String,
        /// Missing GB per GPU.
        missing_gb: f64,
    },
    /// The switch policy rejects its settings.
    #[error("the switch policy cannot be set up: {0}")]
    Policy(#[from] SettingsError),
    /// The steps cannot be compared.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Computes the effect of switching for a unit with `concurrency` requests in flight, spread evenly over groups.
///
/// # Errors
/// [`NoSwitch`] if slices or whole experts cannot run there.
pub fn switching(question: &Question<'_>, unit: SwitchUnit, concurrency: f64) -> Result<Switching, NoSwitch> {
    let room_tokens = unit.room(question)?;
    let (ByLayout { tp, ep }, groups, gpus) = (unit.layouts(), unit.groups as f64, unit.gpus());
    let load = question.workload.load(concurrency);
    let seconds = |layout, sequences| step(&question.target(layout), &decoding(sequences, &load)).total();
    let pair = |exponent: u32| {
        let sequences = f64::from(1u32 << exponent);
        StepPair { sequences, tp: seconds(tp, (sequences / groups).max(1.0)), ep: seconds(ep, sequences) }
    };
    let steps: Vec<StepPair> = (0..=MAX_SEQUENCES).map(pair).collect();
    // Every GPU receives its heads of the sequences that other GPUs of its group had.
    let tokens = concurrency / groups * (load.input_tokens + load.output_tokens / 2.0);
    let cache = tokens * question.shape.kv_moved_to_tp(unit.group_gpus) / unit.group_gpus as f64;
    let bandwidth = question.cluster.levels.first().map_or(1.0, |level| level.bytes_per_second);
    let weight_seconds = unit.weight_seconds(question);
    Ok(Switching {
        unit,
        gpus,
        crossing: crossing(&steps)?,
        steps,
        seconds: weight_seconds + cache / (bandwidth * question.constants.link_bandwidth_share),
        weight_seconds,
        memory_overhead: groups - 1.0 + memory_overhead(1, question.shape.moe_layers),
        room_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Layout as Side, SwitchCost};
    use crate::shape::ModelShape;
    use crate::step::Constants;
    use crate::tests::fixtures::{deepseek_v3, h200, qwen3_235b};
    use crate::workload::Workload;

    const LOAD: &str = "requests_per_second = 2\ninput_tokens = 1024\noutput_tokens = 512\n";

    fn near(found: f64, expected: f64, error: f64) {
        assert!((found - expected).abs() <= error, "{found}, expected {expected}");
    }

    /// Seconds of a switch that moves `weights` bytes per rank and `cache` bytes into each rank.
    fn switch_seconds(ranks: u32, weights: f64, cache: f64, bytes_per_second: f64, fixed_seconds: f64) -> f64 {
        let token_bytes = ByLayout { tp: 1, ep: 1 };
        let cost = SwitchCost { ranks, weight_bytes: weights as u64, token_bytes, bytes_per_second, fixed_seconds };
        cost.seconds(Side::Tp, (cache * f64::from(ranks)) as u64)
    }

    /// One layer's experts on one of 8 ranks.
    fn slot_bytes(shape: &ModelShape) -> f64 {
        (shape.experts * shape.expert_parameters()) as f64 * shape.precision.experts.bytes() / 8.0
    }

    #[test]
    fn golden_switches() {
        let shape = qwen3_235b();
        let weights = shape.routed_parameters() as f64 * 2.0 / 8.0;
        assert_eq!(slot_bytes(&shape), 603_979_776.0);
        for (bandwidth, milliseconds) in [(280e9, 177.4), (315e9, 157.7), (450e9, 110.4)] {
            near(switch_seconds(8, weights, 0.0, bandwidth, 0.0) * 1e3, milliseconds, 0.05);
        }
        near(switch_seconds(8, weights, 28e9, 280e9, 0.01) * 1e3, 177.4 + 100.0 + 10.0, 0.05);
        for (nodes, seconds) in [(2, 0.5875), (u32::MAX, 1.175)] {
            near(switch_seconds(nodes, 235e9 * 2.0 / 8.0, 0.0, 50e9, 0.0), seconds, 1e-9);
        }
        near(0.5875 / 0.7, 0.84, 0.001);
        for (slots, layers, percent) in [(1, 94, 1.064), (2, 94, 2.13), (2, 60, 3.33)] {
            near(memory_overhead(slots, layers) * 100.0, percent, 0.005);
        }
        // Graham's bound for longest-first assignment to 8 ranks, which Moebius states for bin packing.
        near(4.0 / 3.0 - 1.0 / (3.0 * 8.0), 1.2917, 1e-4);
    }

    /// The review's own figures: equation 10 with the other model's H and I, its slot without the down projection, its
    /// bandwidth.
    #[test]
    fn golden_errors_of_the_review() {
        near(128.0 * 3.0 * 2048.0 * 7168.0 * 94.0 / 8.0 * 2.0 / 1e9, 132.5, 0.05);
        let slot = slot_bytes(&qwen3_235b());
        near(slot * 2.0 / 3.0 / 1e6, 402.7, 0.05);
        near(slot / 1e6, 604.0, 0.05);
        near(switch_seconds(8, 60e9, 0.0, 280e9, 0.0) * 1e3, 187.5, 1e-9);
        near(slot * 94.0 * 7.0 / 8.0 / 0.152 / 1e9, 327.0, 0.3);
        near(2.8e9 / (0.85 * 141e9) * 100.0, 2.34, 0.005);
    }

    /// Decode steps of Qwen3-235B on 8 H200 at context 1024, ms, from the measured tables of NVIDIA's aiconfigurator
    /// (Apache-2.0), rounded to 0.1 ms and thinned, so B* is off by up to 5%.
    #[test]
    fn golden_crossings() {
        let sequences = [8.0, 64.0, 256.0, 512.0, 2048.0];
        let engines = [
            ([11.7, 25.7, 36.0, 47.0, 105.9], [19.5, 25.1, 33.2, 39.4, 73.1], Some(58.0)),
            ([12.2, 21.4, 32.6, 41.6, 96.2], [19.9, 27.4, 34.9, 41.5, 90.6], Some(496.0)),
            ([11.5, 21.8, 31.1, 39.8, 97.2], [18.3, 29.6, 39.6, 49.9, 106.0], None),
        ];
        for (tp, ep, expected) in engines {
            let points: Vec<StepPair> =
                (0..5).map(|at| StepPair { sequences: sequences[at], tp: tp[at], ep: ep[at] }).collect();
            match (crossing(&points).unwrap(), expected) {
                (Crossing::At(found), Some(expected)) => near(found / expected, 1.0, 0.05),
                (found, None) => assert_eq!(found, Crossing::AboveAll),
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        }
        assert!(crossing(&[]).is_err());
    }

    #[test]
    fn one_node_switches_as_a_whole() {
        let (shape, cluster, workload) = (qwen3_235b(), h200(2), Workload::from_toml("w", LOAD).unwrap());
        let constants = Constants { link_bandwidth_share: 280.0 / 450.0, ..Constants::uncalibrated() };
        let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
        let switching = switching(&question, SwitchUnit::innermost(&cluster), 64.0).unwrap();
        assert!((switching.weight_seconds - 0.1774).abs() < 1e-4 && switching.seconds > switching.weight_seconds);
        assert!((switching.memory_overhead - 1.0 / 94.0).abs() < 1e-12);
        assert!(switching.steps[3].tp < switching.steps[3].ep, "slices win at 8 sequences");
    }

    #[test]
    fn groups_divide_nodes_or_are_nodes() {
        let of = |nodes| SwitchUnit::divided(&h200(nodes)).iter().map(|unit| (unit.groups, unit.group_gpus)).collect();
        let found: Vec<(u64, u64)> = of(1);
        assert_eq!(found, [(4, 2), (2, 4)]);
        let found: Vec<(u64, u64)> = of(2);
        assert_eq!(found, [(4, 2), (2, 4), (8, 2), (4, 4), (2, 8)]);
        let found: Vec<(u64, u64)> = of(3);
        assert_eq!(found, [(4, 2), (2, 4), (12, 2), (8, 3), (6, 4), (4, 6), (3, 8)]);
    }

    /// Two nodes: equation 6 for the links between them, two copies of the experts, and steps of half the requests.
    #[test]
    fn groups_on_two_nodes() {
        let (shape, cluster, workload) = (qwen3_235b(), h200(2), Workload::from_toml("w", LOAD).unwrap());
        let constants = Constants { link_bandwidth_share: 1.0, ..Constants::uncalibrated() };
        let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
        let unit = SwitchUnit { groups: 2, group_gpus: 8 };
        let (groups, node) = (
            switching(&question, unit, 64.0).unwrap(),
            switching(&question, SwitchUnit::innermost(&cluster), 64.0).unwrap(),
        );
        let slices = expert_bytes(&question) / 8.0;
        near(groups.weight_seconds, switch_seconds(2, slices, 0.0, 50e9, 0.0), 1e-9);
        near(groups.memory_overhead, 1.0 + 1.0 / 94.0, 1e-12);
        for (pair, half) in groups.steps[1..].iter().zip(&node.steps) {
            near(pair.tp, half.tp, 1e-12);
        }
        // One copy of the experts leaves EP twice the memory that is lost here to the second.
        let token = shape.kv_bytes_per_token(1);
        let whole = question.memory(&unit.layouts().ep).unwrap();
        let lost = slices - whole.expert_bytes + slices / 2.0 / 94.0;
        near(groups.room_tokens.ep, (whole.cache_bytes - lost) / token * 16.0, 1.0);
        assert!(groups.room_tokens.tp > 1.9 * node.room_tokens.tp && groups.room_tokens.tp < 2.1 * node.room_tokens.tp);
    }

    #[test]
    fn too_large_a_model_or_buffer_is_refused() {
        let (mut cluster, constants) = (h200(1), Constants::uncalibrated());
        let workload = Workload::from_toml("w", LOAD).unwrap();
        let refused = |shape: &ModelShape, cluster: &Cluster, unit| {
            let question = Question { shape, cluster, workload: &workload, constants: &constants };
            switching(&question, unit, 8.0).unwrap_err().to_string()
        };
        cluster.gpu.memory = 80e9;
        let error = refused(&deepseek_v3(), &cluster, SwitchUnit::innermost(&cluster));
        assert!(error.contains("does not run: weights need"), "{error}");
        // Experts of 56.8 GB a GPU in EP fit; two copies of them do not.
        let two_copies = SwitchUnit { groups: 2, group_gpus: 4 };
        cluster.gpu.memory = 150e9;
        let error = refused(&qwen3_235b(), &cluster, two_copies);
        assert!(error.contains("does not run"), "{error}");
    }
}
