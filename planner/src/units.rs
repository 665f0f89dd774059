//! How many units of a cluster should run sliced experts (TP) and how many whole ones (EP) under a trace: replays each
//! split with fixed units, and for comparison all units under the switch policy ([`crate::policy`]).
//!
//! Step times come from the model. A request goes to the unit with the fewest in flight; a step decodes one token for
//! each running sequence and computes a chunk of waiting prompts.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::Serialize;

use crate::policy::{
    Adaptive, ByLayout, Decision, Event, Fixed, Layout, LayoutPrior, Point, Prior, Settings, Step, StepCurve,
    SwitchCost, SwitchPolicy, UnitView,
};
use crate::search::{Operating, Question, candidate, limited, order};
use crate::step::prefill_occupancy;
use crate::switching::{NoSwitch, StepPair, SwitchUnit, Switching, switching};

/// Maximum requests of a trace that are replayed, from its beginning.
pub const MAX_REQUESTS: usize = 20_000;
/// Maximum splits that are replayed, evenly spaced.
const MAX_SPLITS: u64 = 9;
/// Prompt tokens of one step.
const CHUNK_TOKENS: u64 = 8192;

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Seconds since any fixed origin, in order.
    pub seconds: f64,
    /// Prompt tokens.
    pub input_tokens: u64,
    /// Answer tokens, at least 1.
    pub output_tokens: u64,
}

/// The result of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Replayed {
    /// Units with whole experts; for the adaptive policy the mean over time.
    pub ep_units: f64,
    /// Mean seconds from arrival to the last token.
    pub request_seconds: f64,
    /// Layout switches of all units.
    pub switches: u64,
}

/// Splits of the units under a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnitMix {
    /// Units of the cluster.
    pub units: u64,
    /// GPUs of each.
    pub gpus: u64,
    /// Requests that were replayed.
    pub requests: usize,
    /// Fixed splits, by units with whole experts.
    pub splits: Vec<Replayed>,
    /// The split with the lowest mean request time.
    pub best: Replayed,
    /// Every unit under the policy.
    pub adaptive: Replayed,
}

/// A unit that can switch to independent groups, and how it serves the load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupSwitch {
    /// The effect of switching.
    #[serde(flatten)]
    pub switching: Switching,
    /// The groups at the workload's rate; `None` if they cannot serve it.
    pub at_load: Option<Operating>,
    /// Whether the groups then meet all limits, including those of each priority class.
    pub within_limits: bool,
    /// The replayed trace, if one is given.
    pub units: Option<UnitMix>,
}

/// Chooses N and P: returns every division of a unit into groups that runs, best first. With a trace, divisions are
/// ordered by mean request time under the switch policy. Without one, they are ordered as a plan ranks their groups, by
/// limits and priority classes.
///
/// # Errors
/// [`NoSwitch::Policy`] or [`NoSwitch::Plan`] for invalid settings. Divisions that cannot run are left out.
pub fn group_switches(
    question: &Question<'_>,
    concurrency: f64,
    trace: Option<&[Arrival]>,
) -> Result<Vec<GroupSwitch>, NoSwitch> {
    let mut found = Vec::new();
    for unit in SwitchUnit::divided(question.cluster) {
        let switching = match switching(question, unit, concurrency) {
            Err(NoSwitch::Infeasible { .. } | NoSwitch::Buffer { .. }) => continue,
            other => other?,
        };
        let groups = candidate(question, unit.layouts().tp, question.cluster.gpus() / unit.group_gpus).ok();
        let groups = groups.map(|(groups, _)| groups);
        let units = trace.map(|trace| unit_mix(question, &switching, trace)).transpose()?;
        let replayed = units.as_ref().map_or(0.0, |units| units.adaptive.request_seconds);
        let ranked = groups.as_ref().map_or(f64::INFINITY, |groups| order(groups, limited(question.workload)));
        let at_load = groups.as_ref().map(|groups| groups.at_load);
        let within_limits = groups.is_some_and(|groups| groups.within_limits);
        found.push(((replayed, ranked), GroupSwitch { switching, at_load, within_limits, units }));
    }
    found.sort_by(|((a, first), _), ((b, second), _)| a.total_cmp(b).then(first.total_cmp(second)));
    Ok(found.into_iter().map(|(_, groups)| groups).collect())
}

