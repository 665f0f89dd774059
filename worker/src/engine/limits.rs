//! Engine limits: as requested, and as adapted to a model and a machine.

use semmoe_tables::Attention;
use serde::{Deserialize, Serialize};

use crate::model::{HeadSlice, ModelConfig, PAGE_TOKENS};

/// Default cache size in tokens, unless the model's context is longer or memory is short.
const DEFAULT_KV_TOKENS: usize = 32_768;

/// An engine's upper limits, and the order in which waiting requests are scheduled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLimits {
    /// Maximum number of sequences in a rank's running batch.
    pub running: usize,
    /// Maximum number of sequences that wait on a rank; further ones are rejected.
    pub waiting: usize,
    /// Maximum number of tokens per step on a rank, counting prompt chunks and decoded tokens.
    pub step_tokens: usize,
    /// Size of a rank's KV cache, in which a running sequence reserves the maximum it may need.
    pub kv: KvBudget,
    /// Whether prompts with a common prefix share its KV cache pages.
    pub prefix_reuse: bool,
    /// Seconds of waiting time that one level of priority is worth; negative if lower numbers are more urgent. 0
    /// schedules requests in arrival order.
    pub priority_seconds: f64,
}

/// The size of a rank's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// 32,768 tokens or one full context, whichever is larger, but at most half of the available memory divided by the
    /// number of ranks, because all ranks may be on this machine. If attention can switch, this applies to each
    /// attention layout.
    Auto,
    /// This many tokens, rounded up to whole pages; a second attention layout, if any, gets the same number of bytes.
    Tokens(usize),
    /// This many bytes, rounded down to whole pages.
    Bytes(u64),
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            running: 32,
            waiting: 256,
            step_tokens: 512,
            kv: KvBudget::Auto,
            prefix_reuse: true,
            priority_seconds: 0.0,
        }
    }
}

/// The effective limits, sent by rank 0 so that all ranks use the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct UnitLimits {
    /// Maximum number of sequences in a rank's running batch.
    pub(crate) running: usize,
    /// Maximum number of sequences that wait on a rank; further ones are rejected.
    pub(crate) waiting: usize,
    /// Maximum number of tokens per step on a rank, counting prompt chunks and decoded tokens.
    pub(crate) step_tokens: usize,
    /// KV cache pages per rank: the minimum over all ranks.
    pub(crate) kv_pages: KvPages,
    /// Whether prompts with a common prefix share its KV cache pages.
    pub(crate) prefix_reuse: bool,
    /// Maximum number of row elements that a rank sends or returns in one collective, enough for all ranks' tokens in a
    /// step.
    pub(crate) row_elements: usize,
    /// Seconds of waiting time that one level of priority is worth.
    pub(crate) priority_seconds: f64,
}

/// KV cache pages by attention layout: the same number of bytes in each layout that the unit can use, and 0 pages in
/// all others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct KvPages {
    dp: usize,
    tp: usize,
}

impl KvPages {
    pub(crate) fn of(self, attention: Attention) -> usize {
        match attention {
            Attention::Dp => self.dp,
            Attention::Tp => self.tp,
        }
    }

    /// Returns the smaller page count of two ranks for each layout.
    #[must_use]
    pub(crate) fn min(self, other: Self) -> Self {
        Self { dp: self.dp.min(other.dp), tp: self.tp.min(other.tp) }
    }

    /// Whether attention may switch.
    pub(crate) fn are_both(self) -> bool {
        self.dp > 0 && self.tp > 0
    }
}

/// An attention layout that a unit can use, with the rank's head slice in it.
pub(crate) type AttentionSlice = (Attention, HeadSlice);

/// The memory available for keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KvMemory {
    /// Available bytes for all ranks together, if known.
    pub(crate) available: Option<u64>,
    /// Bytes per key or value element.
    pub(crate) element_bytes: usize,
}

impl KvMemory {
    /// Host memory, which stores keys and values as f32.
    pub(crate) fn host(available: Option<u64>) -> Self {
        Self { available, element_bytes: size_of::<f32>() }
    }
}

/// The KV cache budget is smaller than one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key-value cache of {bytes} bytes is smaller than one page of {page} bytes")]
pub(crate) struct NoPage {
    bytes: u64,
    page: usize,
}

impl EngineLimits {
    /// Adapts the limits to a model and to the layouts that its unit can have (`slices`, initial layout first), so that
    /// progress is always possible.
    pub(crate) fn fitted(
        self,
        model: &ModelConfig,
        slices: &[AttentionSlice],
        world: u16,
        memory: KvMemory,
    ) -> Result<UnitLimits, NoPage> {
        let running = self.running.max(1);
        // The budget covers one token for every running sequence and leaves some for prompts. If attention can switch
        // to tp, each rank runs the sequences of all ranks after the switch.
        let ranks = if slices.len() > 1 { usize::from(world) } else { 1 };
        let step_tokens = self.step_tokens.max(running.saturating_mul(2 * ranks));
        Ok(UnitLimits {
            running,
            waiting: self.waiting,
            step_tokens,
            kv_pages: self.kv.pages(model, slices, world, memory)?,
            prefix_reuse: self.prefix_reuse,
            row_elements: usize::from(world).saturating_mul(step_tokens).saturating_mul(model.hidden),
            priority_seconds: self.priority_seconds,
        })
    }
}

