//! A cluster: one kind of GPU, and the levels of links between GPUs, innermost first.
//!
//! | module | contents |
//! |---|---|
//! | `gpu` | GPU data, and presets with their sources |
//! | `measured` | `[[measured]]`: times of collectives and kernels |
//! | `kernels` | kernels, and finding the nearest table for each |
//! | `span` | which levels a group of ranks crosses |

mod gpu;
mod kernels;
mod measured;
mod span;

pub use gpu::{Contention, Gpu, Sharing};
pub(crate) use kernels::seconds as kernel_seconds;
pub use kernels::{Kernel, MeasuredKernel};
pub use measured::{Curve, Line, Measured, Operator, Tables};
use serde::Serialize;
pub use span::{Group, Span};

use crate::PlanError;
use crate::fields::{Fields, toml};

/// GPUs of one kind, and their interconnect.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// The GPU of every rank.
    pub gpu: Gpu,
    /// Levels of links, innermost first: level 0 connects GPUs, level 1 connects groups of `levels[0].count` GPUs, and
    /// so on.
    pub levels: Vec<Level>,
    /// Measured times, which replace the levels' figures and the roofline.
    pub measured: Tables,
    /// US dollars per GPU hour, if known.
    pub usd_per_gpu_hour: Option<f64>,
}

/// Links of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Level {
    /// Name for messages.
    pub name: String,
    /// Number of units of the next inner level that these links connect.
    pub count: u64,
    /// Bytes per second that one GPU can send, in one direction.
    pub bytes_per_second: f64,
    /// Seconds until the first byte of an operation arrives.
    pub latency: f64,
}

const KEYS: &[&str] = &["gpu", "levels", "measured", "usd_per_gpu_hour"];
const LEVEL_KEYS: &[&str] = &["name", "count", "bandwidth_gb_per_second", "latency_us"];
/// Limit on GPUs, because a plan lists the part of every rank.
const MAX_GPUS: u64 = 1 << 16;
/// Limit on levels: GPU, NVLink domain, node, rack, hall and data centre are fewer than eight.
const MAX_LEVELS: usize = 8;

impl Cluster {
    /// Returns this cluster with `ranks` ranks contending for its processors: applies the slowdown of `contention`, and
    /// adds its wait to measured collectives between that many ranks.
    pub fn contended(&self, ranks: u64, contention: Contention) -> Self {
        let mut cluster = self.clone();
        let sharing = &mut cluster.gpu.sharing;
        sharing.retain(|sharing| sharing.ranks != ranks);
        sharing.push(Sharing { ranks, slowdown: contention.slowdown });
        sharing.sort_by_key(|sharing| sharing.ranks);
        for table in cluster.measured.collectives.iter_mut().filter(|table| table.ranks == ranks) {
            table.points = table.points.later(contention.wait);
        }
        cluster
    }

    /// Reads a `cluster.toml`; `file` names it in errors.
    ///
    /// ```toml
    /// gpu = "H200"                      # a preset, or a table [gpu] of figures
    /// usd_per_gpu_hour = 2.5            # optional
    /// [[levels]]                        # innermost first
    /// name = "nvlink"
    /// count = 8                         # GPUs in an NVLink domain
    /// bandwidth_gb_per_second = 450     # of one GPU, one direction
    /// latency_us = 3
    /// [[levels]]
    /// name = "infiniband"
    /// count = 2                         # NVLink domains
    /// bandwidth_gb_per_second = 50
    /// latency_us = 12
    /// [[measured]]                      # optional: a collective between `ranks` ranks of a level, as measured
    /// level = "nvlink"
    /// operator = "all_reduce"           # all_reduce, scatter (either half of it), all_to_all, point_to_point
    /// ranks = 8
    /// points = [{ bytes = 65536, us = 9.1 }, { bytes = 1048576, us = 14.2 }]
    /// [[measured]]                      # optional: a kernel of one layer on one rank, see `Kernel`
    /// operator = "product"              # product, experts, prefill, decode
    /// dtype = "fp8"
    /// inputs = 4096
    /// outputs = 1280
    /// points = [{ tokens = 1, us = 5.2 }, { tokens = 256, us = 9.9 }]
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if the text is not TOML, [`PlanError::Key`] if a key is unknown or missing, or a value is
    /// negative, NaN or impossible.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, PlanError> {
        toml(file, text, KEYS, Self::read)
    }

    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let gpu = Gpu::read(fields)?;
        let levels = fields.list("levels", LEVEL_KEYS, Level::read)?;
        let gpus = levels.iter().try_fold(1u64, |gpus, level| gpus.checked_mul(level.count));
        if levels.is_empty() || levels.len() > MAX_LEVELS || gpus.is_none_or(|gpus| gpus > MAX_GPUS) {
            let expected = format!("1 to {MAX_LEVELS} levels with at most {MAX_GPUS} GPUs, innermost first");
            return Err(fields.unexpected("levels", expected));
        }
        let measured = Tables::read(fields, &levels)?;
        Ok(Self { gpu, levels, measured, usd_per_gpu_hour: fields.positive_if("usd_per_gpu_hour")? })
    }

    /// Total number of GPUs.
    pub fn gpus(&self) -> u64 {
        self.levels.iter().map(|level| level.count).product()
    }
}