/// Replays a trace on units that switch.
///
/// # Errors
/// [`NoSwitch`] if one of the layouts cannot run there.
pub fn unit_mix(question: &Question<'_>, switching: &Switching, trace: &[Arrival]) -> Result<UnitMix, NoSwitch> {
    let plan = UnitPlan::of(question, switching);
    let units = question.cluster.gpus() / switching.gpus.max(1);
    let trace = &trace[..trace.len().min(MAX_REQUESTS)];
    let stride = units.div_ceil(MAX_SPLITS - 1).max(1);
    let counts = (0..=units).step_by(stride as usize).chain((!units.is_multiple_of(stride)).then_some(units));
    let fixed = |ep: u64| {
        let unit = |at: u64| {
            let layout = if at < ep { Layout::Ep } else { Layout::Tp };
            Unit::new(&plan, layout, Box::new(Fixed { layout }))
        };
        Replayed { ep_units: ep as f64, ..replay((0..units).map(unit).collect(), trace) }
    };
    let splits: Vec<Replayed> = counts.map(fixed).collect();
    let least = |a: &&Replayed, b: &&Replayed| a.request_seconds.total_cmp(&b.request_seconds);
    let best = splits.iter().min_by(least).copied();
    let start = Adaptive::start_layout(&plan.prior, 1).unwrap_or(Layout::Ep);
    let adaptive =
        (0..units).map(|_| Ok(Unit::new(&plan, start, Box::new(plan.policy()?)))).collect::<Result<_, NoSwitch>>()?;
    let adaptive = replay(adaptive, trace);
    let best = best.unwrap_or(adaptive);
    Ok(UnitMix { units, gpus: switching.gpus, requests: trace.len(), splits, best, adaptive })
}

/// Data that all units share.
struct UnitPlan {
    prior: Prior,
    prefill: ByLayout<f64>,
    cost: SwitchCost,
    room: ByLayout<u64>,
    most_sequences: u32,
}

impl UnitPlan {
    fn of(question: &Question<'_>, switching: &Switching) -> Self {
        let (shape, unit) = (question.shape, switching.unit);
        let layouts = unit.layouts();
        // Enough requests for every rank to prefill at once.
        let requests = switching.gpus as f64 * question.workload.output.mean();
        let prefill = |layout, copies: u64| {
            let load = question.workload.load(requests / copies as f64);
            copies as f64 * load.input_tokens / prefill_occupancy(&question.target(layout), &load)
        };
        let curve = |of: fn(&StepPair) -> f64| {
            let points = switching.steps.iter();
            let points = points.map(|pair| Point { sequences: pair.sequences as u32, seconds: of(pair) }).collect();
            StepCurve::new(points).ok()
        };
        let prefill = ByLayout { tp: prefill(layouts.tp, unit.groups), ep: prefill(layouts.ep, 1) };
        let prior = |steps, rate| LayoutPrior { steps, prefill_tokens_per_second: Some(rate) };
        let bandwidth = question.cluster.levels.first().map_or(1.0, |level| level.bytes_per_second);
        Self {
            prior: ByLayout {
                tp: prior(curve(|pair| pair.tp), prefill.tp),
                ep: prior(curve(|pair| pair.ep), prefill.ep),
            },
            prefill,
            cost: SwitchCost {
                ranks: switching.gpus as u32,
                weight_bytes: 0,
                token_bytes: ByLayout {
                    tp: shape.kv_moved_to_tp(unit.group_gpus) as u64,
                    ep: shape.kv_moved_to_ep(unit.group_gpus) as u64,
                },
                bytes_per_second: bandwidth * question.constants.link_bandwidth_share,
                // An overestimate on the way back from several groups, which already hold all experts.
                fixed_seconds: switching.weight_seconds,
            },
            room: ByLayout { tp: switching.room_tokens.tp as u64, ep: switching.room_tokens.ep as u64 },
            most_sequences: switching.steps.last().map_or(1, |pair| pair.sequences as u32),
        }
    }

    fn policy(&self) -> Result<Adaptive, NoSwitch> {
        let settings = Settings { max_sequences: self.most_sequences, ..Settings::default() };
        Ok(Adaptive::new(settings, self.prior.clone(), self.cost, self.room)?)
    }
}

/// A request in a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Running {
    /// The step that generates its last token.
    ends: u64,
    /// Index in the trace.
    request: usize,
    /// Tokens in its cache at the end.
    tokens: u64,
}

