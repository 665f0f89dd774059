//! Moves new traffic between a model's TP and EP backends, for engines that cannot switch. Running requests finish
//! where they are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use semmoe_engines::Engine;
use semmoe_planner::policy::{Adaptive, Layout};
use tokio_util::sync::CancellationToken;

use super::Outcome;
use super::reading::Load;
use super::record::UnitName;
use super::task::in_flight;
use super::unit::Unit;
use crate::backends::{Aside, Backend, Model};
use crate::config::{SwitchConfig, SwitchMode};
use crate::shell::control::Control;

/// The pools of one model.
struct Pools {
    rules: SwitchConfig,
    unit: Unit,
    /// The layout that new traffic is sent to.
    layout: Layout,
    /// Number of requests and prompt tokens sent so far, by backend.
    arrived: BTreeMap<String, (u64, u64)>,
}

/// Watches all models until `stop` is cancelled.
pub(crate) async fn watch(control: Arc<Control>, stop: CancellationToken) {
    let mut pools = BTreeMap::new();
    while !stop.is_cancelled() {
        let config = control.backends.config();
        tick(&control, &config.switch, &mut pools);
        stop.run_until_cancelled(tokio::time::sleep(config.switch.interval)).await;
    }
}

fn tick(control: &Arc<Control>, rules: &SwitchConfig, pools: &mut BTreeMap<String, Pools>) {
    let snapshot = control.backends.snapshot();
    let on = rules.mode != SwitchMode::Off && !control.data.is_draining();
    let steers = |model: &Model| on && rules.webhook.is_none() && has_both(model);
    pools.retain(|name, _| {
        let stays = snapshot.models.iter().any(|model| model.name == *name && steers(model));
        if !stays {
            control.switches.forget(&unit_name(name));
        }
        stays
    });
    for model in &snapshot.models {
        if !steers(model) {
            model.members.iter().for_each(|member| member.backend.gate.set_aside(Aside::Pool, false));
            continue;
        }
        let known = pools.remove(&model.name).filter(|known| known.rules == *rules);
        if let Some(mut known) = known.or_else(|| Pools::new(rules)) {
            known.tick(control, model);
            pools.insert(model.name.clone(), known);
        }
    }
}

/// Returns the unit name, which must differ from backend names: a backend may have the model's name.
fn unit_name(model: &str) -> String {
    format!("pools of {model}")
}

fn labelled(model: &Model) -> impl Iterator<Item = (&Arc<Backend>, Layout)> {
    let backends = model.members.iter().map(|member| &member.backend);
    let backends = backends.filter(|backend| backend.engine != Engine::Semmoe);
    backends.filter_map(|backend| Some((backend, backend.config.layout?)))
}

fn has_both(model: &Model) -> bool {
    [Layout::Tp, Layout::Ep].into_iter().all(|side| labelled(model).any(|(_, layout)| layout == side))
}

impl Pools {
    fn new(rules: &SwitchConfig) -> Option<Self> {
        let layout = Adaptive::start_layout(&rules.prior, 1).unwrap_or(Layout::Ep);
        Some(Self { rules: rules.clone(), unit: Unit::new(rules)?, layout, arrived: BTreeMap::new() })
    }

    fn tick(&mut self, control: &Arc<Control>, model: &Model) {
        let (mut running, mut sent, mut heads) = (0_u32, (0, 0), Vec::new());
        let priority_seconds = control.backends.config().queue.priority_seconds;
        for (backend, layout) in labelled(model) {
            backend.flow.line.keep(self.rules.has_targets());
            if layout == self.layout {
                heads.extend(backend.flow.line.heads(Instant::now(), priority_seconds));
            }
            running = running.saturating_add(in_flight(control, backend));
            let flow = backend.flow.peek();
            let now = (flow.arrived, flow.arrived_tokens);
            let before = self.arrived.insert(backend.name.clone(), now).unwrap_or(now);
            // If a backend was replaced by one with the same name, its counters restart from 0.
            sent = (sent.0 + now.0.saturating_sub(before.0), sent.1 + now.1.saturating_sub(before.1));
        }
        let serving = |side: Layout| {
            labelled(model).filter(|(backend, layout)| *layout == side && backend.takes_requests()).count() as u32
        };
        let backends = serving(self.layout).max(1);
        self.unit.arrived(sent.0.div_ceil(backends.into()), sent.1 / u64::from(backends));
        let load = Load { running: running.div_ceil(backends), ..Load::default() };
        let verdict = self.unit.decide(self.layout, &load, &heads);
        let name = unit_name(&model.name);
        let unit = UnitName { name: &name, by: "pools" };
        control.switches.observed(unit, Some(self.layout), running.into(), &verdict);
        if let Some(to) = verdict.to {
            let outcome = match self.rules.mode {
                SwitchMode::Drive if serving(to) > 0 => Some(Outcome::Committed { seconds: 0.0 }),
                SwitchMode::Drive => {
                    Some(Outcome::Refused { cause: format!("no backend of the {} pool accepts requests", to.name()) })
                }
                SwitchMode::Advise | SwitchMode::Off => None,
            };
            if matches!(outcome, Some(Outcome::Committed { .. })) {
                self.layout = to;
            }
            self.unit.ended(to, outcome.as_ref());
            control.switches.ended(unit, to, &verdict, outcome.as_ref());
        }
        let drives = self.rules.mode == SwitchMode::Drive;
        labelled(model)
            .for_each(|(backend, layout)| backend.gate.set_aside(Aside::Pool, drives && layout != self.layout));
    }
}
