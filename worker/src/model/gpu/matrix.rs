//! Weight matrices in GPU memory, row-major as in the checkpoint.

use std::marker::PhantomData;
use std::ops::Range;

use semmoe_kernels::Element;
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::{Activation, MatMul, MatMulRows};

use super::SharedAccelerator;
use super::memory::Stream;
use crate::ep::UnitError;
use crate::model::checkpoint::{TensorData, TensorKind};
use crate::model::weights::Packer;
use crate::model::{LATENT, ModelError};

/// Number of elements to convert at a time.
const CHUNK: usize = 1 << 20;

/// A weight `[outputs, inputs]` in T, and an optional bias `[outputs]` in f32.
#[derive(Clone, Copy)]
pub(in crate::model) struct DeviceMatrix {
    pub(super) buffer: Buffer,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) bias: Option<Buffer>,
}

/// Writes matrices to the GPU as elements of type T, each to its own allocation.
pub(super) struct Uploader<T> {
    gpu: SharedAccelerator,
    element: PhantomData<T>,
}

/// The location to which the next elements are written.
pub(super) struct Cursor {
    to: Buffer,
}

impl<T: Element> Uploader<T> {
    pub(super) fn new(gpu: &SharedAccelerator) -> Self {
        Self { gpu: gpu.clone(), element: PhantomData }
    }

    /// Allocates GPU memory of this size.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Buffer, ModelError> {
        self.gpu.allocate(bytes as u64).map_err(ModelError::Gpu)
    }

    /// Copies values to the GPU as f32.
    pub(super) fn vector(&self, values: &[f32]) -> Result<Buffer, ModelError> {
        let buffer = self.allocate(size_of_val(values))?;
        self.write(bytemuck::cast_slice(values), &mut Cursor { to: buffer })?;
        Ok(buffer)
    }

    /// Copies values to the GPU, rounded to T.
    pub(super) fn rounded(&self, values: &[f32]) -> Result<Buffer, ModelError> {
        let values: Vec<T> = values.iter().map(|value| T::round(*value)).collect();
        let buffer = self.allocate(size_of_val(&values[..]))?;
        self.write(bytemuck::cast_slice(&values), &mut Cursor { to: buffer })?;
        Ok(buffer)
    }

    pub(super) fn at(buffer: Buffer) -> Cursor {
        Cursor { to: buffer }
    }

    /// Writes the `kept` inputs of one weight, which is row-major `[any, inputs]`.
    pub(super) fn put(
        &self,
        part: &TensorData<'_>,
        inputs: usize,
        kept: &Range<usize>,
        cursor: &mut Cursor,
    ) -> Result<(), ModelError> {
        let same = matches!((part.kind, T::DTYPE), (TensorKind::Bf16, semmoe_kernels::Dtype::Bf16))
            || matches!((part.kind, T::DTYPE), (TensorKind::F32, semmoe_kernels::Dtype::F32));
        if same && kept.len() == inputs {
            return part.bytes.chunks(CHUNK * size_of::<T>()).try_for_each(|bytes| self.write(bytes, cursor));
        }
        let rows = CHUNK.div_ceil(kept.len().max(1));
        let mut values: Vec<T> = Vec::with_capacity(rows * kept.len());
        let all = part.len() / inputs;
        for first in (0..all).step_by(rows) {
            values.clear();
            for row in first..all.min(first + rows) {
                values.extend(kept.clone().map(|column| T::round(part.get(row * inputs + column))));
            }
            self.write(bytemuck::cast_slice(&values), cursor)?;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], cursor: &mut Cursor) -> Result<(), ModelError> {
        assert!(bytes.len() as u64 <= cursor.to.bytes, "the matrix does not fit into its memory");
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the memory was allocated by this uploader, and the assertion above checks its size.
        unsafe { self.gpu.write(bytes, cursor.to) }.map_err(ModelError::Gpu)?;
        cursor.to = cursor.to.from_offset(bytes.len() as u64);
        Ok(())
    }
}

impl<T: Element> Packer for Uploader<T> {
    type Matrix = DeviceMatrix;
    type Table = Buffer;

    fn table(&self, data: TensorData<'_>, hidden: usize) -> Result<Buffer, ModelError> {
        Ok(self.pack_whole(&[data], hidden)?.buffer)
    }

    fn pack(
        &self,
        parts: &[TensorData<'_>],
        inputs: usize,
        kept: Range<usize>,
        bias: Option<Vec<f32>>,
    ) -> Result<DeviceMatrix, ModelError> {
        let outputs = parts.iter().map(|part| part.len() / inputs).sum::<usize>();
        let buffer = self.allocate(outputs * kept.len() * size_of::<T>())?;
        let mut cursor = Self::at(buffer);
        for part in parts {
            self.put(part, inputs, &kept, &mut cursor)?;
        }
        let bias = bias.map(|bias| self.vector(&bias)).transpose()?;
        Ok(DeviceMatrix { buffer, outputs, inputs: kept.len(), bias })
    }

    fn pack_transposed(&self, _part: TensorData<'_>, _inputs: usize) -> Result<DeviceMatrix, ModelError> {
        Err(ModelError::NotOnGpu(LATENT))
    }
}

/// The destination of a matrix product.
#[derive(Clone, Copy)]
pub(super) struct Product {
    to: Buffer,
    f32: bool,
    activation: Activation,
}

impl Product {
    pub(super) fn of(to: Buffer) -> Self {
        Self { to, f32: false, activation: Activation::None }
    }

    pub(super) fn f32(to: Buffer) -> Self {
        Self { f32: true, ..Self::of(to) }
    }

    pub(super) fn silu(to: Buffer) -> Self {
        Self { activation: Activation::SiluProduct, ..Self::of(to) }
    }
}

impl DeviceMatrix {
    /// Computes `out[i] = x[i] W^T + b` for `rows` rows.
    pub(super) fn apply<T: Element>(
        &self,
        x: Buffer,
        rows: usize,
        out: Product,
        stream: &mut Stream,
    ) -> Result<(), UnitError> {
        if rows == 0 {
            return Ok(());
        }
        let fold = if out.activation == Activation::SiluProduct { 2 } else { 1 };
        let product = MatMul {
            x: Buffer { bytes: (rows * self.inputs * size_of::<T>()) as u64, ..x },
            weights: self.buffer,
            out: out.to,
            bias: self.bias,
            inputs: self.inputs as u64,
            outputs: (self.outputs / fold) as u64,
            x_stride: self.inputs as u64,
            dtype: T::DTYPE,
            out_f32: out.f32,
            rows: MatMulRows::Dense { rows: rows as u64 },
            row_of: None,
            activation: out.activation,
        };
        stream.launch(product.launch())
    }
}
