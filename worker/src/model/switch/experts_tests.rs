//! Weights corrupted in memory are detected before anything is replaced.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use semmoe_kernels::collectives::{PrivateMemory, RowCollectives};
use semmoe_tables::{Attention, ExpertCopies, Placement, RankId};

use super::*;
use crate::ep::{ExpertLayout, LocalTransport};
use crate::model::ExpertRoom;

fn placement(layout: ExpertLayout, group_of: fn(u16) -> u16) -> ExpertPlacement {
    let placement = Placement::new(2, vec![(0..32).map(group_of).collect(); 7]).unwrap();
    ExpertPlacement { layout, replicas: ExpertCopies::from(&placement) }
}

#[test]
fn broken_weights_take_the_switch_back_on_every_rank() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let halves: fn(u16) -> u16 = |expert| expert / 16;
    let (whole, slices) = (placement(ExpertLayout::Ep, halves), placement(ExpertLayout::Tp, halves));
    let other = placement(ExpertLayout::Ep, |expert| expert % 2);
    let moves = [(&whole, &other), (&whole, &slices), (&slices, &whole)];
    for ((from, to), near) in moves.into_iter().flat_map(|change| [(change, true), (change, false)]) {
        let run = |link: LocalTransport| {
            let rank = RankId::new(crate::ep::Lockstep::rank(&link) as u16);
            let mut model = Model::load_divided(dir, rank, &from.replicas, from.layout, Attention::Dp).unwrap();
            let rows = RowCollectives::new(link, PrivateMemory::new(rank.index()));
            let unit = crate::ep::WireRows::f32(Box::new(rows));
            let mut ep = ExpertParallel::over(unit, &from.replicas, from.layout).unwrap();
            if near {
                model.share_experts(&[0, 1]);
            }
            if rank.index() == 1 {
                model.backend.cpu_mut().unwrap().experts.resident_mut().corrupt(3);
            }
            let outcome = model.switch_experts(to, &mut ep, &mut |_| None).unwrap();
            let SwitchOutcome::RolledBack { cause } = outcome else { panic!("{:?} to {:?}", from.layout, to.layout) };
            assert_eq!(ep.placement(), from);
            cause
        };
        let causes = std::thread::scope(|scope| {
            let ranks: Vec<_> = LocalTransport::mesh(2).into_iter().map(|link| scope.spawn(|| run(link))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(causes[0], causes[1]);
        assert!(causes[0].contains("layer 3") && causes[0].contains("checksum"), "{}", causes[0]);
    }
}

/// K + 1 slots for K layers, times (N + R) / N for R redundant ones; at first only the experts' part of it is used, and
/// never more than all.
#[test]
fn experts_take_one_slot_more_than_they_are() {
    const EXPERT_BYTES: u64 = 3 * 64 * 256 * 2;
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let (whole, slices) =
        (placement(ExpertLayout::Ep, |expert| expert / 16), placement(ExpertLayout::Tp, |expert| expert / 16));
    for redundant in [0_u64, 4] {
        let run = |link: LocalTransport| {
            let rank = RankId::new(crate::ep::Lockstep::rank(&link) as u16);
            let room = ExpertRoom { slots: Some(16 + redundant as u16 / 2), ..ExpertLayout::Ep.into() };
            let mut model = Model::load_divided(dir, rank, &whole.replicas, room, Attention::Dp).unwrap();
            model.share_experts(&[0, 1]);
            let (experts, slot) = (7 * 16 * EXPERT_BYTES, (32 + redundant) / 2 * EXPERT_BYTES);
            assert_eq!(model.resident().unwrap().pool.bytes() as u64, experts * 8 / 7 * (32 + redundant) / 32);
            let fd = model.resident().unwrap().memory.address().fd;
            let taken = || std::fs::metadata(format!("/proc/self/fd/{fd}")).unwrap().blocks() * 512;
            assert!((experts..=experts + slot).contains(&taken()), "{} of {experts}", taken());
            let rows = RowCollectives::new(link, PrivateMemory::new(rank.index()));
            let unit = crate::ep::WireRows::f32(Box::new(rows));
            let mut ep = ExpertParallel::over(unit, &whole.replicas, ExpertLayout::Ep).unwrap();
            assert!(model.switch_bytes(&slices, &ep) as u64 <= slot + 7 * redundant / 2 * EXPERT_BYTES);
            for to in [&slices, &whole, &slices, &whole] {
                assert_eq!(model.switch_experts(to, &mut ep, &mut |_| None).unwrap(), SwitchOutcome::Committed);
                assert!(taken() <= 7 * slot + slot, "{} of {experts}", taken());
            }
            assert_eq!(model.switch_bytes(&slices, &ep), 0);
        };
        std::thread::scope(|scope| {
            LocalTransport::mesh(2).into_iter().for_each(|link| drop(scope.spawn(|| run(link))));
        });
    }
}
