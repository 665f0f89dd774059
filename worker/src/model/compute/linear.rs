//! A weight matrix packed into panels, once, when it is loaded.

use super::gemm::{Columns, Matrix, NR, multiply};
use crate::model::checkpoint::TensorData;

/// `y = x W^T` for a weight `W [n, k]`: n outputs of k inputs each.
pub(in crate::model) struct Linear {
    outputs: usize,
    inputs: usize,
    panels: Panels,
}

enum Panels {
    /// See [`Columns::Bf16`]; half the memory traffic of f32, and exact for bf16 checkpoints.
    Bf16(Vec<u32>),
    /// See [`Columns::F32`].
    F32(Vec<f32>),
}

impl Linear {
    /// Packs weights that share their input, one below the other; each is row-major `[any, inputs]`.
    pub(in crate::model) fn pack(parts: &[TensorData<'_>], inputs: usize) -> Self {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum();
        let all_bf16: Option<Vec<&[[u8; 2]]>> = parts
            .iter()
            .map(|part| match part {
                TensorData::Bf16(values) => Some(*values),
                TensorData::F32(_) => None,
            })
            .collect();
        let panels = match all_bf16 {
            Some(parts) => Panels::Bf16(pack_bf16(&parts, inputs, outputs)),
            None => Panels::F32(pack_f32(parts, inputs, outputs)),
        };
        Self { outputs, inputs, panels }
    }

    /// Outputs per row.
    pub(in crate::model) fn outputs(&self) -> usize {
        self.outputs
    }

    /// `x [m, inputs]` to `out [m, outputs]`, overwritten.
    pub(in crate::model) fn apply(&self, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / self.inputs;
        let columns = match &self.panels {
            Panels::Bf16(words) => Columns::Bf16(words),
            Panels::F32(values) => Columns::F32(values),
        };
        let x = Matrix { data: x, stride: self.inputs };
        multiply((rows, self.inputs, self.outputs), x, columns, out, self.outputs);
    }
}

fn pack_bf16(parts: &[&[[u8; 2]]], inputs: usize, outputs: usize) -> Vec<u32> {
    let mut words = vec![0u32; outputs.div_ceil(NR) * inputs * (NR / 2)];
    let rows = parts.iter().flat_map(|part| part.chunks_exact(inputs));
    for (output, row) in rows.enumerate() {
        let (panel, column) = (output / NR, output % NR);
        let shift = if column < NR / 2 { 0 } else { 16 };
        let panel = &mut words[panel * inputs * (NR / 2)..][..inputs * (NR / 2)];
        for (word, bytes) in panel[column % (NR / 2)..].iter_mut().step_by(NR / 2).zip(row) {
            *word |= u32::from(u16::from_le_bytes(*bytes)) << shift;
        }
    }
    words
}

fn pack_f32(parts: &[TensorData<'_>], inputs: usize, outputs: usize) -> Vec<f32> {
    let mut values = vec![0.0; outputs.div_ceil(NR) * inputs * NR];
    let mut output = 0;
    for part in parts {
        for row in 0..part.len() / inputs {
            let panel = &mut values[output / NR * inputs * NR..][..inputs * NR];
            for (k, value) in panel[output % NR..].iter_mut().step_by(NR).enumerate() {
                *value = part.get(row * inputs + k);
            }
            output += 1;
        }
    }
    values
}
