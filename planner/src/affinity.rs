//! The gain from co-locating tokens with their experts: a deployment's regime, and the expected gain with its range.
//!
//! Affinity keeps more of a token's experts on its own rank. If a token's row is sent once to each rank that hosts some
//! of its experts, as in semmoe's worker and DeepEP, bytes are proportional to the remote ranks per token. If only the
//! local activation rate (LAR) is known, they are assumed to be proportional to `1 - LAR`. Latencies do not change.
//! Affinity helps if the step waits for those bytes. With two micro-batches a step takes about max(computation,
//! communication), so saving bytes that are hidden behind computation gains nothing. If decoding is bound by reading
//! experts, the number of distinct experts per step matters, which a placement does not change: every rank sees the
//! tokens of the whole unit.

use std::fmt;

use serde::Serialize;

use crate::PlanError;
use crate::error::{not_negative, positive};
use crate::step::{Constants, Part, Target, Work, step};

/// Minimum throughput gain that justifies adopting affinity.
pub const WORTH: f64 = 0.01;
/// Without calibration, communication may take half or twice the predicted time.
pub const UNCALIBRATED_FACTOR: f64 = 2.0;

/// A measured or predicted step of a deployment. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepProfile {
    /// Time of everything except communication between expert ranks.
    pub compute: f64,
    /// Communication time between expert ranks that is proportional to the bytes.
    pub bytes: f64,
    /// Communication time that is independent of the bytes: latencies.
    pub latency: f64,
    /// The part of `compute` spent on reading routed experts.
    pub experts: f64,
    /// Whether two micro-batches hide communication behind computation.
    pub overlap: bool,
}

/// Traffic from a rank to remote experts, before and with affinity, in any common unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Remote {
    /// Current traffic, above 0.
    pub before: f64,
    /// With affinity.
    pub after: f64,
    /// Absolute error of `after`.
    pub error: f64,
}

impl Remote {
    /// Computes the traffic from local activation rates, given the absolute error of the rate with affinity.
    ///
    /// # Errors
    /// [`PlanError::Value`] if a rate is outside 0 to 1, or the current rate is 1, which leaves nothing to gain.
    pub fn of_rates(before: f64, after: f64, error: f64) -> Result<Self, PlanError> {
        not_negative("the local rate before", before)?;
        not_negative("the local rate after", after)?;
        if before >= 1.0 || after > 1.0 {
            let found = before.max(after);
            return Err(PlanError::Value { what: "a local rate", found, expected: "below 1 before, at most 1 after" });
        }
        Ok(Self { before: 1.0 - before, after: 1.0 - after, error })
    }
}

/// The bottleneck of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// The step waits for communication between the ranks.
    CommunicationExposed,
    /// Communication is hidden behind computation.
    CommunicationHidden,
    /// Reading distinct experts takes most of the step.
    ExpertsRead,
    /// Negligible communication: one rank, or links much faster than the computation.
    CommunicationSmall,
}

/// The gain from affinity. Gains are relative increases in throughput.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The bottleneck of the step.
    pub regime: Regime,
    /// Fraction of the step spent waiting for communication between expert ranks.
    pub exposed_share: f64,
    /// Minimum, expected and maximum gain.
    pub range: [f64; 3],
    /// Ratio of bytes between ranks with affinity to bytes before.
    pub bytes_ratio: f64,
}

impl StepProfile {
    /// Predicts the profile of a step.
    pub fn predicted(target: &Target<'_>, work: &Work, overlap: bool) -> Self {
        let constants = Constants { overlap_share: 0.0, ..*target.constants };
        let terms = step(&Target { constants: &constants, ..*target }, work);
        let free = Constants { dispatch_bytes: 0.0, combine_bytes: 0.0, ..constants };
        let latency = step(&Target { constants: &free, ..*target }, work).exchange();
        Self {
            compute: terms.total() - terms.exchange(),
            bytes: terms.exchange() - latency,
            latency,
            experts: terms[Part::Experts],
            overlap,
        }
    }

