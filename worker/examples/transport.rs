//! The carriers of a unit, in turns within one run: one exchange of equal messages, and steps of the bundled model.
//! Ranks are threads here; what they exchange through is the same.
//! `cargo run --release -p semmoe-worker --example transport`.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{Collectives, PrivateMemory, RowCollectives};
use semmoe_tables::{Attention, Placement, RankId};
use semmoe_worker::ep::{
    ExpertLayout, ExpertParallel, LayerTimings, ShmMemory, ShmTransport, StepPhase, TcpTransport, TimedCollective,
    WireRows,
};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Both ends of every pair of ranks: `links[a][b]` is a's link to b.
fn links(world: usize) -> io::Result<Vec<Vec<Option<TcpStream>>>> {
    let mut links: Vec<Vec<Option<TcpStream>>> = (0..world).map(|_| (0..world).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    for (a, b) in (0..world).flat_map(|a| (0..a).map(move |b| (a, b))) {
        links[a][b] = Some(TcpStream::connect(listener.local_addr()?)?);
        links[b][a] = Some(listener.accept()?.0);
    }
    Ok(links)
}

/// The collectives of one rank.
type Unit = Box<dyn Collectives<f32>>;

/// The carriers compared: messages over TCP, messages over shared rings, and rows used in place in shared memory.
const CARRIERS: [&str; 3] = ["tcp", "rings", "memory"];

/// Each rank's units, in the order of [`CARRIERS`], with room for so many elements of rows.
fn units(world: usize, elements: usize) -> Outcome<Vec<[Unit; 3]>> {
    let limit = Duration::from_secs(60);
    let files = [ShmMemory::create(world, 0, 1)?.0, ShmMemory::create(world, elements, 1)?.0];
    let ranks = links(world)?.into_iter().zip(links(world)?).zip(links(world)?).enumerate();
    ranks
        .map(|(rank, ((data, one), other))| {
            let private = || PrivateMemory::new(rank);
            let tcp = TcpTransport::new(rank, data, limit)?;
            let (rings, _) = ShmTransport::new::<f32>(rank, ShmMemory::attach(&files[0], world, 0, 1)?, one, limit)?;
            let memory = ShmMemory::attach(&files[1], world, elements, 1)?;
            let (link, rows) = ShmTransport::new(rank, memory, other, limit)?;
            Ok([
                Box::new(RowCollectives::new(tcp, private())) as Unit,
                Box::new(RowCollectives::new(rings, private())),
                Box::new(RowCollectives::new(link, rows)),
            ])
        })
        .collect()
}

/// Runs every rank on a thread of its own; what rank 0 gives.
fn on_ranks<E: Send, T: Send>(ends: Vec<E>, work: impl Fn(usize, E) -> Outcome<T> + Sync) -> Outcome<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            ends.into_iter().enumerate().map(|(rank, end)| scope.spawn(move || work(rank, end))).collect();
        let mut outcomes = threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked")?);
        let first = outcomes.next().ok_or("no rank")??;
        outcomes.try_for_each(|outcome| outcome.map(drop))?;
        Ok(first)
    })
}

/// Seconds of one round over each carrier, a block after the other: medians of `blocks`.
fn in_turns(blocks: usize, rounds: usize, mut round: impl FnMut(usize) -> Outcome<()>) -> Outcome<[f64; 3]> {
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..blocks {
        for (which, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            (0..rounds).try_for_each(|_| round(which))?;
            times.push(start.elapsed().as_secs_f64() / rounds as f64);
        }
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }))
}

/// Seconds of one exchange in which every rank sends every other so many bytes.
fn exchange(world: usize, bytes: usize) -> Outcome<[f64; 3]> {
    let rounds = (64 << 20) / ((bytes + 20_000) * world * world);
    on_ranks(units(world, 0)?, |_, mut units| {
        let (outgoing, mut incoming) = (vec![vec![1; bytes]; world], vec![Vec::new(); world]);
        in_turns(11, rounds.max(4), |which| Ok(units[which].all_to_all(&outgoing, &mut incoming)?))
    })
}

