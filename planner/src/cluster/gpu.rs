//! GPU data.

use serde::Serialize;
use serde_json::Value;

use crate::PlanError;
use crate::fields::Fields;
use crate::shape::Dtype;

/// A GPU's memory and peak rates. Rates are for dense matrices, without sparsity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Name for tables.
    pub name: String,
    /// Bytes of memory (GB = 10^9).
    pub memory: f64,
    /// Memory bandwidth in bytes per second.
    pub hbm: f64,
    /// FLOP/s with 16-bit elements.
    pub bf16: f64,
    /// FLOP/s with 8-bit floats, if supported.
    pub fp8: Option<f64>,
    /// FLOP/s with 4-bit floats, if supported.
    pub fp4: Option<f64>,
    /// Slowdown by the number of ranks that share processors; empty if each rank has its own GPU.
    pub sharing: Vec<Sharing>,
    /// Source of the figures, such as a data sheet.
    pub source: String,
}

/// Ranks that share the processors of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sharing {
    /// Number of ranks computing at the same time.
    pub ranks: u64,
    /// Slowdown of each rank relative to running alone, at least 1.
    pub slowdown: f64,
}

/// How much slower steps are when several ranks contend for processors, excluding the cost of the collectives, which
/// are measured separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contention {
    /// Slowdown of computation, at least 1.
    pub slowdown: f64,
    /// Seconds that each collective waits for ranks that are not scheduled yet.
    pub wait: f64,
}

const SHARING_KEYS: &[&str] = &["ranks", "slowdown"];

/// A row in the preset table.
struct Preset {
    /// The name in `cluster.toml`.
    name: &'static str,
    memory_gb: f64,
    hbm_tb_per_second: f64,
    /// Rates for 16, 8 and 4 bits; 0 if unsupported.
    tflops: [f64; 3],
    source: &'static str,
}

/// GPUs that a cluster file can name. For `bandwidth_gb_per_second` of the innermost level, use half of the NVLink
/// figure in these sources, which is one direction: A100 300, H100, H200 and H20 450, B200, B300, GB200 and GB300 900,
/// MI300X 448.
const PRESETS: &[Preset] = &[
    preset("H100", [80.0, 3.35], [989.4, 1978.9, 0.0], "NVIDIA H100 data sheet, SXM5, without sparsity"),
    preset("H200", [141.0, 4.8], [989.4, 1978.9, 0.0], "NVIDIA H200 data sheet, SXM5, without sparsity"),
    preset("B200", [180.0, 8.0], [2250.0, 4500.0, 9000.0], "NVIDIA HGX B200 data sheet, per GPU, without sparsity"),
    preset("B300", [270.0, 8.0], [2250.0, 4500.0, 14000.0], "NVIDIA HGX B300 data sheet, per GPU, without sparsity"),
    preset(
        "GB200",
        [186.0, 8.0],
        [2500.0, 5000.0, 10000.0],
        "NVIDIA GB200 NVL72 data sheet, per GPU, without sparsity",
    ),
    preset(
        "GB300",
        [279.0, 8.0],
        [2500.0, 5000.0, 15000.0],
        "NVIDIA GB300 NVL72 data sheet, per GPU, without sparsity",
    ),
    preset("H20", [96.0, 4.0], [148.0, 296.0, 0.0], "NVIDIA H20 product brief, as published by resellers"),
    preset("A100", [80.0, 2.039], [312.0, 0.0, 0.0], "NVIDIA A100 data sheet, SXM4 80 GB, without sparsity"),
    preset("MI300X", [192.0, 5.3], [1307.4, 2614.9, 0.0], "AMD Instinct MI300X data sheet, without sparsity"),
];

const fn preset(name: &'static str, memory: [f64; 2], tflops: [f64; 3], source: &'static str) -> Preset {
    Preset { name, memory_gb: memory[0], hbm_tb_per_second: memory[1], tflops, source }
}

