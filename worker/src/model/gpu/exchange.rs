//! Sends rows to other ranks and back, and applies the experts in between.

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{AllRowsIn, NormIn, OwnRowsIn};
use semmoe_kernels_cuda::compute::{Activation, MatMul, MatMulRows, Pairs, SortPairs, SumPairs, Tiles};
use semmoe_kernels_cuda::unit::RoutedTokens;
use semmoe_kernels_cuda::{Buffer, Rows};
use semmoe_tables::LayerIdx;

use super::backend::GpuBackend;
use super::buffers::Buffers;
use super::experts::DevicePairs;
use super::memory::rows_of;
use crate::ep::{ExpertParallel, RoutedBatch, UnitError};
use crate::model::backend::{LayerStep, RowLists};
use crate::model::step::StepOutput;

impl<T: Element> GpuBackend<T> {
    /// Adds the sums over all ranks to this rank's rows of the residual stream, and normalises them (SRS).
    pub(super) fn scatter(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let Some(split) = step.split else { return Ok(()) };
        let (hidden, epsilon) = (self.config.hidden, self.config.rms_norm_eps);
        let Buffers { residual, other_residual, normed, .. } = self.buffers;
        let (all, own) = (self.rows * hidden, self.own.len() * hidden);
        let weight = rows_of(self.norms[step.layer].post_rounded, hidden);
        let residual_out = rows_of(other_residual, own);
        let norm = NormIn { residual: rows_of(residual, all), weight, epsilon, residual_out };
        step.ep.count_scatter(hidden, split);
        self.stream.flush()?;
        self.unit.reduce_scatter(hidden, split, Some(norm), rows_of(normed, own))?;
        (self.buffers.residual, self.buffers.other_residual) = (other_residual, residual);
        Ok(())
    }

    /// Gathers all rows of the residual stream and, unless the GPU keeps them until the step ends, the experts selected
    /// for them (SAG).
    pub(super) fn gather(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let Some(split) = step.split else { return Ok(()) };
        let (hidden, bound) = (self.config.hidden, self.config.num_experts);
        if let Some(layer) = step.moe.filter(|_| !lists.are_kept) {
            self.read_choices(layer, step.ep, lists)?;
        }
        let width = if step.moe.is_some() && !lists.are_kept { self.config.top_k } else { 0 };
        let Buffers { residual, other_residual, .. } = self.buffers;
        step.ep.count_gather(hidden, width, split);
        let (labels, gathered) = lists.labels(self.rows, width);
        let own = OwnRowsIn { rows: rows_of(residual, self.own.len() * hidden), hidden, labels, width, bound };
        let all = AllRowsIn { rows: rows_of(other_residual, self.rows * hidden), labels: gathered };
        self.stream.flush()?;
        self.unit.allgather(own, split, all)?;
        (self.buffers.residual, self.buffers.other_residual) = (other_residual, residual);
        lists.keep_gathered();
        Ok(())
    }

    /// Applies the experts to all rows on a rank that has all experts. The GPU sorts the row-expert pairs.
    pub(super) fn apply_own(&mut self, layer: LayerIdx) -> Result<(), UnitError> {
        let Buffers { normed, added, routed, .. } = self.buffers;
        let chosen = Pairs::Chosen { experts: self.kept(layer) };
        self.sort_and_multiply(layer, chosen, routed, self.own.len(), [normed, added])
    }

    /// Dispatches the rows to the experts that the router chose, applies them and combines the results. The GPU plans
    /// and sorts; the host learns the choices when the step ends.
    pub(super) fn apply_routed(&mut self, layer: LayerIdx, ep: &ExpertParallel) -> Result<(), UnitError> {
        let (config, elements) = (&self.config, self.own.len() * self.config.hidden);
        let pairs = 4 * (self.own.len() * config.top_k) as u64;
        let Buffers { normed, added, routed, .. } = self.buffers;
        let (slot_of, rank_of_expert) = self.hosts.layer(layer);
        let call = RoutedTokens {
            rows: Rows { tokens: self.own.len() as u64, hidden: config.hidden as u64, dtype: T::DTYPE },
            top_k: config.top_k as u64,
            num_experts: config.num_experts as u64,
            experts: Buffer { bytes: pairs, ..routed.from_offset(pairs) },
            weights: Buffer { bytes: pairs, ..routed },
            rank_of_expert,
            capacity: self.all_rows as u64,
        };
        self.stream.flush()?;
        let arrived = self.unit.dispatch_routed(&call, rows_of(normed, elements))?;
        let slots = ep.hosts(layer).slots as u64;
        let pairs = Pairs::Arrived { experts: arrived.experts, count: arrived.count, slot_of, slots };
        if slots > 0 {
            self.sort_and_multiply(layer, pairs, arrived.weights, self.all_rows, [arrived.rows, arrived.sums])?;
        }
        self.stream.flush()?;
        self.unit.combine_routed(&call, rows_of(added, elements))
    }

