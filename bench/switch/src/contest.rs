//! All policies on one trace, and what each is worth.

use semmoe_bench_papers::moebius::{Moebius, MoebiusSettings};
use semmoe_bench_papers::phases::{Phase, Phases};
use semmoe_planner::policy::{Adaptive, ByLayout, Fixed, Guard, Layout, Settings, SwitchPolicy, TtftTarget};

use crate::engines::{CHUNK_TOKENS, Engine, Rates, room_tokens, switch_cost};
use crate::error::SwitchError;
use crate::traces::{Kind, Part, Trace};
use crate::unit::{Outcome, Setup, run};

/// The service level objective of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slo {
    pub(crate) ttft_seconds: f64,
    pub(crate) tpot_seconds: f64,
}

/// One cell of the comparison: an engine, a load and the objective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) rates: Rates,
    pub(crate) kind: Kind,
    pub(crate) seed: u64,
    pub(crate) part: Part,
    pub(crate) slo: Slo,
    /// Head start in the queue for each step of a request's priority, under every policy.
    pub(crate) priority_seconds: f64,
    /// Error factor of the adaptive policy's prior.
    pub(crate) wrong: ByLayout<f64>,
}

/// A policy's figures on one load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// Requests per second within the SLO; for a rollout, output tokens per second.
    pub(crate) goodput: f64,
    /// Mean over requests of the time per output token after the first.
    pub(crate) tpot_seconds: f64,
    /// 99th percentile of the time to first token.
    pub(crate) ttft_seconds: f64,
    /// 99th percentile of the time to first token of priority 1.
    pub(crate) urgent_ttft_seconds: f64,
    /// Output tokens per second until the last one.
    pub(crate) tokens_per_second: f64,
    pub(crate) switches: f64,
    /// Total time that switches stopped the unit.
    pub(crate) stopped_seconds: f64,
}

/// The figures of all policies.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Results {
    pub(crate) fixed: ByLayout<Figures>,
    pub(crate) moebius: Figures,
    pub(crate) adaptive: Figures,
    pub(crate) oracle: Option<Figures>,
    /// 99th percentile of urgent requests' time to first token if each had the better of both static layouts.
    pub(crate) urgent_floor_seconds: f64,
    /// Requests in phases whose static layout is better by 2% in TPOT.
    pub(crate) prefers: ByLayout<f64>,
}

struct Contest<'a> {
    cell: Cell<'a>,
    trace: &'a Trace,
    setup: Setup<'a>,
}

/// Runs all policies; searches the oracle only with `oracle`.
pub(crate) fn compete(cell: Cell<'_>, settings: &Settings, oracle: bool) -> Result<Results, SwitchError> {
    let trace = cell.kind.trace(cell.engine, cell.rates, cell.seed, cell.part);
    let cost = switch_cost();
    let setup = Setup {
        engine: cell.engine,
        rates: cell.rates,
        cost: &cost,
        room_tokens: room_tokens(),
        requests: &trace.requests,
        priority_seconds: cell.priority_seconds,
        seed: cell.seed,
    };
    let contest = Contest { cell, trace: &trace, setup };
    let fixed = [Layout::Tp, Layout::Ep].map(|layout| run(setup, layout, &mut Fixed { layout }));
    let [tp, ep] = &fixed;
    let moebius_settings = if trace.rollout { MoebiusSettings::ROLLOUT } else { MoebiusSettings::INTERACTIVE };
    // Moebius starts in the layout that its threshold implies.
    let moebius_start = if trace.rollout { Layout::Ep } else { Layout::Tp };
    let mut moebius = Moebius::new(moebius_settings, Guard::new(room_tokens(), 1.0, 1.0));
    let (mut adaptive, start) = contest.adaptive(settings)?;
    let preferred = contest.preferred(tp, ep);
    Ok(Results {
        fixed: ByLayout { tp: contest.figures(tp), ep: contest.figures(ep) },
        moebius: contest.figures(&run(setup, moebius_start, &mut moebius)),
        adaptive: contest.figures(&run(setup, start, &mut adaptive)),
        oracle: oracle.then(|| contest.oracle(&preferred)),
        prefers: contest.shares(&preferred),
        urgent_floor_seconds: contest.urgent_floor(tp, ep),
    })
}

/// The better layout of a phase, and its margin.
#[derive(Clone, Copy, Debug)]
struct Preferred {
    layout: Layout,
    clearly: bool,
    requests: usize,
}

