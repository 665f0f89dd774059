//! Determines how many experts per layer stay resident. The number is the same in all layers, so that every layer's
//! fetch takes equally long and is hidden behind another layer.

use semmoe_tables::ExpertId;

use super::source::largest;
use crate::model::expert::Packing;
use crate::model::load::Loader;
use crate::model::{ExpertMemory, ModelError};

/// Layers of streamed experts in memory at once: one in use, one being read.
const BUFFERS: u64 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// Number of resident experts per layer; they are the first ones of the layer.
    pub(super) resident: usize,
    /// Maximum number of streamed experts in a layer.
    pub(super) streamed: usize,
    /// Total memory.
    pub(super) bytes: u64,
}

impl Budget {
    pub(super) fn of(
        loader: &Loader<'_>,
        held: &[Vec<ExpertId>],
        packing: &Packing,
        limit: ExpertMemory,
    ) -> Result<Self, ModelError> {
        let counts: Vec<usize> = held.iter().map(Vec::len).collect();
        let expert = packing.array_bytes().iter().sum::<usize>() as u64;
        let staging = largest(loader, packing)?.iter().sum::<usize>() as u64;
        Self::new(&counts, expert, staging, limit)
    }

    /// Finds the largest number of resident experts that fits into `limit`, for layers with `counts` experts of
    /// `expert` bytes each and a read buffer of `staging` bytes.
    ///
    /// # Errors
    /// [`ModelError::ExpertBudget`] if not even two layers of streamed experts fit.
    fn new(counts: &[usize], expert: u64, staging: u64, limit: ExpertMemory) -> Result<Self, ModelError> {
        let most = counts.iter().copied().max().unwrap_or(0);
        let with = |resident: usize| {
            let stay: usize = counts.iter().map(|&count| count.min(resident)).sum();
            let streamed = most - resident;
            let reading = if streamed == 0 { 0 } else { staging };
            Self { resident, streamed, bytes: (stay as u64 + BUFFERS * streamed as u64) * expert + reading }
        };
        let limit = match limit {
            ExpertMemory::Bytes(limit) => limit,
            ExpertMemory::Resident(resident) => return Ok(with(resident.min(most))),
        };
        let all = || (0..=most).rev().map(with);
        all().find(|budget| budget.bytes <= limit).ok_or_else(|| {
            let least = all().map(|budget| budget.bytes).min().unwrap_or(0);
            ModelError::ExpertBudget { limit, least }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_stay_as_fit_beside_two_layers_of_the_others() {
        let of = |counts: &[usize], limit| Budget::new(counts, 10, 6, ExpertMemory::Bytes(limit));
        // 4 layers of 8: with r resident 40 r + 20 (8 - r) + 6.
        let four = [8; 4];
        for (limit, resident, bytes) in [(166, 0, 166), (185, 0, 166), (186, 1, 186), (306, 7, 306), (320, 8, 320)] {
            assert_eq!(of(&four, limit).unwrap(), Budget { resident, streamed: 8 - resident, bytes });
        }
        let error = of(&four, 165).unwrap_err();
        assert!(matches!(error, ModelError::ExpertBudget { limit: 165, least: 166 }), "{error}");
        assert_eq!(of(&four, 319).unwrap().resident, 7, "reading takes memory, too");
        // Uneven layers: those with fewer experts keep a larger part of them in memory.
        let uneven = [2, 8, 4, 8, 8];
        assert_eq!(of(&uneven, 246).unwrap(), Budget { resident: 3, streamed: 5, bytes: 246 });
        assert_eq!(of(&uneven, 245).unwrap(), Budget { resident: 2, streamed: 6, bytes: 226 });
        // With one or two layers all experts are resident if two buffers fit.
        assert_eq!(of(&[8, 8], 160).unwrap(), Budget { resident: 8, streamed: 0, bytes: 160 });
        let fixed = |resident| Budget::new(&[8, 8], 10, 6, ExpertMemory::Resident(resident)).unwrap();
        assert_eq!(fixed(3), Budget { resident: 3, streamed: 5, bytes: 166 });
        assert_eq!(fixed(9), Budget { resident: 8, streamed: 0, bytes: 160 });
        assert_eq!(of(&[], 0).unwrap(), Budget { resident: 0, streamed: 0, bytes: 0 });
    }
}