    /// Applies the experts to up to `rows` rows of `k` pairs each, which the GPU sorts.
    fn sort_and_multiply(
        &mut self,
        layer: LayerIdx,
        from: Pairs,
        weights: Buffer,
        rows: usize,
        [x, sums]: [Buffer; 2],
    ) -> Result<(), UnitError> {
        if rows == 0 {
            return Ok(());
        }
        let (top_k, slots) = (self.config.top_k, self.experts.layer(layer).slots as u64);
        let lists = DevicePairs::new(self.buffers.pairs, rows * top_k, rows, Tiles::of((rows * top_k) as u64, slots));
        let sort = SortPairs {
            from,
            weights,
            row_of: lists.row_of,
            sorted: lists.weights,
            first_pair: lists.first_pair,
            pair_of: lists.pair_of,
            tiles: lists.tiles,
            rows: rows as u64,
            top_k: top_k as u64,
            num_experts: self.config.num_experts as u64,
        };
        self.stream.launch(sort.launch())?;
        self.multiply(layer, lists, [x, sums].map(|of| rows_of::<T>(of, rows * self.config.hidden).buffer()))
    }

    /// Returns the buffer that stores a layer's selected experts until the step ends.
    pub(super) fn kept(&self, layer: LayerIdx) -> Buffer {
        let pairs = self.own.len() * self.config.top_k;
        self.buffers.kept.from_offset(2 * (layer.index() * pairs) as u64)
    }

    /// Reads and counts the experts selected in a layer.
    fn read_choices(
        &mut self,
        layer: LayerIdx,
        ep: &mut ExpertParallel,
        lists: &mut RowLists,
    ) -> Result<(), UnitError> {
        let (top_k, hidden) = (self.config.top_k, self.config.hidden);
        self.stream.read(self.kept(layer), lists.resize(self.own.len(), top_k).0)?;
        let RowLists { experts, weights, phases, .. } = lists;
        ep.plan_layer(layer, &RoutedBatch { x: &[], experts, weights, phases, top_k, hidden });
        Ok(())
    }

    /// Reads the selected experts of all layers for this rank's rows, which no table has shuffled.
    pub(super) fn read_kept(&mut self, out: &mut StepOutput) -> Result<(), UnitError> {
        let (top_k, width) = (self.config.top_k, out.route_width);
        let pairs = self.own.len() * top_k;
        if !std::mem::take(&mut self.keeps) || pairs == 0 {
            return Ok(());
        }
        self.lists.kept.resize(self.own.len() * width, 0);
        self.stream.read(self.buffers.kept, &mut self.lists.kept)?;
        let own = &mut out.routes[self.own.start * width..];
        for (layer, experts) in self.lists.kept.chunks_exact(pairs).enumerate() {
            for (row, chosen) in own.chunks_exact_mut(width).zip(experts.chunks_exact(top_k)) {
                row[layer * top_k..][..top_k].copy_from_slice(chosen);
            }
        }
        Ok(())
    }

    /// Applies the experts to rows and sums the results of each row.
    fn multiply(&mut self, layer: LayerIdx, lists: DevicePairs, [rows, sums]: [Buffer; 2]) -> Result<(), UnitError> {
        let (experts, hidden, width) = (self.experts.layer(layer), self.config.hidden, self.experts.width());
        let (Buffers { product, results, .. }, pairs) = (self.buffers, lists.pairs as u64);
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
                count: lists.room.count,
                most: lists.room.rows,
                groups: experts.slots as u64,
                rows: pairs,
            },
            row_of: Some(lists.row_of),
            activation: Activation::SiluProduct,
        };
        self.stream.launch(gate_up.launch())?;
        let down = MatMul {
            x: Buffer { bytes: (lists.pairs * width * size_of::<T>()) as u64, ..product },
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
            pairs,
            first_pair: lists.first_pair,
            pair_of: lists.pair_of,
            weights: lists.weights,
            out: sums,
            rows: lists.rows as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE,
        };
        self.stream.launch(sum.launch())
    }
}
