//! A layer of hybrid TP-EP on 2 nodes of 2 ranks, one level after the other and both at once, over links that are slowed down to given
//! rates: `cargo run --release -p semmoe-ranks --example two_levels [chart.svg]`. Ranks are threads, and links a model: what a rank
//! receives at a level arrives at that level's rate, the two levels at the same time. Times are measured, under that model.
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{
    Collectives, Exchange, HybridCollectives, Lockstep, PrivateMemory, RowCollectives, Stage, StageName, StageObserver,
    UnitError, UnitLink, Wake, Waker,
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

/// When each stage of a rank was under way.
struct Times {
    zero: Instant,
    bars: Vec<Bar>,
}

#[derive(Clone, Copy)]
struct Bar {
    stage: Stage,
    began: Duration,
    ended: Duration,
}

impl StageObserver for Times {
    fn began(&mut self, stage: Stage) {
        let began = self.zero.elapsed();
        self.bars.push(Bar { stage, began, ended: began });
    }

    fn ended(&mut self, stage: Stage) {
        let ended = self.zero.elapsed();
        self.bars.iter_mut().filter(|bar| bar.stage == stage).for_each(|bar| bar.ended = ended);
    }
}

/// One layer on all ranks: how long the slowest exchanged, and the stages by rank.
fn run(inside: f64, chunks: Option<usize>) -> Result<(Duration, Vec<Times>), UnitError> {
    let grid =
        NodeGrid::new(RANKS, NODES).map_err(|error| UnitError::Operands { rank: 0, detail: error.to_string() })?;
    let zero = Instant::now();
    let rank = |link: LocalTransport| -> Result<(Times, UnitLink<Slow>), UnitError> {
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
        let mut times = Times { zero, bars: Vec::new() };
        end.dispatch_observed(&x, HIDDEN, &plan, &mut times)?;
        end.received().sums.fill(1.0);
        end.combine_observed(&plan, &mut out, &mut times)?;
        Ok((times, link))
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> =
            LocalTransport::mesh(RANKS).into_iter().map(|link| scope.spawn(move || rank(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(UnitError::lost(0, "a panic")))).collect()
    });
    let times: Vec<Times> = ended.into_iter().map(|ended| Ok(ended?.0)).collect::<Result<_, UnitError>>()?;
    let took = times.iter().map(|times| {
        let began = times.bars.iter().map(|bar| bar.began).min().unwrap_or_default();
        times.bars.iter().map(|bar| bar.ended).max().unwrap_or_default() - began
    });
    Ok((took.max().unwrap_or_default(), times))
}

/// A bar for each stage, a line for each rank and level.
fn chart(times: &[Times]) -> String {
    let bars = || times.iter().flat_map(|times| &times.bars);
    let zero = bars().map(|bar| bar.began).min().unwrap_or_default();
    let end = bars().map(|bar| bar.ended).max().unwrap_or_default();
    let scale = 900.0 / (end - zero).as_secs_f64().max(1e-9);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1020\" height=\"240\" font-family=\"sans-serif\" font-size=\"11\">\n",
    );
    for (rank, times) in times.iter().enumerate() {
        for (level, name) in ["between", "inside"].into_iter().enumerate() {
            let y = 10 + (rank * 2 + level) * 26;
            let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">rank {rank} {name}</text>", y + 14);
            let is_inside = |bar: &Bar| matches!(bar.stage.name, StageName::Gather | StageName::Reduce);
            for bar in times.bars.iter().filter(|bar| is_inside(bar) == (level == 1)) {
                let (x, width) = (bar.began - zero, bar.ended - bar.began);
                let (x, width) = (100.0 + x.as_secs_f64() * scale, width.as_secs_f64() * scale);
                let colour = match bar.stage.name {
                    StageName::Dispatch => "#e07b39",
                    StageName::Gather => "#7fb069",
                    StageName::Reduce => "#5b8e7d",
                    StageName::Combine => "#c8553d",
                };
                let (title, piece) = (bar.stage.name.as_str(), bar.stage.piece);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"20\" fill=\"{colour}\" stroke=\"#fff\"><title>{title} {piece}</title></rect>"
                );
            }
        }
    }
    svg + "</svg>\n"
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("| rate inside / between | chunks | time | over both levels one after the other |");
    println!("|---|---|---|---|");
    for ratio in [1.0, 2.0, 4.0, 10.0] {
        let (unfused, _) = run(ratio * BETWEEN, None)?;
        println!("| {ratio} | unfused | {unfused:.1?} | 1.00 |");
        for chunks in [1, 2, 4, 8] {
            let (fused, times) = run(ratio * BETWEEN, Some(chunks))?;
            println!("| {ratio} | {chunks} | {fused:.1?} | {:.2} |", fused.as_secs_f64() / unfused.as_secs_f64());
            if let (Some(path), true) = (std::env::args().nth(1), ratio == 2.0 && chunks == 4) {
                std::fs::write(path, chart(&times))?;
            }
        }
    }
    Ok(())
}
