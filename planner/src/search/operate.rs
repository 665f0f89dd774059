//! Operating points: a layout's behaviour at a given number of requests in flight or at a given request rate.

use serde::Serialize;

use crate::layout::Infeasible;
use crate::memory::Memory;
use crate::mixserve::{class_waits, waiting};
use crate::step::{StepTerms, Target, decoding, predict, prefill_occupancy, prompts, step};
use crate::workload::Workload;

/// Growth factor of the requests in flight between points of a curve.
const GROWTH: f64 = 1.25;
/// Number of bisection steps to find a rate.
const HALVINGS: u32 = 40;

/// A layout's steady state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Operating {
    /// Requests per second over all units.
    pub requests_per_second: f64,
    /// Mean number of requests that one unit decodes at a time.
    pub concurrency: f64,
    /// Mean seconds until the prefill begins, over all classes.
    pub wait: f64,
    /// Mean seconds to the first token.
    pub ttft: f64,
    /// Mean seconds between tokens.
    pub itl: f64,
    /// Mean seconds per request.
    pub request_seconds: f64,
    /// Generated tokens per second and GPU, including GPUs that no unit uses.
    pub tokens_per_second_per_gpu: f64,
    /// US dollars per million generated tokens, if the GPU price is known.
    pub usd_per_million_tokens: Option<f64>,
}

/// A layout that serves a workload.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    target: Target<'a>,
    workload: &'a Workload,
    units: f64,
    /// Seconds of a single prompt's prefill.
    ttft: f64,
    /// Number of sequences that fit in a unit's KV cache.
    most: f64,
}

impl<'a> Served<'a> {
    /// Creates the model of `units` equal units in this layout.
    ///
    /// # Errors
    /// [`Infeasible::Cache`] if the longest sequence does not fit in a rank's cache.
    pub fn new(target: Target<'a>, workload: &'a Workload, units: u64, memory: &Memory) -> Result<Self, Infeasible> {
        let longest = workload.input.quantile(1.0) + workload.output.quantile(1.0);
        if memory.cache_tokens < longest {
            return Err(Infeasible::Cache { held: memory.cache_tokens, needed: longest });
        }
        let load = workload.load(1.0);
        Ok(Self {
            target,
            workload,
            units: units as f64,
            ttft: predict(&target, &load).ttft,
            most: memory.unit_tokens(&target.layout) / (load.input_tokens + load.output_tokens),
        })
    }

    /// Returns the parts of a decoding step with this many requests in flight per unit.
    pub fn decode(&self, concurrency: f64) -> StepTerms {
        step(&self.target, &decoding(concurrency.max(1.0), &self.workload.load(1.0)))
    }

    /// Returns the parts of one prompt's prefill.
    pub fn prefill(&self) -> StepTerms {
        step(&self.target, &prompts(1.0, &self.workload.load(1.0)))
    }

    /// Returns the requests per second of a unit that decodes `concurrency` requests. Prefills take part of the time
    /// and decoding the rest, so `rate x output = (1 - rate x occupancy) x concurrency / step`.
    fn rate(&self, concurrency: f64) -> f64 {
        let tokens = concurrency / self.decode(concurrency).total();
        tokens / (self.workload.output.mean() + tokens * self.occupancy(concurrency))
    }

    /// Returns the seconds of a unit's time that each prompt takes.
    fn occupancy(&self, concurrency: f64) -> f64 {
        prefill_occupancy(&self.target, &self.workload.load(concurrency))
    }

    fn operating(&self, concurrency: f64) -> Operating {
        let (rate, occupancy) = (self.rate(concurrency), self.occupancy(concurrency));
        let groups = self.target.layout.attention_dp as f64;
        let step = self.decode(concurrency).total();
        let itl = step / (1.0 - rate * occupancy);
        // Each attention-DP group has its own queue, whose prefills take `groups` times the unit's occupancy. On
        // average, a request also waits for half of the running step.
        let queue = waiting(rate / groups, 1.0 / (occupancy * groups), "requests/s").unwrap_or(f64::INFINITY);
        let wait = queue + step / 2.0;
        let output = self.workload.output.mean();
        let (gpus, requests) = (self.target.cluster.gpus() as f64, rate * self.units);
        let ttft = wait + self.ttft;
        let usd_a_second = self.target.cluster.usd_per_gpu_hour.map(|usd| usd * gpus / 3600.0);
        Operating {
            requests_per_second: requests,
            concurrency,
            wait,
            ttft,
            itl,
            request_seconds: ttft + output * itl,
            tokens_per_second_per_gpu: requests * output / gpus,
            usd_per_million_tokens: usd_a_second.map(|usd| usd / (requests * output) * 1e6),
        }
    }

    /// Returns the operating points from one request in flight to a full cache.
    pub fn curve(&self) -> Vec<Operating> {
        let growing = std::iter::successors(Some(1.0), |concurrency| Some(concurrency * GROWTH));
        let all = growing.take_while(|concurrency| *concurrency < self.most).chain([self.most]);
        all.map(|concurrency| self.operating(concurrency)).collect()
    }

    /// Returns the operating point at which all units together serve `rate` requests per second.
    ///
    /// # Errors
    /// [`Infeasible::Unstable`] if the units cannot serve this rate even with full caches.
    pub fn at_rate(&self, rate: f64) -> Result<Operating, Infeasible> {
        let wanted = rate / self.units;
        let served = self.rate(self.most);
        if wanted >= served {
            return Err(Infeasible::Unstable { wanted, served });
        }
        let (mut low, mut high) = (0.0, self.most);
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if self.rate(middle) < wanted { low = middle } else { high = middle }
        }
        Ok(self.operating(high))
    }

    /// Whether the mean request and every class meet their limits.
    pub fn within_limits(&self, at: &Operating) -> bool {
        if !self.workload.objective.met(at.ttft, at.itl) {
            return false;
        }
        let shares: Vec<f64> = self.workload.classes.iter().map(|class| class.share).collect();
        let groups = self.target.layout.attention_dp as f64;
        let (rate, served) =
            (at.requests_per_second / self.units / groups, 1.0 / (self.occupancy(at.concurrency) * groups));
        let Ok(waits) = class_waits(rate, served, &shares, "requests/s") else { return false };
        let mean: f64 = waits.iter().zip(&shares).map(|(wait, share)| wait * share).sum();
        let kept = |(class, wait): (&crate::workload::Class, &f64)| class.objective.met(at.ttft - mean + wait, at.itl);
        self.workload.classes.iter().zip(&waits).all(kept)
    }
}