/// A step of the bundled model.
#[derive(Clone, Copy)]
struct Step {
    world: u16,
    attention: Attention,
    /// On every rank; with attention tp, the same on all.
    sequences: usize,
    /// Of each sequence.
    tokens: usize,
}

/// Seconds of one step, and of reduce-scatter and allgather in it, by carrier.
fn step(step: Step) -> Outcome<[[f64; 3]; 2]> {
    let model_dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let config = ModelConfig::load(model_dir)?;
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, step.world)?;
    let elements = usize::from(step.world) * step.sequences * step.tokens * config.hidden;
    on_ranks(units(step.world.into(), elements)?, |rank, units| {
        let id = RankId::new(rank as u16);
        let mut model = Model::load_divided(model_dir, id, &placement, ExpertLayout::Ep, step.attention)?;
        let join = |unit| ExpertParallel::over(WireRows::f32(unit), &placement, ExpertLayout::Ep);
        let [tcp, rings, memory] = units.map(join);
        let mut eps = [tcp?, rings?, memory?];
        let seed = if step.attention == Attention::Tp { 0 } else { rank as u64 };
        let mut random = fastrand::Rng::with_seed(seed);
        let (blocks, rounds) = if step.tokens == 1 { (21, 10) } else { (11, 2) };
        let mut kvs: Vec<KvCache> = Vec::new();
        let times = in_turns(blocks, rounds, |which| {
            if step.tokens > 1 || kvs.first().is_none_or(|kv| kv.remaining() == 0) {
                kvs = (0..step.sequences).map(|_| model.new_sequence()).collect();
            }
            let tokens: Vec<u32> = (0..step.sequences * step.tokens).map(|_| random.u32(0..10_000)).collect();
            let item = |(kv, tokens)| StepItem { kv, tokens, want_logits: true, phase: StepPhase::Decode };
            let mut items: Vec<StepItem<'_>> = kvs.iter_mut().zip(tokens.chunks(step.tokens)).map(item).collect();
            model.step(&mut items, &mut eps[which])?;
            Ok(())
        })?;
        let split = eps.map(|ep| {
            let of = |layer: &LayerTimings| layer.of(TimedCollective::Scatter) + layer.of(TimedCollective::Gather);
            ep.timings().layers.iter().map(of).sum::<Duration>().as_secs_f64() / (blocks * rounds) as f64
        });
        Ok([times, split])
    })
}

#[allow(clippy::print_stdout, reason = "an example's output")]
fn show(what: &str, times: [f64; 3]) {
    let [tcp, rings, memory] = times.map(|seconds| seconds * 1e6);
    let [one, two, three] = CARRIERS;
    println!(
        "{what:58} {one} {tcp:9.1} us  {two} {rings:9.1} us  {three} {memory:9.1} us  {three} / {two} {:5.2}",
        memory / rings
    );
}

fn main() -> Outcome<()> {
    for (world, bytes) in [2, 4].into_iter().flat_map(|world| [0, 8 << 10, 1 << 20].map(|bytes| (world, bytes))) {
        show(&format!("{world} ranks, {bytes:8} bytes to each other rank"), exchange(world, bytes)?);
    }
    for (world, attention) in [(2, Attention::Dp), (2, Attention::Tp), (4, Attention::Dp), (4, Attention::Tp)] {
        for (sequences, tokens) in [(1, 1), (16, 1), (64, 1), (1, 512)] {
            let [times, split] = step(Step { world, attention, sequences, tokens })?;
            let name = if attention == Attention::Tp { "tp" } else { "dp" };
            show(&format!("{world} ranks, attention {name}, {sequences:2} sequences, {tokens:3} tokens each"), times);
            if attention == Attention::Tp {
                show("    of it reduce-scatter and allgather", split);
            }
        }
    }
    Ok(())
}