struct Unit<'a> {
    plan: &'a UnitPlan,
    policy: Box<dyn SwitchPolicy>,
    layout: Layout,
    now: f64,
    steps: u64,
    running: BinaryHeap<Reverse<Running>>,
    /// Requests and their uncomputed prompt tokens.
    waiting: VecDeque<(usize, Arrival, u64)>,
    /// Total of those tokens.
    waiting_tokens: u64,
    held: u64,
    ep_seconds: f64,
    switches: u64,
}

fn replay(mut units: Vec<Unit<'_>>, trace: &[Arrival]) -> Replayed {
    let mut ends = vec![0.0; trace.len()];
    for (request, arrival) in trace.iter().enumerate() {
        units.iter_mut().for_each(|unit| unit.advance(arrival.seconds, trace, &mut ends));
        let fewest = units.iter_mut().min_by_key(|unit| unit.running.len() + unit.waiting.len());
        if let Some(unit) = fewest {
            let prompt_tokens = u32::try_from(arrival.input_tokens).unwrap_or(u32::MAX);
            unit.policy.observe(unit.now, &Event::Arrived { prompt_tokens });
            unit.waiting.push_back((request, *arrival, arrival.input_tokens.max(1)));
            unit.waiting_tokens += arrival.input_tokens.max(1);
        }
    }
    units.iter_mut().for_each(|unit| unit.advance(f64::INFINITY, trace, &mut ends));
    let first = trace.first().map_or(0.0, |arrival| arrival.seconds);
    let last = ends.iter().copied().fold(first, f64::max);
    let waited: f64 = ends.iter().zip(trace).map(|(end, arrival)| end - arrival.seconds).sum();
    Replayed {
        ep_units: units.iter().map(|unit| unit.ep_seconds).sum::<f64>() / (last - first).max(f64::MIN_POSITIVE),
        request_seconds: waited / trace.len().max(1) as f64,
        switches: units.iter().map(|unit| unit.switches).sum(),
    }
}

impl<'a> Unit<'a> {
    fn new(plan: &'a UnitPlan, layout: Layout, policy: Box<dyn SwitchPolicy>) -> Self {
        let (running, waiting) = (BinaryHeap::new(), VecDeque::new());
        Self {
            plan,
            policy,
            layout,
            now: 0.0,
            steps: 0,
            running,
            waiting,
            waiting_tokens: 0,
            held: 0,
            ep_seconds: 0.0,
            switches: 0,
        }
    }

    /// Steps until `until`, or until nothing is left.
    fn advance(&mut self, until: f64, trace: &[Arrival], ends: &mut [f64]) {
        while self.now < until && !(self.running.is_empty() && self.waiting.is_empty()) {
            self.decide();
            self.step(trace, ends);
        }
        if until.is_finite() && self.now < until {
            self.pass(until - self.now);
        }
    }

    fn pass(&mut self, seconds: f64) {
        self.now += seconds;
        self.ep_seconds += if self.layout == Layout::Ep { seconds } else { 0.0 };
    }

    fn decide(&mut self) {
        let view = UnitView {
            layout: self.layout,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            waiting_tokens: self.waiting_tokens,
            live_kv_tokens: self.held,
            promised_kv_tokens: self.held,
            blocked: false,
            heads: &[],
        };
        if let Decision::Switch(switch) = self.policy.decide(self.now, &view) {
            let seconds = self.plan.cost.seconds(switch.to, self.held);
            self.pass(seconds);
            self.layout = switch.to;
            self.switches += 1;
            self.policy.observe(self.now, &Event::Switched { to: switch.to, seconds, kv_tokens: self.held });
        }
    }

