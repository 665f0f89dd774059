//! One routed expert on a rank, whole or a slice, and how it travels to another rank.
//!
//! | field | type | what |
//! |---|---|---|
//! | types | 2 x u8 | of gate_up and of down: 0 bf16, 1 f32 |
//! | checksum | u64 | of the packed weights, from when they were packed |
//! | weights | bytes | the packed panels of gate_up `[2 x width, H]`, then those of down `[H, width]` |

use std::ops::Range;

use super::checkpoint::TensorData;
use super::compute::{Arena, Linear, PanelType, RowMajor};
use super::mlp::Mlp;

/// Bytes before the weights of an expert that travels.
const HEADER_BYTES: usize = 2 + size_of::<u64>();

/// A feed-forward network and the checksum of its packed weights, taken when they were packed.
pub(super) struct Expert {
    pub(super) mlp: Mlp,
    checksum: u64,
}

/// Why an expert that arrived is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum BadExpert {
    #[error("{found} bytes, expected those of an expert of width {width}")]
    Length { found: usize, width: usize },
    #[error("an element type {0}, expected 0 (bf16) or 1 (f32)")]
    PanelType(u8),
    #[error("weights with checksum {found:016x}, expected {expected:016x}")]
    Checksum { found: u64, expected: u64 },
    #[error("slices of different element types")]
    Slices,
}

impl Expert {
    pub(super) fn new(mlp: Mlp) -> Self {
        Self { checksum: checksum(&mlp), mlp }
    }

    /// The width of its intermediate activations.
    fn width(&self) -> usize {
        self.mlp.down.inputs()
    }

    fn hidden(&self) -> usize {
        self.mlp.down.outputs()
    }

    /// Bytes of an expert that travels, at most: those of f32.
    pub(super) fn max_bytes(hidden: usize, width: usize) -> usize {
        let packed = |outputs, inputs| Linear::packed_bytes(PanelType::F32, outputs, inputs);
        HEADER_BYTES + packed(2 * width, hidden) + packed(hidden, width)
    }

    pub(super) fn is_bf16(&self) -> bool {
        [&self.mlp.gate_up, &self.mlp.down].iter().all(|linear| linear.panel_type() == PanelType::Bf16)
    }

    /// Whether its weights are those that were packed.
    pub(super) fn verify(&self) -> Result<(), BadExpert> {
        match checksum(&self.mlp) {
            found if found == self.checksum => Ok(()),
            found => Err(BadExpert::Checksum { found, expected: self.checksum }),
        }
    }

    /// Appends it to a message.
    pub(super) fn encode(&self, message: &mut Vec<u8>) {
        let Mlp { gate_up, down } = &self.mlp;
        message.reserve(HEADER_BYTES + gate_up.packed().len() + down.packed().len());
        message.extend([gate_up, down].map(|linear| match linear.panel_type() {
            PanelType::Bf16 => 0,
            PanelType::F32 => 1,
        }));
        message.extend_from_slice(&self.checksum.to_le_bytes());
        message.extend_from_slice(gate_up.packed());
        message.extend_from_slice(down.packed());
    }

    /// Takes the next expert, of this width, off the front of a message and checks that its weights are those that were sent.
    pub(super) fn decode(message: &mut &[u8], hidden: usize, width: usize) -> Result<Self, BadExpert> {
        let wrong = BadExpert::Length { found: message.len(), width };
        let (header, rest) = message.split_first_chunk::<HEADER_BYTES>().ok_or(wrong)?;
        let [gate_up, down, expected @ ..] = *header;
        let (gate_up, down) = (panel_type(gate_up)?, panel_type(down)?);
        let gate_up_bytes = Linear::packed_bytes(gate_up, 2 * width, hidden);
        let down_bytes = Linear::packed_bytes(down, hidden, width);
        if rest.len() < gate_up_bytes + down_bytes {
            return Err(wrong);
        }
        let (weights, rest) = rest.split_at(gate_up_bytes + down_bytes);
        *message = rest;
        let (gate_up_panels, down_panels) = weights.split_at(gate_up_bytes);
        let gate_up = Linear::from_packed(gate_up, 2 * width, hidden, gate_up_panels).ok_or(wrong)?;
        let down = Linear::from_packed(down, hidden, width, down_panels).ok_or(wrong)?;
        let expert = Self { mlp: Mlp { gate_up, down }, checksum: u64::from_le_bytes(expected) };
        expert.verify()?;
        Ok(expert)
    }

    /// Its slices of these intermediate columns, as a checkpoint's loader packs them.
    pub(super) fn cut(&self, columns: impl Iterator<Item = Range<usize>>) -> Vec<Self> {
        let (width, hidden) = (self.width(), self.hidden());
        let (gate_up, down) = (self.mlp.gate_up.unpack(), self.mlp.down.unpack());
        columns
            .map(|columns| {
                let rows = |first: usize| {
                    gate_up.data().part((first + columns.start) * hidden..(first + columns.end) * hidden)
                };
                let gate_up = Linear::pack(&[rows(0), rows(width)], hidden);
                Self::new(Mlp { gate_up, down: Linear::pack_columns(down.data(), width, columns) })
            })
            .collect()
    }

