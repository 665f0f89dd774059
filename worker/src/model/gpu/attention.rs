//! A layer's attention: grouped heads over pages.

use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::{
    Attend, GroupLimit, GroupScore, HeadNorms, HeadRows, PagedHeads, ProjectedHeads, RotaryAngles, RotaryLayout,
};

use super::matrix::{DeviceMatrix, Uploader};
use super::memory::Stream;
use super::rows::DevicePlaces;
use crate::ep::UnitError;
use crate::model::attention::Attention;
use crate::model::config::{self, RopeLayout};
use crate::model::grouped::{Grouped, Projected};
use crate::model::kv::CacheShape;
use crate::model::rope::RotaryTable;
use crate::model::{LATENT, ModelConfig, ModelError, PAGE_TOKENS};

/// Keys and values of all pages, and the angles by which queries and keys turn.
pub(super) struct Cache {
    pub(super) pool: Buffer,
    pub(super) pages: usize,
    pub(super) shape: CacheShape,
    angles: RotaryAngles,
}

/// Buffers of a step's attention.
#[derive(Clone, Copy)]
pub(super) struct AttentionBuffers {
    /// `[rows, kv_heads, group, dim]`
    pub(super) queries: Buffer,
    /// Of rows whose keys are divided among blocks.
    pub(super) scratch: Buffer,
}

impl Cache {
    pub(super) fn new<T: Element>(
        config: &ModelConfig,
        shape: CacheShape,
        pages: usize,
        uploader: &Uploader<T>,
    ) -> Result<Self, ModelError> {
        let mut table = RotaryTable::new(config.rope_dim(), &config.rope);
        table.grow(shape.max_positions);
        let [cos, sin] = table.all();
        let pool = uploader.allocate(pages * Self::page_elements(&shape) * size_of::<T>())?;
        let angles = RotaryAngles {
            cos: uploader.vector(cos)?,
            sin: uploader.vector(sin)?,
            positions: (cos.len() / (config.rope_dim() / 2)) as u64,
            elements: config.rope_dim() as u64,
            layout: match config.rope.layout {
                RopeLayout::Halves => RotaryLayout::Halves,
                RopeLayout::Pairs => RotaryLayout::Pairs,
            },
        };
        Ok(Self { pool, pages, shape, angles })
    }

    /// Elements of a page of keys and values.
    pub(super) fn page_elements(shape: &CacheShape) -> usize {
        shape.layers * shape.kv_heads * PAGE_TOKENS * (shape.key_width + shape.value_width)
    }

    /// The heads of a layer over these pages.
    pub(super) fn heads(&self, layer: usize, of: &Grouped<DeviceMatrix>, dtype: Dtype) -> PagedHeads {
        let CacheShape { layers, kv_heads, key_width, .. } = self.shape;
        PagedHeads {
            pool: self.pool,
            pages: self.pages as u64,
            layer: layer as u64,
            layers: layers as u64,
            kv_heads: kv_heads as u64,
            group: of.heads.group as u64,
            dim: key_width as u64,
            dtype,
        }
    }
}

/// The norms of queries and keys on the GPU.
pub(super) struct DeviceHeadNorms {
    query: Buffer,
    key: Buffer,
}

/// The grouped attention of a layer; the others were refused.
pub(super) fn grouped(attention: &Attention<DeviceMatrix>) -> Result<&Grouped<DeviceMatrix>, ModelError> {
    match attention {
        Attention::Grouped(grouped) => Ok(grouped),
        Attention::Latent(_) => Err(ModelError::NotOnGpu(LATENT)),
    }
}

impl DeviceHeadNorms {
    pub(super) fn new<T: Element>(
        grouped: &Grouped<DeviceMatrix>,
        uploader: &Uploader<T>,
    ) -> Result<Option<Self>, ModelError> {
        let norms = grouped
            .norms
            .as_ref()
            .map(|norms| Ok(Self { query: uploader.vector(&norms.query)?, key: uploader.vector(&norms.key)? }));
        norms.transpose()
    }
}

/// Attention of rows whose projections are in `qkv`, to `out` `[rows, heads x dim]`.
pub(super) struct AttentionCall<'a> {
    pub(super) layer: usize,
    pub(super) heads: &'a Grouped<DeviceMatrix>,
    pub(super) norms: Option<&'a DeviceHeadNorms>,
    pub(super) cache: &'a Cache,
    pub(super) places: &'a DevicePlaces,
    pub(super) buffers: AttentionBuffers,
    pub(super) qkv: Buffer,
    pub(super) out: Buffer,
    pub(super) dtype: Dtype,
}

impl AttentionCall<'_> {
    pub(super) fn run(self, stream: &mut Stream) -> Result<(), UnitError> {
        let Self { layer, heads: of, cache, places, buffers, dtype, .. } = self;
        let (heads, rows) = (cache.heads(layer, of, dtype), places.rows as u64);
        let norms = of.norms.as_ref().zip(self.norms).map(|(host, device)| HeadNorms {
            query: device.query,
            key: device.key,
            whole: host.query.len() != of.heads.key_width,
            epsilon: host.eps,
        });
        let Projected { queries, keys, first_query, first_key } = of.projected;
        let [queries, keys, first_query, first_key] = [queries, keys, first_query, first_key].map(|at| at as u64);
        let prepare = HeadRows {
            heads,
            qkv: self.qkv,
            projected: ProjectedHeads { queries, keys, first_query, first_key },
            norms,
            clip: of.clip,
            angles: cache.angles,
            positions: places.positions,
            page_of: places.page_of,
            queries: buffers.queries,
            rows,
        };
        stream.launch(prepare.launch())?;
        let attend = Attend {
            heads,
            scale: of.heads.scale,
            queries: buffers.queries,
            positions: places.positions,
            sequence_of: places.sequence_of,
            page_table: places.page_table,
            sequences: places.sequences as u64,
            table_width: places.table_width as u64,
            longest: places.last as u64,
            scratch: buffers.scratch,
            out: self.out,
            rows,
        };
        attend
            .launch()
            .map_err(|error| stream.refused(&error))?
            .into_iter()
            .try_for_each(|each| stream.launch(Ok(each)))
    }
}

/// The limit of groups as the router's kernel takes it.
pub(super) fn group_limit(limit: &config::GroupLimit) -> GroupLimit {
    let by = match limit.by {
        config::GroupScore::Best => GroupScore::Best,
        config::GroupScore::TwoBest => GroupScore::TwoBest,
    };
    GroupLimit { groups: limit.groups as u64, kept: limit.kept as u64, by }
}
