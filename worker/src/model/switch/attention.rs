//! Switches attention between dp, tp and tp in groups while sequences are running. A rank that can switch stores the
//! weights for each layout, that is, all heads as well as its slices of them, and its sequences' pages move to the new
//! layout.

use semmoe_kernels::reshard::kv::{KvError, KvShape};
use semmoe_tables::Attention;

use super::{Refusal, SwitchFault};
use crate::ep::ExpertParallel;
use crate::model::config::AttentionKind;
use crate::model::kv::{AttentionSwitch, CacheShape, KvObjection, KvPool, KvSpan, KvSwitch, PreparedKv};
use crate::model::layout::AttentionLayout;
use crate::model::slices::HeadSlice;
use crate::model::{AttentionShape, Backend, Model, ModelConfig};

impl Model {
    /// Returns the current attention layout.
    pub fn attention(&self) -> Attention {
        self.layout.attention()
    }

    /// Returns the current attention layout and the number of ranks that share it.
    pub fn attention_shape(&self) -> AttentionShape {
        self.layout.shape()
    }

    /// Returns the other layouts that attention can switch to.
    pub fn other_attentions(&self) -> impl Iterator<Item = AttentionShape> {
        self.others.iter().map(AttentionLayout::shape)
    }

    /// Returns how many pages of an attention layout fit into the memory of `dp_pages` dp pages.
    pub(crate) fn pages_of(&self, to: AttentionShape, dp_pages: usize) -> Option<usize> {
        let layout = self.others.iter().chain([&self.layout]).find(|layout| layout.shape() == to)?;
        let [whole, part] = [HeadSlice::ALL, layout.heads].map(|heads| heads.cache_shape(&self.config).page_bytes());
        Some(dp_pages.saturating_mul(whole) / part)
    }

    /// Moves pages to where another attention layout needs them, or only plans the moves, together with all ranks and
    /// between two steps. Nothing changes until [`Model::commit_attention`], except that on a GPU the pages that no
    /// sequence holds are dropped, because pages move within GPU memory.
    ///
    /// # Errors
    /// Fails if a rank refuses, in which case nothing has changed, or if a rank was lost.
    ///
    /// # Panics
    /// If the model does not have this layout.
    pub fn prepare_attention(
        &mut self,
        to: AttentionShape,
        switch: &AttentionSwitch<'_>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<PreparedKv, SwitchFault> {
        self.next = self.others.iter().position(|other| other.shape() == to).expect("the model has this layout");
        let other = &self.others[self.next];
        let elsewhere = self.backend.cpu().is_none();
        if elsewhere {
            switch.pool.flush();
        }
        let span = KvSpan::new(self.layout.ranks, other.ranks, ep.rank().index());
        let whole = plan_shape(&self.config, self.head_bytes(), span.ranks.len()).map_err(Refusal::Pages)?;
        let switch = KvSwitch {
            switch,
            whole,
            span,
            shape: self.shape_of(other),
            route_width: self.config.num_moe_layers() * self.config.top_k,
            elsewhere,
        };
        let prepared = switch.prepare(ep, objection)?;
        #[cfg(feature = "gpu")]
        if let (Backend::Gpu(gpu), Some(moves)) = (&mut self.backend, &prepared.moves)
            && let Some(refusal) = gpu.parts_to_switch().move_pages(moves, ep)?
        {
            return Err(refusal.into());
        }
        Ok(prepared)
    }

    /// Returns the shape of a layout's pages in host memory.
    fn shape_of(&self, layout: &AttentionLayout) -> CacheShape {
        let shape = layout.heads.cache_shape(&self.config);
        match &self.backend {
            Backend::Cpu(_) => shape,
            #[cfg(feature = "gpu")]
            Backend::Gpu(_) => shape.elsewhere(),
        }
    }

    /// Bytes per head and layer in one page, wherever the page is stored.
    fn head_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu(_) => self.config.cache_shape().head_bytes(),
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => gpu.cache().head_bytes(),
        }
    }

    /// Switches to the attention layout for which pages were prepared.
    ///
    /// # Panics
    /// If no switch was prepared.
    pub fn commit_attention(&mut self) {
        std::mem::swap(&mut self.layout, &mut self.others[self.next]);
        let pages = match &mut self.backend {
            Backend::Cpu(cpu) => {
                cpu.exchange_heads(self.next);
                usize::MAX
            }
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => {
                gpu.exchange_attention();
                gpu.cache().pages()
            }
        };
        self.pool = KvPool::new(self.shape_of(&self.layout), pages, false);
    }
}

/// Describes whole pages and how the ranks divide them.
fn plan_shape(config: &ModelConfig, head_bytes: usize, ranks: usize) -> Result<KvShape, KvError> {
    let shape: CacheShape = config.cache_shape();
    match config.attention {
        AttentionKind::Grouped(_) => KvShape::grouped(shape.layers, shape.kv_heads, head_bytes, ranks),
        AttentionKind::Latent(_) => KvShape::latent(shape.layers, head_bytes, ranks),
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
