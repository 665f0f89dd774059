//! `[[measured]]` tables: times of collectives, which replace latency and bandwidth, and of kernels, which replace the
//! roofline model. Every table has an operator, its dimensions, and `points` of size and microseconds.

use serde::Serialize;

use super::Level;
use super::kernels::{self, MeasuredKernel};
use crate::PlanError;
use crate::fields::Fields;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operator {
    /// Reduce-scatter or allgather; bytes of the whole tensor.
    Scatter,
    /// All-reduce; bytes of the tensor.
    AllReduce,
    /// All-to-all; bytes that one rank has for all ranks, including itself.
    AllToAll,
    /// A transfer from one rank to another.
    PointToPoint,
}

const OPERATORS: [(&str, Operator); 4] = [
    ("scatter", Operator::Scatter),
    ("all_reduce", Operator::AllReduce),
    ("all_to_all", Operator::AllToAll),
    ("point_to_point", Operator::PointToPoint),
];

impl Operator {
    /// Returns the operator's name in cluster files.
    pub fn name(self) -> &'static str {
        OPERATORS.iter().find(|(_, operator)| *operator == self).map_or("", |(name, _)| *name)
    }
}

/// A linear cost model: `latency + bytes x seconds_per_byte`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Seconds for the smallest message.
    pub latency: f64,
    /// Reciprocal of the bandwidth, above 0.
    pub seconds_per_byte: f64,
}

impl Line {
    /// Returns the size at which the latency equals the transfer time; smaller messages are latency-bound.
    pub fn knee(&self) -> f64 {
        self.latency / self.seconds_per_byte
    }
}

/// Measured times of a collective between ranks on one level.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The level's name.
    pub level: String,
    /// The collective measured.
    pub operator: Operator,
    /// Number of ranks.
    pub ranks: u64,
    /// Bytes in ascending order, and seconds.
    pub points: Curve,
}

const KEYS: &[&str] = &["level", "operator", "ranks", "points"];
/// Limit on points, far above a sweep over all sizes.
const MAX_POINTS: usize = 4096;

/// Seconds by size: at least one point, with ascending sizes and positive times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve(Vec<[f64; 2]>);

impl Curve {
    /// Creates a curve through (size, seconds) points; `None` unless sizes are non-negative and ascending, and times
    /// are finite and positive.
    pub fn new(points: Vec<[f64; 2]>) -> Option<Self> {
        let good =
            |[size, seconds]: &[f64; 2]| size.is_finite() && *size >= 0.0 && seconds.is_finite() && *seconds > 0.0;
        let rising = points.is_sorted_by(|one, next| one[0] < next[0]);
        (rising && (1..=MAX_POINTS).contains(&points.len()) && points.iter().all(good)).then_some(Self(points))
    }

    /// The points.
    pub fn points(&self) -> &[[f64; 2]] {
        &self.0
    }

    /// Returns the curve with `wait` seconds added at every size.
    pub(super) fn later(&self, wait: f64) -> Self {
        Self(self.0.iter().map(|&[size, seconds]| [size, seconds + wait]).collect())
    }

    /// Reads a table's `points`, whose sizes have the key `size`.
    pub(super) fn read(fields: &Fields<'_>, size: &'static str) -> Result<Self, PlanError> {
        let point = |point: &Fields<'_>| Ok([point.not_negative(size)?, point.positive("us")? * 1e-6]);
        let points = fields.list("points", &[size, "us"], point)?;
        let expected = || format!("1 to {MAX_POINTS} of {{ {size}, us }}, {size} ascending");
        Self::new(points).ok_or_else(|| fields.unexpected("points", expected()))
    }

    /// Interpolates the seconds at `size` linearly. This is exact for times that are constant, proportional, or latency
    /// plus bytes over bandwidth, except that a knee between two points is overestimated. Below all points it returns
    /// the first time; above them it extrapolates the last slope.
    pub fn seconds(&self, size: f64) -> f64 {
        let points = &self.0;
        let above = points.iter().position(|point| point[0] >= size).unwrap_or(points.len() - 1);
        let (high, low) = (points[above], points[above.saturating_sub(1)]);
        if above == 0 || high[0] <= low[0] {
            // A single point has no slope, so times for larger sizes are proportional.
            return if size > high[0] && high[0] > 0.0 { high[1] * size / high[0] } else { high[1] };
        }
        // Noise must not make extrapolated times decrease.
        let slope = ((high[1] - low[1]) / (high[0] - low[0])).max(if size > high[0] { 0.0 } else { f64::NEG_INFINITY });
        if size > high[0] { high[1] + slope * (size - high[0]) } else { low[1] + slope * (size - low[0]) }
    }
}

/// All tables in a cluster file.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tables {
    /// Tables of collectives.
    pub collectives: Vec<Measured>,
    /// Tables of kernels.
    pub kernels: Vec<MeasuredKernel>,
}

impl Tables {
    pub(super) fn read(fields: &Fields<'_>, levels: &[Level]) -> Result<Self, PlanError> {
        let mut tables = Self::default();
        for table in fields.any_sections("measured")? {
            match table.text("operator")?.and_then(kernels::keys) {
                Some(keys) => tables.kernels.push(MeasuredKernel::read(&table.known(keys)?)?),
                None => tables.collectives.push(Measured::read(&table.known(KEYS)?, levels)?),
            }
        }
        Ok(tables)
    }
}

