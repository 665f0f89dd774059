//! Further options for a deployment: replicas of experts that keep tokens local.

use serde::Serialize;

use crate::PlanError;
use crate::affinity::WORTH;
use crate::cluster::Cluster;
use crate::hybridep::{Choice, HybridLevel, Stream, Use, best_domains, domain_choices};
use crate::layout::Layout;
use crate::search::{Candidate, Question};
use crate::step::{Constants, Part, decoding, step};

/// Replicas of experts in memory that the cache does not need (HybridEP in serving).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replication {
    /// The choice if gathered experts are kept in memory.
    pub resident: Choice,
    /// The choice if experts are gathered again in every step, for when memory is short.
    pub streamed: Choice,
    /// Slots per layer beyond one per expert, for `semmoe solve --redundant`.
    pub redundant_slots: u64,
}

/// Resident expert domains that shorten a plan's decoding step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResidentDomains {
    /// The argument of `semmoe worker --domains`.
    pub domains: String,
    /// Seconds of a decoding step without and with them.
    pub step_seconds: [f64; 2],
    /// Bytes of experts on a GPU, all layers.
    pub expert_bytes: f64,
}

/// HybridEP's view of a decoding step.
struct Exchange {
    stream: Stream,
    levels: Vec<HybridLevel>,
    /// Experts that stay on a GPU.
    resident: Use,
}

/// Domains for the decoding step of a plan with whole experts; `None` if its experts are sliced or on one rank.
///
/// # Errors
/// [`PlanError::Value`] if the plan's figures are invalid.
pub fn replication(question: &Question<'_>, plan: &Candidate) -> Result<Option<Replication>, PlanError> {
    let Some(Exchange { stream, levels, resident }) = exchange(question, plan) else { return Ok(None) };
    let resident = best_domains(&stream, &levels, resident)?;
    let copies: u64 = resident.domains.iter().product();
    let streamed = best_domains(&stream, &levels, Use::Streamed)?;
    Ok(Some(Replication { redundant_slots: question.shape.experts * (copies - 1), resident, streamed }))
}

/// The domains that shorten a plan's decoding step most, in memory that its cache does not need; `None` if the gain is
/// below 1%. In domains of S, a rank computes the tokens of one in S ranks for S times as many experts: fewer bytes are
/// sent, and more experts are read.
///
/// # Errors
/// [`PlanError::Value`] if the plan's figures are invalid.
pub fn resident_domains(question: &Question<'_>, plan: &Candidate) -> Result<Option<ResidentDomains>, PlanError> {
    let Some(found) = exchange(question, plan) else { return Ok(None) };
    let (shape, constants) = (question.shape, question.constants);
    let (before, load) = (plan.decode.total(), question.workload.load(1.0));
    let exposed = shape.moe_layers as f64 * (1.0 - constants.overlap_share.min(1.0));
    let seconds = |choice: &Choice| {
        let size = choice.domains.iter().product::<u64>();
        let layout = Layout { expert_ep: plan.layout.expert_ep / size, ..plan.layout };
        let work = decoding(plan.at_load.concurrency.max(1.0) / size as f64, &load);
        let experts = step(&question.target(layout), &work)[Part::Experts] - plan.decode[Part::Experts];
        before + experts - exposed * (choice.ep_seconds - choice.seconds)
    };
    let choices = domain_choices(&found.stream, &found.levels, found.resident)?
        .into_iter()
        .map(|choice| (seconds(&choice), choice));
    let best = choices.min_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(best.filter(|(seconds, _)| *seconds < before * (1.0 - WORTH)).map(|(seconds, choice)| ResidentDomains {
        domains: argument(&choice.domains, &found.levels),
        step_seconds: [before, seconds],
        expert_bytes: choice.expert_bytes * shape.moe_layers as f64,
    }))
}

/// Domain sizes, outermost first, formatted as an argument.
fn argument(domains: &[u64], levels: &[HybridLevel]) -> String {
    let mut crossed = domains.iter().zip(levels).filter(|(_, level)| level.workers > 1);
    let outermost = crossed.next().map_or(1, |(size, _)| *size);
    crossed.fold(outermost.to_string(), |text, (size, level)| format!("{text}:{size}/{}", level.workers))
}

