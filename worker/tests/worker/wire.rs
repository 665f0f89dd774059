//! Rows sent as bf16: about half the bytes, all counted; logits that are close, and equal on all ranks.

use crate::common;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{
    Meters, Rank, golden, metered_mesh, model_dir, on_ranks, on_tp_ranks, relative_error, shuffled, tp_tables,
};
use semmoe_kernels::collectives::{PrivateMemory, RowCollectives};
use semmoe_tables::Placement;
use semmoe_worker::ep::{Counters, ExpertLayout, ExpertParallel, Lockstep, WireRows, WireType};

/// The results of a rank.
struct Run {
    logits: Vec<Vec<f32>>,
    counted: Counters,
}

/// Runs these prompts on every rank.
fn run(mut rank: Rank, prompts: &[&[u32]]) -> Run {
    let logits = prompts.iter().map(|prompt| rank.prefill(prompt).0).collect();
    Run { logits, counted: rank.counted() }
}

/// Sends the rank's rows as bf16 from here on.
fn as_bf16(mut rank: Rank, placement: &Placement, link: Box<dyn Lockstep>) -> Rank {
    let memory = PrivateMemory::new(link.rank());
    let unit = WireRows::bf16(Box::new(RowCollectives::new(link, memory)));
    rank.ep = ExpertParallel::over(unit, placement, ExpertLayout::Ep).unwrap();
    rank
}

fn sent(meters: &[Meters]) -> u64 {
    meters.iter().map(|[bytes, _]| bytes.load(Ordering::Relaxed)).sum()
}

fn counted(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.counted.total().bytes.remote + run.counted.collective_bytes.iter().sum::<u64>()).sum()
}

#[test]
fn both_attentions_send_about_half_the_bytes_and_compute_nearly_the_same() {
    let golden = golden();
    let prompts: Vec<&[u32]> = golden.iter().map(|golden| &golden.ids[..]).collect();
    for world in [2, 4] {
        let placement = shuffled(world, 3);
        let tables = Arc::new(tp_tables(&common::config(), &placement, 7));
        for is_tp in [false, true] {
            let [wide, narrow] = [WireType::F32, WireType::Bf16].map(|wire| {
                let (links, meters) = metered_mesh(world);
                let (spare, links) = match wire {
                    WireType::F32 => (Vec::new(), links),
                    WireType::Bf16 => (links, common::local_mesh(world)),
                };
                let spare: Vec<_> = spare.into_iter().map(|link| std::sync::Mutex::new(Some(link))).collect();
                let work = |rank: Rank| {
                    let link = spare.get(rank.rank).and_then(|link| link.lock().unwrap().take());
                    match link {
                        Some(link) => run(as_bf16(rank, &placement, link), &prompts),
                        None => run(rank, &prompts),
                    }
                };
                let runs = match is_tp {
                    true => on_tp_ranks(&model_dir(), links, &placement, Some(&tables), work),
                    false => on_ranks(links, &placement, work),
                };
                assert_eq!(counted(&runs), sent(&meters), "{wire} on {world} ranks");
                runs
            });
            let share = counted(&narrow) as f64 / counted(&wide) as f64;
            assert!((0.5..0.53).contains(&share), "{share} of the bytes, tp {is_tp}, {world} ranks");
            for (wide, narrow) in wide.iter().zip(&narrow) {
                for (wide, rounded) in wide.logits.iter().zip(&narrow.logits) {
                    let error = relative_error(rounded, wide);
                    assert!(error > 0.0 && error < 0.05, "{error}, tp {is_tp}, {world} ranks");
                }
            }
            let bits = |run: &Run| run.logits.concat().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(narrow.iter().all(|run| bits(run) == bits(&narrow[0])), "every rank has the same prompts");
        }
    }
}
