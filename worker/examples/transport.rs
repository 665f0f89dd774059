//! Shared memory beside TCP loopback, in turns within one run: one collective of equal messages, and one decode step of the
//! bundled model. Ranks are threads here; what they exchange through is the same.
//! `cargo run --release -p semmoe-worker --example transport`.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_tables::{Placement, RankId};
use semmoe_worker::ep::{Counters, ExpertParallel, ShmMemory, ShmTransport, StepPhase, TcpTransport, Transport};
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

/// Each rank's ends: TCP, then shared memory.
fn ends(world: usize) -> Outcome<Vec<[Box<dyn Transport>; 2]>> {
    let limit = Duration::from_secs(60);
    let (file, _) = ShmMemory::create(world, 1)?;
    let ranks = links(world)?.into_iter().zip(links(world)?).enumerate();
    ranks
        .map(|(rank, (data, lives))| {
            let rank = RankId::new(rank as u16);
            let memory = ShmMemory::attach(&file, world, 1)?;
            let tcp: Box<dyn Transport> = Box::new(TcpTransport::new(rank, data, limit)?);
            let shm: Box<dyn Transport> = Box::new(ShmTransport::new(rank, memory, lives, limit)?);
            Ok([tcp, shm])
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

/// Seconds of one round over both, each a block after the other: medians of `blocks`.
fn in_turns(blocks: usize, rounds: usize, mut round: impl FnMut(usize) -> Outcome<()>) -> Outcome<[f64; 2]> {
    let mut times = [Vec::new(), Vec::new()];
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

/// Seconds of one collective in which every rank sends every other so many bytes.
fn collective(world: usize, bytes: usize) -> Outcome<[f64; 2]> {
    let rounds = (64 << 20) / ((bytes + 20_000) * world * world);
    on_ranks(ends(world)?, |_, mut ends| {
        let (outgoing, mut incoming) = (vec![vec![1; bytes]; world], vec![Vec::new(); world]);
        in_turns(21, rounds.max(4), |which| Ok(ends[which].all_to_all(&outgoing, &mut incoming)?))
    })
}

/// Seconds of one decode step of the bundled model with so many sequences on every rank.
fn decode(world: u16, sequences: usize) -> Outcome<[f64; 2]> {
    let model_dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
    let config = ModelConfig::load(model_dir)?;
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, world)?;
    on_ranks(ends(world.into())?, |rank, ends| {
        let mut model = Model::load(model_dir, RankId::new(rank as u16), &placement)?;
        let join = |end| ExpertParallel::new(end, &placement, Arc::new(Counters::new(placement.layers())));
        let [tcp, shm] = ends.map(join);
        let (mut eps, mut random) = ([tcp?, shm?], fastrand::Rng::with_seed(rank as u64));
        let mut kvs: Vec<KvCache> = (0..sequences).map(|_| model.new_sequence()).collect();
        in_turns(21, 10, |which| {
            let tokens: Vec<u32> = kvs.iter().map(|_| random.u32(0..10_000)).collect();
            let item = |(kv, tokens)| StepItem { kv, tokens, want_logits: true, phase: StepPhase::Decode };
            let mut items: Vec<StepItem<'_>> = kvs.iter_mut().zip(tokens.chunks(1)).map(item).collect();
            model.step(&mut items, &mut eps[which])?;
            Ok(())
        })
    })
}

#[allow(clippy::print_stdout, reason = "an example's output")]
fn main() -> Outcome<()> {
    let told = |what: String, [tcp, shm]: [f64; 2]| {
        println!("{what:42} tcp {:9.1} us  shm {:9.1} us  tcp / shm {:5.2}", tcp * 1e6, shm * 1e6, tcp / shm);
    };
    for world in [2, 4] {
        for bytes in [0, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 8 << 20] {
            told(format!("{world} ranks, {bytes:8} bytes to each other rank"), collective(world, bytes)?);
        }
    }
    for world in [2, 4] {
        for sequences in [1, 16] {
            told(format!("{world} ranks, decode of {sequences:2} sequences each"), decode(world, sequences)?);
        }
    }
    Ok(())
}
