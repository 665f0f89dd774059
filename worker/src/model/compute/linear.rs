//! A weight matrix packed into panels when it is loaded. Packed panels can be sent to another rank as they are, or unpacked again
//! to be cut and joined.

use std::ops::{Deref, DerefMut, Range};

use bytemuck::Pod;

use super::arena::{Arena, Piece};
use super::gemm::{Columns, Matrix, group_of, multiply};
use super::ops::add_row;
use crate::model::checkpoint::TensorData;

/// `y = x W^T + b` for a weight `W [n, k]`: n outputs of k inputs each; b where there is one.
pub(in crate::model) struct Linear {
    outputs: usize,
    inputs: usize,
    panels: Panels,
    /// `[n]`
    bias: Option<Vec<f32>>,
}

enum Panels {
    /// See [`Columns::Bf16`]; half the memory traffic of f32, and exact for bf16 checkpoints.
    Bf16(Store<u32>),
    /// See [`Columns::F32`].
    F32(Store<f32>),
}

/// Where packed weights lie: on the heap while a model is loaded, then in its arena.
enum Store<T> {
    Heap(Vec<T>),
    Arena(Piece<T>),
}

impl<T> Deref for Store<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Heap(values) => values,
            Self::Arena(values) => values,
        }
    }
}

impl<T> DerefMut for Store<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Heap(values) => values,
            Self::Arena(values) => values,
        }
    }
}

/// The element type of packed weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::model) enum PanelType {
    Bf16,
    F32,
}

/// Weights in row-major order.
pub(in crate::model) enum RowMajor {
    Bf16(Vec<[u8; 2]>),
    F32(Vec<[u8; 4]>),
}

impl RowMajor {
    pub(in crate::model) fn data(&self) -> TensorData<'_> {
        match self {
            Self::Bf16(values) => TensorData::Bf16(values),
            Self::F32(values) => TensorData::F32(values),
        }
    }
}

impl<T: Pod> Store<T> {
    /// Gives the memory back, as far as it is this store's alone.
    fn release(&mut self) {
        match self {
            Self::Heap(values) => *values = Vec::new(),
            Self::Arena(piece) => piece.release(),
        }
    }

    fn settle(&mut self, arena: &mut Arena) {
        if let Some(mut piece) = arena.take(self.len()) {
            piece.copy_from_slice(self);
            *self = Self::Arena(piece);
        }
    }
}

impl Linear {
    /// Packs weights that share their input, one below the other; each is row-major `[any, inputs]`.
    pub(in crate::model) fn pack(parts: &[TensorData<'_>], inputs: usize) -> Self {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum();
        let all_bf16: Option<Vec<&[[u8; 2]]>> = parts
            .iter()
            .map(|part| match part {
                TensorData::Bf16(values) => Some(*values),
                TensorData::F16(_) | TensorData::F32(_) => None,
            })
            .collect();
        let panels = match all_bf16 {
            Some(parts) => Panels::Bf16(Store::Heap(pack_bf16(&parts, inputs, outputs))),
            None => Panels::F32(Store::Heap(pack_f32(parts, inputs, outputs))),
        };
        Self { outputs, inputs, panels, bias: None }
    }

    /// Packs the transpose of one weight, which is row-major `[inputs, any]`.
    pub(in crate::model) fn pack_transposed(part: TensorData<'_>, inputs: usize) -> Self {
        match part {
            TensorData::Bf16(values) => Self::pack(&[TensorData::Bf16(&transposed(values, inputs))], inputs),
            TensorData::F16(values) => Self::pack(&[TensorData::F16(&transposed(values, inputs))], inputs),
            TensorData::F32(values) => Self::pack(&[TensorData::F32(&transposed(values, inputs))], inputs),
        }
    }

    /// Packs some of the inputs of one weight, which is row-major `[any, inputs]`.
    pub(in crate::model) fn pack_columns(part: TensorData<'_>, inputs: usize, columns: Range<usize>) -> Self {
        let kept = columns.len();
        if kept == inputs {
            return Self::pack(&[part], inputs);
        }
        match part {
            TensorData::Bf16(values) => Self::pack(&[TensorData::Bf16(&some_columns(values, inputs, columns))], kept),
            TensorData::F16(values) => Self::pack(&[TensorData::F16(&some_columns(values, inputs, columns))], kept),
            TensorData::F32(values) => Self::pack(&[TensorData::F32(&some_columns(values, inputs, columns))], kept),
        }
    }

    /// Weights `[outputs, inputs]` from the bytes of [`Linear::packed`]; none if they have another length.
    pub(in crate::model) fn from_packed(
        panel_type: PanelType,
        outputs: usize,
        inputs: usize,
        packed: &[u8],
    ) -> Option<Self> {
        if packed.len() != Self::packed_bytes(panel_type, outputs, inputs) {
            return None;
        }
        fn copied<T: Pod>(bytes: &[u8]) -> Store<T> {
            let mut values = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes);
            Store::Heap(values)
        }
        let panels = match panel_type {
            PanelType::Bf16 => Panels::Bf16(copied(packed)),
            PanelType::F32 => Panels::F32(copied(packed)),
        };
        Some(Self { outputs, inputs, panels, bias: None })
    }