    fn step(&mut self, trace: &[Arrival], ends: &mut [f64]) {
        let sequences = (self.running.len() as u32).min(self.plan.most_sequences);
        let mut prompt = 0;
        // Prompts are computed in order; one that does not fit the cache waits for running sequences to end.
        while prompt < CHUNK_TOKENS {
            let Some((request, arrival, left)) = self.waiting.front_mut() else { break };
            let tokens = arrival.input_tokens.saturating_add(arrival.output_tokens);
            let fits = self.held.saturating_add(tokens) <= self.plan.room[self.layout] || self.running.is_empty();
            if !fits || self.running.len() as u32 >= self.plan.most_sequences {
                break;
            }
            let chunk = (*left).min(CHUNK_TOKENS - prompt);
            (*left, prompt) = (*left - chunk, prompt + chunk);
            self.waiting_tokens -= chunk;
            if *left == 0 {
                let ends = self.steps + arrival.output_tokens.max(1);
                let running = Running { ends, request: *request, tokens };
                self.held += tokens;
                self.running.push(Reverse(running));
                self.waiting.pop_front();
            }
        }
        let curve = self.plan.prior[self.layout].steps.as_ref();
        let decode = if sequences > 0 { curve.and_then(|curve| curve.seconds(sequences)).unwrap_or(0.0) } else { 0.0 };
        let seconds = (decode + prompt as f64 / self.plan.prefill[self.layout]).max(f64::MIN_POSITIVE);
        self.pass(seconds);
        self.steps += 1;
        let step = Step { layout: self.layout, sequences, prompt_tokens: prompt as u32, seconds };
        self.policy.observe(self.now, &Event::Stepped(step));
        while let Some(Reverse(done)) = self.running.peek().copied().filter(|Reverse(first)| first.ends <= self.steps) {
            debug_assert!(done.request < trace.len());
            self.running.pop();
            self.held -= done.tokens;
            ends[done.request] = self.now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::ModelShape;
    use crate::step::Constants;
    use crate::tests::fixtures::{OLMOE, h200, qwen3_235b, shape};
    use crate::workload::Workload;

    /// Calls `judge` with a question about 512 prompt and 256 answer tokens on nodes of 8 GPUs.
    fn ask<T>(shape: &ModelShape, nodes: u64, limits: &str, judge: impl FnOnce(&Question<'_>) -> T) -> T {
        let (cluster, constants) = (h200(nodes), Constants::uncalibrated());
        let text = format!("requests_per_second = 1\ninput_tokens = 512\noutput_tokens = 256\n{limits}");
        let workload = Workload::from_toml("w", &text).unwrap();
        judge(&Question { shape, cluster: &cluster, workload: &workload, constants: &constants })
    }

    fn mix(nodes: u64, trace: &[Arrival]) -> UnitMix {
        ask(&qwen3_235b(), nodes, "", |question| {
            let unit = SwitchUnit::innermost(question.cluster);
            unit_mix(question, &switching(question, unit, 1.0).unwrap(), trace).unwrap()
        })
    }

    fn groups(limits: &str, trace: Option<&[Arrival]>) -> Vec<(u64, u64, bool)> {
        ask(&shape(OLMOE), 2, limits, |question| {
            let found = group_switches(question, 1.0, trace).unwrap();
            let unit = |found: &GroupSwitch| {
                let unit = found.switching.unit;
                (unit.groups, unit.group_gpus, found.within_limits)
            };
            found.iter().map(unit).collect()
        })
    }

    fn trace(requests: usize, per_second: f64) -> Vec<Arrival> {
        let at = |request| Arrival { seconds: request as f64 / per_second, input_tokens: 512, output_tokens: 256 };
        (0..requests).map(at).collect()
    }

    /// A low load favours slices on every unit.
    #[test]
    fn a_light_load_runs_slices() {
        let found = mix(2, &trace(40, 0.5));
        assert_eq!((found.units, found.gpus, found.splits.len()), (2, 8, 3));
        assert_eq!((found.best.ep_units, found.adaptive.switches), (0.0, 0));
        assert!(found.adaptive.request_seconds <= found.best.request_seconds * 1.01, "{found:?}");
    }

    #[test]
    fn every_request_ends_and_more_load_never_ends_sooner() {
        let (light, heavy) = (mix(1, &trace(300, 5.0)), mix(1, &trace(300, 500.0)));
        for (light, heavy) in light.splits.iter().zip(&heavy.splits) {
            assert!(light.request_seconds > 0.0 && heavy.request_seconds > light.request_seconds);
        }
        let empty = mix(1, &[]);
        assert_eq!((empty.requests, empty.best.request_seconds), (0, 0.0));
        assert_eq!(mix(1, &trace(MAX_REQUESTS + 5, 1e6)).requests, MAX_REQUESTS);
    }

    /// OLMoE on two nodes: only groups of eight meet the limit of a token; under heavy traffic a node of its own beats
    /// whole experts over both.
    #[test]
    fn groups_are_chosen_by_load_and_limits() {
        let all = groups("", None);
        assert_eq!((all.len(), all[0]), (5, (2, 8, true)));
        let limited = groups("itl_ms = 2\n", None);
        assert_eq!(limited[0], (2, 8, true));
        assert!(limited[1..].iter().all(|(_, _, within)| !within), "{limited:?}");
        assert_eq!(groups("", Some(&trace(100, 1.0)))[0].1, 8);
        assert_eq!(groups("", Some(&trace(3000, 100.0)))[0], (2, 4, true));
    }
}
