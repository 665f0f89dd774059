//! Weights that broke in memory are found before anything is replaced.

use std::path::Path;
use std::sync::Arc;

use semmoe_tables::{ExpertCopies, Placement};

use super::*;
use crate::ep::{Counters, LocalTransport};

fn spread(layout: ExpertLayout, group_of: fn(u16) -> u16) -> ExpertSpread {
    let placement = Placement::new(2, vec![(0..32).map(group_of).collect(); 7]).unwrap();
    ExpertSpread { layout, copies: ExpertCopies::from(&placement) }
}

#[test]
fn broken_weights_take_the_switch_back_on_every_rank() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let halves: fn(u16) -> u16 = |expert| expert / 16;
    let (whole, slices) = (spread(ExpertLayout::Ep, halves), spread(ExpertLayout::Tp, halves));
    let other = spread(ExpertLayout::Ep, |expert| expert % 2);
    for (from, to) in [(&whole, &other), (&whole, &slices), (&slices, &whole)] {
        let run = |link: LocalTransport| {
            let rank = RankId::new(crate::ep::Lockstep::rank(&link) as u16);
            let mut model = Model::load_experts(dir, rank, &from.copies, from.layout).unwrap();
            let counters = Arc::new(Counters::new(7));
            let memory = semmoe_kernels::collectives::PrivateMemory::new(rank.index());
            let rows = semmoe_kernels::collectives::RowCollectives::new(link, memory);
            let unit = crate::ep::WireRows::f32(Box::new(rows));
            let mut ep = ExpertParallel::over(unit, &from.copies, from.layout, counters).unwrap();
            let mut corrupt = |layer: usize| {
                let moes = model.weights.blocks.iter_mut().filter_map(|block| match &mut block.feed_forward {
                    FeedForward::Moe(moe) => Some(moe),
                    FeedForward::Dense(_) => None,
                });
                moes.into_iter().nth(layer).unwrap().experts.iter_mut().for_each(Expert::corrupt);
            };
            if rank.index() == 1 {
                corrupt(3);
            }
            let outcome = model.switch_experts(to, &mut ep, &mut |_| None).unwrap();
            let SwitchOutcome::RolledBack { cause } = outcome else { panic!("{:?} to {:?}", from.layout, to.layout) };
            assert_eq!(ep.spread(), from);
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
