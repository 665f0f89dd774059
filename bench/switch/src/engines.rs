//! Step times of engines, and the unit that all runs share.

use std::path::Path;

use semmoe_planner::policy::{ByLayout, Layout, LayoutPrior, MAX_POINTS, Point, Prior, StepCurve, SwitchCost};
use serde::Deserialize;

use crate::error::SwitchError;

/// An engine's decode step times.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) steps: ByLayout<StepCurve>,
    /// Most sequences decoded at once, limited by the range of both curves.
    pub(crate) max_sequences: u32,
}

/// One row of a table: sequences, milliseconds with TP, with EP.
struct Row(u32, f64, f64);

/// Qwen3-235B-A22B, bf16, 8 x H200, context 1024, TP8 and DP8 EP8: interpolated by NVIDIA's aiconfigurator (Apache-2.0)
/// from its measured tables.
const MEASURED: [(&str, [Row; 5]); 3] = [
    (
        "trtllm",
        [Row(8, 11.7, 19.5), Row(64, 25.7, 25.1), Row(256, 36.0, 33.2), Row(512, 47.0, 39.4), Row(2048, 105.9, 73.1)],
    ),
    (
        "vllm",
        [Row(8, 12.2, 19.9), Row(64, 21.4, 27.4), Row(256, 32.6, 34.9), Row(512, 41.6, 41.5), Row(2048, 96.2, 90.6)],
    ),
    (
        "sglang",
        [Row(8, 11.5, 18.3), Row(64, 21.8, 29.6), Row(256, 31.1, 39.6), Row(512, 39.8, 49.9), Row(2048, 97.2, 106.0)],
    ),
];

/// Bytes of a token's cache on one rank, sharded over 8 with TP (4 heads, each held twice) and whole with EP: 94 layers
/// of keys and values, 4 heads of 128 elements of 2 bytes.
const TOKEN_BYTES: ByLayout<u64> = ByLayout { tp: 48_128, ep: 192_512 };
/// Ranks of the unit.
pub(crate) const RANKS: u32 = 8;
/// Bytes free for the cache on a rank: 0.85 of 141 GB less the weights, which are all sharded with TP; attention is
/// whole with EP.
const FREE_BYTES: ByLayout<u64> = ByLayout { tp: 61_080_000_000, ep: 47_190_000_000 };
/// Most sequences decoded at once.
pub(crate) const MAX_SEQUENCES: u32 = 2048;
/// Most prompt tokens of a step.
pub(crate) const CHUNK_TOKENS: u32 = 8192;

/// KV tokens that the unit holds.
pub(crate) fn room_tokens() -> ByLayout<u64> {
    let whole = FREE_BYTES.ep / TOKEN_BYTES.ep;
    ByLayout { tp: FREE_BYTES.tp / TOKEN_BYTES.tp, ep: whole * u64::from(RANKS) }
}

/// The cost of a switch: expert weights at 70% of NVLink's 450 GB/s, plus the rest of Moebius' fastest switch (215 ms).
pub(crate) fn switch_cost() -> SwitchCost {
    SwitchCost {
        ranks: RANKS,
        weight_bytes: 56_774_098_944,
        // TP to EP: all ranks but the owner send their shares. EP to TP: the owner sends the rest.
        token_bytes: ByLayout { tp: 7 * TOKEN_BYTES.tp, ep: TOKEN_BYTES.ep - TOKEN_BYTES.tp },
        bytes_per_second: 315e9,
        fixed_seconds: 0.057,
    }
}

/// The three engines of the table.
pub(crate) fn published() -> Result<Vec<Engine>, SwitchError> {
    let points = |rows: &[Row; 5], layout| {
        let seconds = |row: &Row| if layout == Layout::Tp { row.1 } else { row.2 } / 1e3;
        rows.iter().map(|row| Point { sequences: row.0, seconds: seconds(row) }).collect()
    };
    MEASURED.iter().map(|(name, rows)| engine(name, &|layout| points(rows, layout))).collect()
}

fn engine(name: &str, points: &dyn Fn(Layout) -> Vec<Point>) -> Result<Engine, SwitchError> {
    let curve = |layout: Layout| {
        StepCurve::new(points(layout)).map_err(|source| SwitchError::Curve {
            engine: name.to_owned(),
            layout: layout.name(),
            source,
        })
    };
    let steps = ByLayout { tp: curve(Layout::Tp)?, ep: curve(Layout::Ep)? };
    let is_known = |batch: &u32| [Layout::Tp, Layout::Ep].iter().all(|layout| steps[*layout].seconds(*batch).is_some());
    let max_sequences = (1..=MAX_SEQUENCES).take_while(is_known).last().unwrap_or(1);
    Ok(Engine { name: name.to_owned(), steps, max_sequences })
}

/// Measured curves: `[{"name": ..., "tp": [[sequences, milliseconds], ...], "ep": [...]}, ...]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CurveFile {
    name: String,
    tp: Vec<(u32, f64)>,
    ep: Vec<(u32, f64)>,
}

/// Size limit of a file of curves.
const MAX_BYTES: u64 = 1 << 24;

/// Reads engines from a file of measured curves.
pub(crate) fn read(path: &Path) -> Result<Vec<Engine>, SwitchError> {
    let failed = |cause: String| SwitchError::Read { path: path.display().to_string(), cause };
    let bytes = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if bytes > MAX_BYTES {
        return Err(failed(format!("{bytes} bytes, expected at most {MAX_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let files: Vec<CurveFile> = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
    let points = |pairs: &[(u32, f64)]| {
        let pairs = pairs.iter().take(MAX_POINTS + 1);
        pairs.map(|&(sequences, milliseconds)| Point { sequences, seconds: milliseconds / 1e3 }).collect::<Vec<_>>()
    };
    files
        .iter()
        .map(|file| engine(&file.name, &|layout| points(if layout == Layout::Tp { &file.tp } else { &file.ep })))
        .collect()
}

/// Prompt tokens per second of both layouts.
pub(crate) type Rates = ByLayout<f64>;

impl Engine {
    /// Whether one layout is never slower than the other, at any batch and in prefill.
    pub(crate) fn is_one_sided(&self, rates: Rates) -> bool {
        [Layout::Tp, Layout::Ep].into_iter().any(|layout| {
            let (own, other) = (&self.steps[layout], &self.steps[layout.other()]);
            rates[layout] >= rates[layout.other()]
                && (1..=self.max_sequences).all(|batch| own.seconds(batch) <= other.seconds(batch))
        })
    }

    /// The calibration that an engine would report at startup, off by a factor in each layout.
    pub(crate) fn prior(&self, rates: Rates, wrong: ByLayout<f64>) -> Result<Prior, SwitchError> {
        let layout = |layout: Layout| -> Result<LayoutPrior, SwitchError> {
            let scaled = |sequences: u32| {
                let seconds = self.steps[layout].seconds(sequences)? * wrong[layout];
                Some(Point { sequences, seconds })
            };
            let octaves = (0..u32::BITS).map(|octave| 1 << octave).take_while(|&batch| batch < self.max_sequences);
            let points = octaves.chain([self.max_sequences]).filter_map(scaled).collect();
            let steps = StepCurve::new(points).map_err(|source| SwitchError::Curve {
                engine: self.name.clone(),
                layout: layout.name(),
                source,
            })?;
            Ok(LayoutPrior { steps: Some(steps), prefill_tokens_per_second: Some(rates[layout] / wrong[layout]) })
        };
        Ok(Prior { tp: layout(Layout::Tp)?, ep: layout(Layout::Ep)? })
    }
}
