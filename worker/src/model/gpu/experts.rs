//! The routed experts of a rank, and the rows that they are sent.

use std::ops::Range;

use semmoe_kernels::collectives::ReceivedIn;
use semmoe_kernels::{Element, RankOrder, argsort_by_rank};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::TILE_ROWS;
use semmoe_kernels_cuda::unit::Gpu;
use semmoe_tables::{ExpertId, LayerIdx, RankId};

use super::matrix::Uploader;
use super::memory::WordLists;
use crate::ep::{ExpertSpread, LayerHosts, NotHere};
use crate::model::ModelError;
use crate::model::checkpoint::TensorData;
use crate::model::load::Loader;

/// The experts of all layers, whole or the rank's slices of them.
pub(super) struct DeviceExperts {
    layers: Vec<DeviceLayer>,
    /// Columns of an expert that are here.
    pub(super) width: usize,
}

/// Of one layer: `[slots, 2 x width, H]` and `[slots, H, width]`, by ascending expert.
#[derive(Clone, Copy)]
pub(super) struct DeviceLayer {
    pub(super) gate_up: Buffer,
    pub(super) down: Buffer,
    pub(super) slots: usize,
}

impl DeviceExperts {
    pub(super) fn load<T: Element>(
        loader: &Loader<'_, Uploader<T>>,
        rank: RankId,
        spread: &ExpertSpread,
        columns: &Range<usize>,
    ) -> Result<Self, ModelError> {
        let layers = loader.moe_layers().map(|layer| Self::load_layer(loader, rank, spread, columns, layer));
        Ok(Self { layers: layers.collect::<Result<_, _>>()?, width: columns.len() })
    }

    /// Every expert's tensors are checked, also those that other ranks keep.
    fn load_layer<T: Element>(
        loader: &Loader<'_, Uploader<T>>,
        rank: RankId,
        spread: &ExpertSpread,
        columns: &Range<usize>,
        layer: LayerIdx,
    ) -> Result<DeviceLayer, ModelError> {
        let (hidden, width, uploader) = (loader.config.hidden, loader.config.expert_width, loader.packer);
        let slots = spread.experts_of(rank, layer).count();
        let bytes = slots * hidden * columns.len() * size_of::<T>();
        let [gate_up, down] = [uploader.allocate(2 * bytes)?, uploader.allocate(bytes)?];
        let (mut to_gate_up, mut to_down) = (Uploader::<T>::at(gate_up), Uploader::<T>::at(down));
        for expert in (0..loader.config.num_experts as u16).map(ExpertId::new) {
            let [gate, up, of_down] = loader.expert_tensors(layer, expert)?;
            if !spread.has(rank, layer, expert) {
                continue;
            }
            let rows = |part: TensorData<'_>| -> Result<(), ModelError> {
                uploader.put(&part, hidden, &(0..hidden), &mut to_gate_up)
            };
            let kept = columns.start * hidden..columns.end * hidden;
            [gate.part(kept.clone()), up.part(kept)].into_iter().try_for_each(rows)?;
            uploader.put(&of_down, width, columns, &mut to_down)?;
        }
        Ok(DeviceLayer { gate_up, down, slots })
    }

    pub(super) fn layer(&self, layer: LayerIdx) -> DeviceLayer {
        self.layers[layer.index()]
    }
}

/// The pairs of row and expert that a rank computes in a layer, by expert; reused by the next layer.
#[derive(Default)]
pub(super) struct PairLists {
    slots: Vec<u16>,
    order: RankOrder,
    cursors: Vec<u32>,
    /// All that goes to the GPU, one list behind the other: see [`PairLists::parts`].
    words: Vec<u32>,
    pairs: usize,
    rows: usize,
    pub(super) tiles: usize,
    /// Rows of the fullest tile.
    pub(super) fullest: usize,
}

/// Where the lists lie on the GPU.
pub(super) struct DevicePairs {
    /// `[pairs]`: the row of each, by expert.
    pub(super) row_of: Buffer,
    /// `[pairs]`, in f32
    pub(super) weights: Buffer,
    /// `[R + 1]`
    pub(super) first_pair: Buffer,
    /// `[pairs]`: those of a row, by ascending expert.
    pub(super) pair_of: Buffer,
    /// `[tiles]` of expert slot, first pair, number of pairs.
    pub(super) tiles: Buffer,
}

impl PairLists {
    /// Words at most for so many pairs of so many rows, over experts of `slots` slots.
    pub(super) fn max_words(pairs: usize, rows: usize, slots: usize) -> usize {
        3 * pairs + rows + 1 + 3 * (pairs.div_ceil(TILE_ROWS as usize) + slots)
    }

    /// Sorts what was received.
    ///
    /// # Errors
    /// A row for an expert that is not here.
    pub(super) fn sort<T: Element>(
        &mut self,
        received: &ReceivedIn<'_, T, Gpu>,
        hosts: &LayerHosts,
    ) -> Result<(), NotHere> {
        let (index, pair_rows) = (&received.rows.index, received.pair_rows);
        hosts.slots_of(received.experts, |pair| index.source(pair_rows[pair] as usize), &mut self.slots)?;
        argsort_by_rank(&self.slots, hosts.slots, &mut self.order).expect("slots were just looked up");
        (self.pairs, self.rows) = (pair_rows.len(), index.len());
        let order = self.order.permutation();
        self.words.clear();
        self.words.extend(order.iter().map(|&pair| pair_rows[pair as usize]));
        self.words.extend(order.iter().map(|&pair| received.weights[pair as usize].to_bits()));
        self.count_rows(pair_rows);
        let first = self.words.len();
        self.words.resize(first + self.pairs, 0);
        for sorted in 0..self.pairs {
            let cursor = &mut self.cursors[self.words[sorted] as usize];
            self.words[first + *cursor as usize] = sorted as u32;
            *cursor += 1;
        }
        self.cut_tiles(hosts.slots);
        Ok(())
    }

    /// `[R + 1]`: the first pair of each row.
    fn count_rows(&mut self, pair_rows: &[u32]) {
        self.cursors.clear();
        self.cursors.resize(self.rows + 1, 0);
        for &row in pair_rows {
            self.cursors[row as usize + 1] += 1;
        }
        for row in 0..self.rows {
            self.cursors[row + 1] += self.cursors[row];
        }
        self.words.extend_from_slice(&self.cursors);
    }

    fn cut_tiles(&mut self, slots: usize) {
        (self.tiles, self.fullest) = (0, 0);
        for slot in 0..slots {
            let (first, end) = (self.order.offsets()[slot], self.order.offsets()[slot + 1]);
            for begin in (first..end).step_by(TILE_ROWS as usize) {
                let rows = (end - begin).min(TILE_ROWS);
                self.words.extend([slot as u32, begin, rows]);
                self.tiles += 1;
                self.fullest = self.fullest.max(rows as usize);
            }
        }
    }

    pub(super) fn pairs(&self) -> usize {
        self.pairs
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// All of it, in one piece.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Where the lists are, once they were written to `at`.
    pub(super) fn parts(&self, at: Buffer) -> DevicePairs {
        let mut lists = WordLists(at);
        DevicePairs {
            row_of: lists.next(self.pairs),
            weights: lists.next(self.pairs),
            first_pair: lists.next(self.rows + 1),
            pair_of: lists.next(self.pairs),
            tiles: lists.next(3 * self.tiles),
        }
    }
}
