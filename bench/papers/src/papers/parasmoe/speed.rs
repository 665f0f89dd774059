//! Times and memory of a switch, and of steps in either layout.

use semmoe_planner::cluster::Cluster;
use semmoe_planner::fitted::fitted;
use semmoe_planner::shape::{Dtype, ModelShape};
use semmoe_planner::step::{Constants, Target, Work, step};

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu, Refuted};
use crate::papers::inputs::{deepseek_v2, h200, layout, qwen3_30b, qwen3_235b};
use crate::papers::{Found, Verdict, axis, line, lines, near};

/// Bytes per second of a GPU: 3,200 Gbit/s per server over 8 GPUs (4.1); NVLink of H200 and A100 in one direction; and
/// the memory of both (data sheets; `planner/src/cluster/gpu.rs`).
const RDMA: f64 = 50e9;
const NVLINK: [f64; 2] = [450e9, 300e9];
const HBM: [f64; 2] = [4.8e12, 2.039e12];
/// 4.1: GPUs of a server.
const SERVER: f64 = 8.0;

/// DeepSeek-V2.5 on 16 GPUs: two units of TP8, or one of EP16.
struct Layouts {
    shape: ModelShape,
    one: Cluster,
    two: Cluster,
    constants: Constants,
}

impl Layouts {
    fn new() -> Outcome<Self> {
        let constants = fitted("vllm", "H100", Dtype::of("bf16").ok_or("bf16")?)?.constants;
        Ok(Self { shape: deepseek_v2()?, one: h200(1)?, two: h200(2)?, constants })
    }

    /// Seconds of a step of all sequences, each with `cached` tokens.
    fn seconds(&self, tp: bool, sequences: f64, cached: f64) -> f64 {
        let (cluster, layout, units) =
            if tp { (&self.one, layout([8, 1], [8, 1]), 2.0) } else { (&self.two, layout([1, 16], [1, 16]), 1.0) };
        let work = Work { sequences: sequences / units, tokens: 1.0, cached };
        step(&Target { shape: &self.shape, cluster, layout, constants: &self.constants }, &work).total()
    }
}

/// Tokens per second of 16 GPUs by number of sequences: two units of TP8, one of EP16; and seconds per token.
pub(super) fn figure_1() -> Outcome<Found> {
    let layouts = Layouts::new()?;
    let seconds = |tp: bool, sequences: f64| layouts.seconds(tp, sequences, 1024.0);
    let batches: Vec<f64> = (4..=12).map(|power| f64::from(1 << power)).collect();
    let mut table = String::from("sequences   TP8 x 2, ms   EP16, ms\n");
    batches.iter().for_each(|&batch| {
        table += &format!("{batch:>9}   {:>11.1}   {:>8.1}\n", 1e3 * seconds(true, batch), 1e3 * seconds(false, batch));
    });
    let wins = |batch: f64| seconds(true, batch) < seconds(false, batch);
    let crossing = batches.iter().copied().find(|&batch| !wins(batch));
    let holds = wins(batches[0]) && crossing.is_some() && !wins(batches[batches.len() - 1]);
    let speed = |tp: bool| batches.iter().map(|&batch| (batch, batch / seconds(tp, batch))).collect();
    let panel = lines(
        "ParaSMoE, figure 1: 2 x 8 H200, DeepSeek-V2.5",
        [axis("sequences", true), axis("tokens a second", true)],
        vec![line("two units of TP8", speed(true)), line("EP16", speed(false))],
    );
    let ours = crossing.map_or_else(
        || "EP16 never catches up".to_owned(),
        |at| {
            format!(
                "TP8 x 2 is {:.2} times as fast at 16 sequences, EP16 from {at} on, {:.2} times at 4096",
                seconds(false, 16.0) / seconds(true, 16.0),
                seconds(true, 4096.0) / seconds(false, 4096.0)
            )
        },
    );
    Ok(Found::new(Verdict::of(holds, Refuted), ours).with_table(table).with_picture("parasmoe-figure-1", panel))
}

/// How few of figure 5's answers may outlast its 2k tokens if TP is to be the faster layout for the others, as
/// appendix C has it. The answers themselves need a policy and GPUs.
pub(super) fn figure_5() -> Outcome<Found> {
    const ANSWERS: f64 = 16_382.0;
    let layouts = Layouts::new()?;
    let tp_wins = |left: u32| {
        let [tp, ep] = [true, false].map(|tp| layouts.seconds(tp, f64::from(left), 2048.0));
        tp < ep
    };
    let left = (1..=4096).take_while(|&left| tp_wins(left)).last().ok_or("TP8 x 2 never wins")?;
    let share = f64::from(left) / ANSWERS * 1e2;
    let ours =
        format!("model: TP8 x 2 beats EP16 up to {left} sequences: {share:.1}% of them may outlast 2k for appendix C");
    Ok(Found::new(NeedsGpu, ours))
}

/// Bytes of a layer that each GPU gathers between nodes, permutes, and sends within its node.
struct Layer {
    gathered: f64,
    permuted: f64,
    sent: f64,
}

impl Layer {
    /// U of every expert, or D, on N nodes of P GPUs, bf16: after the allgather a GPU has 1 / P of all experts.
    fn of(shape: &ModelShape, nodes: f64, gpus: f64, share: f64) -> Self {
        let all = shape.experts as f64 * shape.expert_parameters() as f64 * 2.0 * share / gpus;
        Self { gathered: all * (nodes - 1.0) / nodes, permuted: 2.0 * all, sent: all * (gpus - 1.0) / gpus }
    }

