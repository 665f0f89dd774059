//! A weight matrix, packed into panels at load time.

use std::ops::{Deref, Range};

use super::arena::{Arena, Piece};
use super::gemm::{Columns, Matrix, Sizes, group_of, multiply};
use super::ops::add_row;
use crate::model::checkpoint::{TensorData, TensorKind};

/// Computes `y = x W^T + b` for a weight `W [n, k]` with n outputs and k inputs; b is optional.
pub(in crate::model) struct Linear {
    /// Per row.
    pub(in crate::model) outputs: usize,
    inputs: usize,
    panel_type: PanelType,
    panels: Words,
    /// `[n]`
    bias: Option<Vec<f32>>,
}

/// Packed weights in the layout of [`Columns`]: on the heap while a model is being loaded, then in its arena.
enum Words {
    Heap(Vec<u32>),
    Arena(Piece<u32>),
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Heap(words) => words,
            Self::Arena(words) => words,
        }
    }
}

/// The element type of packed weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::model) enum PanelType {
    /// Half the memory traffic of f32, and exact for bf16 checkpoints.
    Bf16,
    F32,
}

impl PanelType {
    /// Returns the lossless type: bf16 if all parts are bf16, otherwise f32.
    pub(in crate::model) fn of(parts: &[TensorData<'_>]) -> Self {
        match parts.iter().all(|part| part.kind == TensorKind::Bf16) {
            true => Self::Bf16,
            false => Self::F32,
        }
    }

    /// Wraps packed words as the right operand of a matrix product, in groups of `group` columns.
    pub(in crate::model) fn columns(self, words: &[u32], group: usize) -> Columns<'_> {
        match self {
            Self::Bf16 => Columns::Bf16 { words, group },
            Self::F32 => Columns::F32 { values: bytemuck::cast_slice(words), group },
        }
    }
}