    /// The whole expert of all its slices, in order; as a checkpoint's loader packs it.
    pub(super) fn join(slices: &[&Self]) -> Result<Self, BadExpert> {
        let hidden = slices.first().map_or(0, |slice| slice.hidden());
        let gate_ups: Vec<RowMajor> = slices.iter().map(|slice| slice.mlp.gate_up.unpack()).collect();
        let downs: Vec<RowMajor> = slices.iter().map(|slice| slice.mlp.down.unpack()).collect();
        let half = |second: usize| {
            gate_ups.iter().map(move |rows| {
                let rows = rows.data();
                rows.part(second * rows.len() / 2..(second + 1) * rows.len() / 2)
            })
        };
        let parts: Vec<TensorData<'_>> = half(0).chain(half(1)).collect();
        let width: usize = slices.iter().map(|slice| slice.width()).sum();
        let down = side_by_side(&downs, hidden).ok_or(BadExpert::Slices)?;
        let mlp = Mlp { gate_up: Linear::pack(&parts, hidden), down: Linear::pack(&[down.data()], width) };
        Ok(Self::new(mlp))
    }

    /// Whether another expert has the same shape and packed types.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.mlp.gate_up.is_like(&other.mlp.gate_up) && self.mlp.down.is_like(&other.mlp.down)
    }

    /// Takes over the weights of an expert of the same shape and types, where its own lie.
    ///
    /// # Panics
    /// If [`Expert::is_like`] is false.
    pub(super) fn overwrite(&mut self, with: &Self) {
        self.mlp.gate_up.overwrite(&with.mlp.gate_up);
        self.mlp.down.overwrite(&with.mlp.down);
        self.checksum = with.checksum;
    }

    /// Gives its memory back to the system.
    pub(super) fn release(self) {
        self.mlp.gate_up.release();
        self.mlp.down.release();
    }

    /// Moves experts into memory of their own, one after the other.
    pub(super) fn settle(experts: &mut [&mut Self]) {
        let bytes = experts.iter_mut().flat_map(|expert| expert.mlp.linears()).map(|linear| linear.arena_bytes()).sum();
        let mut arena = Arena::new(bytes);
        experts.iter_mut().flat_map(|expert| expert.mlp.linears()).for_each(|linear| linear.settle(&mut arena));
    }

    /// As if its weights had broken in memory since they were packed.
    #[cfg(test)]
    pub(super) fn corrupt(&mut self) {
        self.checksum ^= 1;
    }
}

fn panel_type(code: u8) -> Result<PanelType, BadExpert> {
    match code {
        0 => Ok(PanelType::Bf16),
        1 => Ok(PanelType::F32),
        other => Err(BadExpert::PanelType(other)),
    }
}

/// Matrices of `rows` rows beside each other; none if their types differ.
fn side_by_side(parts: &[RowMajor], rows: usize) -> Option<RowMajor> {
    fn joined<T: Copy>(parts: &[&[T]], rows: usize) -> Vec<T> {
        let row = |row: usize| {
            parts.iter().flat_map(move |part| {
                let width = part.len() / rows.max(1);
                &part[row * width..(row + 1) * width]
            })
        };
        (0..rows).flat_map(row).copied().collect()
    }
    let halves = |part: &'_ RowMajor| matches!(part, RowMajor::Bf16(_));
    let all_bf16 = parts.iter().all(halves);
    if !all_bf16 && parts.iter().any(halves) {
        return None;
    }
    let bf16: Vec<&[[u8; 2]]> = parts
        .iter()
        .filter_map(|part| if let RowMajor::Bf16(values) = part { Some(&values[..]) } else { None })
        .collect();
    let f32: Vec<&[[u8; 4]]> = parts
        .iter()
        .filter_map(|part| if let RowMajor::F32(values) = part { Some(&values[..]) } else { None })
        .collect();
    Some(if all_bf16 { RowMajor::Bf16(joined(&bf16, rows)) } else { RowMajor::F32(joined(&f32, rows)) })
}

/// Of the packed weights: detects flipped, lost and exchanged words; not made against malice. Four words at a time, each in a sum of
/// its own, as one multiplication would have to wait for the one before.
fn checksum(mlp: &Mlp) -> u64 {
    const LANES: usize = 4;
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let mut lanes = [1_u64, 2, 3, 4];
    for linear in [&mlp.gate_up, &mlp.down] {
        let (words, _) = linear.packed().as_chunks::<8>();
        // Panels are whole rows of 128 bytes.
        let (blocks, _) = words.as_chunks::<LANES>();
        for block in blocks {
            for (lane, word) in lanes.iter_mut().zip(block) {
                *lane = mix(*lane, u64::from_le_bytes(*word));
            }
        }
    }
    lanes.into_iter().fold(0, mix)
}
