//! Attention changes between dp and tp while sequences run: a rank that may do that has the weights of both, all heads
//! and its share of them, and its sequences' pages move to the other form ([`KvPool`](super::KvPool)).

use semmoe_kernels::reshard::kv::{KvError, KvShape};
use semmoe_tables::Attention;

use super::config::AttentionKind;
use super::kv::{AttentionChange, CacheShape, KvChange, KvObjection, KvPool, StagedKv};
use super::{Division, Model, ModelConfig};
use crate::ep::{ExpertParallel, UnitError};

impl Model {
    /// How attention is divided now.
    pub fn attention(&self) -> Attention {
        self.division.attention()
    }

    /// How else it can be divided, if it can.
    pub fn other_attention(&self) -> Option<Attention> {
        self.other.as_ref().map(Division::attention)
    }

    /// Moves pages to where the other attention needs them, or plans that, together with all ranks and between two
    /// steps. Nothing changes until [`Model::install_attention`]; the inner error is the first rank's objection.
    ///
    /// # Errors
    /// A rank was lost.
    ///
    /// # Panics
    /// If the model does not have the other attention.
    pub fn stage_attention(
        &self,
        change: &AttentionChange<'_>,
        ep: &mut ExpertParallel,
        objection: KvObjection<'_>,
    ) -> Result<Result<StagedKv, String>, UnitError> {
        let other = self.other.as_ref().expect("a model with both attentions");
        let whole = match plan_shape(&self.config, ep.world()) {
            Ok(whole) => whole,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let change = KvChange {
            change,
            whole,
            to: other.attention(),
            shape: other.share.cache_shape(&self.config),
            route_width: self.config.num_moe_layers() * self.config.top_k,
        };
        change.stage(ep, objection)
    }

    /// From now on attention is the other one.
    ///
    /// # Panics
    /// As [`Model::stage_attention`].
    pub fn install_attention(&mut self) {
        let other = self.other.as_mut().expect("a model with both attentions");
        std::mem::swap(&mut self.division, other);
        if let Ok(cpu) = self.backend.cpu_mut() {
            cpu.exchange_heads();
        }
        self.pool = KvPool::new(self.division.share.cache_shape(&self.config), usize::MAX, false);
    }
}

/// The bytes of whole pages, and how ranks share them.
fn plan_shape(config: &ModelConfig, ranks: usize) -> Result<KvShape, KvError> {
    let shape: CacheShape = config.cache_shape();
    match config.attention {
        AttentionKind::Grouped(_) => KvShape::grouped(shape.layers, shape.kv_heads, shape.head_bytes(), ranks),
        AttentionKind::Latent(_) => KvShape::latent(shape.layers, shape.head_bytes(), ranks),
    }
}

#[cfg(test)]
#[path = "relayout_tests.rs"]
mod tests;