impl Gpu {
    /// Returns a preset by name.
    pub fn preset(name: &str) -> Option<Self> {
        let found = PRESETS.iter().find(|preset| preset.name == name)?;
        let rate = |at: usize| (found.tflops[at] > 0.0).then_some(found.tflops[at] * 1e12);
        Some(Self {
            name: found.name.to_owned(),
            memory: found.memory_gb * 1e9,
            hbm: found.hbm_tb_per_second * 1e12,
            bf16: found.tflops[0] * 1e12,
            fp8: rate(1),
            fp4: rate(2),
            sharing: Vec::new(),
            source: found.source.to_owned(),
        })
    }

    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        const KEYS: &[&str] =
            &["name", "memory_gb", "hbm_tb_per_second", "bf16_tflops", "fp8_tflops", "fp4_tflops", "sharing", "source"];
        if let Some(gpu) = fields.inner("gpu") {
            let gpu = gpu.known(KEYS)?;
            let rate = |key: &str| Ok::<_, PlanError>(gpu.positive_if(key)?.map(|tera| tera * 1e12));
            return Ok(Self {
                name: gpu.text("name")?.unwrap_or("described").chars().take(64).collect(),
                memory: gpu.positive("memory_gb")? * 1e9,
                hbm: gpu.positive("hbm_tb_per_second")? * 1e12,
                bf16: gpu.positive("bf16_tflops")? * 1e12,
                fp8: rate("fp8_tflops")?,
                fp4: rate("fp4_tflops")?,
                sharing: Sharing::read(&gpu)?,
                source: gpu.text("source")?.unwrap_or("the cluster file").chars().take(200).collect(),
            });
        }
        let preset = fields.get("gpu").and_then(Value::as_str).and_then(Self::preset);
        preset.ok_or_else(|| {
            let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
            fields.unexpected("gpu", format!("a table or one of {}", names.join(", ")))
        })
    }

    /// Returns the slowdown of computation if `ranks` ranks compute at the same time: interpolated linearly between
    /// measured rank counts, proportional above the last.
    pub fn slowdown(&self, ranks: u64) -> f64 {
        let (mut low, ranks) = (Sharing { ranks: 1, slowdown: 1.0 }, ranks as f64);
        for &high in &self.sharing {
            let (from, to) = (low.ranks as f64, high.ranks as f64);
            if ranks <= to {
                return low.slowdown + (high.slowdown - low.slowdown) * (ranks - from) / (to - from).max(1.0);
            }
            low = high;
        }
        if self.sharing.is_empty() { 1.0 } else { low.slowdown * ranks / low.ranks as f64 }
    }

    /// Returns the FLOP/s of a product with weights of this type. Types that the GPU does not support are widened
    /// first.
    pub fn flops(&self, weights: Dtype) -> f64 {
        match weights {
            Dtype::F32 => self.bf16 / 2.0,
            Dtype::Bf16 | Dtype::Int4 => self.bf16,
            Dtype::Fp8 => self.fp8.unwrap_or(self.bf16),
            // Activations stay at 16 bits unless the GPU multiplies 4-bit floats.
            Dtype::Mxfp4 | Dtype::Nvfp4 => self.fp4.unwrap_or(self.bf16),
        }
    }
}

impl Sharing {
    fn read(gpu: &Fields<'_>) -> Result<Vec<Self>, PlanError> {
        let row = |row: &Fields<'_>| Ok(Self { ranks: row.dimension("ranks")?, slowdown: row.positive("slowdown")? });
        let rows: Vec<Self> = gpu.list("sharing", SHARING_KEYS, row)?;
        let rising = rows.is_sorted_by(|one, next| one.ranks < next.ranks);
        let good = rising && rows.iter().all(|row| row.ranks > 1 && row.slowdown >= 1.0);
        let expected = "rows of { ranks, slowdown }, with ranks ascending from 2 and slowdowns of at least 1";
        if good { Ok(rows) } else { Err(gpu.unexpected("sharing", expected)) }
    }
}
