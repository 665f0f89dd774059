//! The layouts compared, and the planner's predictions for them.

use semmoe_bench_e2e::error::BenchError;
use semmoe_bench_papers::mixserve::TwoLevels;
use semmoe_planner::PlanError;
use semmoe_planner::hybridep::{HybridLevel, Stream, Use, best_domains};

/// Nodes of the unit that is timed.
pub(crate) const NODES: u16 = 2;
/// Nodes of the unit whose bytes are counted. It has more ranks than this machine has cores, so its times mean nothing.
pub(crate) const MANY_NODES: u16 = 4;
/// Ranks of a node.
pub(crate) const WIDTH: u16 = 2;

/// A layout of a unit's experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// Whole experts in domains of this many ranks; 1 is plain expert parallelism.
    Domains(u16),
    /// On this many nodes, one level after the other.
    Unfused(u16),
    /// On this many nodes, both levels at once.
    Fused { nodes: u16, chunks: u16 },
}

impl Layout {
    /// Name in tables.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Domains(1) => "ep".to_owned(),
            Self::Domains(size) => format!("ep, domains of {size}"),
            Self::Unfused(nodes) => format!("hybrid:{nodes}x{WIDTH}"),
            Self::Fused { nodes, chunks } => format!("hybrid:{nodes}x{WIDTH}:{chunks}"),
        }
    }

    /// Arguments of `semmoe worker`.
    pub(crate) fn arguments(self) -> Vec<String> {
        let words = match self {
            Self::Domains(size) => ["--domains".to_owned(), size.to_string()],
            Self::Unfused(_) | Self::Fused { .. } => ["--experts".to_owned(), self.name()],
        };
        words.to_vec()
    }

    /// Seconds of a layer's dispatch and combine.
    pub(crate) fn predicted(self, unit: &TwoLevels) -> Result<f64, BenchError> {
        match self {
            Self::Domains(size) => unit.domains(size.into()).map_err(BenchError::failed),
            Self::Unfused(_) => Ok(unit.unfused()),
            Self::Fused { chunks, .. } => Ok(unit.fused(chunks.into())),
        }
    }
}

/// The size of resident domains that HybridEP's model chooses if each rank has memory for the experts of
/// `memory_of_ranks` ranks.
pub(crate) fn best_size(unit: &TwoLevels, memory_of_ranks: u64) -> Result<u64, PlanError> {
    let stream = Stream {
        workers: unit.nodes * unit.width,
        bytes_per_second: unit.between,
        before_experts: 0.0,
        data_bytes: unit.tokens * unit.top_k as f64 * unit.row_bytes,
        // In units of one rank's experts.
        expert_bytes: 1.0,
    };
    let levels = [
        HybridLevel { workers: unit.nodes, bytes_per_second: unit.between },
        HybridLevel { workers: unit.width, bytes_per_second: unit.inside },
    ];
    let choice = best_domains(&stream, &levels, Use::Resident { memory: memory_of_ranks as f64, layers: 1 })?;
    Ok(choice.domains.iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_arguments_and_predictions() {
        let unit = TwoLevels {
            tokens: 256.0,
            row_bytes: 1024.0,
            experts: 32,
            top_k: 4,
            nodes: NODES.into(),
            width: WIDTH.into(),
            inside: 2e6,
            between: 1e6,
        };
        let [unfused, fused] = [Layout::Unfused(NODES), Layout::Fused { nodes: NODES, chunks: 4 }];
        assert_eq!(fused.arguments(), ["--experts", "hybrid:2x2:4"]);
        assert_eq!(Layout::Unfused(MANY_NODES).arguments(), ["--experts", "hybrid:4x2"]);
        assert_eq!(Layout::Domains(1).arguments(), ["--domains", "1"]);
        let of = |layout: Layout| layout.predicted(&unit).unwrap();
        assert!(of(fused) < of(unfused) && of(Layout::Domains(2)) < of(Layout::Domains(1)));
        assert_eq!([1, 4].map(|memory| best_size(&unit, memory).unwrap()), [1, 4]);
    }
}