    /// Bytes of the packed panels of `[outputs, inputs]`.
    pub(in crate::model) fn packed_bytes(panel_type: PanelType, outputs: usize, inputs: usize) -> usize {
        let rows = match panel_type {
            PanelType::Bf16 => inputs.div_ceil(2),
            PanelType::F32 => inputs,
        };
        outputs.next_multiple_of(group_of(outputs)) * rows * size_of::<u32>()
    }

    pub(in crate::model) fn panel_type(&self) -> PanelType {
        match &self.panels {
            Panels::Bf16(_) => PanelType::Bf16,
            Panels::F32(_) => PanelType::F32,
        }
    }

    /// The packed panels.
    pub(in crate::model) fn packed(&self) -> &[u8] {
        match &self.panels {
            Panels::Bf16(words) => bytemuck::cast_slice(words),
            Panels::F32(values) => bytemuck::cast_slice(values),
        }
    }

    /// Whether another matrix has the same shape and packed type.
    pub(in crate::model) fn is_like(&self, other: &Self) -> bool {
        let shape = |linear: &Self| (linear.outputs, linear.inputs, linear.panel_type());
        shape(self) == shape(other)
    }

    /// Takes over the weights of a matrix of the same shape and type, where its own lie.
    ///
    /// # Panics
    /// If [`Linear::is_like`] is false.
    pub(in crate::model) fn overwrite(&mut self, with: &Self) {
        assert!(self.is_like(with), "weights of another shape");
        match (&mut self.panels, &with.panels) {
            (Panels::Bf16(own), Panels::Bf16(other)) => own.copy_from_slice(other),
            (Panels::F32(own), Panels::F32(other)) => own.copy_from_slice(other),
            (Panels::Bf16(_), Panels::F32(_)) | (Panels::F32(_), Panels::Bf16(_)) => {}
        }
    }

    /// Gives the memory of the packed weights back to the system.
    pub(in crate::model) fn release(mut self) {
        match &mut self.panels {
            Panels::Bf16(words) => words.release(),
            Panels::F32(values) => values.release(),
        }
    }

    /// `[outputs, inputs]`, without the bias.
    pub(in crate::model) fn unpack(&self) -> RowMajor {
        match &self.panels {
            Panels::Bf16(words) => RowMajor::Bf16(unpack_bf16(words, self.inputs, self.outputs)),
            Panels::F32(values) => RowMajor::F32(unpack_f32(values, self.inputs, self.outputs)),
        }
    }

    /// With a bias `[outputs]`.
    pub(in crate::model) fn with_bias(mut self, bias: Vec<f32>) -> Self {
        debug_assert_eq!(bias.len(), self.outputs);
        self.bias = Some(bias);
        self
    }

    /// Inputs per row.
    pub(in crate::model) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Outputs per row.
    pub(in crate::model) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Moves the packed weights into the arena, if it has room: what is read one after the other should lie so.
    pub(in crate::model) fn settle(&mut self, arena: &mut Arena) {
        match &mut self.panels {
            Panels::Bf16(words) => words.settle(arena),
            Panels::F32(values) => values.settle(arena),
        }
    }

    /// What the packed weights take of an arena, in bytes.
    pub(in crate::model) fn arena_bytes(&self) -> usize {
        match &self.panels {
            Panels::Bf16(words) => Arena::bytes_of::<u32>(words.len()),
            Panels::F32(values) => Arena::bytes_of::<f32>(values.len()),
        }
    }

    /// `x [m, inputs]` to `out [m, outputs]`, overwritten.
    pub(in crate::model) fn apply(&self, x: &[f32], out: &mut [f32]) {
        let rows = x.len() / self.inputs;
        self.multiply(rows, Matrix { data: x, stride: self.inputs }, out, self.outputs);
        if let Some(bias) = &self.bias {
            add_row(bias, &mut out[..rows * self.outputs]);
        }
    }

    /// As [`Linear::apply`] without a bias, for rows that are parts of wider ones: those of `out` are `out_stride` apart.
    pub(in crate::model) fn apply_rows(&self, rows: usize, x: Matrix<'_>, out: &mut [f32], out_stride: usize) {
        debug_assert!(self.bias.is_none());
        self.multiply(rows, x, out, out_stride);
    }

    fn multiply(&self, rows: usize, x: Matrix<'_>, out: &mut [f32], out_stride: usize) {
        let columns = match &self.panels {
            Panels::Bf16(words) => Columns::Bf16(words),
            Panels::F32(values) => Columns::F32(values),
        };
        multiply((rows, self.inputs, self.outputs), x, columns, out, out_stride);
    }
}

