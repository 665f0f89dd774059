//! A switch of experts between two hosts: the next layer travels while this one is placed.
//!
//! Each of two processes is a rank, with a TCP connection between them. Experts are random bytes from a seed, and half
//! of each slot crosses. In turns: the messages alone, a switch layer by layer (each layer is a switch by itself, so
//! nothing overlaps), and the whole switch. Placement is the time of the second outside messages. Against the two ways
//! that need no other host: a restart reads all of a rank's experts from local files, and an offload writes them there
//! first.

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use clap::Args;
use semmoe_kernels::NodeGrid;
use semmoe_kernels::collectives::{Exchange, Lockstep, UnitError, Wake, Waker};
use semmoe_kernels::reshard::{
    Checksums, ExpertMemory, ExpertShape, Hosts, Layout, MemoryFault, Outcome as Ended, PieceHash, Pool, Resharder,
    Side, Switch,
};
use semmoe_ranks::SharedExperts;
use semmoe_worker::ep::TcpTransport;

use crate::measure::{Outcome, median};

const RANKS: usize = 2;
const EXPERTS: usize = 16;
/// Sleeps shorter than this are saved up.
const SHORTEST_SLEEP: Duration = Duration::from_millis(1);

/// A rank of the pipeline's measurement.
#[derive(Debug, Args)]
pub(crate) struct Settings {
    /// This rank: 0 listens, 1 connects.
    rank: usize,
    /// Where rank 0 listens.
    address: SocketAddr,
    /// Megabytes of experts of both ranks together.
    #[arg(long, default_value_t = 400)]
    megabytes: usize,
    /// MoE layers.
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Megabytes of experts that a rank may write per second, one table row each; 0 is no limit.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    place: Vec<f64>,
    /// Switches there and back of each kind.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// A rank's memory with a limited rate of writing.
struct Throttled {
    inner: SharedExperts,
    seconds_per_byte: f64,
    owed: Duration,
}

impl Throttled {
    fn create(rank: usize, pool: &Pool) -> Outcome<Self> {
        let inner = SharedExperts::create(rank, RANKS, pool.bytes())?;
        Ok(Self { inner, seconds_per_byte: 0.0, owed: Duration::ZERO })
    }

    fn note(&mut self, began: Instant, written: usize) {
        let least = Duration::from_secs_f64(written as f64 * self.seconds_per_byte);
        self.owed += least.saturating_sub(began.elapsed());
        if self.owed >= SHORTEST_SLEEP {
            let sleeping = Instant::now();
            std::thread::sleep(self.owed);
            self.owed = self.owed.saturating_sub(sleeping.elapsed());
        }
    }
}

impl ExpertMemory for Throttled {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn reaches(&self, rank: usize) -> bool {
        self.inner.reaches(rank)
    }

    fn bytes(&self) -> usize {
        self.inner.bytes()
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.inner.read(rank, offset, into)
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        let began = Instant::now();
        self.inner.write(offset, bytes)?;
        self.note(began, bytes.len());
        Ok(())
    }

    fn copy(
        &mut self,
        rank: usize,
        from: usize,
        to: usize,
        bytes: usize,
        hash: &mut PieceHash,
    ) -> Result<(), MemoryFault> {
        let began = Instant::now();
        self.inner.copy(rank, from, to, bytes, hash)?;
        self.note(began, bytes);
        Ok(())
    }
}

/// A link that adds up the time of its exchanges.
struct TimedLink {
    inner: TcpTransport,
    busy: Duration,
}

impl Lockstep for TimedLink {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let began = Instant::now();
        self.inner.group_all_to_all(exchange)?;
        self.busy += began.elapsed();
        Ok(())
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.inner.wait()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// Some layers of a rank's experts.
struct Store {
    pool: Pool,
    ep: Layout,
    side: Side,
    memory: Throttled,
    checksums: Checksums,
}

impl Store {
    fn fill(link: &mut TimedLink, layers: usize, slice_bytes: usize, seed: u64) -> Outcome<Self> {
        let shape = ExpertShape::slice_major(RANKS, slice_bytes)?;
        let pool = Pool::new(shape, NodeGrid::of_nodes(1, RANKS)?, EXPERTS, layers, EXPERTS / RANKS)?;
        let experts: Vec<u16> = (0..EXPERTS as u16).collect();
        let ep = Layout::Ep(Hosts::new(EXPERTS, RANKS, vec![experts; layers])?);
        let (rank, side) = (link.rank(), Side::Low);
        let mut memory = Throttled::create(rank, &pool)?;
        let mut random = fastrand::Rng::with_seed(seed + rank as u64);
        let mut bytes = vec![0; pool.slot_bytes(&ep)];
        for layer in 0..layers {
            random.fill(&mut bytes);
            memory.write(pool.slot(&ep, side, layer).start, &bytes)?;
        }
        let mut resharder = Resharder::new(&mut *link, &mut memory, 1);
        let mut checksums = resharder.record(&pool, &ep, side)?;
        resharder.gather(&mut checksums)?;
        Ok(Self { pool, ep, side, memory, checksums })
    }

