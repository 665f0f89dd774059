//! A policy that learns its own thresholds from measurements and avoids switches that do not pay off.
//!
//! At each step boundary it predicts the step time in both layouts for the upcoming batch and the arriving prompt
//! tokens, `D = min(f / (1 - a / p), f + C / p)`, with decode time f, arrival rate a, prefill rate p, and at most C
//! prompt tokens per step. The *gain* is the fraction of D that the other layout saves.
//!
//! The *regret*, in request-seconds, is the time that past steps would have saved in the other layout, times the
//! requests in flight. Steps that are faster in this layout reduce it, and so does a small allowance per step.
//!
//! It switches when the regret plus the gain over the horizon exceeds the cost of switching there and back. Switching
//! stops the requests in flight for the switch time at the live KV; switching back is assumed to cost as much as the
//! last switch to this layout. So a large gain pays off at once, a small gain only if it persists, and an intermittent
//! gain never. A switch that earned less than the round-trip cost doubles the requirement for the next switch; a switch
//! that earned it halves the requirement again.

use super::arrivals::Arrivals;
use super::learned::Learned;
use super::{
    ByLayout, Cause, Decision, Event, Guard, Head, Layout, Prior, Settings, SettingsError, Stay, Step, Switch,
    SwitchCost, SwitchPolicy, UnitView,
};

/// Maximum factor on the gain required for a switch.
const MAX_PATIENCE: f64 = 8.0;
/// A failed switch is retried after the dwell time, which doubles with each failure, at most this many times.
const MAX_FAILURES: u32 = 6;

/// The policy's state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    /// May switch.
    Stable,
    /// Switched or failed to switch recently.
    Dwelling {
        /// The time from which switching is allowed again.
        until: f64,
    },
    /// Waiting for the outcome of a requested switch.
    Switching {
        /// The target layout.
        to: Layout,
    },
}

/// A comparison of the other layout with the current one.
#[derive(Clone, Copy, Debug)]
struct Comparison {
    /// Fraction of the step time that the other layout saves.
    gain: f64,
    /// Prefill rate of each layout, in prompt tokens per second.
    prefill: ByLayout<f64>,
}

/// The adaptive policy, described in the module documentation.
#[derive(Clone, Debug)]
pub struct Adaptive {
    settings: Settings,
    cost: SwitchCost,
    room_tokens: ByLayout<u64>,
    guard: Guard,
    learned: Learned,
    arrivals: Arrivals,
    state: State,
    layout: Option<Layout>,
    now: f64,
    /// Requests in flight at the last decision.
    in_flight: f64,
    /// Request-seconds lost since the other layout became faster.
    regret: f64,
    /// Request-seconds that the last switch has saved so far; `price` is its cost.
    earned: f64,
    price: f64,
    /// Cost of the last switch to each layout in request-seconds: lost before the decision and while the switch stopped
    /// the unit. It estimates the cost of switching back.
    way: ByLayout<f64>,
    /// Duration of the last switch.
    stopped_seconds: f64,
    patience: f64,
    /// Log of the ratio of measured to predicted switch times.
    switch_error: f64,
    failures: u32,
}

impl Adaptive {
    /// Creates a policy from a prior, the switch cost model and both layouts' KV capacity.
    pub fn new(
        settings: Settings,
        prior: Prior,
        cost: SwitchCost,
        room_tokens: ByLayout<u64>,
    ) -> Result<Self, SettingsError> {
        settings.validate()?;
        Ok(Adaptive {
            guard: Guard::new(room_tokens, settings.guard_close, settings.guard_reopen),
            learned: Learned::new(prior),
            arrivals: Arrivals::new(settings.fast_seconds, settings.slow_seconds),
            settings,
            cost,
            room_tokens,
            state: State::Stable,
            layout: None,
            now: 0.0,
            in_flight: 0.0,
            regret: 0.0,
            earned: 0.0,
            price: 0.0,
            way: ByLayout::default(),
            stopped_seconds: 0.0,
            patience: 1.0,
            switch_error: 0.0,
            failures: 0,
        })
    }

