//! Switches attention between dp, tp and groups of tp while sequences run: a rank that may do that has the weights of
//! each, all heads and its shares of them, and its sequences' pages move to the other layout
//! ([`KvPool`](super::KvPool)).

use semmoe_kernels::reshard::kv::{KvError, KvShape};
use semmoe_tables::Attention;

use super::config::AttentionKind;
use super::kv::{AttentionChange, CacheShape, KvChange, KvObjection, KvPool, KvSpan, StagedKv};
use super::share::HeadSlice;
use super::{AttentionShape, Backend, Division, Model, ModelConfig};
use crate::ep::{ExpertParallel, UnitError};

impl Model {
    /// The current layout of attention.
    pub fn attention(&self) -> Attention {
        self.division.attention()
    }

    /// Attention, and the ranks that share it now.
    pub fn attention_shape(&self) -> AttentionShape {
        self.division.shape()
    }

    /// The other layouts of attention that it may switch to.
    pub fn other_attentions(&self) -> impl Iterator<Item = AttentionShape> {
        self.others.iter().map(Division::shape)
    }

    /// Number of pages in another layout of attention that fit the memory of `dp_pages` pages with dp.
    pub(crate) fn pages_of(&self, to: AttentionShape, dp_pages: usize) -> Option<usize> {
        let division = self.others.iter().chain([&self.division]).find(|division| division.shape() == to)?;
        let [whole, part] = [HeadSlice::ALL, division.share].map(|share| share.cache_shape(&self.config).page_bytes());
        Some(dp_pages.saturating_mul(whole) / part)
    }

    /// Moves pages to where another layout of attention needs them, or plans that, together with all ranks and between
    /// two steps. Nothing changes until [`Model::install_attention`], except that a GPU drops the pages that no
    /// sequence holds, because pages move within its memory. The inner error is the first rank's objection.
    ///
    /// # Errors
    /// A rank was lost.
    ///
    /// # Panics
    /// If the model does not have it.
    pub fn stage_shape(
        &mut self,
        to: AttentionShape,
        change: &AttentionChange<'_>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Result<StagedKv, String>, UnitError> {
        self.staged = self.others.iter().position(|other| other.shape() == to).expect("a division that the rank has");
        let other = &self.others[self.staged];
        let elsewhere = self.backend.cpu().is_none();
        if elsewhere {
            change.pool.flush();
        }
        let span = KvSpan::new(self.division.ranks, other.ranks, ep.rank().index());
        let whole = match plan_shape(&self.config, self.head_bytes(), span.ranks.len()) {
            Ok(whole) => whole,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let change = KvChange {
            change,
            whole,
            span,
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

    /// Switches to the attention that pages were staged for.
    ///
    /// # Panics
    /// If the model does not have the other attention.
    pub fn install_attention(&mut self) {
        std::mem::swap(&mut self.division, &mut self.others[self.staged]);
        let pages = match &mut self.backend {
            Backend::Cpu(cpu) => {
                cpu.exchange_heads(self.staged);
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
