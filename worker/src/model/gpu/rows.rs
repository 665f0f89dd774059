//! A step's rows, in the form that the attention kernels expect.

use semmoe_kernels_cuda::Buffer;

use super::memory::{Stream, WordLists};
use crate::ep::UnitError;
use crate::model::kv::PAGE_TOKENS;
use crate::model::step::StepItem;

/// Page table widths are multiples of this many pages.
const TABLE_PAGES: usize = 4;

/// Positions, sequences and pages of a step's rows; reused by the next step.
#[derive(Default)]
pub(super) struct RowPlaces {
    /// All lists for the GPU, stored contiguously; see [`RowPlaces::write`].
    words: Vec<u32>,
}

/// Locations of the row lists on the GPU.
#[derive(Clone, Copy, Default)]
pub(super) struct DevicePlaces {
    pub(super) rows: usize,
    /// `[rows]`
    pub(super) positions: Buffer,
    /// `[rows]`: the page that stores each row's key and value.
    pub(super) page_of: Buffer,
    /// `[rows]`
    pub(super) sequence_of: Buffer,
    /// `[sequences, table_width]`
    pub(super) page_table: Buffer,
    pub(super) sequences: usize,
    pub(super) table_width: usize,
    /// The largest position.
    pub(super) last: usize,
}

/// Returns the page table width for this many tokens. Steps with equal widths launch identical kernels.
pub(super) fn table_width(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS).next_multiple_of(TABLE_PAGES)
}

impl RowPlaces {
    /// Maximum number of words.
    pub(super) fn max_words(rows: usize, sequences: usize, max_positions: usize) -> usize {
        3 * rows + sequences * table_width(max_positions)
    }

    /// Lays out the items' rows, for which the caches must have space reserved, and writes the lists to `to`. `places`
    /// maps page ids to positions.
    pub(super) fn write(
        &mut self,
        items: &[StepItem<'_>],
        places: &[u32],
        to: Buffer,
        stream: &mut Stream,
    ) -> Result<DevicePlaces, UnitError> {
        let words = &mut self.words;
        words.clear();
        let rows: usize = items.iter().map(|item| item.tokens.len()).sum();
        let longest = items.iter().map(|item| item.kv.len() + item.tokens.len()).max().unwrap_or(0);
        let table_width = table_width(longest);
        let place = |id: &u32| places[*id as usize];
        let positions = |item: &StepItem<'_>| item.kv.len()..item.kv.len() + item.tokens.len();
        words.extend(items.iter().flat_map(positions).map(|position| position as u32));
        for item in items {
            words.extend(positions(item).map(|position| place(&item.kv.page_ids()[position / PAGE_TOKENS])));
        }
        for (sequence, item) in items.iter().enumerate() {
            words.extend(std::iter::repeat_n(sequence as u32, item.tokens.len()));
        }
        for item in items {
            let pages = item.kv.page_ids();
            words.extend(pages.iter().map(place).chain(std::iter::repeat(0)).take(table_width));
        }
        let mut lists = WordLists(stream.write(words, to)?);
        Ok(DevicePlaces {
            rows,
            positions: lists.next(rows),
            page_of: lists.next(rows),
            sequence_of: lists.next(rows),
            page_table: lists.next(items.len() * table_width),
            sequences: items.len(),
            table_width,
            last: (table_width * PAGE_TOKENS).saturating_sub(1),
        })
    }
}