    /// Returns the step's seconds if communication takes `bytes` and `latency` seconds.
    fn seconds(&self, bytes: f64, latency: f64) -> f64 {
        if self.overlap { self.compute.max(bytes + latency) } else { self.compute + bytes + latency }
    }
}

/// Determines the regime and the gain. Communication times in the profile may be off by `factor` (at least 1) in either
/// direction.
///
/// # Errors
/// [`PlanError::Value`] for invalid times or amounts.
pub fn gain(profile: &StepProfile, remote: &Remote, factor: f64) -> Result<Gain, PlanError> {
    positive("the seconds of computation", profile.compute)?;
    positive("the remote rows before", remote.before)?;
    for (what, value) in [
        ("the seconds of communication proportional to bytes", profile.bytes),
        ("the seconds of latency", profile.latency),
        ("the seconds spent reading experts", profile.experts),
        ("the remote rows after", remote.after),
        ("the error of the local rate", remote.error),
        ("the uncertainty factor minus 1", factor - 1.0),
    ] {
        not_negative(what, value)?;
    }
    let gain = |after: f64, factor: f64| {
        let ratio = after.max(0.0) / remote.before;
        let (bytes, latency) = (profile.bytes * factor, profile.latency * factor);
        profile.seconds(bytes, latency) / profile.seconds(bytes * ratio, latency) - 1.0
    };
    let expected = gain(remote.after, 1.0);
    let ends = [-remote.error, remote.error]
        .into_iter()
        .flat_map(|error| [1.0 / factor, factor].map(|factor| gain(remote.after + error, factor)));
    let (least, most) = ends.fold((expected, expected), |(low, high), gain| (low.min(gain), high.max(gain)));
    let step = profile.seconds(profile.bytes, profile.latency);
    let exposed_share = (step - profile.compute) / step;
    Ok(Gain {
        regime: regime(profile, exposed_share),
        exposed_share,
        range: [least, expected, most],
        bytes_ratio: remote.after / remote.before,
    })
}

fn regime(profile: &StepProfile, exposed_share: f64) -> Regime {
    let experts = profile.experts > profile.compute / 2.0;
    match (exposed_share >= 0.05, profile.bytes >= 0.05 * profile.compute) {
        (true, _) => Regime::CommunicationExposed,
        (false, _) if experts => Regime::ExpertsRead,
        (false, true) => Regime::CommunicationHidden,
        (false, false) => Regime::CommunicationSmall,
    }
}

impl Gain {
    /// Whether the expected gain justifies adopting affinity.
    pub fn pays(&self) -> bool {
        self.range[1] >= WORTH
    }
}

