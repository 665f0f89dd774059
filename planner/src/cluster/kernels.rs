//! Measured kernel times on a GPU, which replace the roofline model.

use std::mem::discriminant;

use serde::Serialize;
use serde_json::Value;

use super::measured::Curve;
use crate::PlanError;
use crate::fields::Fields;
use crate::shape::Dtype;

/// A kernel, or several that always run together, for one layer on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "operator", rename_all = "snake_case")]
pub enum Kernel {
    /// A product with dense weights: `tokens x inputs` by `inputs x outputs`.
    Product {
        /// Type of the weights.
        dtype: Dtype,
        /// Inner dimension.
        inputs: u64,
        /// Number of outputs on this rank.
        outputs: u64,
    },
    /// All products of the routed experts on one rank. Tokens are counted over the whole unit and spread over all
    /// experts.
    Experts {
        /// Type of the weights.
        dtype: Dtype,
        /// H.
        hidden: u64,
        /// Rows of an expert's gate projection on this rank.
        width: u64,
        /// E, the model's number of experts.
        experts: u64,
        /// Experts on this rank.
        local: u64,
        /// k.
        top_k: u64,
    },
    /// Attention over a single prompt with an empty cache.
    Prefill {
        /// Type of the cache.
        dtype: Dtype,
        /// Query heads of this rank.
        heads: u64,
        /// Key and value heads of this rank.
        kv_heads: u64,
        /// Elements of a key. With multi-head latent attention, this is per query head and includes the rotary part.
        head_dim: u64,
    },
    /// Attention of one new token per sequence.
    Decode {
        /// Type of the cache.
        dtype: Dtype,
        /// Query heads of this rank.
        heads: u64,
        /// Key and value heads of this rank; 1 with multi-head latent attention.
        kv_heads: u64,
        /// Elements of a key. With multi-head latent attention, the latent and the rotary key together.
        head_dim: u64,
        /// Cached tokens per sequence.
        context: u64,
    },
}

/// Measured times of a kernel by number of tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredKernel {
    /// The kernel that was measured.
    pub kernel: Kernel,
    /// Tokens (sequences for decoding) in ascending order, and seconds.
    pub points: Curve,
}

/// A table for another shape is used, scaled by the roofline model, if each dimension is within this factor.
const NEAR: f64 = 2.0;

/// The keys in a table, by operator.
const KEYS: [(&str, &[&str]); 4] = [
    ("product", &["operator", "points", "dtype", "inputs", "outputs"]),
    ("experts", &["operator", "points", "dtype", "hidden", "width", "experts", "local", "top_k"]),
    ("prefill", &["operator", "points", "dtype", "heads", "kv_heads", "head_dim"]),
    ("decode", &["operator", "points", "dtype", "heads", "kv_heads", "head_dim", "context"]),
];

/// Returns the keys in a table for this operator, if it is a kernel.
pub(super) fn keys(operator: &str) -> Option<&'static [&'static str]> {
    KEYS.iter().find(|(known, _)| *known == operator).map(|(_, keys)| *keys)
}

impl MeasuredKernel {
    /// Reads a table with its operator's keys.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, PlanError> {
        let dtype = fields.get("dtype").and_then(Value::as_str).and_then(Dtype::of);
        let names = || Dtype::NAMES.map(|(name, _)| name).join(", ");
        let dtype = dtype.ok_or_else(|| fields.unexpected("dtype", format!("one of {}", names())))?;
        let size = |key| fields.dimension(key);
        let kernel = match fields.text("operator")? {
            Some("product") => Kernel::Product { dtype, inputs: size("inputs")?, outputs: size("outputs")? },
            Some("experts") => Kernel::Experts {
                dtype,
                hidden: size("hidden")?,
                width: size("width")?,
                experts: size("experts")?,
                local: size("local")?,
                top_k: size("top_k")?,
            },
            Some("prefill") => Kernel::Prefill {
                dtype,
                heads: size("heads")?,
                kv_heads: size("kv_heads")?,
                head_dim: size("head_dim")?,
            },
            _ => Kernel::Decode {
                dtype,
                heads: size("heads")?,
                kv_heads: size("kv_heads")?,
                head_dim: size("head_dim")?,
                context: size("context")?,
            },
        };
        Ok(Self { kernel, points: Curve::read(fields, "tokens")? })
    }
}

impl Kernel {
    /// Returns the type, the values that a substitute table must share, and the dimensions in which it may differ.
    fn shape(&self) -> (Dtype, [u64; 2], [u64; 3]) {
        match *self {
            Self::Product { dtype, inputs, outputs } => (dtype, [1, 1], [inputs, outputs, 1]),
            Self::Experts { dtype, hidden, width, experts, local, top_k } => {
                (dtype, [experts, top_k], [hidden, width, local])
            }
            Self::Prefill { dtype, heads, kv_heads, head_dim }
            | Self::Decode { dtype, heads, kv_heads, head_dim, .. } => (dtype, [head_dim, 1], [heads, kv_heads, 1]),
        }
    }

