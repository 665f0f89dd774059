//! Exchanges on MixServe's two clusters (IV-A), by bandwidth only: the paper prints no latencies.

use semmoe_planner::cluster::{Cluster, Group};
use semmoe_planner::layout::Layout;
use semmoe_planner::step::Constants;

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu, Refuted, Reproduced};
use crate::papers::inputs::{cluster, deepseek_v3, layout};
use crate::papers::{Found, Verdict, axis, line, lines, near};
use crate::published::scores;

const H20: &str = include_str!("../../../published/clusters/h20-2x8.toml");
const ASCEND: &str = include_str!("../../../published/clusters/910b-4x8.toml");

/// A cluster without latencies.
fn without_latency(text: &str) -> Outcome<Cluster> {
    let mut cluster = cluster(text)?;
    cluster.levels.iter_mut().for_each(|level| level.latency = 0.0);
    Ok(cluster)
}

/// 2 servers of 8 H20: NVLink 450 GB/s in one direction, InfiniBand 400 Gbit/s per GPU.
pub(super) fn h20() -> Outcome<Cluster> {
    without_latency(H20)
}

/// 4 servers of 8 Ascend 910B: HCCS 480 Gbit/s, RoCE 200 Gbit/s per NPU.
pub(super) fn ascend() -> Outcome<Cluster> {
    without_latency(ASCEND)
}

/// Top-k of both models.
const TOP_K: f64 = 8.0;

/// Seconds of an all-reduce of `bytes` over `degree` NPUs: level by level, and as one ring over the slowest link.
fn reduces(cluster: &Cluster, degree: u64, bytes: f64) -> [f64; 2] {
    let levels = cluster.span(Group { size: degree, stride: 1 }).all_reduce(bytes);
    let slowest = cluster.levels[usize::from(degree > cluster.levels[0].count)].bytes_per_second;
    [levels, 2.0 * bytes * (degree - 1) as f64 / degree as f64 / slowest]
}

/// Dispatch and combine of `bytes` of tokens over `degree` NPUs.
fn exchange(cluster: &Cluster, degree: u64, bytes: f64) -> f64 {
    2.0 * cluster.span(Group { size: degree, stride: 1 }).all_to_all(bytes * TOP_K / degree as f64)
}

pub(super) fn figure_3() -> Outcome<Found> {
    let cluster = ascend()?;
    // 16 requests of 4,096 tokens (IV-B) of DeepSeek-R1, bf16.
    let bytes = 16.0 * 4096.0 * deepseek_v3()?.hidden as f64 * 2.0;
    let degrees = [2, 4, 8, 16, 32];
    let [inside, outside] = [8, 32].map(|degree| reduces(&cluster, degree, bytes));
    let [levels, ring] = [0, 1].map(|at| outside[at] / inside[at]);
    let all_to_all = exchange(&cluster, 32, bytes);
    let panel = lines(
        "MixServe, figure 3: DeepSeek-R1, 4 x 8 910B, 65,536 tokens",
        [axis("NPUs", true), axis("ms a layer", false)],
        vec![
            line(
                "TP, one ring",
                degrees.map(|degree| (degree as f64, 1e3 * reduces(&cluster, degree, bytes)[1])).into(),
            ),
            line(
                "TP, level by level",
                degrees.map(|degree| (degree as f64, 1e3 * reduces(&cluster, degree, bytes)[0])).into(),
            ),
            line(
                "EP, there and back",
                degrees.map(|degree| (degree as f64, 1e3 * exchange(&cluster, degree, bytes))).into(),
            ),
        ],
    );
    let ours = format!(
        "all-reduce from 8 to 32 NPUs: one ring {ring:.2} times, level by level {levels:.2}; at 32 {:.1} times EP's exchange",
        outside[0] / all_to_all
    );
    // A clear difference is at least a factor of two, even if the all-reduce uses both levels.
    let verdict = match (ring >= 2.0 && outside[0] > all_to_all, levels >= 2.0) {
        (true, true) => Reproduced,
        (true, false) => Corrected,
        (false, _) => Refuted,
    };
    Ok(Found::new(verdict, ours).with_picture("mixserve-figure-3", panel))
}

/// Bytes that leave a rank for other servers in an all-to-all, over `bytes`.
fn leaving(cluster: &Cluster, group: Group, bytes: f64) -> f64 {
    // Links inside a server are infinitely fast.
    let mut alone = cluster.clone();
    alone.levels[0].bytes_per_second = f64::INFINITY;
    alone.span(group).all_to_all(bytes) * alone.levels[1].bytes_per_second
}

pub(super) fn figure_4() -> Outcome<Found> {
    let cluster = ascend()?;
    // A row of hidden states counts 1; each of the k copies leaves whole, or as one slice from each NPU of the server.
    let (servers, all) = (Group { size: 4, stride: 8 }, Group { size: 32, stride: 1 });
    let printed = leaving(&cluster, servers, TOP_K);
    let [sliced, hybrid] = [all, servers].map(|group| leaving(&cluster, group, TOP_K / 8.0));
    let ours = format!(
        "rows that an NPU sends to other servers for a token: hybrid {hybrid:.2}, EP {printed:.2} by eq 12, {sliced:.2} with slices"
    );
    Ok(Found::new(Verdict::of(hybrid < 0.9 * sliced, Corrected), ours))
}