impl Linear {
    /// Losslessly packs vertically stacked weights with a common input; each is row-major `[any, inputs]`.
    pub(in crate::model) fn pack(parts: &[TensorData<'_>], inputs: usize) -> Self {
        Self::pack_as(PanelType::Bf16, parts, inputs)
    }

    /// Packs weights into panels of `panel_type`, or of f32 if any part is not bf16.
    pub(in crate::model) fn pack_as(panel_type: PanelType, parts: &[TensorData<'_>], inputs: usize) -> Self {
        Self::pack_columns(panel_type, parts, inputs, 0..inputs)
    }

    /// Packs the transpose of one weight, which is row-major `[inputs, any]`.
    pub(in crate::model) fn pack_transposed(part: TensorData<'_>, inputs: usize) -> Self {
        Self::pack(&[part.kind.of(&transposed(part, inputs))], inputs)
    }

    /// Packs the `kept` range of the inputs into panels of `panel_type`, or of f32 if any part is not bf16.
    pub(in crate::model) fn pack_columns(
        panel_type: PanelType,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: Range<usize>,
    ) -> Self {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum();
        let panel_type = if panel_type == PanelType::Bf16 { PanelType::of(parts) } else { panel_type };
        let mut words = vec![0; Self::packed_bytes(panel_type, outputs, kept.len()) / size_of::<u32>()];
        Self::pack_into(panel_type, parts, inputs, &kept, &mut words);
        Self { outputs, inputs: kept.len(), panel_type, panels: Words::Heap(words), bias: None }
    }

    /// Packs the `kept` input columns of several row-major `[any, inputs]` weights with a common input into
    /// [`Linear::packed_bytes`] bytes, without allocating. Padding is left untouched. bf16 panels require bf16 weights.
    pub(in crate::model) fn pack_into(
        panel_type: PanelType,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: &Range<usize>,
        words: &mut [u32],
    ) {
        let columns = group_of(parts.iter().map(|part| part.len() / inputs).sum());
        let mut first = 0;
        for part in parts {
            let to = Target { first, columns };
            match (panel_type, part.kind) {
                (PanelType::Bf16, TensorKind::Bf16) => fill_bf16(part.bytes.as_chunks().0, inputs, kept, to, words),
                _ => fill_f32(part, inputs, kept, to, bytemuck::cast_slice_mut(words)),
            }
            first += part.len() / inputs;
        }
    }

    /// Bytes that an `[outputs, inputs]` weight takes when packed.
    pub(in crate::model) fn packed_bytes(panel_type: PanelType, outputs: usize, inputs: usize) -> usize {
        let rows = match panel_type {
            PanelType::Bf16 => inputs.div_ceil(2),
            PanelType::F32 => inputs,
        };
        outputs.next_multiple_of(group_of(outputs)) * rows * size_of::<u32>()
    }

    /// The packed panels.
    pub(in crate::model) fn packed(&self) -> &[u8] {
        bytemuck::cast_slice(&self.panels)
    }

    /// Sets the bias, `[outputs]`.
    pub(in crate::model) fn with_bias(mut self, bias: Vec<f32>) -> Self {
        debug_assert_eq!(bias.len(), self.outputs);
        self.bias = Some(bias);
        self
    }

    /// Moves the packed weights into the arena if it has room, to make them contiguous in the order in which they are
    /// read.
    pub(in crate::model) fn settle(&mut self, arena: &mut Arena) {
        if let Some(mut piece) = arena.take::<u32>(self.panels.len()) {
            piece.copy_from_slice(&self.panels);
            self.panels = Words::Arena(piece);
        }
    }

    /// Bytes that the packed weights occupy in an arena.
    pub(in crate::model) fn arena_bytes(&self) -> usize {
        Arena::bytes_of::<u32>(self.panels.len())
    }

    /// Applies the weight and the bias to `x [m, inputs]` and overwrites `out [m, outputs]`.
    pub(in crate::model) fn apply(&self, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / self.inputs;
        self.apply_rows(rows, Matrix { data: x, stride: self.inputs }, out, self.outputs);
        if let Some(bias) = &self.bias {
            add_row(bias, &mut out[..rows * self.outputs]);
        }
    }

    /// Applies the weight, but not the bias, to rows that may be parts of wider rows; those of `out` are `out_stride`
    /// elements apart.
    pub(in crate::model) fn apply_rows(&self, rows: usize, x: Matrix<'_>, out: &mut [f32], out_stride: usize) {
        let columns = self.panel_type.columns(&self.panels, group_of(self.outputs));
        multiply(Sizes { m: rows, k: self.inputs, n: self.outputs }, x, columns, out, out_stride);
    }
}

/// Transposes row-major `[rows, any]` to row-major `[any, rows]`.
fn transposed(part: TensorData<'_>, rows: usize) -> Vec<u8> {
    let (size, columns) = (part.kind.bytes(), part.len() / rows);
    let order = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
    order.flat_map(|at| &part.bytes[at * size..][..size]).copied().collect()
}

/// The destination of a part that is being packed.
#[derive(Clone, Copy)]
struct Target {
    /// The part's first output.
    first: usize,
    /// Outputs per group.
    columns: usize,
}

/// Number of words of a row to pack before moving on to the next row, small enough that the group's panels stay in the
/// L1 cache.
const ROW_WORDS: usize = 16;

/// Packs a range of columns from one bf16 part, row-major `[any, inputs]`.
fn fill_bf16(part: &[[u8; 2]], inputs: usize, kept: &Range<usize>, to: Target, words: &mut [u32]) {
    let Target { first, columns } = to;
    let row_words = kept.len().div_ceil(2);
    let (group_words, last) = (columns * row_words, first + part.len() / inputs);
    let mut output = first;
    while output < last {
        let end = last.min((output / columns + 1) * columns);
        let group = &mut words[output / columns * group_words..][..group_words];
        for from in (0..row_words).step_by(ROW_WORDS) {
            for output in output..end {
                let row = &part[(output - first) * inputs..][kept.clone()][2 * from..];
                let (pairs, odd) = row[..row.len().min(2 * ROW_WORDS)].as_chunks::<2>();
                let mut to = group[from * columns + output % columns..].iter_mut().step_by(columns);
                for ([[a, b], [c, d]], word) in pairs.iter().zip(&mut to) {
                    *word = u32::from_le_bytes([*a, *b, *c, *d]);
                }
                if let ([[a, b]], Some(word)) = (odd, to.next()) {
                    *word = u32::from_le_bytes([*a, *b, 0, 0]);
                }
            }
        }
        output = end;
    }
}

/// Packs a range of columns from one part of any element type, row-major `[any, inputs]`.
fn fill_f32(part: &TensorData<'_>, inputs: usize, kept: &Range<usize>, to: Target, values: &mut [f32]) {
    let Target { first, columns } = to;
    let group_values = kept.len() * columns;
    for row in 0..part.len() / inputs {
        let output = first + row;
        let group = &mut values[output / columns * group_values..][..group_values];
        for (k, value) in kept.clone().zip(group[output % columns..].iter_mut().step_by(columns)) {
            *value = part.get(row * inputs + k);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(values: &[[u8; 2]]) -> TensorData<'_> {
        TensorKind::Bf16.of(values.as_flattened())
    }

    /// Expert slots are sized by this, also for widths that do not fill a panel.
    #[test]
    fn packed_weights_have_as_many_bytes_as_said() {
        for (outputs, inputs) in [(1, 1), (5, 3), (32, 8), (33, 7), (96, 17), (128, 64), (200, 31)] {
            let (halves, values) = (vec![[1; 2]; outputs * inputs], vec![[1; 4]; outputs * inputs]);
            for (panel_type, data) in
                [(PanelType::Bf16, bf16(&halves)), (PanelType::F32, TensorKind::F32.of(values.as_flattened()))]
            {
                let packed = Linear::pack(&[data], inputs);
                assert_eq!(packed.packed().len(), Linear::packed_bytes(panel_type, outputs, inputs));
            }
            let widened = Linear::pack_as(PanelType::F32, &[bf16(&halves)], inputs);
            assert_eq!(widened.packed().len(), Linear::packed_bytes(PanelType::F32, outputs, inputs));
        }
    }

    /// Checks each word in the place that [`Columns`] defines.
    fn word(row: &[u16], pair: usize) -> u32 {
        u32::from(row[2 * pair]) | u32::from(row.get(2 * pair + 1).copied().unwrap_or(0)) << 16
    }

    #[test]
    fn packed_words_lie_in_groups_and_parts_of_columns_are_packed_in_place() {
        for (outputs, inputs) in [(5, 3), (32, 8), (96, 67), (128, 64), (200, 131)] {
            let values: Vec<u16> = (0..outputs * inputs).map(|at| at as u16).collect();
            let bytes: Vec<[u8; 2]> = values.iter().map(|value| value.to_le_bytes()).collect();
            let (upper, lower) = bytes.split_at(outputs / 2 * inputs);
            let parts = [bf16(upper), bf16(lower)];
            let columns = group_of(outputs);
            for kept in [0..inputs, inputs / 3..inputs - 1] {
                let pairs = kept.len().div_ceil(2);
                let mut words = vec![0; Linear::packed_bytes(PanelType::Bf16, outputs, kept.len()) / 4];
                Linear::pack_into(PanelType::Bf16, &parts, inputs, &kept, &mut words);
                for (output, row) in values.chunks_exact(inputs).enumerate() {
                    let group = &words[output / columns * columns * pairs..];
                    for pair in 0..pairs {
                        assert_eq!(group[pair * columns + output % columns], word(&row[kept.clone()], pair));
                    }
                }
                if kept.len() == inputs {
                    assert_eq!(Linear::pack(&parts, inputs).packed(), bytemuck::cast_slice::<u32, u8>(&words));
                }
                let mut floats = vec![0; Linear::packed_bytes(PanelType::F32, outputs, kept.len()) / 4];
                Linear::pack_into(PanelType::F32, &parts, inputs, &kept, &mut floats);
                let whole: Vec<[u8; 2]> =
                    bytes.chunks_exact(inputs).flat_map(|row| row[kept.clone()].to_vec()).collect();
                let widened = Linear::pack_as(PanelType::F32, &[bf16(&whole)], kept.len());
                assert_eq!(widened.packed(), bytemuck::cast_slice::<u32, u8>(&floats));
            }
        }
    }
}
