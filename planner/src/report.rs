//! A plan's answer, as text and as a serialisable value.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use serde::Serialize;

use crate::affinity::Gain;
use crate::calibration::Accuracy;
use crate::flags::{Launch, sglang, vllm};
use crate::layout::RankPart;
use crate::memory::Memory;
use crate::search::{Candidate, Plan, Question};
use crate::step::{Constants, Term};

/// A complete plan.
#[derive(Clone, Debug, Serialize)]
pub struct Answer<'a> {
    /// The model's parameters.
    pub parameters: u64,
    /// Bytes of the model's weights.
    pub weight_bytes: f64,
    /// Number of GPUs in the cluster.
    pub gpus: u64,
    /// The kind of GPU.
    pub gpu: &'a str,
    /// Source of the GPU's figures.
    pub gpu_source: &'a str,
    /// The expected error of predicted times.
    pub accuracy: Accuracy,
    /// The engine's constants.
    pub constants: Constants,
    /// Ranked and rejected layouts, and the Pareto front.
    pub plan: &'a Plan,
    /// How to launch the best plan in SGLang.
    pub sglang: Option<Launch>,
    /// How to launch the best plan in vLLM.
    pub vllm: Option<Launch>,
    /// Each rank's part of the model in a unit of the best plan.
    pub partition: Vec<RankPart>,
    /// The gain from affinity, if requested.
    pub affinity: Vec<Judged>,
}

/// The gain from affinity for one kind of step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Decoding, prefill, or a measured step.
    pub step: String,
    /// Number of units and their layout, or the deployment's name.
    pub layout: String,
    /// The gain.
    pub gain: Gain,
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, layout, gain } = self;
        write!(f, "affinity, {step} of {layout}: {gain}")
    }
}

impl<'a> Answer<'a> {
    /// Builds the answer to `question` from the search's `plan`.
    pub fn new(question: &Question<'a>, plan: &'a Plan, accuracy: Accuracy, affinity: Vec<Judged>) -> Self {
        let host = question.cluster.levels.first().map_or(1, |level| level.count);
        let (shape, best) = (question.shape, plan.ranked.first());
        let bytes = shape.routed_parameters() as f64 * shape.precision.experts.bytes()
            + (shape.attention_parameters() + shape.dense_parameters()) as f64 * shape.precision.dense.bytes()
            + (shape.embedding_parameters() + shape.small_parameters) as f64 * shape.precision.other.bytes();
        Self {
            parameters: shape.parameters(),
            weight_bytes: bytes,
            gpus: question.cluster.gpus(),
            gpu: &question.cluster.gpu.name,
            gpu_source: &question.cluster.gpu.source,
            accuracy,
            constants: *question.constants,
            plan,
            sglang: best.map(|best| sglang(&best.layout, host)),
            vllm: best.map(|best| vllm(&best.layout, host)),
            partition: best.and_then(|best| best.layout.partition(shape).ok()).unwrap_or_default(),
            affinity,
        }
    }

    /// Writes the answer as text: `rows` rows of the ranked list and, with `explain`, every term and every reason.
    ///
    /// # Errors
    /// Only if the writer fails.
    pub fn write(&self, rows: usize, explain: bool, out: &mut impl Write) -> fmt::Result {
        let (ranked, rejected) = (&self.plan.ranked, &self.plan.rejected);
        writeln!(out, "{:.1} B parameters, {:.1} GB", self.parameters as f64 / 1e9, self.weight_bytes / 1e9)?;
        writeln!(out, "{} x {} ({})", self.gpus, self.gpu, self.gpu_source)?;
        let served = ranked.len();
        writeln!(out, "{} strategies: {served} can serve the load, {} cannot", self.plan.strategies, rejected.len())?;
        writeln!(out, "modelled, {}", self.accuracy)?;
        if served > 0 {
            self.table(rows, out)?;
        }
        self.reasons(explain, out)?;
        for (engine, launch) in [("SGLang", &self.sglang), ("vLLM", &self.vllm)] {
            if let Some(Launch::Command(text) | Launch::Impossible(text)) = launch {
                writeln!(out, "{engine}: {text}")?;
            }
        }
        for judged in &self.affinity {
            writeln!(out, "{judged}")?;
        }
        match ranked.first() {
            Some(best) if explain => self.explain(best, out),
            _ => Ok(()),
        }
    }

    fn table(&self, rows: usize, out: &mut impl Write) -> fmt::Result {
        writeln!(
            out,
            "\nrank units  attention, experts          TTFT ms   ITL ms in flight weight GB  cache tok  max req/s  $/M tok  limits"
        )?;
        for (at, candidate) in self.plan.ranked.iter().take(rows).enumerate() {
            let load = &candidate.at_load;
            let best = candidate.best.map_or("-".to_owned(), |best| format!("{:.2}", best.requests_per_second));
            let price = load.usd_per_million_tokens.map_or("-".to_owned(), |usd| format!("{usd:.2}"));
            writeln!(
                out,
                "{:>4} {:>5}  {:<26} {:>8.0} {:>8.1} {:>9.1} {:>9.1} {:>10.0} {best:>10} {price:>8}  {:<6}",
                at + 1,
                candidate.units,
                candidate.layout.name(),
                load.ttft * 1e3,
                load.itl * 1e3,
                load.concurrency,
                candidate.memory.weight_bytes() / 1e9,
                candidate.memory.cache_tokens,
                if candidate.within_limits { "kept" } else { "broken" },
            )?;
        }
        writeln!(out)
    }