impl Contest<'_> {
    fn adaptive(&self, settings: &Settings) -> Result<(Adaptive, Layout), SwitchError> {
        let prior = self.cell.engine.prior(self.cell.rates, self.cell.wrong)?;
        let max_sequences = self.cell.engine.max_sequences;
        let expected = if self.trace.rollout { max_sequences } else { 1 };
        let start = Adaptive::start_layout(&prior, expected).unwrap_or(Layout::Tp);
        let settings = Settings {
            chunk_tokens: CHUNK_TOKENS,
            max_sequences,
            ttft: match (self.trace.rollout, settings.ttft.as_slice()) {
                (true, _) => Vec::new(),
                (false, []) => vec![TtftTarget { priority: 1, seconds: self.cell.slo.ttft_seconds }],
                (false, given) => given.to_vec(),
            },
            ..settings.clone()
        };
        Ok((Adaptive::new(settings, prior, *self.setup.cost, self.setup.room_tokens)?, start))
    }

    fn tpot(&self, outcome: &Outcome, index: usize) -> Option<f64> {
        let (served, tokens) = (outcome.served[index], self.trace.requests[index].output_tokens);
        (tokens > 1).then(|| (served.last - served.first) / f64::from(tokens - 1))
    }

    fn figures(&self, outcome: &Outcome) -> Figures {
        let requests = &self.trace.requests;
        let ttft: Vec<f64> =
            outcome.served.iter().zip(requests).map(|(served, request)| served.first - request.at).collect();
        let tpot: Vec<f64> = (0..requests.len()).filter_map(|index| self.tpot(outcome, index)).collect();
        let slo = self.cell.slo;
        let good = |&index: &usize| {
            ttft[index] <= slo.ttft_seconds && self.tpot(outcome, index).is_none_or(|tpot| tpot <= slo.tpot_seconds)
        };
        let tokens_per_second =
            requests.iter().map(|request| f64::from(request.output_tokens)).sum::<f64>() / outcome.end;
        let goodput = if self.trace.rollout {
            tokens_per_second
        } else {
            let good = (0..requests.len()).filter(good).count();
            good as f64 / requests.last().map_or(1.0, |last| last.at)
        };
        let urgent = ttft.iter().zip(requests).filter(|(_, request)| request.priority == 1);
        Figures {
            goodput,
            tpot_seconds: tpot.iter().sum::<f64>() / tpot.len().max(1) as f64,
            ttft_seconds: p99(ttft.iter().copied()),
            urgent_ttft_seconds: p99(urgent.map(|(ttft, _)| *ttft)),
            tokens_per_second,
            switches: outcome.switches.into(),
            stopped_seconds: outcome.stopped_seconds,
        }
    }

    fn urgent_floor(&self, tp: &Outcome, ep: &Outcome) -> f64 {
        let requests = self.trace.requests.iter().enumerate().filter(|(_, request)| request.priority == 1);
        p99(requests.map(|(index, request)| tp.served[index].first.min(ep.served[index].first) - request.at))
    }

    /// The better static layout of every phase: by TPOT of the requests that arrive in it; for a rollout by the tokens
    /// generated in it, by the step curves.
    fn preferred(&self, tp: &Outcome, ep: &Outcome) -> Vec<Preferred> {
        let mut sums: Vec<(ByLayout<f64>, usize)> = Vec::new();
        let end = tp.end.max(ep.end);
        sums.resize((end / self.trace.phase_seconds) as usize + 1, Default::default());
        for (index, request) in self.trace.requests.iter().enumerate() {
            let (Some(tp_time), Some(ep_time)) = (self.tpot(tp, index), self.tpot(ep, index)) else { continue };
            // A rollout's requests are sorted by completion, because all arrive at once.
            let at = if self.trace.rollout { tp.served[index].last.min(ep.served[index].last) } else { request.at };
            let (sum, count) = &mut sums[(at / self.trace.phase_seconds) as usize];
            sum.tp += tp_time;
            sum.ep += ep_time;
            *count += 1;
        }
        let prefer = |&(sum, requests): &(ByLayout<f64>, usize)| Preferred {
            layout: if sum.ep < sum.tp { Layout::Ep } else { Layout::Tp },
            clearly: (sum.ep - sum.tp).abs() > 0.02 * sum.ep.min(sum.tp),
            requests,
        };
        sums.iter().map(prefer).collect()
    }

    fn shares(&self, preferred: &[Preferred]) -> ByLayout<f64> {
        let all: usize = preferred.iter().map(|phase| phase.requests).sum();
        let share = |layout| {
            let clear = preferred.iter().filter(|phase| phase.clearly && phase.layout == layout);
            clear.map(|phase| phase.requests).sum::<usize>() as f64 / all.max(1) as f64
        };
        ByLayout { tp: share(Layout::Tp), ep: share(Layout::Ep) }
    }

    /// The layouts of phases, chosen with the whole trace known: starts from the best of both static layouts and each
    /// phase's own best, then changes one phase at a time while that helps.
    fn oracle(&self, preferred: &[Preferred]) -> Figures {
        let count = preferred.len();
        let own: Vec<Layout> = preferred.iter().map(|phase| phase.layout).collect();
        let starts = [vec![Layout::Tp; count], vec![Layout::Ep; count], own];
        let played = starts.map(|layouts| (self.play(&layouts), layouts));
        let [mut best, second, third] = played;
        for other in [second, third] {
            if worth(&other.0) > worth(&best.0) {
                best = other;
            }
        }
        for _pass in 0..2 {
            let before = worth(&best.0);
            for at in 0..count {
                let mut layouts = best.1.clone();
                layouts[at] = layouts[at].other();
                let figures = self.play(&layouts);
                if worth(&figures) > worth(&best.0) {
                    best = (figures, layouts);
                }
            }
            if worth(&best.0) <= before {
                break;
            }
        }
        best.0
    }

    fn play(&self, layouts: &[Layout]) -> Figures {
        let phase =
            |(number, &layout): (usize, &Layout)| Phase { at: number as f64 * self.trace.phase_seconds, layout };
        let phases = layouts.iter().enumerate().map(phase).collect();
        let mut policy = Phases::new(phases, Guard::new(self.setup.room_tokens, 1.0, 1.0));
        self.figures(&run(self.setup, layouts[0], &mut policy as &mut dyn SwitchPolicy))
    }
}

/// The 99th percentile; 0 of nothing.
fn p99(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) * 99 / 100).copied().unwrap_or_default()
}

/// The oracle's objective: goodput over time per token, which weighs one percent of either equally.
fn worth(figures: &Figures) -> f64 {
    figures.goodput / figures.tpot_seconds
}
