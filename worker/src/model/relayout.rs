//! Switches attention between dp and tp while sequences run: a rank that may do that has the weights of both, all heads
//! and its share of them, and its sequences' pages move to the other layout ([`KvPool`](super::KvPool)).

use semmoe_kernels::reshard::kv::{KvError, KvShape};
use semmoe_tables::Attention;

use super::config::AttentionKind;
use super::kv::{AttentionChange, CacheShape, KvChange, KvObjection, KvPool, StagedKv};
use super::{Backend, Division, Model, ModelConfig};
use crate::ep::{ExpertParallel, UnitError};

impl Model {
    /// The current layout of attention.
    pub fn attention(&self) -> Attention {
        self.division.attention()
    }

    /// The other layout of attention, if it may switch.
    pub fn other_attention(&self) -> Option<Attention> {
        self.other.as_ref().map(Division::attention)
    }

    /// Moves pages to where the other attention needs them, or plans that, together with all ranks and between two
    /// steps. Nothing changes until [`Model::install_attention`], except that a GPU drops the pages that no sequence
    /// holds, since pages move within its memory. The inner error is the first rank's objection.
    ///
    /// # Errors
    /// A rank was lost.
    ///
    /// # Panics
    /// If the model does not have the other attention.
    pub fn stage_attention(
        &mut self,
        change: &AttentionChange<'_>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Result<StagedKv, String>, UnitError> {
        let other = self.other.as_ref().expect("a model with both attentions");
        let elsewhere = self.backend.cpu().is_none();
        if elsewhere {
            change.pool.flush();
        }
        let whole = match plan_shape(&self.config, self.head_bytes(), ep.world()) {
            Ok(whole) => whole,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let change = KvChange {
            change,
            whole,
            to: other.attention(),
            shape: self.shape_of(other),
            route_width: self.config.num_moe_layers() * self.config.top_k,
            elsewhere,
        };
        let staged = change.stage(ep, objection)?;
        #[cfg(feature = "gpu")]
        if let (Backend::Gpu(gpu), Ok(StagedKv { moves: Some(moves), .. })) = (&mut self.backend, &staged)
            && let Some(cause) = gpu.changes().move_pages(moves, ep)?
        {
            return Ok(Err(cause));
        }
        Ok(staged)
    }

    /// The shape of pages in host memory.
    fn shape_of(&self, division: &Division) -> CacheShape {
        let shape = division.share.cache_shape(&self.config);
        match &self.backend {
            Backend::Cpu(_) => shape,
            #[cfg(feature = "gpu")]
            Backend::Gpu(_) => shape.elsewhere(),
        }
    }

    /// Bytes of one head of a page in one layer, wherever it is stored.
    fn head_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu(_) => self.config.cache_shape().head_bytes(),
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => gpu.cache().head_bytes(),
        }
    }

    /// Switches to the other attention.
    ///
    /// # Panics
    /// If the model does not have the other attention.
    pub fn install_attention(&mut self) {
        let other = self.other.as_mut().expect("a model with both attentions");
        std::mem::swap(&mut self.division, other);
        let pages = match &mut self.backend {
            Backend::Cpu(cpu) => {
                cpu.exchange_heads();
                usize::MAX
            }
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => {
                gpu.exchange_attention();
                gpu.cache().pages()
            }
        };
        self.pool = KvPool::new(self.shape_of(&self.division), pages, false);
    }
}

/// The bytes of whole pages, and how ranks share them.
fn plan_shape(config: &ModelConfig, head_bytes: usize, ranks: usize) -> Result<KvShape, KvError> {
    let shape: CacheShape = config.cache_shape();
    match config.attention {
        AttentionKind::Grouped(_) => KvShape::grouped(shape.layers, shape.kv_heads, head_bytes, ranks),
        AttentionKind::Latent(_) => KvShape::latent(shape.layers, head_bytes, ranks),
    }
}

#[cfg(test)]
#[path = "relayout_tests.rs"]
mod tests;
