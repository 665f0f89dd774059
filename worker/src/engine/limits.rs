//! What an engine holds and does at most: as asked for, and as it comes out for a model on a machine.

use serde::{Deserialize, Serialize};

use crate::model::{HeadShare, ModelConfig, PAGE_TOKENS};

/// Tokens of cache where nothing is asked for, if the model's context is not longer and memory suffices.
const DEFAULT_KV_TOKENS: usize = 32_768;

/// What an engine holds and does at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Sequences in the running batch of one rank.
    pub running: usize,
    /// Sequences that may wait behind them on one rank; more are refused.
    pub waiting: usize,
    /// Tokens of one step on one rank, prompt chunks and decoded tokens together.
    pub step_tokens: usize,
    /// Key-value cache of one rank: running sequences reserve what they may need.
    pub kv: KvBudget,
    /// Whether prompts that begin alike share what was computed for the beginning.
    pub prefix_reuse: bool,
}

/// The size of a rank's key-value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// 32,768 tokens or one full context, whichever is more; but at most half of the available memory, divided by the
    /// number of ranks, as all of them may be on this machine.
    Auto,
    /// So many tokens, rounded up to pages.
    Tokens(usize),
    /// So many bytes, rounded down to pages.
    Bytes(u64),
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self { running: 32, waiting: 256, step_tokens: 512, kv: KvBudget::Auto, prefix_reuse: true }
    }
}

/// The limits as they count: the same on every rank, told by rank 0, so that ranks cannot differ in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnitLimits {
    /// As [`EngineLimits::running`].
    pub(crate) running: usize,
    /// As [`EngineLimits::waiting`].
    pub(crate) waiting: usize,
    /// As [`EngineLimits::step_tokens`].
    pub(crate) step_tokens: usize,
    /// Pages of the key-value cache of one rank: the fewest of all ranks.
    pub(crate) kv_pages: usize,
    /// As [`EngineLimits::prefix_reuse`].
    pub(crate) prefix_reuse: bool,
    /// Elements of rows that a rank sends or returns in one collective at most: all ranks' tokens of a step.
    pub(crate) row_elements: usize,
}

/// A budget that holds no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key-value cache of {bytes} bytes holds no page, which has {page} bytes")]
pub(crate) struct NoPage {
    bytes: u64,
    page: usize,
}

impl EngineLimits {
    /// Makes the limits hold together for a model: progress is always possible. `available` is memory in bytes, if known.
    pub(crate) fn fitted(
        self,
        (model, share): (&ModelConfig, HeadShare),
        world: u16,
        available: Option<u64>,
    ) -> Result<UnitLimits, NoPage> {
        let running = self.running.max(1);
        // Every running sequence decodes in every step and something is left for prompts.
        let step_tokens = self.step_tokens.max(2 * running);
        Ok(UnitLimits {
            running,
            waiting: self.waiting,
            step_tokens,
            kv_pages: self.kv.pages((model, share), world, available)?,
            prefix_reuse: self.prefix_reuse,
            row_elements: usize::from(world).saturating_mul(step_tokens).saturating_mul(model.hidden),
        })
    }
}

impl KvBudget {
    fn pages(
        self,
        (model, share): (&ModelConfig, HeadShare),
        world: u16,
        available: Option<u64>,
    ) -> Result<usize, NoPage> {
        let page = share.cache_shape(model).page_bytes();
        let in_bytes = |bytes: u64| match usize::try_from(bytes / page as u64).unwrap_or(usize::MAX) {
            0 => Err(NoPage { bytes, page }),
            pages => Ok(pages),
        };
        match self {
            Self::Tokens(tokens) => Ok(tokens.div_ceil(PAGE_TOKENS).max(1)),
            Self::Bytes(bytes) => in_bytes(bytes),
            Self::Auto => {
                let wanted = DEFAULT_KV_TOKENS.max(model.max_positions).div_ceil(PAGE_TOKENS);
                match available {
                    Some(available) => Ok(in_bytes(available / 2 / u64::from(world.max(1)))?.min(wanted)),
                    None => Ok(wanted),
                }
            }
        }
    }
}

impl UnitLimits {
    /// Tokens that a rank's cache holds.
    pub(crate) fn kv_tokens(&self) -> usize {
        self.kv_pages.saturating_mul(PAGE_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_cache_is_as_large_as_asked_for_and_as_memory_allows() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
        let model = ModelConfig::load(dir).unwrap();
        let page = model.cache_shape().page_bytes() as u64;
        let pages = |kv, world, available| {
            let limits = EngineLimits { kv, ..EngineLimits::default() };
            limits.fitted((&model, HeadShare::ALL), world, available).map(|limits| limits.kv_pages)
        };
        assert_eq!(pages(KvBudget::Auto, 4, None), Ok(512));
        assert_eq!(pages(KvBudget::Auto, 4, Some(u64::MAX)), Ok(512));
        assert_eq!(pages(KvBudget::Auto, 4, Some(100 * 8 * page)), Ok(100), "half of it for four ranks");
        assert_eq!(pages(KvBudget::Auto, 4, Some(page)), Err(NoPage { bytes: page / 8, page: page as usize }));
        assert_eq!(pages(KvBudget::Tokens(1), 1, Some(1)), Ok(1), "what was asked for counts");
        assert_eq!(pages(KvBudget::Tokens(65), 1, None), Ok(2));
        assert_eq!(pages(KvBudget::Bytes(3 * page - 1), 1, None), Ok(2));
        assert!(pages(KvBudget::Bytes(page - 1), 1, None).unwrap_err().to_string().contains("holds no page"));
    }
}
