//! Rows to other ranks and back, and the experts between.

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{AllRowsIn, NormIn, OwnRowsIn, ReceivedIn};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::{Activation, MatMul, MatMulRows, SumPairs};
use semmoe_kernels_cuda::unit::Gpu;
use semmoe_tables::LayerIdx;

use super::backend::GpuBackend;
use super::buffers::Buffers;
use super::memory::rows_of;
use crate::ep::{ExpertParallel, UnitError};
use crate::model::backend::{LayerStep, RowLists};

impl<T: Element> GpuBackend<T> {
    /// This rank's rows of the residual stream with the sums of all ranks added, and their norm (SRS).
    pub(super) fn scatter(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let Some(split) = step.split else { return Ok(()) };
        let (hidden, epsilon) = (self.config.hidden, self.config.rms_norm_eps);
        let Buffers { residual, other_residual, normed, .. } = self.buffers;
        let (all, own) = (self.rows * hidden, self.own_rows * hidden);
        let weight = rows_of(self.norms[step.layer].post_rounded, hidden);
        let residual_out = rows_of(other_residual, own);
        let norm = NormIn { residual: rows_of(residual, all), weight, epsilon, residual_out };
        step.ep.count_scatter(hidden, split);
        self.stream.flush()?;
        self.unit.reduce_scatter(hidden, split, Some(norm), rows_of(normed, own))?;
        (self.buffers.residual, self.buffers.other_residual) = (other_residual, residual);
        Ok(())
    }

    /// All rows of the residual stream, and the experts that they went to (SAG).
    pub(super) fn gather(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let Some(split) = step.split else { return Ok(()) };
        let (hidden, bound) = (self.config.hidden, self.config.num_experts);
        let width = if step.moe.is_some() { self.config.top_k } else { 0 };
        let Buffers { residual, other_residual, .. } = self.buffers;
        step.ep.count_gather(hidden, width, split);
        let (labels, gathered) = lists.labels(self.rows, width);
        let own = OwnRowsIn { rows: rows_of(residual, self.own_rows * hidden), hidden, labels, width, bound };
        let all = AllRowsIn { rows: rows_of(other_residual, self.rows * hidden), labels: gathered };
        self.stream.flush()?;
        self.unit.allgather(own, split, all)?;
        (self.buffers.residual, self.buffers.other_residual) = (other_residual, residual);
        lists.keep_gathered();
        Ok(())
    }

    /// The experts on the rows that were received, into the sums that `combine` brings home.
    pub(super) fn apply_experts(&mut self, layer: LayerIdx, ep: &ExpertParallel) -> Result<(), UnitError> {
        let received: ReceivedIn<'_, T, Gpu> = self.unit.received();
        let sorted = self.lists.pairs.sort(&received, ep.hosts(layer));
        sorted.map_err(|wrong| UnitError::protocol(wrong.from, wrong.to_string()))?;
        let (rows, sums) = (received.rows.rows.buffer(), received.sums.buffer());
        let pairs = &self.lists.pairs;
        if pairs.rows() == 0 {
            return Ok(());
        }
        let lists = pairs.parts(self.stream.write(pairs.words(), self.buffers.pairs)?);
        let (experts, hidden, width) = (self.experts.layer(layer), self.config.hidden, self.experts.width());
        let Buffers { product, results, .. } = self.buffers;
        let gate_up = MatMul {
            x: rows,
            weights: experts.gate_up,
            out: product,
            bias: None,
            inputs: hidden as u64,
            outputs: width as u64,
            x_stride: hidden as u64,
            dtype: T::DTYPE,
            out_f32: false,
            rows: MatMulRows::Grouped {
                tiles: lists.tiles,
                count: pairs.tiles as u64,
                most: pairs.fullest as u64,
                groups: experts.slots as u64,
                rows: pairs.pairs() as u64,
            },
            row_of: Some(lists.row_of),
            activation: Activation::SiluProduct,
        };
        self.stream.launch(gate_up.launch())?;
        let down = MatMul {
            x: Buffer { bytes: (pairs.pairs() * width * size_of::<T>()) as u64, ..product },
            weights: experts.down,
            out: results,
            inputs: width as u64,
            outputs: hidden as u64,
            x_stride: width as u64,
            row_of: None,
            activation: Activation::None,
            ..gate_up
        };
        self.stream.launch(down.launch())?;
        let sum = SumPairs {
            y: results,
            pairs: pairs.pairs() as u64,
            first_pair: lists.first_pair,
            pair_of: lists.pair_of,
            weights: lists.weights,
            out: sums,
            rows: pairs.rows() as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE,
        };
        self.stream.launch(sum.launch())
    }
}