impl Measured {
    fn read(fields: &Fields<'_>, levels: &[Level]) -> Result<Self, PlanError> {
        let named = |name: &str| levels.iter().find(|level| level.name == name);
        let level = fields.text("level")?.and_then(named);
        let names = || levels.iter().map(|level| level.name.as_str()).collect::<Vec<_>>().join(", ");
        let level = level.ok_or_else(|| fields.unexpected("level", format!("one of {}", names())))?;
        let operator = fields.text("operator")?.and_then(|name| OPERATORS.iter().find(|(known, _)| *known == name));
        let known = || OPERATORS.map(|(name, _)| name).join(", ");
        let expected = || format!("one of {}, product, experts, prefill, decode", known());
        let (_, operator) = *operator.ok_or_else(|| fields.unexpected("operator", expected()))?;
        Ok(Self {
            level: level.name.clone(),
            operator,
            ranks: fields.dimension("ranks")?,
            points: Curve::read(fields, "bytes")?,
        })
    }

    /// Returns the line through the smallest and the largest size; `None` if the time does not grow with the bytes.
    pub fn line(&self) -> Option<Line> {
        let (first, last) = (self.points.0.first()?, self.points.0.last()?);
        let seconds_per_byte = (last[1] - first[1]) / (last[0] - first[0]);
        let latency = (first[1] - first[0] * seconds_per_byte).max(0.0);
        (seconds_per_byte.is_finite() && seconds_per_byte > 0.0).then_some(Line { latency, seconds_per_byte })
    }

    /// Seconds for `bytes`.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.points.seconds(bytes)
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
        let alone =
            Measured { points: Curve::new(vec![[1000.0, 1e-5]]).unwrap(), ..cluster.measured.collectives[0].clone() };
        assert_eq!([10.0, 1000.0, 2000.0].map(|bytes| alone.seconds(bytes)), [1e-5, 1e-5, 2e-5]);
        assert_eq!(alone.line(), None);
        let line = cluster.measured.collectives[0].line().unwrap();
        assert!(
            (line.seconds_per_byte - 8e-6 / 3000.0).abs() < 1e-15 && (line.knee() - 2750.0).abs() < 1e-6,
            "{line:?}"
        );
        // Other numbers of ranks, operators and levels are modelled.
        let modelled = Cluster { measured: Tables::default(), ..cluster.clone() };
        for group in [Group { size: 4, stride: 1 }, Group { size: 2, stride: 8 }, Group { size: 16, stride: 1 }] {
            assert_eq!(cluster.span(group).all_reduce(1e6), modelled.span(group).all_reduce(1e6));
        }
        let tuned = |cluster: &Cluster| cluster.span(Group { size: 8, stride: 1 }).tuned(0.5, 1e-3).all_reduce(2000.0);
        assert!((tuned(&cluster) - 11e-6).abs() < 1e-12 && tuned(&modelled) > 1e-3);
    }

    const KERNEL: &str = "[[measured]]\noperator = \"product\"\ndtype = \"fp8\"\ninputs = 4096\noutputs = 1280\n\
        points = [{ tokens = 1, us = 5.0 }, { tokens = 256, us = 10.0 }]\n";

    #[test]
    fn kernels_have_the_same_form() {
        let read = |text: &str| Cluster::from_toml("c", &format!("{TEXT}{text}"));
        let tables = read(KERNEL).unwrap().measured;
        assert_eq!((tables.collectives.len(), tables.kernels.len()), (1, 1));
        let product = kernels::Kernel::Product { dtype: crate::shape::Dtype::Fp8, inputs: 4096, outputs: 1280 };
        for (tokens, us) in [(1.0, 5.0), (128.5, 7.5), (256.0, 10.0), (511.0, 15.0)] {
            let seconds = kernels::seconds(&tables.kernels, &product, tokens, |_| 1.0).unwrap();
            assert!((seconds * 1e6 - us).abs() < 1e-9, "{tokens}");
        }
        let many = (0..=MAX_POINTS).map(|at| format!("{{ tokens = {at}, us = 1 }}")).collect::<Vec<_>>().join(", ");
        let cases = [
            ("us = 5.0", "us = nan", "`measured[1].points[0].us` is null, NaN or infinite"),
            ("us = 5.0", "us = -5.0", "`measured[1].points[0].us` is -5"),
            ("us = 5.0", "us = 1e300", "`measured[1].points[0].us` is 1e+300"),
            ("tokens = 1,", "tokens = 300,", "`measured[1].points` is ["),
            ("tokens = 1,", "tokens = -1,", "`measured[1].points[0].tokens` is -1"),
            ("tokens = 1,", "bytes = 1,", "`measured[1].points[0].bytes` is an unknown key"),
            ("inputs = 4096", "inputs = 0", "`measured[1].inputs` is 0"),
            ("inputs = 4096", "hidden = 4096", "`measured[1].hidden` is an unknown key"),
            ("\"fp8\"", "\"fp9\"", "`measured[1].dtype` is \"fp9\", expected one of f32"),
            ("\"product\"", "\"gemm\"", "`measured[1].dtype` is an unknown key, expected one of level"),
            ("{ tokens = 1, us = 5.0 }", &many, "`measured[1].points` is ["),
            ("{ tokens = 1, us = 5.0 }, { tokens = 256, us = 10.0 }", "", "`measured[1].points` is []"),
        ];
        for (from, to, message) in cases {
            let error = read(&KERNEL.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
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
