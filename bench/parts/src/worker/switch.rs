//! Time to move experts, against a memcpy of as many bytes between buffers of the same kind, alternating within one
//! run: from one E to another, from whole experts to slices, and back; with a synthetic checkpoint of 402 MB of experts
//! on two ranks, which are threads here.

use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

use semmoe_kernels::collectives::{PrivateMemory, RowCollectives};
use semmoe_kernels::reshard::ExpertMemory as _;
use semmoe_ranks::SharedExperts;
use semmoe_tables::{Attention, ExpertCopies, Placement, RankId};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, ExpertPlacement, LocalTransport, WireRows};
use semmoe_worker::model::{Model, SwitchOutcome};

use super::{EXPERT_BYTES, EXPERTS, LAYERS, RANKS, on_ranks, write_checkpoint};
use crate::measure::{Outcome, median};

const ROUNDS: usize = 11;

/// Durations of a rank's switches and of its copies of as many bytes.
struct Round {
    switch_seconds: f64,
    copy_seconds: f64,
}

struct Move {
    name: &'static str,
    from: ExpertPlacement,
    to: ExpertPlacement,
}

/// Bytes that a rank writes in a switch: all experts that it has afterwards.
const RANK_BYTES: usize = LAYERS * EXPERTS / RANKS * EXPERT_BYTES;

fn moves() -> Outcome<Vec<Move>> {
    let placement = |group: fn(usize) -> usize| {
        let layer: Vec<u16> = (0..EXPERTS).map(|expert| group(expert) as u16).collect();
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(ExpertCopies::from(&Placement::new(
            RANKS as u16,
            vec![layer; LAYERS],
        )?))
    };
    let whole = |replicas: &ExpertCopies| ExpertPlacement { layout: ExpertLayout::Ep, replicas: replicas.clone() };
    let slices = |replicas: &ExpertCopies| ExpertPlacement { layout: ExpertLayout::Tp, replicas: replicas.clone() };
    let (halves, odd) = (placement(|expert| expert / (EXPERTS / RANKS))?, placement(|expert| expert % RANKS)?);
    Ok(vec![
        Move { name: "E to another E", from: whole(&halves), to: whole(&odd) },
        Move { name: "whole to slices", from: whole(&halves), to: slices(&halves) },
        Move { name: "slices to whole", from: slices(&halves), to: whole(&halves) },
    ])
}

fn rank_rounds(dir: &Path, link: LocalTransport, change: &Move, together: &Barrier) -> Outcome<Vec<Round>> {
    let rank = semmoe_worker::ep::Lockstep::rank(&link);
    let (id, from) = (RankId::new(rank as u16), &change.from);
    let mut model = Model::load_divided(dir, id, &from.replicas, from.layout, Attention::Dp)?;
    model.share_experts(&(0..RANKS).collect::<Vec<_>>());
    let unit = WireRows::f32(Box::new(RowCollectives::new(link, PrivateMemory::new(rank))));
    let mut ep = ExpertParallel::over(unit, &from.replicas, from.layout)?;
    let buffer = |byte: u8| {
        let mut buffer = SharedExperts::create(rank, RANKS, RANK_BYTES)?;
        buffer.write(0, &vec![byte; RANK_BYTES])?;
        buffer.settle(0..RANK_BYTES);
        Outcome::Ok(buffer)
    };
    let (source, mut target) = (buffer(7)?, buffer(1)?);
    let mut rounds = Vec::new();
    // One extra round to warm up.
    for _ in 0..=ROUNDS {
        together.wait();
        let began = Instant::now();
        target.write(0, std::hint::black_box(source.own()))?;
        std::hint::black_box(target.own());
        together.wait();
        let copy_seconds = began.elapsed().as_secs_f64();
        together.wait();
        let began = Instant::now();
        let outcome = model.switch_experts(&change.to, &mut ep, &mut |_| None)?;
        let switch_seconds = began.elapsed().as_secs_f64();
        if outcome != SwitchOutcome::Committed || model.switch_experts(&change.from, &mut ep, &mut |_| None)? != outcome
        {
            return Err(format!("{outcome:?}").into());
        }
        rounds.push(Round { switch_seconds, copy_seconds });
    }
    rounds.remove(0);
    Ok(rounds)
}

/// Prints each kind of switch.
pub(crate) fn run() -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    write_checkpoint(folder.path())?;
    println!(
        "{RANKS} ranks, {} MB of experts; medians of {ROUNDS} rounds",
        LAYERS * EXPERTS * EXPERT_BYTES / 1_000_000
    );
    println!("{:<18} {:>8} {:>10} {:>10} {:>6}", "", "MB each", "switch ms", "copy ms", "ratio");
    for change in moves()? {
        let together = Barrier::new(RANKS);
        let rounds = on_ranks(|link| rank_rounds(folder.path(), link, &change, &together))?;
        let switch = median(rounds.iter().map(|round| round.switch_seconds).collect());
        let copy = median(rounds.iter().map(|round| round.copy_seconds).collect());
        let megabytes = RANK_BYTES / 1_000_000;
        println!(
            "{:<18} {megabytes:>8} {:>10.1} {:>10.1} {:>6.2}",
            change.name,
            1e3 * switch,
            1e3 * copy,
            switch / copy
        );
    }
    Ok(())
}
