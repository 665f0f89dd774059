//! A layer of hybrid TP-EP on 2 nodes of 2 ranks, one level after the other and both at once, over links that are
//! slowed down to given rates: `cargo run --release -p semmoe-ranks --example two_levels`. Ranks are threads, and links
//! a model: what a rank receives at a level arrives at that level's rate, the two levels at the same time. Times are
//! measured, under that model.
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{
    Collectives, Exchange, HybridCollectives, Lockstep, PrivateMemory, RowCollectives, UnitError, UnitLink, Wake, Waker,
};
use semmoe_kernels::{DispatchPlan, NodeGrid};
use semmoe_ranks::LocalTransport;

const NODES: usize = 2;
const RANKS: usize = 4;
const TOKENS: usize = 256;
const HIDDEN: usize = 1024;
const EXPERTS: u16 = 16;
const TOP_K: usize = 2;
/// Bytes a second between nodes.
const BETWEEN: f64 = 20e6;

/// A link whose messages take their time.
struct Slow {
    link: LocalTransport,
    grid: NodeGrid,
    /// Bytes a second inside a node.
    inside: f64,
}

impl Lockstep for Slow {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn world(&self) -> usize {
        self.link.world()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let Exchange { peers, outgoing, incoming, arrived } = exchange;
        let (me, began) = (self.rank(), Instant::now());
        self.link.group_all_to_all(Exchange { peers, outgoing, incoming: &mut *incoming, arrived: &mut |_| () })?;
        let mut due: Vec<(Duration, usize)> = Vec::new();
        let mut busy = [Duration::ZERO; 2];
        for (i, (&peer, message)) in peers.iter().zip(&*incoming).enumerate().filter(|(_, (peer, _))| **peer != me) {
            let is_inside = self.grid.node(peer) == self.grid.node(me);
            let rate = if is_inside { self.inside } else { BETWEEN };
            let level = &mut busy[usize::from(is_inside)];
            *level += Duration::from_secs_f64(message.len() as f64 / rate);
            due.push((*level, i));
        }
        due.sort_unstable();
        for (after, i) in due {
            std::thread::sleep(after.saturating_sub(began.elapsed()));
            arrived(i);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.link.wait()
    }

    fn waker(&self) -> Waker {
        self.link.waker()
    }
}

/// One layer on all ranks: how long the slowest exchanged.
fn run(inside: f64, chunks: Option<usize>) -> Result<Duration, UnitError> {
    let grid =
        NodeGrid::new(RANKS, NODES).map_err(|error| UnitError::Operands { rank: 0, detail: error.to_string() })?;
    // No rank leaves its link before all have ended.
    let rank = |link: LocalTransport| -> Result<(Duration, UnitLink<Slow>), UnitError> {
        let link = UnitLink::join(Slow { link, grid, inside }, NODES)?;
        let rank = link.rank();
        let unit = Box::new(RowCollectives::new(link.clone(), PrivateMemory::new(rank)));
        let mut end = match chunks {
            None => HybridCollectives::unfused(link.clone(), unit, PrivateMemory::new(grid.local(rank))),
            Some(chunks) => HybridCollectives::fused(link.clone(), unit, chunks)?,
        };
        let mut random = fastrand::Rng::with_seed(rank as u64);
        let experts: Vec<u16> = (0..TOKENS).flat_map(|_| random.choose_multiple(0..EXPERTS, TOP_K)).collect();
        let hosts: Vec<u16> = (0..EXPERTS).map(|expert| expert % NODES as u16).collect();
        let mut plan = DispatchPlan::default();
        plan.build(&experts, &vec![0.5; experts.len()], TOP_K, &hosts, NODES)
            .map_err(|error| UnitError::Operands { rank, detail: error.to_string() })?;
        let x = vec![1.0f32; TOKENS * HIDDEN];
        let mut out = vec![0.0; x.len()];
        let began = Instant::now();
        end.dispatch(&x, HIDDEN, &plan)?;
        end.received().sums.fill(1.0);
        end.combine(&plan, &mut out)?;
        Ok((began.elapsed(), link))
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> =
            LocalTransport::mesh(RANKS).into_iter().map(|link| scope.spawn(move || rank(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(UnitError::lost(0, "a panic")))).collect()
    });
    let took: Vec<Duration> = ended.into_iter().map(|ended| Ok(ended?.0)).collect::<Result<_, UnitError>>()?;
    Ok(took.into_iter().max().unwrap_or_default())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("| rate inside / between | chunks | time | over both levels one after the other |");
    println!("|---|---|---|---|");
    for ratio in [1.0, 2.0, 4.0, 10.0] {
        let unfused = run(ratio * BETWEEN, None)?;
        println!("| {ratio} | unfused | {unfused:.1?} | 1.00 |");
        for chunks in [1, 2, 4, 8] {
            let fused = run(ratio * BETWEEN, Some(chunks))?;
            println!("| {ratio} | {chunks} | {fused:.1?} | {:.2} |", fused.as_secs_f64() / unfused.as_secs_f64());
        }
    }
    Ok(())
}