    /// Returns the distance to another kernel: the sum of the logarithms of the dimension ratios, excluding contexts.
    /// `None` if the kind, type, k or number of experts differs, or a dimension differs by more than a factor of two.
    fn distance(&self, other: &Self) -> Option<f64> {
        let ((dtype, fixed, wanted), (other_dtype, other_fixed, found)) = (self.shape(), other.shape());
        if discriminant(self) != discriminant(other) || dtype != other_dtype || fixed != other_fixed {
            return None;
        }
        let ratios: [f64; 3] = std::array::from_fn(|at| (wanted[at] as f64 / found[at] as f64).ln().abs());
        ratios.iter().all(|ratio| *ratio <= NEAR.ln() + 1e-9).then(|| ratios.iter().sum())
    }

    fn context(&self) -> f64 {
        match *self {
            Self::Decode { context, .. } => context as f64,
            _ => 0.0,
        }
    }
}

/// Returns the seconds of `kernel` for `tokens` if there is a table for it or for a similar shape. Tables for other
/// shapes are scaled by `modelled`, the roofline model; times are interpolated between measured contexts.
pub(crate) fn seconds(
    tables: &[MeasuredKernel],
    kernel: &Kernel,
    tokens: f64,
    modelled: impl Fn(&Kernel) -> f64,
) -> Option<f64> {
    let near = tables.iter().filter_map(|table| Some((kernel.distance(&table.kernel)?, table)));
    let best = near.clone().map(|(distance, _)| distance).min_by(f64::total_cmp)?;
    let near = near.filter(|(distance, _)| *distance <= best).map(|(_, table)| table);
    let context = kernel.context();
    let below = near.clone().filter(|table| table.kernel.context() <= context);
    let below = below.max_by(|a, b| a.kernel.context().total_cmp(&b.kernel.context()));
    let above = near.filter(|table| table.kernel.context() >= context);
    let above = above.min_by(|a, b| a.kernel.context().total_cmp(&b.kernel.context()));
    let scaled = |table: &MeasuredKernel| {
        // Substitute tables are scaled by the roofline model at the substitute's own context.
        let mut shape = *kernel;
        if let Kernel::Decode { context, .. } = &mut shape {
            *context = table.kernel.context() as u64;
        }
        table.points.seconds(tokens) * modelled(&shape) / modelled(&table.kernel)
    };
    match (below, above) {
        (Some(low), Some(high)) => {
            let (from, to) = (low.kernel.context(), high.kernel.context());
            let share = if to > from { (context - from) / (to - from) } else { 0.0 };
            Some(scaled(low) * (1.0 - share) + scaled(high) * share)
        }
        (Some(only), None) | (None, Some(only)) => {
            Some(only.points.seconds(tokens) * modelled(kernel) / modelled(&only.kernel))
        }
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(inputs: u64, outputs: u64, points: Vec<[f64; 2]>) -> MeasuredKernel {
        let kernel = Kernel::Product { dtype: Dtype::Fp8, inputs, outputs };
        MeasuredKernel { kernel, points: Curve::new(points).unwrap() }
    }

    fn size(kernel: &Kernel) -> f64 {
        match *kernel {
            Kernel::Product { inputs, outputs, .. } => (inputs * outputs) as f64,
            Kernel::Decode { heads, context, .. } => (heads * context) as f64,
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_nearest_shape_counts_scaled_by_the_roofline() {
        let tables = [product(4096, 1024, vec![[1.0, 1e-5], [64.0, 2e-5]]), product(4096, 4096, vec![[1.0, 4e-5]])];
        let time = |inputs, outputs, dtype| {
            seconds(&tables, &Kernel::Product { dtype, inputs, outputs }, 1.0, size).map(|seconds| seconds * 1e6)
        };
        assert_eq!(time(4096, 1024, Dtype::Fp8), Some(10.0));
        assert!((time(4096, 1280, Dtype::Fp8).unwrap() - 12.5).abs() < 1e-9);
        assert!((time(4096, 3072, Dtype::Fp8).unwrap() - 30.0).abs() < 1e-9, "from the table of 4096");
        assert_eq!(time(4096, 1024, Dtype::Bf16), None, "another type");
        assert_eq!(time(1024, 1024, Dtype::Fp8), None, "too far");
    }

    #[test]
    fn contexts_are_interpolated() {
        let kernel = |heads, context| Kernel::Decode { dtype: Dtype::Bf16, heads, kv_heads: 1, head_dim: 128, context };
        let table = |context, us: f64| MeasuredKernel {
            kernel: kernel(8, context),
            points: Curve::new(vec![[1.0, us * 1e-6]]).unwrap(),
        };
        let tables = [table(1000, 10.0), table(3000, 20.0)];
        let time = |heads, context| seconds(&tables, &kernel(heads, context), 1.0, size).unwrap() * 1e6;
        for (heads, context, us) in [(8, 1000, 10.0), (8, 2000, 15.0), (16, 2000, 30.0), (8, 6000, 40.0), (8, 500, 5.0)]
        {
            assert!((time(heads, context) - us).abs() < 1e-9, "{heads} {context}");
        }
    }
}