/// Row-major `[any, width]` to row-major `[any, columns]`.
fn some_columns<T: Copy>(values: &[T], width: usize, columns: Range<usize>) -> Vec<T> {
    values.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Row-major `[rows, any]` to row-major `[any, rows]`.
fn transposed<T: Copy>(values: &[T], rows: usize) -> Vec<T> {
    let columns = values.len() / rows;
    (0..columns).flat_map(|column| values[column..].iter().step_by(columns).copied()).collect()
}

fn pack_bf16(parts: &[&[[u8; 2]]], inputs: usize, outputs: usize) -> Vec<u32> {
    let columns = group_of(outputs);
    let group_words = columns * inputs.div_ceil(2);
    let mut words = vec![0u32; outputs.div_ceil(columns) * group_words];
    let rows = parts.iter().flat_map(|part| part.chunks_exact(inputs));
    for (output, row) in rows.enumerate() {
        let group = &mut words[output / columns * group_words..][..group_words];
        for (word, pair) in group[output % columns..].iter_mut().step_by(columns).zip(row.chunks(2)) {
            let half = |at: usize| pair.get(at).map_or(0, |bytes| u32::from(u16::from_le_bytes(*bytes)));
            *word = half(0) | half(1) << 16;
        }
    }
    words
}

fn pack_f32(parts: &[TensorData<'_>], inputs: usize, outputs: usize) -> Vec<f32> {
    let columns = group_of(outputs);
    let mut values = vec![0.0; outputs.div_ceil(columns) * inputs * columns];
    let mut output = 0;
    for part in parts {
        for row in 0..part.len() / inputs {
            let group = &mut values[output / columns * inputs * columns..][..inputs * columns];
            for (k, value) in group[output % columns..].iter_mut().step_by(columns).enumerate() {
                *value = part.get(row * inputs + k);
            }
            output += 1;
        }
    }
    values
}

fn unpack_bf16(words: &[u32], inputs: usize, outputs: usize) -> Vec<[u8; 2]> {
    let columns = group_of(outputs);
    let group_words = columns * inputs.div_ceil(2);
    let mut rows = Vec::with_capacity(outputs * inputs);
    for output in 0..outputs {
        let group = &words[output / columns * group_words..][..group_words];
        let pairs = group[output % columns..].iter().step_by(columns);
        let halves = pairs.flat_map(|word| [*word as u16, (*word >> 16) as u16]);
        rows.extend(halves.take(inputs).map(u16::to_le_bytes));
    }
    rows
}

fn unpack_f32(values: &[f32], inputs: usize, outputs: usize) -> Vec<[u8; 4]> {
    let columns = group_of(outputs);
    let mut rows = Vec::with_capacity(outputs * inputs);
    for output in 0..outputs {
        let group = &values[output / columns * inputs * columns..][..inputs * columns];
        rows.extend(group[output % columns..].iter().step_by(columns).map(|value| value.to_le_bytes()));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit pattern is kept, widths that fill no panel included.
    #[test]
    fn packed_weights_unpack_to_what_was_packed() {
        let mut random = fastrand::Rng::with_seed(3);
        for (outputs, inputs) in [(1, 1), (5, 3), (32, 8), (33, 7), (96, 17), (128, 64), (200, 31)] {
            let count = outputs * inputs;
            let halves: Vec<[u8; 2]> = (0..count).map(|_| random.u16(..).to_le_bytes()).collect();
            let packed = Linear::pack(&[TensorData::Bf16(&halves)], inputs);
            let RowMajor::Bf16(found) = packed.unpack() else { panic!("another type") };
            assert_eq!(found, halves, "[{outputs}, {inputs}]");
            assert_eq!(packed.packed().len(), Linear::packed_bytes(PanelType::Bf16, outputs, inputs));
            let copy = Linear::from_packed(PanelType::Bf16, outputs, inputs, packed.packed()).unwrap();
            assert_eq!(copy.packed(), packed.packed());
            assert!(Linear::from_packed(PanelType::Bf16, outputs, inputs, &packed.packed()[4..]).is_none());

            // Quiet NaNs only: f32 values pass through registers.
            let values: Vec<[u8; 4]> = (0..count).map(|_| random.f32().to_le_bytes()).collect();
            let packed = Linear::pack(&[TensorData::F32(&values)], inputs);
            let RowMajor::F32(found) = packed.unpack() else { panic!("another type") };
            assert_eq!(found, values, "[{outputs}, {inputs}]");
            assert_eq!(packed.packed().len(), Linear::packed_bytes(PanelType::F32, outputs, inputs));
        }
    }

    #[test]
    fn weights_of_the_same_shape_are_overwritten_in_place() {
        let pack = |value: f32, outputs: usize| {
            let values = vec![value.to_le_bytes(); outputs * 4];
            Linear::pack(&[TensorData::F32(&values)], 4)
        };
        let mut own = pack(1.0, 32);
        let at = own.packed().as_ptr();
        own.overwrite(&pack(2.0, 32));
        assert_eq!((own.packed().as_ptr(), own.packed()), (at, pack(2.0, 32).packed()));
        assert!(!own.is_like(&pack(3.0, 64)));
    }
}
