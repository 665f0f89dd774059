//! Measured steps of a running deployment: the breakdown of their time, and a rank's traffic.

use serde::Serialize;

use crate::PlanError;
use crate::affinity::StepProfile;
use crate::error::{not_negative, positive};
use crate::fields::{Fields, toml};

const KEYS: &[&str] = &[
    "name",
    "compute_ms",
    "communication_ms",
    "latency_ms",
    "expert_mb",
    "other_mb",
    "links",
    "overlap",
    "local_rate",
    "remote_ranks",
];
const LINK_KEYS: &[&str] = &["mbit_per_second", "share"];

/// A deployment's steps and current routing rates, as far as they are known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deployment {
    /// Name for tables.
    pub name: String,
    /// The step at each link rate.
    pub steps: Vec<NamedStep>,
    /// Current fraction of local activations.
    pub local_rate: Option<f64>,
    /// Current number of remote ranks that a token is sent to, averaged over tokens and layers.
    pub remote_ranks: Option<f64>,
}

/// A step at one link rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedStep {
    /// Name that states the link rate, or "the measured step".
    pub name: String,
    /// Times of the step.
    pub profile: StepProfile,
}

/// Sums over all ranks since the unit started, from its `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UnitCounts {
    /// Steps of all ranks.
    pub steps: f64,
    /// Total seconds of those steps.
    pub step_seconds: f64,
    /// Total seconds that those steps spent in dispatch and combine, including waiting for slower ranks.
    pub exchange_seconds: f64,
    /// Activations on the token's own rank.
    pub local: f64,
    /// Activations on other ranks.
    pub remote: f64,
}

impl Deployment {
    /// Reads a description; `file` names it in errors. It has either `communication_ms`, or bytes and links.
    ///
    /// ```toml
    /// name = "4 ranks, attention dp"
    /// compute_ms = 35.3             # a step without communication
    /// local_rate = 0.25             # current fraction of activations on the token's own rank
    /// remote_ranks = 2.14           # current number of remote ranks per token
    /// overlap = false               # whether two micro-batches hide communication
    /// communication_ms = 18         # time in dispatch and combine
    /// latency_ms = 4                # the part that does not grow with the bytes
    /// # or, for links of several rates:
    /// expert_mb = 3.96              # MB that a rank sends in a step to experts and back (1 MB = 10^6 bytes)
    /// other_mb = 0                  # MB that it sends for other purposes
    /// links = [{ mbit_per_second = 1000, share = 0.95 }]    # share: achieved fraction of the rate
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if the text is not TOML, [`PlanError::Key`] if a key is unknown or missing, or a value is
    /// impossible.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, PlanError> {
        toml(file, text, KEYS, Self::read)
    }

    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let local_rate = || {
            let rate = fields.not_negative("local_rate").ok().filter(|rate| *rate < 1.0);
            rate.ok_or_else(|| fields.unexpected("local_rate", "a fraction in [0, 1)"))
        };
        Ok(Self {
            name: fields.text("name")?.unwrap_or("the deployment").chars().take(64).collect(),
            steps: steps(fields)?,
            local_rate: fields.get("local_rate").map(|_| local_rate()).transpose()?,
            remote_ranks: fields.positive_if("remote_ranks")?,
        })
    }

    /// Builds a deployment from a unit's counts, assuming that all dispatch and combine time is proportional to the
    /// bytes.
    ///
    /// # Errors
    /// [`PlanError::Value`] if the unit has run no steps or activated no experts, or spent more time in collectives
    /// than in steps.
    pub fn of_counts(name: String, counts: &UnitCounts) -> Result<Self, PlanError> {
        let steps = positive("the steps of the unit", counts.steps)?;
        let activations = positive("the activations of the unit", counts.local + counts.remote)?;
        let compute =
            positive("the seconds of steps outside collectives", counts.step_seconds - counts.exchange_seconds)?;
        let bytes = not_negative("the seconds in collectives", counts.exchange_seconds)?;
        let profile =
            StepProfile { compute: compute / steps, bytes: bytes / steps, latency: 0.0, experts: 0.0, overlap: false };
        let step = NamedStep { name: "the measured step".to_owned(), profile };
        Ok(Self { name, steps: vec![step], local_rate: Some(counts.local / activations), remote_ranks: None })
    }
}

