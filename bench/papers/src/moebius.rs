//! Moebius' policy as its authors describe it: requests in flight against one threshold, with asymmetric hysteresis.

use std::collections::VecDeque;

use semmoe_planner::policy::{Decision, Event, Guard, Layout, Stay, SwitchPolicy, UnitView};

use crate::phases::Gate;

/// The numbers of section 7.1 and equation 13.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoebiusSettings {
    /// T_h: switches from TP to EP at once at this many requests in flight or more.
    pub high: f64,
    /// T_l: switches from EP to TP below this average over the window.
    pub low: f64,
    /// W: steps of the window, at least 1.
    pub window_steps: usize,
    /// C: seconds between switches.
    pub cooldown_seconds: f64,
}

impl MoebiusSettings {
    /// Interactive serving: T_h = 256, T_l = 0.8 T_h, C = 5 s. The paper gives no W; 50 steps take one to two seconds.
    pub const INTERACTIVE: Self =
        MoebiusSettings { high: 256.0, low: 0.8 * 256.0, window_steps: 50, cooldown_seconds: 5.0 };
    /// Rollout (eq 13): T_l = T_h, W = 1.
    pub const ROLLOUT: Self = MoebiusSettings { low: 256.0, window_steps: 1, ..Self::INTERACTIVE };
}

/// Moebius' switch policy.
#[derive(Clone, Debug)]
pub struct Moebius {
    settings: MoebiusSettings,
    gate: Gate,
    in_flight: VecDeque<u64>,
    sum: u64,
    switched_at: Option<f64>,
}

impl Moebius {
    /// With a guard that prevents switches to a layout whose cache is full (the paper's capacity check has neither
    /// margin nor hysteresis).
    pub fn new(settings: MoebiusSettings, guard: Guard) -> Self {
        Moebius { settings, gate: Gate::new(guard), in_flight: VecDeque::new(), sum: 0, switched_at: None }
    }

    fn record(&mut self, in_flight: u64) {
        self.in_flight.push_back(in_flight);
        self.sum += in_flight;
        while self.in_flight.len() > self.settings.window_steps.max(1) {
            self.sum -= self.in_flight.pop_front().unwrap_or_default();
        }
    }

    fn crosses(&self, layout: Layout, now: u64) -> bool {
        match layout {
            Layout::Tp => now as f64 >= self.settings.high,
            Layout::Ep => (self.sum as f64 / self.in_flight.len().max(1) as f64) < self.settings.low,
        }
    }
}

impl SwitchPolicy for Moebius {
    fn name(&self) -> &'static str {
        "moebius"
    }

    fn observe(&mut self, at: f64, event: &Event) {
        self.gate.observe(event);
        if matches!(event, Event::Switched { .. }) {
            self.switched_at = Some(at);
        }
    }

    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision {
        let in_flight = u64::from(unit.running) + u64::from(unit.waiting);
        self.record(in_flight);
        if let Err(stay) = self.gate.update(unit) {
            return Decision::Stay(stay);
        }
        let left_seconds = self.switched_at.map_or(0.0, |last| last + self.settings.cooldown_seconds - at);
        if left_seconds > 0.0 {
            return Decision::Stay(Stay::Dwell { left_seconds });
        }
        match self.crosses(unit.layout, in_flight) {
            true => self.gate.pass(unit, unit.layout.other(), "requests in flight crossed the threshold"),
            false => Decision::Stay(Stay::Fixed),
        }
    }
}

#[cfg(test)]
mod tests {
    use semmoe_planner::policy::ByLayout;

    use super::*;

    fn view(layout: Layout, running: u32, promised_kv_tokens: u64) -> UnitView<'static> {
        UnitView {
            layout,
            running,
            waiting: 0,
            waiting_tokens: 0,
            live_kv_tokens: promised_kv_tokens,
            promised_kv_tokens,
            blocked: false,
            heads: &[],
        }
    }

    fn policy(settings: MoebiusSettings) -> Moebius {
        Moebius::new(settings, Guard::new(ByLayout { tp: 1000, ep: 2000 }, 1.0, 1.0))
    }

    #[test]
    fn up_at_once_down_by_the_mean_after_the_cooldown() {
        let mut moebius = policy(MoebiusSettings { window_steps: 4, ..MoebiusSettings::INTERACTIVE });
        assert_eq!(moebius.decide(0.0, &view(Layout::Tp, 255, 0)), Decision::Stay(Stay::Fixed));
        let up = moebius.decide(0.1, &view(Layout::Tp, 256, 0));
        assert!(matches!(up, Decision::Switch(switch) if switch.to == Layout::Ep));
        assert!(matches!(moebius.decide(0.2, &view(Layout::Tp, 256, 0)), Decision::Stay(Stay::Switching { .. })));
        moebius.observe(1.0, &Event::Switched { to: Layout::Ep, seconds: 0.3, kv_tokens: 0 });
        assert!(matches!(moebius.decide(5.9, &view(Layout::Ep, 0, 0)), Decision::Stay(Stay::Dwell { .. })));
        // The mean of 256, 256, 0 and 400 is above 204.8; one step later it is below.
        assert_eq!(moebius.decide(6.0, &view(Layout::Ep, 400, 0)), Decision::Stay(Stay::Fixed));
        assert!(matches!(moebius.decide(6.1, &view(Layout::Ep, 100, 1001)), Decision::Stay(Stay::NoRoom(_))));
        assert!(matches!(moebius.decide(6.2, &view(Layout::Ep, 100, 1000)), Decision::Switch(_)));
    }

    #[test]
    fn a_rollout_leaves_ep_at_the_first_step_below_the_threshold() {
        let mut moebius = policy(MoebiusSettings::ROLLOUT);
        assert_eq!(moebius.decide(0.0, &view(Layout::Ep, 256, 0)), Decision::Stay(Stay::Fixed));
        let down = moebius.decide(0.1, &view(Layout::Ep, 255, 0));
        assert!(matches!(down, Decision::Switch(switch) if switch.to == Layout::Tp));
    }
}