impl Level {
    fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        Ok(Self {
            name: fields.name("name")?,
            count: fields.dimension("count")?,
            bytes_per_second: fields.positive("bandwidth_gb_per_second")? * 1e9,
            latency: fields.not_negative("latency_us")? * 1e-6,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "gpu = \"H200\"\n[[levels]]\nname = \"nvlink\"\ncount = 8\nbandwidth_gb_per_second = 450\nlatency_us = 3\n\
                        [[levels]]\nname = \"ib\"\ncount = 2\nbandwidth_gb_per_second = 50\nlatency_us = 12\n";

    #[test]
    fn what_is_wrong_is_named_by_its_key() {
        assert_eq!(Cluster::from_toml("c", GOOD).unwrap().gpus(), 16);
        let cases = [
            ("\"H200\"", "\"H2000\"", "`gpu` is \"H2000\", expected a table or one of H100"),
            ("450", "nan", "`levels[0].bandwidth_gb_per_second` is null, NaN or infinite"),
            ("450", "-450", "`levels[0].bandwidth_gb_per_second` is -450"),
            ("count = 2", "count = 0", "`levels[1].count` is 0"),
            ("latency_us = 12", "latency_ms = 1", "`levels[1].latency_ms` is an unknown key"),
            ("latency_us = 12", "", "`levels[1].latency_us` is missing"),
            ("count = 2", "count = 1000000", "`levels` is ["),
            ("[[levels]]", "[levels]", "not valid TOML"),
        ];
        for (from, to, message) in cases {
            let error = Cluster::from_toml("c", &GOOD.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
        let error = Cluster::from_toml("c", "gpu = \"H100\"").unwrap_err().to_string();
        assert!(error.contains("`levels` is missing, expected 1 to 8 levels"), "{error}");
    }

    #[test]
    fn a_gpu_can_be_described() {
        let text = GOOD.replace("gpu = \"H200\"", "").to_owned()
            + "[gpu]\nmemory_gb = 64\nhbm_tb_per_second = 1.6\nbf16_tflops = 320\n";
        let gpu = Cluster::from_toml("c", &text).unwrap().gpu;
        assert_eq!((gpu.memory, gpu.hbm, gpu.bf16, gpu.fp8), (64e9, 1.6e12, 320e12, None));
        assert_eq!(gpu.slowdown(8), 1.0);
        let error = Cluster::from_toml("c", &text.replace("64", "0")).unwrap_err().to_string();
        assert!(error.contains("`gpu.memory_gb` is 0"), "{error}");

        let sharing = |rows: &str| Cluster::from_toml("c", &format!("{text}sharing = [{rows}]\n"));
        let shared = sharing("{ ranks = 2, slowdown = 1.5 }, { ranks = 4, slowdown = 3.5 }").unwrap().gpu;
        assert_eq!([1, 2, 3, 4, 8].map(|ranks| shared.slowdown(ranks)), [1.0, 1.5, 2.5, 3.5, 7.0]);
        for wrong in ["{ ranks = 1, slowdown = 1 }", "{ ranks = 2, slowdown = 0.5 }", "{ ranks = 2, slowdown = nan }"] {
            assert!(sharing(wrong).unwrap_err().to_string().contains("`gpu.sharing"), "{wrong}");
        }
    }
}
