//! All ranks' buffers at once. Moves of a layer run in any order; what a layer leaves behind is poisoned, and no slot
//! that is still to be read may be written.

use semmoe_kernels::reshard::{Layout, Move, Part, Pool, Side, Switch};

/// A bf16 NaN, as in reshard.py.
const POISON: [u8; 2] = 0x7fc1u16.to_le_bytes();

/// splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 7
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// The expected value of every byte of a part: `value(part, row, byte)`, by its position in the complete expert.
pub(crate) type Truth<'a> = &'a dyn Fn(&Part, usize, usize) -> u8;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sim<'a> {
    pool: &'a Pool,
    pub(crate) buffers: Vec<Vec<u8>>,
    pub(crate) side: Side,
}

impl<'a> Sim<'a> {
    /// Loads all experts of a layout at a side.
    pub(crate) fn load(pool: &'a Pool, layout: &Layout, side: Side, truth: Truth<'_>) -> Self {
        let buffer: Vec<u8> = POISON.into_iter().cycle().take(pool.bytes()).collect();
        let mut sim = Self { pool, buffers: vec![buffer; pool.grid().ranks()], side };
        sim.each_byte(layout, |byte, expected| *byte = expected, truth);
        sim
    }

    pub(crate) fn holds(&mut self, layout: &Layout, truth: Truth<'_>) -> bool {
        let mut holds = true;
        self.each_byte(layout, |byte, expected| holds &= *byte == expected, truth);
        holds
    }

    fn each_byte(&mut self, layout: &Layout, mut visit: impl FnMut(&mut u8, u8), truth: Truth<'_>) {
        let mut parts = Vec::new();
        for layer in 0..self.pool.layers() {
            for (rank, buffer) in self.buffers.iter_mut().enumerate() {
                self.pool.parts(layout, self.side, layer, rank, &mut parts);
                for part in &parts {
                    for row in 0..part.rows {
                        for byte in 0..part.bytes {
                            let at = part.place.offset + row * part.place.stride + byte;
                            visit(&mut buffer[at], truth(part, row, byte));
                        }
                    }
                }
            }
        }
    }

    /// Runs a switch in the given order of layers; `None` if it would overwrite a slot that is still to be read.
    pub(crate) fn run(
        &mut self,
        switch: &Switch<'_>,
        order: impl Iterator<Item = usize>,
        random: &mut Random,
    ) -> Option<()> {
        assert_eq!(self.side, switch.side());
        let (pool, side) = (self.pool, self.side);
        let mut to_move: Vec<usize> = (0..pool.layers()).collect();
        let mut moves = Vec::new();
        for layer in order {
            let target = pool.slot(switch.to(), side.other(), layer);
            // The layer's own old slot is read while others write, so it counts as well.
            for &live in &to_move {
                let source = pool.slot(switch.from(), side, live);
                if source.start < target.end && target.start < source.end {
                    return None;
                }
            }
            self.poison(target.clone());
            switch.moves(layer, &mut moves);
            random.shuffle(&mut moves);
            for moved in &moves {
                let end = moved.to.offset + (moved.rows - 1) * moved.to.stride + moved.bytes;
                assert!(target.start <= moved.to.offset && end <= target.end, "{moved:?} leaves its slot");
                self.carry(moved);
            }
            self.poison(pool.slot(switch.from(), side, layer));
            to_move.retain(|&other| other != layer);
        }
        self.side = side.other();
        Some(())
    }

    pub(crate) fn carry(&mut self, moved: &Move) {
        for row in 0..moved.rows {
            let (from, to) = (moved.from.offset + row * moved.from.stride, moved.to.offset + row * moved.to.stride);
            let bytes = self.buffers[moved.from.rank][from..from + moved.bytes].to_vec();
            self.buffers[moved.to.rank][to..to + moved.bytes].copy_from_slice(&bytes);
        }
    }

    fn poison(&mut self, slot: std::ops::Range<usize>) {
        for buffer in &mut self.buffers {
            for (at, byte) in buffer.iter_mut().enumerate().take(slot.end).skip(slot.start) {
                *byte = POISON[at % 2];
            }
        }
    }
}

/// The layers of a switch in its own order.
pub(crate) fn order<'a>(switch: &'a Switch<'_>) -> impl DoubleEndedIterator<Item = usize> + 'a {
    (0..switch.pool().layers()).map(|step| switch.layer(step))
}
