//! One contest: starts both configurations side by side, finds the link rates that give the wanted communication
//! shares, then runs rounds over every link and both configurations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use semmoe_gateway::{Gateway, RawBackend, RawConfig, RawModel, RawServer};

use crate::analysis::{Prediction, first_limit, next_limit};
use crate::configs::{Config, Contest};
use crate::error::BenchError;
use crate::measure::{Contestant, Traffic};
use crate::network::Network;
use crate::prepare::{Attention, Judged, Placing, Recorded, Workshop};
use crate::results::{Level, Link, Outcome, Placed, share};
use crate::unit::{Unit, UnitSpec};

/// Tolerance between found and wanted share, and the most rate adjustments to get there.
const NEAR: f64 = 0.03;
const MAX_GUESSES: usize = 4;
/// The load at which requests hardly overlap, as a share of the baseline's capacity.
const LIGHTEST: f64 = 0.1;
/// Good requests finish within this multiple of the lightest load's median.
pub(crate) const SLO_FACTOR: f64 = 5.0;

/// The measurements, and how often each is repeated.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// Communication shares to find link rates for.
    pub(crate) shares: Vec<f64>,
    /// Link rates in bits per second, instead of finding them; empty to find them for the shares.
    pub(crate) rates: Vec<u64>,
    /// Rounds at saturation, and of the open loop.
    pub(crate) rounds: usize,
    pub(crate) open_rounds: usize,
    /// Open-loop loads, as shares of the baseline's capacity at the link.
    pub(crate) loads: Vec<f64>,
}

/// Everything that a contest needs.
#[derive(Debug)]
pub(crate) struct Stage<'a> {
    pub(crate) workshop: Workshop<'a>,
    pub(crate) network: &'a Network,
    pub(crate) traffic: Traffic,
    pub(crate) schedule: Schedule,
    pub(crate) model_name: String,
    pub(crate) secret: PathBuf,
    /// Arguments of every rank.
    pub(crate) arguments: Vec<String>,
    /// Per rank: tokens of a step, and sequences that run together.
    pub(crate) step_tokens: u32,
    pub(crate) running: u16,
}

/// Reports progress.
pub(crate) type Say<'a> = &'a dyn Fn(&str);

