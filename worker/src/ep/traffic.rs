//! Activations and bytes of a dispatch for the tokens of a rank, there and back, by place and by level.

use semmoe_kernels::collectives::{DISPATCH_HEADER_BYTES, dispatch_row_bytes};
use semmoe_kernels::{DispatchPlan, Dtype};

use super::counters::{LayerTraffic, LevelBytes};
use super::exchange::RoutedBatch;
use super::layout::ExpertLayout;

/// From where a rank counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Viewpoint<'a> {
    /// The rank.
    pub(super) rank: usize,
    /// How experts are divided.
    pub(super) layout: ExpertLayout,
    /// `[W]`: the ranks of its node, where experts do not belong to nodes.
    pub(super) near: &'a [bool],
    /// The element type of rows on the wire.
    pub(super) dtype: Dtype,
}

impl Viewpoint<'_> {
    /// Counts one layer, in bytes of messages that carry the rows. Where every rank has a slice of every expert, each
    /// pair is local, and the bytes are those of gathering rows and scattering sums. In a hybrid layout remote is what
    /// crosses nodes.
    pub(super) fn count(self, plan: &DispatchPlan, batch: &RoutedBatch<'_>) -> (LayerTraffic, LevelBytes) {
        let (mut traffic, mut levels) = (LayerTraffic::default(), LevelBytes::default());
        for host in 0..plan.ranks() {
            let (rows, is_local) = (plan.rank(host), host == self.layout.host(self.rank));
            let mut row_bytes = 0;
            for (token, pairs) in rows.tokens.iter().zip(rows.pairs) {
                let of = traffic.of_mut(batch.phases[*token as usize]);
                if is_local || self.layout != ExpertLayout::Tp {
                    of.activations.add(is_local, u64::from(*pairs));
                }
                let bytes = dispatch_row_bytes(self.dtype, usize::from(*pairs), batch.hidden) as u64;
                of.bytes.add(is_local, bytes);
                row_bytes += bytes;
            }
            // The headers of messages go with the first row.
            let mut header_bytes = 0;
            if let Some(first) = rows.tokens.first() {
                header_bytes = (rows.tokens.len().min(self.layout.messages()) * DISPATCH_HEADER_BYTES) as u64;
                traffic.of_mut(batch.phases[*first as usize]).bytes.add(is_local, header_bytes);
            }
            self.count_levels(host, row_bytes, header_bytes, &mut levels);
        }
        (traffic, levels)
    }

    /// A row for a node is gathered by all its ranks, in messages that hold rows of several ranks: their headers are no
    /// rank's.
    fn count_levels(self, host: usize, row_bytes: u64, header_bytes: u64, levels: &mut LevelBytes) {
        let bytes = row_bytes + header_bytes;
        match self.layout {
            ExpertLayout::Hybrid(nodes) => {
                levels.node += row_bytes * u64::from(nodes.width - 1);
                *(if host == self.layout.host(self.rank) { &mut levels.rank } else { &mut levels.other }) += bytes;
            }
            ExpertLayout::Ep | ExpertLayout::Tp if host == self.rank => levels.rank += bytes,
            ExpertLayout::Ep | ExpertLayout::Tp if self.near[host] => levels.node += bytes,
            ExpertLayout::Ep | ExpertLayout::Tp => levels.other += bytes,
        }
    }
}