    /// Seconds of the allgather, of both permutations, of the all-to-all.
    fn seconds(&self, between: f64, inside: f64, memory: f64) -> [f64; 3] {
        [self.gathered / between, 2.0 * self.permuted / memory, self.sent / inside]
    }
}

/// U and D of every layer as a pipeline with three resources that each part uses in order: the links between nodes, the
/// GPU, and the links inside. Also the sum of all steps.
fn pipelined(parts: &[[f64; 3]]) -> [f64; 2] {
    let mut free = [0.0f64; 3];
    for part in parts {
        let mut at = 0.0;
        for (machine, seconds) in free.iter_mut().zip(part) {
            *machine = machine.max(at) + seconds;
            at = *machine;
        }
    }
    [free[2], parts.iter().flatten().sum()]
}

/// 2/3 of an expert are U (gate and up), 1/3 is D.
fn parts(shape: &ModelShape, nodes: f64, gpus: f64, rates: [f64; 3]) -> Vec<[f64; 3]> {
    let [between, inside, memory] = rates;
    let layer =
        [2.0 / 3.0, 1.0 / 3.0].map(|share| Layer::of(shape, nodes, gpus, share).seconds(between, inside, memory));
    (0..shape.moe_layers).flat_map(|_| layer).collect()
}

pub(super) fn pipeline() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let parts = parts(&shape, 2.0, SERVER, [RDMA, NVLINK[0], HBM[0]]);
    let gather: f64 = parts.iter().map(|part| part[0]).sum();
    let [piped, sequence] = pipelined(&parts);
    let ours = format!(
        "{:.0} ms, the allgather alone {:.0} ms, one after the other {:.0} ms",
        piped * 1e3,
        gather * 1e3,
        sequence * 1e3
    );
    Ok(Found::new(Verdict::of(near(piped, gather, 0.05), Refuted), ours))
}

/// Equation 6 for N nodes; the limit for `None`.
fn switch(shape: &ModelShape, nodes: Option<u64>) -> f64 {
    let weights = shape.parameters() as f64 * 2.0 / SERVER;
    nodes.map_or(1.0, |nodes| (nodes - 1) as f64 / nodes as f64) * weights / RDMA
}

pub(super) fn switch_time() -> Outcome<Found> {
    let seconds = switch(&qwen3_235b()?, Some(2));
    let holds = near(seconds, 0.6, 0.05) && seconds / 0.7 > 0.8;
    Ok(Found::new(Verdict::of(holds, Corrected), format!("{seconds:.3} s; 0.7 s is {:.0}% of it", seconds / 0.7 * 1e2)))
}

pub(super) fn invariance() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let times = [Some(2), Some(4), Some(16), None].map(|nodes| switch(&shape, nodes));
    let invariant = times.iter().all(|time| near(*time, times[0], 0.05));
    let [two, four, sixteen, limit] = times;
    let ours = format!("{two:.2}, {four:.2}, {sixteen:.2} s with 2, 4, 16 nodes, {limit:.2} s in the limit");
    Ok(Found::new(Verdict::of(invariant, Corrected), ours))
}

/// Equation 7 in TP layer slots, over all layers.
fn peak(layers: u64, nodes: u64) -> f64 {
    let at = |layer: u64| (layer + 3) as f64 + (layers - layer - 1) as f64 / nodes as f64;
    (0..layers).map(at).fold(0.0, f64::max)
}

pub(super) fn memory() -> Outcome<Found> {
    let over =
        |layers: u64| [2, 4, 16].map(|nodes| peak(layers, nodes) / layers as f64 - 1.0).into_iter().fold(0.0, f64::max);
    let [fifty, qwen] = [over(51), over(qwen3_235b()?.moe_layers)];
    let holds = near(qwen, 2.0 / 94.0, 1e-9) && fifty < 0.05;
    Ok(Found::new(
        Verdict::of(holds, Corrected),
        format!("{:.2}% with 94 layers, {:.2}% with 51", qwen * 1e2, fifty * 1e2),
    ))
}

pub(super) fn figure_4() -> Outcome<Found> {
    let shape = qwen3_235b()?;
    let ours = format!("model {:.2} s (2 x 8 H200); not run: two servers", switch(&shape, Some(2)));
    Ok(Found::new(NeedsGpu, ours))
}

/// EP8 to TP4 x DP2 on one server of A100: the allgather also uses NVLink, so the times of both transfers add up.
pub(super) fn one_node() -> Outcome<Found> {
    let parts = parts(&qwen3_30b()?, 2.0, 4.0, [NVLINK[1], NVLINK[1], HBM[1]]);
    let [gather, permute, exchange] = [0, 1, 2].map(|at| parts.iter().map(|part| part[at]).sum::<f64>());
    let least = (gather + exchange).max(permute);
    let ours = format!(
        "at least {:.0} ms however it overlaps, {:.0} ms in sequence; the allgather alone {:.0} ms",
        least * 1e3,
        (gather + permute + exchange) * 1e3,
        gather * 1e3
    );
    Ok(Found::new(Verdict::of(near(least, gather, 0.05), Refuted), ours))
}
