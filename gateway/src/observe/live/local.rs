//! Counts local activations, according to the experts hosted on a rank.

use semmoe_tables::{LayerIdx, RankId, Tables};

/// The experts on one attention-DP rank, including replicas, because an engine prefers a replica on its own rank.
pub(super) struct Hosted {
    experts: usize,
    /// [L, N]
    here: Vec<bool>,
}

impl Hosted {
    /// Collects the experts on a rank. `rank` must be below the tables' rank count.
    pub(super) fn on(tables: &Tables, rank: RankId) -> Self {
        let placement = tables.placement();
        let experts = usize::from(placement.experts());
        let is_here = |group: usize| tables.group_to_dp().get(group) == Some(&rank);
        let mut here = vec![false; placement.layers() * experts];
        for (layer, row) in (0..).zip(here.chunks_exact_mut(experts.max(1))) {
            let layer = LayerIdx::new(layer);
            match tables.physical_to_logical() {
                None => {
                    row.iter_mut().zip(placement.layer(layer)).for_each(|(here, of)| *here = is_here(usize::from(*of)))
                }
                Some(replicas) => {
                    let per_group = (replicas.slots() / usize::from(replicas.groups()).max(1)).max(1);
                    for (slot, expert) in replicas.layer(layer).iter().enumerate() {
                        let place = usize::try_from(*expert).ok().and_then(|expert| row.get_mut(expert));
                        if let Some(place) = place.filter(|_| is_here(slot / per_group)) {
                            *place = true;
                        }
                    }
                }
            }
        }
        Self { experts, here }
    }

    /// Counts how many of `routes`, [n, L, k] with k experts per token and layer, are hosted here.
    pub(super) fn count(&self, routes: &[u16], top_k: u16) -> u64 {
        let layers = self.here.len() / self.experts.max(1);
        let rows = routes.chunks_exact(usize::from(top_k).max(1));
        let local = |(row, route): (usize, &[u16])| {
            let first = row % layers.max(1) * self.experts;
            let is_local = |expert: &&u16| self.here.get(first + usize::from(**expert)).copied().unwrap_or(false);
            route.iter().filter(is_local).count() as u64
        };
        rows.enumerate().map(local).sum()
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use semmoe_tables::{ModelInfo, Placement, Provenance, TablesBuilder};

    use super::*;

    #[test]
    fn experts_of_the_own_rank_are_local() {
        let model = ModelInfo {
            model: "m".into(),
            tokenizer_sha256: None,
            num_experts: 4,
            top_k: 2,
            vocab_size: 3,
            num_hidden_layers: 2,
            layer_ids: vec![0, 1],
        };
        let placement = Placement::new(2, vec![vec![0, 1, 0, 1], vec![1, 1, 0, 0]]).unwrap();
        let provenance = Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() };
        let t = vec![f16::from_f32(0.5); 6];
        let builder = TablesBuilder::dp(model, provenance, placement, t, vec![0.0; 2]);
        let tables = Tables::from_bytes(builder.to_bytes().unwrap()).unwrap();
        let routes = [0, 1, 0, 1, 2, 0, 2, 3];
        let local = |rank| Hosted::on(&tables, RankId::new(rank)).count(&routes, 2);
        // Token 0: expert 0 in layer 0; token 1: experts 2 and 0 in layer 0, 2 and 3 in layer 1.
        assert_eq!((local(0), local(1)), (5, 3));
    }
}