    /// Returns the layout to start a unit in: the one that the prior prefers for a batch of `sequences`. `None` if the
    /// prior does not cover both layouts.
    pub fn start_layout(prior: &Prior, sequences: u32) -> Option<Layout> {
        let seconds = |layout: Layout| prior[layout].steps.as_ref()?.seconds(sequences);
        Some(if seconds(Layout::Ep)? < seconds(Layout::Tp)? { Layout::Ep } else { Layout::Tp })
    }

    /// Returns the state at time `at`.
    pub fn state(&self, at: f64) -> State {
        match self.state {
            State::Dwelling { until } if at >= until => State::Stable,
            state => state,
        }
    }

    /// Returns the expected duration of a switch to `to` in seconds.
    pub fn switch_seconds(&self, to: Layout, live_tokens: u64) -> f64 {
        self.cost.seconds(to, live_tokens) * self.switch_error.exp()
    }

    fn compare(&self, unit: &UnitView<'_>) -> Result<Comparison, Stay> {
        let batch = unit.running.saturating_add(unit.waiting).clamp(1, self.settings.max_sequences);
        let arriving = self.arrivals.rate(self.now);
        let coming = arriving + unit.waiting_tokens as f64 / self.settings.slow_seconds;
        let mut prefill = ByLayout::default();
        let mut step = ByLayout::default();
        for layout in [Layout::Tp, Layout::Ep] {
            let unknown = Stay::Unknown { layout, sequences: batch };
            let decode = self.learned.decode_seconds(layout, batch).ok_or(unknown)?;
            let rate = self.learned.prefill_rate(layout).ok_or(unknown)?;
            let chunk = f64::from(self.settings.chunk_tokens);
            let full = decode + chunk / rate;
            let busy = coming / rate;
            step[layout] = if busy < 1.0 { full.min(decode / (1.0 - busy)) } else { full };
            prefill[layout] = chunk / full;
        }
        Ok(Comparison { gain: 1.0 - step[unit.layout.other()] / step[unit.layout], prefill })
    }

    /// Adds to the regret the time that a completed step would have saved in the other layout, times the requests in
    /// flight.
    fn account(&mut self, step: &Step) {
        let seconds = |layout: Layout| {
            let decode = match step.sequences {
                0 => 0.0,
                sequences => self.learned.decode_seconds(layout, sequences)?,
            };
            let prefill = match step.prompt_tokens {
                0 => 0.0,
                tokens => f64::from(tokens) / self.learned.prefill_rate(layout)?,
            };
            Some(decode + prefill)
        };
        let (Some(here), Some(there)) = (seconds(step.layout), seconds(step.layout.other())) else { return };
        // As in a CUSUM test, the allowance keeps random fluctuations around zero from accumulating.
        let allowance = self.settings.least_gain * here;
        self.regret = (self.regret + (here - there - allowance) * self.in_flight).max(0.0);
        self.earned -= (here - there) * self.in_flight;
    }

    /// Finds the first request that would miss its TTFT target in this layout and would get its first token sooner
    /// after a switch.
    fn urgent(&self, unit: &UnitView<'_>, compared: &Comparison, switch_seconds: f64) -> Option<Cause> {
        let to = unit.layout.other();
        // With more KV room, the other layout can admit requests that are blocked in this layout.
        let stuck = unit.blocked && self.room_tokens[to] > self.room_tokens[unit.layout];
        unit.heads.iter().find_map(|&Head { priority, waited_seconds, tokens_ahead }| {
            let target = self.settings.ttft.iter().find(|target| target.priority == priority)?;
            let ahead = tokens_ahead as f64;
            let here_seconds =
                if stuck { f64::INFINITY } else { waited_seconds + ahead / compared.prefill[unit.layout] };
            let there_seconds = waited_seconds + switch_seconds + ahead / compared.prefill[to];
            let sooner = here_seconds - there_seconds > switch_seconds;
            (here_seconds > target.seconds && sooner).then_some(Cause::Ttft { priority, here_seconds, there_seconds })
        })
    }

