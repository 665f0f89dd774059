//! Measured times of collectives, which count in place of latency and bandwidth.

use serde::Serialize;

use super::Level;
use crate::PlanError;
use crate::fields::Fields;

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operator {
    /// Reduce-scatter or allgather; bytes are those of the whole tensor.
    Scatter,
    /// All-reduce; bytes of the tensor.
    AllReduce,
    /// All-to-all; bytes that one rank has for all, itself included.
    AllToAll,
    /// From one rank to another.
    PointToPoint,
}

const OPERATORS: [(&str, Operator); 4] = [
    ("scatter", Operator::Scatter),
    ("all_reduce", Operator::AllReduce),
    ("all_to_all", Operator::AllToAll),
    ("point_to_point", Operator::PointToPoint),
];

/// Times of one operator between a number of ranks of one level.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The level's name.
    pub level: String,
    /// What was measured.
    pub operator: Operator,
    /// Between how many ranks.
    pub ranks: u64,
    /// Bytes, rising, and seconds.
    pub points: Vec<[f64; 2]>,
}

pub(super) const KEYS: &[&str] = &["level", "operator", "ranks", "points"];
const POINT_KEYS: &[&str] = &["bytes", "us"];

impl Measured {
    pub(super) fn read(fields: &Fields<'_>, levels: &[Level]) -> Result<Self, PlanError> {
        let named = |name: &str| levels.iter().find(|level| level.name == name);
        let level = fields.text("level")?.and_then(named);
        let names = || levels.iter().map(|level| level.name.as_str()).collect::<Vec<_>>().join(", ");
        let level = level.ok_or_else(|| fields.unexpected("level", format!("one of {}", names())))?;
        let operator = fields.text("operator")?.and_then(|name| OPERATORS.iter().find(|(known, _)| *known == name));
        let operator = operator.ok_or_else(|| {
            fields.unexpected("operator", format!("one of {}", OPERATORS.map(|(name, _)| name).join(", ")))
        })?;
        let point = |point: &Fields<'_>| Ok([point.not_negative("bytes")?, point.positive("us")? * 1e-6]);
        let points: Vec<[f64; 2]> =
            fields.sections("points", POINT_KEYS)?.iter().map(point).collect::<Result<_, PlanError>>()?;
        if points.is_empty() || points.windows(2).any(|pair| pair[0][0] >= pair[1][0]) {
            return Err(fields.unexpected("points", "one or more { bytes, us }, bytes rising"));
        }
        Ok(Self { level: level.name.clone(), operator: operator.1, ranks: fields.dimension("ranks")?, points })
    }

    /// Seconds for `bytes`: straight lines between points; the first time below them, the last slope above.
    #[must_use]
    pub fn seconds(&self, bytes: f64) -> f64 {
        let above = self.points.iter().position(|point| point[0] >= bytes).unwrap_or(self.points.len() - 1);
        let (high, low) = (self.points[above], self.points[above.saturating_sub(1)]);
        if above == 0 || high[0] <= low[0] {
            // A single point says nothing about bandwidth: larger messages take longer in proportion.
            return if bytes > high[0] && high[0] > 0.0 { high[1] * bytes / high[0] } else { high[1] };
        }
        low[1] + (high[1] - low[1]) * (bytes - low[0]) / (high[0] - low[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, Group};

    const TEXT: &str = "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n\
        [[levels]]\nname = \"ib\"\ncount = 2\nbandwidth_gb_per_second = 50\nlatency_us = 12\n\
        [[measured]]\nlevel = \"nvlink\"\noperator = \"all_reduce\"\nranks = 8\n\
        points = [{ bytes = 1000, us = 10 }, { bytes = 3000, us = 12 }, { bytes = 4000, us = 18 }]\n";

    #[test]
    fn measured_times_count_where_they_fit() {
        let cluster = Cluster::from_toml("c", TEXT).unwrap();
        let eight = cluster.span(Group { size: 8, stride: 1 });
        for (bytes, us) in [(0.0, 10.0), (1000.0, 10.0), (2000.0, 11.0), (3500.0, 15.0), (5000.0, 24.0)] {
            assert!((eight.all_reduce(bytes) * 1e6 - us).abs() < 1e-9, "{bytes}");
        }
        let alone = Measured { points: vec![[1000.0, 1e-5]], ..cluster.measured[0].clone() };
        assert_eq!([10.0, 1000.0, 2000.0].map(|bytes| alone.seconds(bytes)), [1e-5, 1e-5, 2e-5]);
        // Other ranks, operators and levels are modelled.
        let modelled = Cluster { measured: Vec::new(), ..cluster.clone() };
        for group in [Group { size: 4, stride: 1 }, Group { size: 2, stride: 8 }, Group { size: 16, stride: 1 }] {
            assert_eq!(cluster.span(group).all_reduce(1e6), modelled.span(group).all_reduce(1e6));
        }
        let tuned = |cluster: &Cluster| cluster.span(Group { size: 8, stride: 1 }).tuned(0.5, 1e-3).all_reduce(2000.0);
        assert!((tuned(&cluster) - 11e-6).abs() < 1e-12 && tuned(&modelled) > 1e-3);
    }

    #[test]
    fn what_is_wrong_is_named_by_its_key() {
        let cases = [
            (
                "level = \"nvlink\"",
                "level = \"nvswitch\"",
                "`measured[0].level` is \"nvswitch\", expected one of nvlink, ib",
            ),
            ("all_reduce", "reduce", "`measured[0].operator` is \"reduce\""),
            ("bytes = 3000", "bytes = 1000", "`measured[0].points` is ["),
            ("3000, us = 12", "3000, us = 0", "`measured[0].points[1].us` is 0"),
            ("3000, us = 12", "3000, ms = 12", "`measured[0].points[1].ms` is an unknown key"),
        ];
        for (from, to, message) in cases {
            let error = Cluster::from_toml("c", &TEXT.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
    }
}