/// Equation 2 as printed, against the bytes that a reduce-scatter and an allgather move: 229,376 bytes over 8 ranks.
pub(super) fn table_1() -> Outcome<Found> {
    let bytes = 229_376.0;
    let mut cluster = h20()?;
    cluster.levels.truncate(1);
    let moved = cluster.span(Group { size: 8, stride: 1 }).all_reduce(bytes) * cluster.levels[0].bytes_per_second;
    // RS(x / d, d) is proportional to x / d / d.
    let printed = 2.0 * bytes / 64.0;
    let ours = format!("{bytes:.0} bytes over 8 ranks: each moves {moved:.0}, by the printed proportion {printed:.0}");
    Ok(Found::new(Verdict::of(near(moved, printed, 0.01), Corrected), ours))
}

pub(super) fn equations_12_13() -> Outcome<Found> {
    // b 16, s 1, h 7168, k 8 on the H20 cluster, bf16.
    let cluster = h20()?;
    let span = |size, stride| cluster.span(Group { size, stride });
    let (inside, between, all) = (span(8, 1), span(2, 8), span(16, 1));
    let whole = 16.0 * 7168.0 * 2.0;
    let (routed, slice) = (TOP_K * whole, TOP_K * whole / 8.0);
    let (reduce, gather, crossing) = (inside.all_reduce(whole), inside.scatter(routed), between.all_to_all(slice));
    let [printed_ep, printed_hybrid, sliced_ep, overlapped] = [
        reduce + 2.0 * between.all_to_all(routed),
        reduce + gather + 2.0 * crossing,
        reduce + 2.0 * all.all_to_all(slice),
        reduce + gather.max(2.0 * crossing),
    ]
    .map(|seconds| seconds * 1e6);
    let ours = format!(
        "as printed {printed_ep:.2} and {printed_hybrid:.2} us; EP with slices {sliced_ep:.2}, hybrid overlapped {overlapped:.2}"
    );
    let holds = overlapped / sliced_ep < 0.5;
    let printed = printed_hybrid / printed_ep < 0.5;
    let verdict = if holds {
        Reproduced
    } else if printed {
        Corrected
    } else {
        Refuted
    };
    Ok(Found::new(verdict, ours))
}

/// Copies that leave each device in a dispatch (equation 5), counted token by token with a token's experts spread
/// evenly over the group; and the tokens that all groups exchange together.
fn copies(data: u64, experts: u64) -> [u64; 2] {
    const BATCH: u64 = 16;
    let members = data.min(experts);
    let own = BATCH / data.max(experts);
    let leaving =
        (0..own).flat_map(|token| (0..TOP_K as u64).map(move |copy| (token + copy) % members)).filter(|to| *to != 0);
    let groups = data.max(experts) / members;
    [leaving.count() as u64, groups * members * own]
}

pub(super) fn figure_6() -> Outcome<Found> {
    // The figure's three examples; for the second and the third, equation 5 can be checked.
    let found = [(4, 4), (8, 4), (4, 8)].map(|(data, experts)| copies(data, experts));
    let formula = [(4, 4), (8, 4), (4, 8)].map(|(data, experts): (u64, u64)| {
        let members = data.min(experts);
        16 / data.max(experts) * 8 * (members - 1) / members
    });
    let holds = found.iter().zip(formula).all(|([leaving, tokens], formula)| *leaving == formula && *tokens == 16);
    let ours = format!(
        "(4, 4), (8, 4), (4, 8): {}, {}, {} copies leave a device; no token twice",
        found[0][0], found[1][0], found[2][0]
    );
    Ok(Found::new(Verdict::of(holds, Corrected), ours))
}

/// Dispatch and combine by equation 5, over all copies from each device, for the three cases of figure 11.
fn cases(cluster: &Cluster, cases: [Layout; 3]) -> [f64; 3] {
    cases.map(|layout| {
        let bytes = TOP_K / layout.attention_dp.max(layout.expert_ep) as f64;
        2.0 * cluster.span(layout.exchange_group()).all_to_all(bytes)
    })
}

pub(super) fn figure_11() -> Outcome<Found> {
    // d_DP = d_EP, d_DP > d_EP, d_DP < d_EP.
    let ascend = cases(&ascend()?, [layout([8, 4], [8, 4]), layout([4, 8], [8, 4]), layout([8, 4], [4, 8])]);
    let h20 = cases(&h20()?, [layout([8, 2], [8, 2]), layout([4, 4], [8, 2]), layout([8, 2], [4, 4])]);
    let [ascend, h20] = [ascend, h20].map(|[even, more_data, more_experts]| [more_data / even, more_experts / even]);
    let ours = format!(
        "exchange by eq 5 over that of d_DP = d_EP: {:.2} and {:.2} on 910B, {:.2} and {:.2} on H20",
        ascend[0], ascend[1], h20[0], h20[1]
    );
    let explained = ascend.iter().all(|ratio| *ratio > 1.0) && h20[1] < 1.0;
    Ok(Found::new(Verdict::of(explained, Refuted), ours))
}

/// The paper's pairs of layouts that the planner ranks in the measured order.
pub(super) fn figure_10() -> Outcome<Found> {
    let scores = scores(&Constants::uncalibrated())?;
    let of_paper = scores.iter().filter(|((_, family), _)| family.starts_with("mixserve "));
    let (right, pairs) = of_paper.fold((0, 0), |(right, pairs), (_, score)| (right + score.right, pairs + score.pairs));
    Ok(Found::new(NeedsGpu, format!("the planner ranks {right} of {pairs} pairs of layouts so")))
}
