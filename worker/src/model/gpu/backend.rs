//! Runs the model's steps on a GPU, behind the compute backend interface.

use std::ops::Range;
use std::sync::Arc;

use semmoe_kernels::Element;
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::{self, AddRows, Embed, Norm, Route};
use semmoe_kernels_cuda::unit::RoutedCollectives;

use super::attention::{AttentionCall, Cache, DeviceHeadNorms, group_limit, grouped};
use super::buffers::Buffers;
use super::choose::Choices;
use super::experts::{DeviceExperts, DeviceHosts};
use super::matrix::{DeviceMatrix, Product};
use super::memory::Stream;
use super::rows::{DevicePlaces, RowPlaces};
use super::switch::Mover;
use crate::ep::UnitError;
use crate::model::ModelConfig;
use crate::model::backend::{ComputeBackend, LayerStep, RowLists, WantedRows};
use crate::model::config::Scoring;
use crate::model::mlp::Mlp;
use crate::model::probe::Probe;
use crate::model::step::StepOutput;
use crate::model::weights::{FeedForward, HeadWeights, Weights};

/// A rank's weights, KV cache pages and activations on its GPU.
pub(in crate::model) struct GpuBackend<T: Element> {
    pub(super) config: Arc<ModelConfig>,
    pub(super) stream: Stream,
    pub(super) unit: Box<dyn RoutedCollectives<T>>,
    pub(super) weights: Weights<DeviceMatrix, Buffer>,
    /// Head weights for the other attention layout, `[layers]`, if the rank can switch to it.
    pub(super) other_heads: Option<Vec<HeadWeights<DeviceMatrix>>>,
    pub(super) norms: Vec<LayerNorms>,
    pub(super) final_norm: Buffer,
    pub(super) experts: DeviceExperts,
    pub(super) hosts: DeviceHosts,
    pub(super) cache: Cache,
    pub(super) mover: Mover,
    pub(super) buffers: Buffers,
    pub(super) lists: HostLists,
    /// Number of rows in the residual stream.
    pub(super) rows: usize,
    /// Positions in the split of the rows that this rank continues with after attention.
    pub(super) own: Range<usize>,
    /// Number of rows of all ranks, unless this one is alone.
    pub(super) all_rows: usize,
    /// Whether `added` still has to be added to the residual stream.
    pub(super) is_pending: bool,
    /// Whether this rank is the only one and therefore has all experts and rows, so that no rows are sent.
    pub(super) is_alone: bool,
    /// Whether this step's selected experts are in `buffers.kept`.
    pub(super) keeps: bool,
}

/// One layer's norm and correction vectors.
pub(super) struct LayerNorms {
    pub(super) input: Buffer,
    pub(super) post: Buffer,
    /// The post-attention norm rounded to T, as the fused reduce-scatter requires.
    pub(super) post_rounded: Buffer,
    pub(super) heads: Option<DeviceHeadNorms>,
    /// Correction of the router's scores.
    pub(super) correction: Option<Buffer>,
}

/// Host-side lists for a step or layer; reused.
#[derive(Default)]
pub(super) struct HostLists {
    pub(super) places: RowPlaces,
    pub(super) on_gpu: DevicePlaces,
    pub(super) kept: Vec<u16>,
    pub(super) choices: Choices,
}

/// The input to a norm, based on the residual stream.
struct NormSource {
    /// Rows to add to the residual stream first.
    added: Option<Buffer>,
    /// Restricts the norm to these rows.
    row_of: Option<Buffer>,
}

impl<T: Element> GpuBackend<T> {
    /// Adds any pending output to `rows` rows of the residual stream, and normalises them.
    fn add_and_norm(&mut self, rows: usize, weight: Buffer) -> Result<(), UnitError> {
        let added = std::mem::take(&mut self.is_pending).then_some(self.buffers.added);
        self.norm(NormSource { added, row_of: None }, rows, weight)
    }

    /// Normalises rows of the residual stream.
    fn norm(&mut self, source: NormSource, rows: usize, weight: Buffer) -> Result<(), UnitError> {
        if rows == 0 {
            return Ok(());
        }
        let NormSource { added, row_of } = source;
        let norm = Norm {
            residual: self.buffers.residual,
            added,
            row_of,
            weight,
            out: self.buffers.normed,
            rows: rows as u64,
            hidden: self.config.hidden as u64,
            epsilon: self.config.rms_norm_eps,
            dtype: T::DTYPE,
        };
        self.stream.launch(norm.launch())
    }

    /// Computes `to += added`. If there are gates, each added row is scaled by the sigmoid of its gate.
    fn add(&mut self, to: Buffer, added: Buffer, gate: Option<Buffer>, rows: usize) -> Result<(), UnitError> {
        if rows == 0 {
            return Ok(());
        }
        let (rows, hidden) = (rows as u64, self.config.hidden as u64);
        self.stream.launch(AddRows { residual: to, added, gate, rows, hidden, dtype: T::DTYPE }.launch())
    }

    /// Writes the lists that all layers of a step read.
    fn begin(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let Self { lists, cache, buffers, stream, hosts, is_alone, .. } = self;
        lists.on_gpu = lists.places.write(step.items, cache.places(), buffers.places, stream)?;
        if !*is_alone {
            hosts.write(step.ep, stream)?;
            self.all_rows = if step.split.is_some() { self.rows } else { step.ep.total_rows(self.rows)? };
        }
        Ok(())
    }

    /// Applies a gated feed-forward network to the normalised rows.
    fn mlp(&mut self, [gate_up, down]: [DeviceMatrix; 2], rows: usize, out: Buffer) -> Result<(), UnitError> {
        let Buffers { normed, product, .. } = self.buffers;
        gate_up.apply::<T>(normed, rows, Product::silu(product), &mut self.stream)?;
        down.apply::<T>(product, rows, Product::of(out), &mut self.stream)
    }
}