/// `None` under the conditions of [`replication`], and if levels do not divide the ranks evenly.
fn exchange(question: &Question<'_>, plan: &Candidate) -> Option<Exchange> {
    let (shape, layout, constants) = (question.shape, plan.layout, question.constants);
    let levels = levels(question.cluster, layout.expert_ep, constants);
    let ranks: u64 = levels.iter().map(|level| level.workers).product();
    if layout.expert_tp > 1 || layout.expert_ep < 2 || layout.pipeline > 1 || ranks != layout.expert_ep {
        return None;
    }
    let tokens = (plan.at_load.concurrency / layout.attention_dp as f64).max(1.0) / layout.attention_tp as f64;
    let copies = question.target(layout).copies();
    let attention = [Part::AttentionProducts, Part::AttentionCore, Part::AttentionReduce];
    let attention: f64 = attention.map(|part| plan.decode[part]).iter().sum();
    let stream = Stream {
        workers: layout.expert_ep,
        bytes_per_second: 1.0,
        before_experts: attention / shape.layers as f64,
        // A token is sent once to each rank with some of its experts.
        data_bytes: tokens * copies * shape.hidden as f64 * constants.combine_bytes,
        expert_bytes: plan.memory.expert_bytes / shape.moe_layers as f64,
    };
    let context = question.workload.input.mean() + question.workload.output.mean();
    let used = plan.at_load.concurrency / layout.attention_dp as f64 * context / plan.memory.cache_tokens;
    let memory = plan.memory.expert_bytes + plan.memory.cache_bytes * (1.0 - used.min(1.0));
    Some(Exchange { stream, levels, resident: Use::Resident { memory, layers: shape.moe_layers } })
}

/// The levels between `ranks` neighbours, outermost first.
fn levels(cluster: &Cluster, ranks: u64, constants: &Constants) -> Vec<HybridLevel> {
    let mut left = ranks;
    let mut levels = Vec::new();
    for (at, level) in cluster.levels.iter().enumerate() {
        let workers = if at + 1 == cluster.levels.len() { left } else { level.count.min(left) };
        levels.push(HybridLevel { workers, bytes_per_second: level.bytes_per_second * constants.link_bandwidth_share });
        left = left.div_ceil(workers);
    }
    levels.reverse();
    levels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::search;
    use crate::tests::fixtures::{h200, qwen3_235b};
    use crate::workload::Workload;

    #[test]
    fn replicas_of_a_plan() {
        let (shape, cluster) = (qwen3_235b(), h200(2));
        let constants = Constants { link_bandwidth_share: 280.0 / 450.0, ..Constants::uncalibrated() };
        let text = "requests_per_second = 2\ninput_tokens = 1024\noutput_tokens = 512\n";
        let workload = Workload::from_toml("w", text).unwrap();
        let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
        let plan = search(&question).unwrap();
        let whole = plan.ranked.iter().find(|plan| plan.layout.expert_ep == 16).unwrap();
        let found = replication(&question, whole).unwrap().unwrap();
        assert_eq!(found.resident.domains.len(), 2);
        assert!(found.resident.domains[0] == 2, "replicas on both nodes leave the slow links: {found:?}");
        assert!(found.resident.seconds < found.resident.ep_seconds);
        let copies: u64 = found.resident.domains.iter().product();
        assert_eq!(found.redundant_slots, 128 * (copies - 1));
        let sliced = plan.ranked.iter().find(|plan| plan.layout.expert_ep == 1).unwrap();
        assert_eq!(replication(&question, sliced).unwrap(), None);
        assert_eq!(resident_domains(&question, sliced).unwrap(), None);
    }

    /// On two nodes with slow links domains span both; on one fast level they would only read more.
    #[test]
    fn domains_are_proposed_where_links_cost_more_than_reading() {
        let (shape, constants) = (qwen3_235b(), Constants::uncalibrated());
        let text = "requests_per_second = 0.05\ninput_tokens = 1024\noutput_tokens = 512\n";
        let workload = Workload::from_toml("w", text).unwrap();
        let whole = Layout { pipeline: 1, attention_tp: 1, attention_dp: 16, expert_tp: 1, expert_ep: 16 };
        let of = |bytes_per_second: f64, memory: f64| {
            let mut cluster = h200(2);
            (cluster.levels[1].bytes_per_second, cluster.gpu.memory) = (bytes_per_second, memory);
            let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
            let plan = search(&question).unwrap();
            let plan = plan.ranked.iter().find(|plan| plan.layout == whole).unwrap().clone();
            resident_domains(&question, &plan).unwrap()
        };
        let slow = of(1e9, 141e9).unwrap();
        assert_eq!(slow.domains, "2:1/8");
        assert!(slow.step_seconds[1] < 0.9 * slow.step_seconds[0] && slow.expert_bytes > 50e9, "{slow:?}");
        assert_eq!(of(1e12, 141e9), None, "nothing to gain");
        assert_eq!(of(1e9, 70e9), None, "no memory");
    }

    #[test]
    fn domains_are_written_as_the_worker_reads_them() {
        let levels = |workers: &[u64]| -> Vec<HybridLevel> {
            workers.iter().map(|&workers| HybridLevel { workers, bytes_per_second: 1.0 }).collect()
        };
        for (domains, workers, text) in [
            (&[4][..], &[8][..], "4"),
            (&[2, 1], &[2, 8], "2:1/8"),
            (&[1, 2], &[1, 8], "2"),
            (&[1, 1, 2], &[2, 1, 4], "1:2/4"),
        ] {
            assert_eq!(argument(domains, &levels(workers)), text);
        }
    }
}
