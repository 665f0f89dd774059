//! Counts the activations and bytes of dispatch and combine for a rank's tokens, by locality and by distance.

use semmoe_kernels::collectives::{DISPATCH_HEADER_BYTES, dispatch_row_bytes};

use super::counters::{LayerTraffic, LevelBytes};
use super::exchange::{ExpertParallel, RoutedBatch};
use super::layout::ExpertLayout;

impl ExpertParallel {
    /// Counts the planned layer, with bytes as for rows sent in messages. If every rank has a slice of every expert,
    /// every pair is local, and the bytes are those of gathering rows and scattering sums. In a hybrid layout, remote
    /// means on another node.
    pub(super) fn traffic(&self, batch: &RoutedBatch<'_>) -> (LayerTraffic, LevelBytes) {
        let (mut traffic, mut levels) = (LayerTraffic::default(), LevelBytes::default());
        let layout = self.placement.layout;
        let own_host = layout.host(self.unit.rank()) - self.first_host();
        for host in 0..self.plan.ranks() {
            let (rows, is_local) = (self.plan.rank(host), host == own_host);
            let mut row_bytes = 0;
            for (token, pairs) in rows.tokens.iter().zip(rows.pairs) {
                let of = traffic.of_mut(batch.phases[*token as usize]);
                if is_local || !layout.is_sliced() {
                    of.activations.add(is_local, u64::from(*pairs));
                }
                let bytes = dispatch_row_bytes(self.unit.dtype, usize::from(*pairs), batch.hidden) as u64;
                of.bytes.add(is_local, bytes);
                row_bytes += bytes;
            }
            // Message headers are attributed to the phase of the first row.
            let mut header_bytes = 0;
            if let Some(first) = rows.tokens.first() {
                header_bytes = (rows.tokens.len().min(layout.messages()) * DISPATCH_HEADER_BYTES) as u64;
                traffic.of_mut(batch.phases[*first as usize]).bytes.add(is_local, header_bytes);
            }
            self.count_levels(self.first_host() + host, row_bytes, header_bytes, &mut levels);
        }
        (traffic, levels)
    }

    /// Returns the rank at index 0 of the collectives: the first rank of an independent group, otherwise rank 0.
    fn first_host(&self) -> usize {
        if self.is_in_groups() { self.attention_group().start } else { 0 }
    }

    /// Counts the bytes for one host by distance. In a hybrid layout, all ranks of a node gather the rows sent to it,
    /// in messages that mix rows of several ranks, so those headers are attributed to no rank.
    fn count_levels(&self, host: usize, row_bytes: u64, header_bytes: u64, levels: &mut LevelBytes) {
        let (bytes, rank) = (row_bytes + header_bytes, self.unit.rank());
        match self.placement.layout {
            ExpertLayout::Hybrid(nodes) => {
                levels.node += row_bytes * u64::from(nodes.width - 1);
                let is_local = host == self.placement.layout.host(rank);
                *(if is_local { &mut levels.rank } else { &mut levels.other }) += bytes;
            }
            _ if host == rank => levels.rank += bytes,
            _ if self.near[host] => levels.node += bytes,
            _ => levels.other += bytes,
        }
    }
}