fn matrices(mlp: &Mlp<DeviceMatrix>) -> [DeviceMatrix; 2] {
    [mlp.gate_up, mlp.down]
}

impl<T: Element> ComputeBackend for GpuBackend<T> {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), UnitError> {
        self.rows = tokens.len();
        self.is_pending = false;
        if tokens.is_empty() {
            return Ok(());
        }
        let on_gpu = self.stream.write(tokens, self.buffers.tokens)?;
        let launch = Embed {
            table: self.weights.embedding,
            tokens: on_gpu,
            out: self.buffers.residual,
            rows: self.rows as u64,
            hidden: self.config.hidden as u64,
            vocab: self.config.vocab_size as u64,
            dtype: T::DTYPE,
        }
        .launch();
        self.stream.launch(launch)
    }

    fn attention(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError> {
        let (layer, rows) = (step.layer, self.rows);
        if layer == 0 {
            self.begin(step)?;
        }
        self.own = step.own_positions();
        self.add_and_norm(rows, self.norms[layer].input)?;
        let block = &self.weights.blocks[layer];
        let heads = grouped(&block.heads.attention).map_err(|error| self.stream.lost(&error.into()))?;
        let (Buffers { normed, qkv, attended, added, .. }, out) = (self.buffers, block.heads.out);
        heads.qkv.apply::<T>(normed, rows, Product::of(qkv), &mut self.stream)?;
        if rows > 0 {
            let call = AttentionCall {
                layer,
                heads,
                norms: self.norms[layer].heads.as_ref(),
                cache: &self.cache,
                places: &self.lists.on_gpu,
                buffers: self.buffers.attention,
                qkv,
                out: attended,
                dtype: T::DTYPE,
            };
            call.run(&mut self.stream)?;
        }
        if step.split.is_some() {
            let part = self.unit.part(rows * self.config.hidden)?.buffer();
            out.apply::<T>(attended, rows, Product::of(part), &mut self.stream)?;
            return self.scatter(step);
        }
        out.apply::<T>(attended, rows, Product::of(added), &mut self.stream)?;
        self.is_pending = true;
        self.add_and_norm(rows, self.norms[layer].post)
    }

    fn route(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let (rows, top_k) = (self.own.len(), self.config.top_k);
        let (Some(layer), Some(moe)) = (step.moe, self.weights.moe(step.layer)) else { return Ok(()) };
        let Buffers { normed, router_logits, routed, .. } = self.buffers;
        lists.are_kept = !step.splits_by_choices;
        // Nothing to copy until the choices are read.
        lists.resize(0, top_k);
        self.keeps = lists.are_kept;
        moe.router.apply::<T>(normed, rows, Product::f32(router_logits), &mut self.stream)?;
        if rows == 0 {
            return Ok(());
        }
        let launch = Route {
            logits: router_logits,
            correction: self.norms[step.layer].correction,
            experts: self.kept(layer),
            weights: routed,
            ids: (!self.is_alone).then(|| routed.from_offset(4 * (rows * top_k) as u64)),
            rows: rows as u64,
            num_experts: self.config.num_experts as u64,
            top_k: top_k as u64,
            scoring: match self.config.router.scoring {
                Scoring::Softmax => compute::Scoring::Softmax,
                Scoring::CorrectedSigmoid => compute::Scoring::Sigmoid,
            },
            normalise: self.config.router.normalise,
            scale: self.config.router.scale,
            groups: self.config.router.groups.as_ref().map(group_limit),
        }
        .launch();
        self.stream.launch(launch)
    }

    fn experts(&mut self, step: &mut LayerStep<'_, '_>, _lists: &RowLists) -> Result<(), UnitError> {
        match step.moe {
            None => Ok(()),
            Some(layer) if self.is_alone => self.apply_own(layer),
            Some(layer) => self.apply_routed(layer, step.ep),
        }
    }

    fn feed_forward(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError> {
        let (rows, Buffers { normed, added, shared, gates, residual, .. }) = (self.own.len(), self.buffers);
        match &self.weights.blocks[step.layer].feed_forward {
            FeedForward::Dense(dense) => self.mlp(matrices(dense), rows, added)?,
            FeedForward::Moe(moe) => {
                if let Some((mlp, gate)) = moe.shared.as_ref().map(|of| (matrices(&of.mlp), of.gate)) {
                    self.mlp(mlp, rows, shared)?;
                    if let Some(gate) = gate {
                        gate.apply::<T>(normed, rows, Product::f32(gates), &mut self.stream)?;
                    }
                    self.add(added, shared, gate.map(|_| gates), rows)?;
                }
            }
        }
        if step.split.is_none() {
            self.is_pending = true;
            return Ok(());
        }
        self.add(residual, added, None, rows)?;
        self.gather(step, lists)
    }

    fn head(&mut self, wanted: &WantedRows, out: &mut StepOutput, _probe: &mut dyn Probe) -> Result<(), UnitError> {
        if std::mem::take(&mut self.is_pending) {
            self.add(self.buffers.residual, self.buffers.added, None, self.rows)?;
        }
        let rows = wanted.rows.len();
        out.logits.clear();
        if rows > 0 {
            let row_of = self.stream.write(&wanted.rows, self.buffers.wanted)?;
            self.norm(NormSource { added: None, row_of: Some(row_of) }, rows, self.final_norm)?;
            let Buffers { normed, logits, .. } = self.buffers;
            self.weights.output.apply::<T>(normed, rows, Product::f32(logits), &mut self.stream)?;
            self.choose(&wanted.items, out)?;
        }
        self.read_kept(out)?;
        out.device = Some(self.stream.done);
        Ok(())
    }
}