impl KvBudget {
    fn pages(
        self,
        model: &ModelConfig,
        slices: &[AttentionSlice],
        world: u16,
        KvMemory { available, element_bytes }: KvMemory,
    ) -> Result<KvPages, NoPage> {
        let page_bytes = |slice: &HeadSlice| slice.cache_shape(model).page_bytes() / size_of::<f32>() * element_bytes;
        let bytes_of = |pages: usize, page: usize| (pages as u64).saturating_mul(page as u64);
        let bytes = match self {
            Self::Tokens(tokens) => {
                let start = slices.first().map_or(0, |(_, slice)| page_bytes(slice));
                bytes_of(tokens.div_ceil(PAGE_TOKENS).max(1), start)
            }
            Self::Bytes(bytes) => bytes,
            Self::Auto => {
                let largest = slices.iter().map(|(_, slice)| page_bytes(slice)).max().unwrap_or(0);
                let wanted = bytes_of(DEFAULT_KV_TOKENS.max(model.max_positions).div_ceil(PAGE_TOKENS), largest);
                available.map_or(wanted, |available| wanted.min(available / 2 / u64::from(world.max(1))))
            }
        };
        let mut kv_pages = KvPages::default();
        for (attention, slice) in slices {
            let page = page_bytes(slice);
            let pages = usize::try_from(bytes / page as u64).unwrap_or(usize::MAX);
            if pages == 0 {
                return Err(NoPage { bytes, page });
            }
            match attention {
                Attention::Dp => kv_pages.dp = pages,
                Attention::Tp => kv_pages.tp = pages,
            }
        }
        Ok(kv_pages)
    }
}

impl UnitLimits {
    /// Returns how many tokens fit into a rank's cache in the layout with the smallest capacity.
    pub(crate) fn kv_tokens(&self) -> usize {
        let KvPages { dp, tp } = self.kv_pages;
        [dp, tp].into_iter().filter(|&pages| pages > 0).min().unwrap_or(0).saturating_mul(PAGE_TOKENS)
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
            let dp = [(Attention::Dp, HeadSlice::ALL)];
            limits
                .fitted(&model, &dp[..], world, KvMemory::host(available))
                .map(|limits| limits.kv_pages.of(Attention::Dp))
        };
        assert_eq!(pages(KvBudget::Auto, 4, None), Ok(512));
        assert_eq!(pages(KvBudget::Auto, 4, Some(u64::MAX)), Ok(512));
        assert_eq!(pages(KvBudget::Auto, 4, Some(100 * 8 * page)), Ok(100), "half of it for four ranks");
        assert_eq!(pages(KvBudget::Auto, 4, Some(page)), Err(NoPage { bytes: page / 8, page: page as usize }));
        assert_eq!(pages(KvBudget::Tokens(1), 1, Some(1)), Ok(1), "the requested amount counts");
        assert_eq!(pages(KvBudget::Tokens(65), 1, None), Ok(2));
        assert_eq!(pages(KvBudget::Bytes(3 * page - 1), 1, None), Ok(2));
        assert!(
            pages(KvBudget::Bytes(page - 1), 1, None).unwrap_err().to_string().contains("is smaller than one page")
        );
    }

    #[test]
    fn where_attention_may_change_both_layouts_have_as_many_bytes() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
        let model = ModelConfig::load(dir).unwrap();
        let half = HeadSlice::new(&model, 0, 2).unwrap();
        let both = [(Attention::Tp, half), (Attention::Dp, HeadSlice::ALL)];
        let fitted = |kv, slices: &[AttentionSlice]| {
            EngineLimits { kv, ..EngineLimits::default() }.fitted(&model, slices, 2, KvMemory::host(None)).unwrap()
        };
        let limits = fitted(KvBudget::Tokens(20 * PAGE_TOKENS), &both);
        assert_eq!((limits.kv_pages.of(Attention::Tp), limits.kv_pages.of(Attention::Dp)), (20, 10));
        assert_eq!(limits.kv_tokens(), 10 * PAGE_TOKENS, "a request has to fit in either");
        let auto = fitted(KvBudget::Auto, &both);
        assert_eq!((auto.kv_pages.of(Attention::Tp), auto.kv_pages.of(Attention::Dp)), (1024, 512));
        let less = KvPages { dp: 3, tp: 30 };
        assert_eq!(limits.kv_pages.min(less), KvPages { dp: 3, tp: 20 });
        assert_eq!(fitted(KvBudget::Auto, &both[1..]).kv_pages, KvPages { dp: 512, tp: 0 });
    }
}
