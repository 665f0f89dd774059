//! Router and experts of one layer, read from a checkpoint's own files.

use super::super::family::{Experts, Family};
use super::super::source::Source;
use super::matrix::{Matrix, Stored, numbers};

/// GPT-OSS: gates are at most this, and linear parts in between.
const GPT_OSS_LIMIT: f32 = 7.0;
const GPT_OSS_SLOPE: f32 = 1.702;

/// One MoE layer.
#[derive(Debug)]
pub(super) struct MoeLayer<'s> {
    source: &'s Source,
    family: &'static Family,
    layer: u16,
    /// As many columns as a hidden state has numbers.
    pub(super) router: Matrix<'s>,
    pub(super) bias: Option<Vec<f32>>,
}

impl<'s> MoeLayer<'s> {
    /// Opens the router; an error names a form that is not known.
    pub(super) fn open(source: &'s Source, family: &'static Family, layer: u16) -> Result<Self, String> {
        let tensor = |leaf: &str| stored(source, &family.router_name(layer, leaf));
        let router = Matrix::open(tensor("weight")?, None)?;
        let bias = family.router.iter().find(|leaf| **leaf != "weight");
        let bias = bias.map(|leaf| numbers(tensor(leaf)?)).transpose()?;
        if bias.as_ref().is_some_and(|bias| bias.len() != router.rows) {
            return Err(format!("a router of {} rows with a bias of another length", router.rows));
        }
        Ok(Self { source, family, layer, router, bias })
    }

    /// f(h) of one expert, in this checkpoint's numbering.
    pub(super) fn expert(&self, expert: usize, hidden: &[f32]) -> Result<Vec<f32>, String> {
        match self.family.experts {
            Experts::Each(&[gate, up, down]) => self.gated(expert, hidden, [gate, up, down]),
            Experts::Stacked { .. } => self.gpt_oss(expert, hidden),
            Experts::Each(_) => Err("experts without three matrices are not computed".to_owned()),
        }
    }

    /// down (silu(gate h) * (up h))
    fn gated(&self, expert: usize, hidden: &[f32], projections: [&str; 3]) -> Result<Vec<f32>, String> {
        let matrix = |projection: &str| {
            // Expert numbers are below N, a u16.
            let name = |leaf| self.family.expert_name(self.layer, expert as u16, &format!("{projection}.{leaf}"));
            let scale = stored(self.source, &name("weight_scale_inv")).ok();
            Matrix::open(stored(self.source, &name("weight"))?, scale)
        };
        let [gate, up, down] = projections;
        let (gate, up, down) = (matrix(gate)?, matrix(up)?, matrix(down)?);
        let fits = |matrix: &Matrix<'_>, rows, cols| (matrix.rows, matrix.cols) == (rows, cols);
        let (width, inner) = (hidden.len(), gate.rows);
        if !(fits(&gate, inner, width) && fits(&up, inner, width) && fits(&down, width, inner)) {
            return Err(format!("experts whose matrices do not fit hidden states of {width} are not computed"));
        }
        let activated = gate.times(hidden).into_iter().zip(up.times(hidden));
        let inner: Vec<f32> = activated.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        Ok(down.times(&inner))
    }

    /// Rows of gate and up take turns; both have biases and are clamped; MXFP4 only.
    fn gpt_oss(&self, expert: usize, hidden: &[f32]) -> Result<Vec<f32>, String> {
        let tensor = |leaf: &str| stored(self.source, &self.family.expert_name(self.layer, 0, leaf));
        let part = |projection: &str| -> Result<(Matrix<'_>, Vec<f32>), String> {
            let [blocks, scales] = ["blocks", "scales"].map(|ending| tensor(&format!("{projection}_{ending}")));
            let matrix = Matrix::open_mxfp4(blocks?, scales?, expert)?;
            let biases = numbers(tensor(&format!("{projection}_bias"))?)?;
            let bias = biases.chunks(matrix.rows.max(1)).nth(expert).unwrap_or_default().to_vec();
            Ok((matrix, bias))
        };
        let ((gate_up, gate_up_bias), (down, down_bias)) = (part("gate_up_proj")?, part("down_proj")?);
        let (width, inner) = (hidden.len(), gate_up.rows / 2);
        let biases_fit = gate_up_bias.len() == gate_up.rows && down_bias.len() == down.rows;
        if gate_up.cols != width || down.rows != width || down.cols != inner || !biases_fit {
            return Err(format!("experts whose matrices do not fit hidden states of {width} are not computed"));
        }
        let biased = |values: Vec<f32>, bias: &[f32]| -> Vec<f32> {
            values.into_iter().zip(bias).map(|(value, bias)| value + bias).collect()
        };
        let activate = |pair: &[f32]| {
            let gate = pair[0].min(GPT_OSS_LIMIT);
            let up = pair[1].clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT);
            gate / (1.0 + (-GPT_OSS_SLOPE * gate).exp()) * (up + 1.0)
        };
        let inner: Vec<f32> = biased(gate_up.times(hidden), &gate_up_bias).chunks_exact(2).map(activate).collect();
        Ok(biased(down.times(&inner), &down_bias))
    }
}

fn stored<'s>(source: &'s Source, name: &str) -> Result<Stored<'s>, String> {
    let shard = source.shard_of.get(name).map(|&shard| &source.shards[shard].file);
    let found = shard.and_then(|file| file.tensors.get(name).map(|tensor| (tensor, file.bytes(tensor))));
    found.ok_or_else(|| format!("without `{name}` its layer is not computed"))
}
