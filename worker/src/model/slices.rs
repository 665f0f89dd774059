//! A rank's heads in every layer and its columns of every expert.
//!
//! With attention tp, heads are split evenly over the ranks; if there are fewer key-value heads than ranks,
//! neighbouring ranks share one. With experts tp or hybrid, an expert's intermediate width is split: a rank stores a
//! range of gate and up columns (rows in the checkpoint's tensors) and the matching rows of down (columns in the
//! checkpoint), so the ranks' results sum to the expert's output.

use std::ops::Range;

use super::config::AttentionKind;
use super::{CacheShape, ModelConfig, ModelError};
use crate::ep::ExpertLayout;

/// One of several equal parts of every layer's heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadSlice {
    part: usize,
    parts: usize,
}

impl HeadSlice {
    /// All heads: attention dp.
    pub const ALL: Self = Self { part: 0, parts: 1 };

    /// Creates part `part` of `parts`.
    ///
    /// # Errors
    /// Fails if the heads cannot be split into this many parts; the error lists the numbers that would work.
    ///
    /// # Panics
    /// If `part` is not below `parts`.
    pub fn new(config: &ModelConfig, part: usize, parts: usize) -> Result<Self, ModelError> {
        assert!(part < parts, "part {part} of {parts}");
        if splits(config, parts) {
            return Ok(Self { part, parts });
        }
        let possible: Vec<String> =
            (1..=config.heads).filter(|&parts| splits(config, parts)).map(|parts| parts.to_string()).collect();
        Err(ModelError::Heads {
            heads: config.heads,
            kv_heads: config.cache_shape().kv_heads,
            ranks: parts,
            possible: possible.join(", "),
        })
    }

    /// Returns this part's query heads.
    pub(super) fn heads(&self, heads: usize) -> Range<usize> {
        let each = heads / self.parts;
        self.part * each..(self.part + 1) * each
    }

    /// Returns the key-value heads that this part's query heads read.
    pub(super) fn kv_heads(&self, kv_heads: usize) -> Range<usize> {
        let first = self.part * kv_heads / self.parts;
        first..first + (kv_heads / self.parts).max(1)
    }

    /// Returns the shape of a sequence's cache for this part of the heads.
    pub fn cache_shape(&self, config: &ModelConfig) -> CacheShape {
        let shape = config.cache_shape();
        match config.attention {
            AttentionKind::Grouped(_) => CacheShape { kv_heads: self.kv_heads(shape.kv_heads).len(), ..shape },
            // All heads share a single latent vector.
            AttentionKind::Latent(_) => shape,
        }
    }
}

/// Returns the columns of each expert that a rank stores: the ranks that share an expert store equal parts of it.
///
/// # Errors
/// Fails if the expert width is not divisible by the number of ranks that share an expert.
pub(crate) fn expert_columns(
    config: &ModelConfig,
    layout: ExpertLayout,
    rank: usize,
    world: usize,
) -> Result<Range<usize>, ModelError> {
    let (part, ranks) = match layout {
        ExpertLayout::Ep => (0, 1),
        ExpertLayout::Tp => (rank, world),
        ExpertLayout::Hybrid(nodes) => (rank % usize::from(nodes.width), nodes.width.into()),
        ExpertLayout::Groups(groups) => (rank % usize::from(groups.ranks), groups.ranks.into()),
    };
    let width = config.expert_width;
    if ranks == 0 || !width.is_multiple_of(ranks) {
        return Err(ModelError::ExpertWidth { width, ranks });
    }
    Ok(part * (width / ranks)..(part + 1) * (width / ranks))
}

fn splits(config: &ModelConfig, parts: usize) -> bool {
    // Latent attention has a single key-value head for all query heads.
    let kv_heads = config.cache_shape().kv_heads;
    config.heads.is_multiple_of(parts) && (kv_heads.is_multiple_of(parts) || parts.is_multiple_of(kv_heads))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(heads: usize, kv_heads: usize) -> ModelConfig {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
        let mut config = ModelConfig::load(dir).unwrap();
        let AttentionKind::Grouped(grouped) = &mut config.attention else { panic!() };
        grouped.kv_heads = kv_heads;
        config.heads = heads;
        config
    }

    #[test]
    fn every_query_head_is_one_ranks_and_finds_its_keys_there() {
        for (heads, kv_heads) in [(4, 2), (16, 4), (12, 6), (6, 1), (8, 8)] {
            let (config, group) = (config(heads, kv_heads), heads / kv_heads);
            for parts in (1..=heads).filter(|&parts| splits(&config, parts)) {
                let shares: Vec<_> = (0..parts).map(|part| HeadSlice::new(&config, part, parts).unwrap()).collect();
                let all: Vec<usize> = shares.iter().flat_map(|share| share.heads(heads)).collect();
                assert_eq!(all, (0..heads).collect::<Vec<_>>());
                for share in shares {
                    let (own, keys) = (share.heads(heads), share.kv_heads(kv_heads));
                    assert_eq!(own.len() % keys.len(), 0);
                    for (at, head) in own.clone().enumerate() {
                        assert_eq!(keys.start + at / (own.len() / keys.len()), head / group, "{share:?} of {heads}");
                    }
                    assert_eq!(share.cache_shape(&config).kv_heads, keys.len());
                }
            }
        }
    }

    #[test]
    fn ranks_that_do_not_divide_the_heads_are_reported_which_would() {
        let reported =
            |heads, kv_heads, parts| HeadSlice::new(&config(heads, kv_heads), 0, parts).unwrap_err().to_string();
        assert!(reported(4, 2, 3).contains("over 3 ranks, expected one of 1, 2, 4"), "{}", reported(4, 2, 3));
        assert!(reported(12, 4, 3).contains("expected one of 1, 2, 4, 12"), "{}", reported(12, 4, 3));
        assert!(reported(4, 2, 8).contains("expected one of 1, 2, 4"));
    }
}