    /// Writes why strategies were rejected: all reasons, or a count and one example per kind.
    fn reasons(&self, all: bool, out: &mut impl Write) -> fmt::Result {
        let mut kinds = BTreeMap::<&str, (usize, String)>::new();
        for rejected in &self.plan.rejected {
            let name = rejected.layout.name();
            let reason = format!("{} x {name}: {}", rejected.units, rejected.reason);
            if all {
                writeln!(out, "rejected {reason}")?;
            }
            kinds.entry(rejected.reason.kind()).or_insert((0, reason)).0 += 1;
        }
        for (kind, (count, example)) in kinds.iter().filter(|_| !all) {
            writeln!(out, "rejected {count} ({kind}), such as {example}")?;
        }
        Ok(())
    }

    fn explain(&self, best: &Candidate, out: &mut impl Write) -> fmt::Result {
        writeln!(out, "\nthe best plan's times, ms")?;
        let (decode, prefill) = (best.decode, best.prefill);
        for (Term { name, seconds, source }, other) in decode.terms().into_iter().zip(prefill.terms()) {
            let [decode, prefill] = [seconds, other.seconds].map(|seconds| seconds * 1e3);
            writeln!(out, "  {name:<22} decode {decode:>9.3}  prefill {prefill:>9.3}  {source}")?;
        }
        writeln!(out, "  {:<22} decode {:>9.3}  prefill {:>9.3}", "sum", decode.total() * 1e3, prefill.total() * 1e3)?;
        let (load, memory) = (&best.at_load, &best.memory);
        writeln!(out, "wait {:.1} ms: MixServe eq 7 for each DP group, plus half a decoding step", load.wait * 1e3)?;
        writeln!(
            out,
            "ITL = decoding step / (1 - share of time in prefills); TTFT = wait + request_seconds + prefill (eqs 9, 10)"
        )?;
        let Memory { expert_bytes, dense_bytes, other_bytes, activation_bytes, cache_bytes, .. } = memory;
        let parts = [expert_bytes, dense_bytes, other_bytes, activation_bytes, cache_bytes].map(|bytes| bytes / 1e9);
        let [experts, dense, other, activations, cache] = parts;
        write!(out, "memory per GPU, GB: experts {experts:.2}, attention and dense {dense:.2}, other {other:.2}, ")?;
        writeln!(out, "activations {activations:.2}, cache {cache:.2} (MixServe eq 8 corrected)")?;
        writeln!(out, "constants: {:?}", self.constants)?;
        writeln!(out, "each rank loads")?;
        for RankPart { rank, layers, dp_group, heads, experts, expert_rows } in &self.partition {
            let ranges = [layers, heads, experts, expert_rows].map(|[from, to]| format!("{from}..{to}"));
            let [layers, heads, experts, rows] = ranges;
            writeln!(
                out,
                "  rank {rank}: layers {layers}, DP group {dp_group}, heads {heads}, experts {experts}, rows {rows}"
            )?;
        }
        writeln!(out, "the Pareto front: requests in flight, tokens/s per user, tokens/s per GPU")?;
        for point in &self.plan.front {
            writeln!(
                out,
                "  {} x {:<26} {:>8.1} {:>8.1} {:>9.1}",
                point.units,
                point.layout.name(),
                point.concurrency,
                point.user_tokens_per_second,
                point.gpu_tokens_per_second
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity::{Remote, StepProfile, gain};
    use crate::search::search;
    use crate::tests::fixtures::{h200, qwen3_235b};
    use crate::workload::Workload;

    #[test]
    fn an_answer_has_every_part() {
        let (shape, cluster, constants) = (qwen3_235b(), h200(2), Constants::uncalibrated());
        let text = "requests_per_second = 2\ninput_tokens = 1024\noutput_tokens = 512\nttft_ms = 800\nitl_ms = 25\n";
        let workload = Workload::from_toml("w", text).unwrap();
        let question = Question { shape: &shape, cluster: &cluster, workload: &workload, constants: &constants };
        let plan = search(&question).unwrap();
        let profile = StepProfile { compute: 0.06, bytes: 0.03, latency: 0.0, experts: 0.0, overlap: false };
        let gain = gain(&profile, &Remote::of_rates(0.125, 0.4, 0.0).unwrap(), 1.0).unwrap();
        let answer = Answer::new(
            &question,
            &plan,
            Accuracy::Uncalibrated,
            vec![Judged { step: "decoding".into(), layout: "1 x EP16".into(), gain }],
        );
        let mut text = String::new();
        answer.write(5, true, &mut text).unwrap();
        for part in [
            "235.1 B parameters, 470.2 GB",
            "16 x H200 (NVIDIA H200 data sheet",
            "modelled, uncalibrated",
            "SGLang: python -m sglang.launch_server",
            "affinity, decoding of 1 x EP16: communication is exposed",
            "rank 0: layers 0..94",
            "the Pareto front",
            "MixServe eq 7",
        ] {
            assert!(text.contains(part), "{text}\nlacks: {part}");
        }
        let json = serde_json::to_value(&answer).unwrap();
        assert_eq!(json["plan"]["strategies"], 105);
        assert!(json["plan"]["ranked"][0]["at_load"]["itl"].as_f64().unwrap() > 0.0);
        assert_eq!(json["accuracy"], "uncalibrated");
    }
}