impl Stage<'_> {
    /// Records, solves, starts, measures, stops.
    pub(crate) async fn run(&self, contest: Contest, recorded: &Recorded, say: Say<'_>) -> Result<Outcome, BenchError> {
        say(&format!("solving and judging tables for attention {}", contest.attention));
        let solved = self.workshop.solve(recorded, contest.attention, Placing::Solved).await?;
        let predictions = self.predict(contest, recorded, &solved).await?;
        let mut sides = Vec::new();
        for config in contest.configs() {
            say(&format!("starting: {}", config.name));
            let tables = config.solved.then_some(&solved);
            let unit = self.unit(contest.attention, config, tables).await?;
            sides.push(self.contestant(config, contest.attention, unit, tables).await?);
        }
        let links = self.links(&sides[0], say).await?;
        let ranks = self.workshop.ranks;
        let mut outcome = Outcome { contest, ranks, links, predictions, levels: BTreeMap::new(), blocks: Vec::new() };
        self.saturate(&sides, &mut outcome, say).await?;
        self.arrive(&sides, &mut outcome, say).await?;
        self.network.limit(None)?;
        for side in sides {
            side.stop().await?;
        }
        Ok(outcome)
    }

    /// The ranks of a configuration, without a gateway.
    pub(crate) async fn unit(
        &self,
        attention: Attention,
        config: Config,
        tables: Option<&PathBuf>,
    ) -> Result<Unit, BenchError> {
        // With attention tp a step and its sequences belong to all ranks together; the limits per rank equal those of
        // dp.
        let shared = if attention == Attention::Tp { u32::from(self.workshop.ranks) } else { 1 };
        let (tokens, running) = (self.step_tokens * shared, u32::from(self.running) * shared);
        let sizes = ["--step-tokens".to_owned(), tokens.to_string(), "--max-running".to_owned(), running.to_string()];
        let further = config.arguments.iter().map(|argument| (*argument).to_owned());
        let arguments: Vec<String> = self.arguments.iter().cloned().chain(sizes).chain(further).collect();
        let spec = UnitSpec {
            semmoe: self.workshop.semmoe,
            model: self.workshop.model,
            ranks: self.workshop.ranks,
            tables: tables.map(PathBuf::as_path),
            arguments: &arguments,
            secret: &self.secret,
        };
        Unit::start(&spec, self.network).await
    }

    /// A unit behind a gateway in this process, on free ports of 127.0.0.1.
    pub(crate) async fn contestant(
        &self,
        config: Config,
        attention: Attention,
        unit: Unit,
        tables: Option<&PathBuf>,
    ) -> Result<Contestant, BenchError> {
        // With attention tp the unit routes tokens itself, so the gateway has one target.
        let by_rank = attention == Attention::Dp;
        let tables = tables.filter(|_| by_rank).cloned();
        let raw = RawConfig {
            server: RawServer {
                listen: "127.0.0.1:0".to_owned(),
                admin: Some("127.0.0.1:0".to_owned()),
                tables_root: tables.as_deref().and_then(Path::parent).map(Path::to_owned),
                ..RawServer::default()
            },
            models: vec![RawModel {
                name: self.model_name.clone(),
                tokenizer: Some(self.workshop.model.join("tokenizer.json")),
                policy: config.policy.to_owned(),
                backends: vec![RawBackend {
                    name: "unit".to_owned(),
                    engine: "semmoe".to_owned(),
                    url: unit.url.to_string(),
                    tables,
                    ranks: Some(if by_rank { self.workshop.ranks } else { 1 }),
                    ..RawBackend::default()
                }],
                ..RawModel::default()
            }],
            ..RawConfig::default()
        };
        let raw = semmoe_gateway::Config::from_raw(raw, Path::new("")).map_err(BenchError::input)?;
        let gateway = Gateway::start(raw).await.map_err(BenchError::failed)?;
        let url = format!("http://{}", gateway.data_addr()).parse().map_err(BenchError::failed)?;
        Ok(Contestant { config, unit, gateway: Some(gateway), url })
    }

    /// Predictions for both configurations. Baselines place experts in order; requests go round robin (attention dp),
    /// rows go wherever they happen to be, which is random with respect to their experts (attention tp).
    async fn predict(
        &self,
        contest: Contest,
        recorded: &Recorded,
        solved: &Path,
    ) -> Result<[Prediction; 2], BenchError> {
        let linear = self.workshop.solve(recorded, contest.attention, Placing::InOrder).await?;
        let step_tokens = self.step_tokens * u32::from(self.workshop.ranks);
        let [before, after] = match contest.attention {
            Attention::Dp => [Judged::Policy(contest.before.policy), Judged::Policy(contest.after.policy)],
            Attention::Tp => [Judged::AtRandom(step_tokens), Judged::Steps(step_tokens)],
        };
        let before = self.workshop.evaluate(recorded, &linear, before).await?;
        Ok([before, self.workshop.evaluate(recorded, solved, after).await?])
    }

    /// Unlimited links, and one link rate for each communication share wanted of the baseline's steps.
    async fn links(&self, baseline: &Contestant, say: Say<'_>) -> Result<Vec<Link>, BenchError> {
        let limited = |bits: u64, wanted| {
            let name = format!("{:.0} Mbit/s", bits as f64 / 1e6);
            Link { name, bits_per_second: Some(bits), wanted }
        };
        let mut links = vec![Link { name: "not limited".to_owned(), bits_per_second: None, wanted: None }];
        if matches!(self.network, Network::Loopback) {
            return Ok(links);
        }
        // Warm-up: the first requests find cold caches.
        baseline.saturate(&self.traffic).await?;
        if !self.schedule.rates.is_empty() {
            links.extend(self.schedule.rates.iter().map(|&bits| limited(bits, None)));
            return Ok(links);
        }
        for &wanted in &self.schedule.shares {
            self.network.limit(None)?;
            let free = baseline.saturate(&self.traffic).await?.counters;
            let mut guess = None;
            for _ in 0..MAX_GUESSES {
                let bits = guess.unwrap_or_else(|| first_limit(free.all_bytes(), free.step_time(), wanted));
                self.network.limit(Some(bits))?;
                let found = share(&baseline.saturate(&self.traffic).await?.counters, &free);
                say(&format!(
                    "links of {:.0} Mbit/s: communication is {:.0}% of a step, wanted {:.0}%",
                    bits as f64 / 1e6,
                    found * 100.0,
                    wanted * 100.0
                ));
                guess = Some(bits);
                if (found - wanted).abs() <= NEAR {
                    break;
                }
                guess = Some(next_limit(bits, found, wanted));
            }
            links.push(limited(guess.unwrap_or(1_000_000), Some(wanted)));
        }
        Ok(links)
    }

    /// Rounds over all links and both configurations. The order of both alternates.
    async fn saturate(&self, sides: &[Contestant], outcome: &mut Outcome, say: Say<'_>) -> Result<(), BenchError> {
        for round in 0..self.schedule.rounds {
            for link in turned(outcome.links.len(), round) {
                self.network.limit(outcome.links[link].bits_per_second)?;
                for side in turned(sides.len(), round) {
                    let block = sides[side].saturate(&self.traffic).await?;
                    say(&format!(
                        "round {} of {}, {}: {:.0} tokens/s, local {:.3}: {}",
                        round + 1,
                        self.schedule.rounds,
                        outcome.links[link].name,
                        block.tokens_per_second,
                        block.counters.lar(),
                        sides[side].config.name
                    ));
                    outcome.blocks.push(Placed { side, link, round, load: None, block });
                }
            }
        }
        Ok(())
    }

    /// Measures the lightest load, which sets the service level, then rounds over all links, loads and both
    /// configurations. Where some links are limited, only those, to save time.
    async fn arrive(&self, sides: &[Contestant], outcome: &mut Outcome, say: Say<'_>) -> Result<(), BenchError> {
        if self.schedule.open_rounds == 0 {
            return Ok(());
        }
        let first = usize::from(outcome.links.len() > 1);
        let links = first..outcome.links.len();
        for link in links.clone() {
            let kept_up = outcome.at_saturation(0, link, |block| block.requests_per_second);
            let kept_up = kept_up.map_or(0.0, |rate| rate.median);
            self.network.limit(outcome.links[link].bits_per_second)?;
            let block = sides[0].arrive(&self.traffic, LIGHTEST * kept_up, None).await?;
            let level = Level { kept_up, slo_ms: SLO_FACTOR * block.e2e_ms.map_or(0.0, |latency| latency.p50) };
            let name = &outcome.links[link].name;
            say(&format!(
                "{name}: good requests end within {:.0} ms, 5 times the lightest load's median",
                level.slo_ms
            ));
            outcome.levels.insert(link, level);
        }
        for round in 0..self.schedule.open_rounds {
            for link in turned(links.len(), round).into_iter().map(|at| at + first) {
                self.network.limit(outcome.links[link].bits_per_second)?;
                for &load in &self.schedule.loads {
                    for side in turned(sides.len(), round) {
                        let Some(level) = outcome.levels.get(&link) else { continue };
                        let rate = load * level.kept_up;
                        let block = sides[side].arrive(&self.traffic, rate, Some(level.slo_ms)).await?;
                        say(&format!(
                            "open round {} of {}, {}, {rate:.0} requests/s: {:.1} ms, good {:.0}: {}",
                            round + 1,
                            self.schedule.open_rounds,
                            outcome.links[link].name,
                            block.e2e_ms.map_or(0.0, |latency| latency.p50),
                            block.goodput.unwrap_or(0.0),
                            sides[side].config.name
                        ));
                        outcome.blocks.push(Placed { side, link, round, load: Some(load), block });
                    }
                }
            }
        }
        Ok(())
    }
}

/// 0 to n, reversed in odd rounds, so that each configuration goes first equally often.
pub(crate) fn turned(n: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_first_as_often() {
        assert_eq!((turned(3, 0), turned(3, 1), turned(3, 2)), (vec![0, 1, 2], vec![2, 1, 0], vec![0, 1, 2]));
    }
}