    /// Checks whether the gain pays for switching there and back, and otherwise returns the reason to stay.
    fn paying(&self, gain: f64, to: Layout, switch_seconds: f64) -> Result<Cause, Stay> {
        if gain < self.settings.least_gain {
            return Err(Stay::Best { gain });
        }
        let saved = self.regret + gain * self.settings.horizon_seconds * self.in_flight;
        let there_and_back = switch_seconds * self.in_flight + self.way[to.other()];
        let needed = there_and_back * self.settings.margin * self.patience;
        if saved < needed {
            return Err(Stay::Unpaid { saved, needed });
        }
        Ok(Cause::Gain { gain, regret: self.regret, switch_seconds })
    }

    fn judge(&mut self, unit: &UnitView<'_>) -> Result<Switch, Stay> {
        if unit.running == 0 && unit.waiting == 0 {
            return Err(Stay::Idle);
        }
        let compared = self.compare(unit)?;
        match self.state(self.now) {
            State::Switching { to } => return Err(Stay::Switching { to }),
            State::Dwelling { until } => {
                // Requests that arrived while the unit was stopped also waited.
                let price = self.stopped_seconds * self.in_flight;
                if self.failures == 0 && price > self.price {
                    self.way[unit.layout] += price - self.price;
                    self.price = price;
                }
                return Err(Stay::Dwell { left_seconds: until - self.now });
            }
            State::Stable => self.state = State::Stable,
        }
        let to = unit.layout.other();
        let switch_seconds = self.switch_seconds(to, unit.live_kv_tokens);
        let cause = match self.urgent(unit, &compared, switch_seconds) {
            Some(cause) => cause,
            None => self.paying(compared.gain, to, switch_seconds)?,
        };
        self.guard.check(to, unit.promised_kv_tokens).map_err(Stay::NoRoom)?;
        Ok(Switch { to, cause })
    }

    fn switched(&mut self, to: Layout, seconds: f64, kv_tokens: u64) {
        let price = if seconds.is_finite() { seconds.max(0.0) * self.in_flight } else { 0.0 };
        if self.layout.is_some() && self.price > 0.0 {
            let earned = self.earned >= self.price + price;
            self.patience = (self.patience * if earned { 0.5 } else { 2.0 }).clamp(1.0, MAX_PATIENCE);
        }
        if seconds.is_finite() && seconds > 0.0 {
            let error = (seconds / self.cost.seconds(to, kv_tokens)).ln().clamp(-1.0, 1.0);
            self.switch_error += 0.5 * (error - self.switch_error);
            self.stopped_seconds = seconds;
        }
        self.price = price;
        self.way[to] = self.regret + price;
        self.layout = Some(to);
        self.failures = 0;
        (self.regret, self.earned) = (0.0, 0.0);
        self.state = State::Dwelling { until: self.now + self.settings.dwell_seconds };
    }
}

impl SwitchPolicy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn observe(&mut self, at: f64, event: &Event) {
        match *event {
            Event::Arrived { prompt_tokens } => self.arrivals.add(at, prompt_tokens),
            Event::Stepped(step) => {
                self.learned.learn(&step);
                self.account(&step);
            }
            Event::Switched { to, seconds, kv_tokens } => {
                self.now = self.now.max(at);
                self.switched(to, seconds, kv_tokens);
            }
            Event::Failed { .. } => {
                self.now = self.now.max(at);
                self.failures = (self.failures + 1).min(MAX_FAILURES);
                let wait = self.settings.dwell_seconds.max(1.0) * f64::from(1 << self.failures);
                self.state = State::Dwelling { until: self.now + wait };
            }
        }
    }

    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision {
        self.now = self.now.max(at);
        self.in_flight = f64::from(unit.running) + f64::from(unit.waiting);
        if self.layout.replace(unit.layout) != Some(unit.layout) {
            self.regret = 0.0;
        }
        self.guard.update(unit.promised_kv_tokens);
        match self.judge(unit) {
            Ok(switch) => {
                self.state = State::Switching { to: switch.to };
                Decision::Switch(switch)
            }
            Err(stay) => Decision::Stay(stay),
        }
    }
}

#[cfg(test)]
mod tests;