fn steps(fields: &Fields<'_>) -> Result<Vec<NamedStep>, PlanError> {
    let compute = fields.positive("compute_ms")? / 1e3;
    let overlap = fields.flag("overlap", false)?;
    let step = |name: String, bytes: f64, latency: f64| NamedStep {
        name,
        profile: StepProfile { compute, bytes, latency, experts: 0.0, overlap },
    };
    if fields.get("links").is_none() {
        let communication = fields.not_negative("communication_ms")? / 1e3;
        let latency = fields.get("latency_ms").map_or(Ok(0.0), |_| fields.not_negative("latency_ms"))? / 1e3;
        if latency > communication {
            return Err(fields.unexpected("latency_ms", "at most communication_ms"));
        }
        return Ok(vec![step("the measured step".to_owned(), communication - latency, latency)]);
    }
    if let Some(key) = ["communication_ms", "latency_ms"].into_iter().find(|key| fields.get(key).is_some()) {
        return Err(fields.unexpected(key, "no value, as it follows from `links`"));
    }
    let moved = fields.positive("expert_mb")? * 8.0;
    let other = fields.get("other_mb").map_or(Ok(0.0), |_| fields.not_negative("other_mb"))? * 8.0;
    let link = |link: &Fields<'_>| {
        let (rate, share) = (link.positive("mbit_per_second")?, link.positive_if("share")?.unwrap_or(1.0));
        Ok(step(format!("the step at {rate:.0} Mbit/s"), moved / (rate * share), other / (rate * share)))
    };
    let steps = fields.list("links", LINK_KEYS, link)?;
    if steps.is_empty() { Err(fields.unexpected("links", "one or more { mbit_per_second, share }")) } else { Ok(steps) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity::{Remote, gain};

    const LINKS: &str = "compute_ms = 36\nexpert_mb = 4\nother_mb = 1\nlocal_rate = 0.25\nremote_ranks = 2.0\n\
        links = [{ mbit_per_second = 1000 }, { mbit_per_second = 2000, share = 0.5 }]\n";

    #[test]
    fn bytes_over_links_give_the_gain_that_amdahl_gives() {
        let found = Deployment::from_toml("d", LINKS).unwrap();
        // 36 ms, 32 ms of experts' rows, 8 ms of other traffic; half as many rows.
        for step in &found.steps {
            let gain = gain(&step.profile, &Remote { before: 2.0, after: 1.0, error: 0.0 }, 1.0).unwrap();
            assert!((gain.range[1] - 16.0 / 60.0).abs() < 1e-12, "{}: {gain}", step.name);
        }
        assert_eq!(found.steps[1].name, "the step at 2000 Mbit/s");
        let timed = Deployment::from_toml("d", "compute_ms = 34\ncommunication_ms = 18\nlatency_ms = 4\n").unwrap();
        assert!((timed.steps[0].profile.bytes - 0.014).abs() < 1e-12 && timed.local_rate.is_none());
    }

    #[test]
    fn counters_give_the_mean_step() {
        let counts = UnitCounts { steps: 40.0, step_seconds: 2.0, exchange_seconds: 0.5, local: 30.0, remote: 70.0 };
        let found = Deployment::of_counts("unit".to_owned(), &counts).unwrap();
        assert_eq!((found.steps[0].profile.compute, found.steps[0].profile.bytes), (0.0375, 0.0125));
        assert_eq!(found.local_rate, Some(0.3));
        for wrong in [
            UnitCounts { steps: 0.0, ..counts },
            UnitCounts { step_seconds: 0.1, ..counts },
            UnitCounts { local: 0.0, remote: 0.0, ..counts },
            UnitCounts { exchange_seconds: f64::NAN, ..counts },
        ] {
            assert!(Deployment::of_counts("unit".to_owned(), &wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_by_its_key() {
        let cases = [
            (LINKS, "compute_ms = 36", "compute_ms = nan", "`compute_ms` is null, NaN or infinite"),
            (LINKS, "other_mb", "communication_ms", "`communication_ms` is 1, expected no value"),
            (LINKS, "expert_mb = 4\n", "", "`expert_mb` is missing"),
            (LINKS, "0.25", "1.0", "`local_rate` is 1.0, expected a fraction"),
            (LINKS, "mbit_per_second = 1000", "gbit = 1", "`links[0].gbit` is an unknown key"),
            ("links = []\ncompute_ms = 1\nexpert_mb = 1\n", "", "", "`links` is []"),
            ("compute_ms = 1\n", "", "", "`communication_ms` is missing"),
            ("compute_ms = 1\ncommunication_ms = 1\nlatency_ms = 2\n", "", "", "`latency_ms` is 2"),
        ];
        for (text, from, to, message) in cases {
            let error = Deployment::from_toml("d", &text.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
    }
}