impl fmt::Display for Gain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let regime = match self.regime {
            Regime::CommunicationExposed => "communication is exposed",
            Regime::CommunicationHidden => "communication is hidden behind computation",
            Regime::ExpertsRead => "the step is bound by reading distinct experts, which placement cannot change",
            Regime::CommunicationSmall => "communication is negligible",
        };
        let [least, expected, most] = self.range.map(|gain| gain * 100.0);
        write!(f, "{regime} ({:.1}% of the step waits for it); ", self.exposed_share * 100.0)?;
        if self.pays() {
            write!(f, "affinity should bring {expected:+.1}% throughput ({least:+.1}% to {most:+.1}%)")
        } else {
            write!(f, "affinity does not pay off here: {expected:+.1}% throughput ({least:+.1}% to {most:+.1}%)")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::Layout;
    use crate::tests::fixtures::{h200, qwen3_235b};

    const EXPOSED: StepProfile =
        StepProfile { compute: 0.06, bytes: 0.035, latency: 0.005, experts: 0.02, overlap: false };
    const REMOTE: Remote = Remote { before: 0.75, after: 0.6, error: 0.0 };

    /// Amdahl: 35% of the step shrinks to 80%.
    #[test]
    fn exposed_communication_follows_amdahl() {
        let found = gain(&EXPOSED, &REMOTE, 1.0).unwrap();
        assert_eq!(found.regime, Regime::CommunicationExposed);
        assert!((found.range[1] - (1.0 / (1.0 - 0.35 * 0.2) - 1.0)).abs() < 1e-12);
        assert_eq!(found.range, [found.range[1]; 3]);
        assert!(found.to_string().contains("affinity should bring +7.5% throughput"), "{found}");
    }

    #[test]
    fn hidden_communication_and_read_experts_do_not_pay() {
        let hidden = gain(&StepProfile { overlap: true, ..EXPOSED }, &REMOTE, 1.0).unwrap();
        assert_eq!((hidden.regime, hidden.range[1], hidden.pays()), (Regime::CommunicationHidden, 0.0, false));
        assert!(hidden.to_string().contains("affinity does not pay off here"), "{hidden}");
        let read = StepProfile { experts: 0.05, bytes: 0.0005, latency: 0.001, ..EXPOSED };
        let read = gain(&read, &REMOTE, 1.0).unwrap();
        assert_eq!((read.regime, read.pays()), (Regime::ExpertsRead, false));
        for (before, after) in [(1.0, 1.0), (0.5, 1.1), (0.5, f64::NAN), (-0.1, 0.5)] {
            assert!(Remote::of_rates(before, after, 0.0).is_err(), "{before} {after}");
        }
        for wrong in [Remote { before: 0.0, ..REMOTE }, Remote { after: f64::NAN, ..REMOTE }] {
            assert!(gain(&EXPOSED, &wrong, 1.0).is_err());
        }
        assert!(gain(&EXPOSED, &REMOTE, 0.5).is_err());
    }

    /// If doubled, communication exceeds computation and is exposed; the range must show it.
    #[test]
    fn ranges_hold_what_errors_allow() {
        let profile = StepProfile { overlap: true, compute: 0.035, ..EXPOSED };
        let found = gain(&profile, &Remote { error: 0.02, ..REMOTE }, UNCALIBRATED_FACTOR).unwrap();
        assert!(found.range[0] == 0.0 && found.range[1] > 0.0 && found.range[2] > found.range[1]);
    }

    #[test]
    fn links_between_nodes_are_exposed_and_nvlink_is_not() {
        let (shape, constants) = (qwen3_235b(), Constants::uncalibrated());
        let share = |nodes: u64| {
            let cluster = h200(nodes);
            let gpus = cluster.gpus();
            let layout = Layout { pipeline: 1, attention_tp: 1, attention_dp: gpus, expert_tp: 1, expert_ep: gpus };
            let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
            let work = Work { sequences: 1.0 * gpus as f64, tokens: 2048.0, cached: 0.0 };
            let profile = StepProfile::predicted(&target, &work, false);
            gain(&profile, &Remote::of_rates(1.0 / gpus as f64, 0.4, 0.0).unwrap(), 1.0).unwrap().exposed_share
        };
        assert!(share(1) < 0.4 && share(4) > 0.5, "{} {}", share(1), share(4));
    }

    proptest! {
        #[test]
        fn more_locality_never_hurts(
            compute in 1e-4f64..1.0, bytes in 0.0f64..1.0, latency in 0.0f64..0.1, before in 0.0f64..0.9, more in 0.0f64..0.1,
            overlap: bool,
        ) {
            let profile = StepProfile { compute, bytes, latency, experts: 0.0, overlap };
            let of = |after| gain(&profile, &Remote::of_rates(before, after, 0.01).unwrap(), 2.0).unwrap();
            let (same, better) = (of(before), of(before + more));
            prop_assert!(same.range[1].abs() < 1e-12);
            prop_assert!(better.range[1] >= same.range[1] - 1e-12);
            prop_assert!(better.range[0] <= better.range[1] && better.range[1] <= better.range[2]);
        }
    }
}