    /// Switches to slices, or back.
    fn switch(&mut self, link: &mut TimedLink, back: bool, chunk_bytes: usize) -> Outcome<()> {
        let [from, to] = if back { [&Layout::Tp, &self.ep] } else { [&self.ep, &Layout::Tp] };
        let switch = Switch::new(&self.pool, from, to, self.side)?;
        let ended = Resharder::new(link, &mut self.memory, chunk_bytes).run(&switch, &self.checksums, &mut |_| true)?;
        self.side = self.side.other();
        if ended == Ended::Switched { Ok(()) } else { Err(format!("the switch ended with {ended:?}").into()) }
    }
}

/// A file that a rank's experts are read from, in whichever layout comes next. It stays in the page cache.
struct Local {
    file: File,
    layer: Vec<u8>,
}

impl Local {
    fn new(bytes: usize) -> Outcome<Self> {
        Ok(Self { file: tempfile::tempfile()?, layer: vec![0; bytes] })
    }

    /// Writes all of a rank's experts out.
    fn save(&mut self, from: &Store) -> Outcome<()> {
        for layer in 0..from.pool.layers() {
            let start = from.pool.slot(&from.ep, from.side, layer).start;
            from.memory.read(from.memory.rank(), start, &mut self.layer)?;
            self.file.write_all_at(&self.layer, (layer * self.layer.len()) as u64)?;
        }
        Ok(())
    }

    /// Reads them back and places them.
    fn load(&mut self, to: &mut Store) -> Outcome<()> {
        let bytes = self.layer.len();
        for layer in 0..to.pool.layers() {
            self.file.read_exact_at(&mut self.layer, (layer * bytes) as u64)?;
            to.memory.write(to.pool.slot(&to.ep, to.side, layer).start, &self.layer)?;
        }
        Ok(())
    }
}

/// Seconds of each kind.
#[derive(Default)]
struct Measured {
    transfer: Vec<f64>,
    placement: Vec<f64>,
    apart: Vec<f64>,
    pipelined: Vec<f64>,
    restart: Vec<f64>,
    offload: Vec<f64>,
}

fn connect(rank: usize, address: SocketAddr) -> Outcome<TimedLink> {
    let stream = match rank {
        0 => TcpListener::bind(address)?.accept()?.0,
        1 => TcpStream::connect(address)?,
        _ => return Err(format!("rank {rank} is neither 0 nor 1").into()),
    };
    let mut peers = vec![None, None];
    peers[1 - rank] = Some(stream);
    Ok(TimedLink { inner: TcpTransport::new(rank, peers, Duration::from_secs(60))?, busy: Duration::ZERO })
}

/// Seconds of `work`, which begins at the same time on both ranks.
fn seconds(link: &mut TimedLink, work: impl FnOnce(&mut TimedLink) -> Outcome<()>) -> Outcome<f64> {
    link.all_to_all(&vec![Vec::new(); RANKS], &mut vec![Vec::new(); RANKS])?;
    let began = Instant::now();
    work(link)?;
    Ok(began.elapsed().as_secs_f64())
}

pub(crate) fn run(settings: &Settings) -> Outcome<()> {
    let &Settings { rank, address, megabytes, layers, rounds, .. } = settings;
    let mut link = connect(rank, address)?;
    let slice_bytes = megabytes * 1_000_000 / (layers * EXPERTS * RANKS);
    // The bytes of a layer that cross fit one message.
    let message = slice_bytes * EXPERTS / RANKS;
    let mut whole = Store::fill(&mut link, layers, slice_bytes, 0)?;
    let single = |layer| Store::fill(&mut link, 1, slice_bytes, layer as u64);
    let mut singles = (0..layers).map(single).collect::<Outcome<Vec<Store>>>()?;
    let mut local = Local::new(whole.pool.slot_bytes(&whole.ep))?;
    local.save(&whole)?;
    for &limit in &settings.place {
        let seconds_per_byte = if limit > 0.0 { 1e-6 / limit } else { 0.0 };
        singles.iter_mut().chain([&mut whole]).for_each(|store| store.memory.seconds_per_byte = seconds_per_byte);
        let mut found = Measured::default();
        for back in (0..rounds).flat_map(|_| [false, true]) {
            found.transfer.push(seconds(&mut link, |link| {
                let (outgoing, mut incoming) = (vec![vec![1; message]; RANKS], vec![Vec::new(); RANKS]);
                (0..layers).try_for_each(|_| Ok(link.all_to_all(&outgoing, &mut incoming)?))
            })?);
            let before = link.busy;
            let apart =
                seconds(&mut link, |link| singles.iter_mut().try_for_each(|store| store.switch(link, back, message)))?;
            found.apart.push(apart);
            found.placement.push(apart - (link.busy - before).as_secs_f64());
            found.pipelined.push(seconds(&mut link, |link| whole.switch(link, back, message))?);
            if back {
                found.restart.push(seconds(&mut link, |_| local.load(&mut whole))?);
                found.offload.push(seconds(&mut link, |_| {
                    local.save(&whole)?;
                    local.load(&mut whole)
                })?);
            }
        }
        if rank == 0 {
            report(limit, found);
        }
    }
    Ok(())
}

fn report(limit: f64, found: Measured) {
    let Measured { transfer, placement, apart, pipelined, restart, offload } = found;
    let [transfer, placement, apart, pipelined] = [transfer, placement, apart, pipelined].map(median);
    let [restart, offload] = [restart, offload].map(median);
    let limit = if limit > 0.0 { format!("{limit} MB/s") } else { "none".to_owned() };
    println!(
        "| {limit} | {transfer:.3} | {placement:.3} | {:.2} | {apart:.3} | {pipelined:.3} | {:.2} | {:.2} | {restart:.3} | {offload:.3} |",
        placement / transfer,
        pipelined / transfer.max(placement),
        pipelined / apart
    );
}
