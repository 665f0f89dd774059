//! Streams over memory shared by the processes of one host. If there is a core per rank, a waiting rank first spins
//! briefly. Then it sleeps on its bell (a futex), which other ranks ring when they write to it or free space.
//!
//! | module | what |
//! |---|---|
//! | `memory` | bells, rings and rows, in an unnamed file |
//! | `ring` | bytes from one rank to another |
//! | `watch` | detection of dead ranks |

mod memory;
mod ring;
mod watch;

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(crate) use memory::ShmError;
pub use memory::{MAX_SHARED_WORLD, ShmMemory};
use ring::{RingReader, RingWriter};
use watch::{Life, Watch};

use super::stream::{ByteStream, Medium, Peer, Pending, StreamTransport};
use semmoe_kernels::Element;
use semmoe_kernels::collectives::Waker;
use semmoe_ranks::SharedHalves;

use super::links::check_links;

/// Number of bell checks before sleeping, if every rank can have its own core. They take a few microseconds, about the
/// cost of sleeping. On a shared machine, longer spinning could take the core from the awaited rank.
const SPINS: u32 = 64;

/// One rank's transport over shared memory.
pub type ShmTransport = StreamTransport<Rings>;

impl ShmTransport {
    /// Joins the unit as `rank`, at most once, and returns the transport and the memory for rows; all ranks must use
    /// the same row type. `links[p]` is an idle connection to rank p, which closes when that rank dies. `limit` bounds
    /// one collective, including the wait for slower ranks.
    ///
    /// # Errors
    /// A rank has no link, this rank's own slot has one, the memory is for a different number of ranks, or a thread
    /// cannot be started.
    pub fn new<T: Element>(
        rank: usize,
        memory: ShmMemory,
        links: Vec<Option<TcpStream>>,
        limit: Duration,
    ) -> io::Result<(Self, SharedHalves<T>)> {
        check_links(rank, &links)?;
        if memory.layout.world != links.len() {
            let detail = format!("memory for {} ranks, expected {}", memory.layout.world, links.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let (memory, me) = (Arc::new(memory), rank);
        let lives = links.into_iter().map(|link| link.map(|link| Life::new(link).map(Arc::new)).transpose());
        let lives = lives.collect::<io::Result<Vec<_>>>()?;
        let watch = Watch::start(me, lives.iter().flatten().cloned().collect(), Arc::clone(&memory))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if cores >= memory.layout.world { SPINS } else { 0 };
        let streams = (0..).zip(lives).map(|(peer, life)| {
            let (incoming, outgoing) = (RingReader::new(&memory, peer, me), RingWriter::new(&memory, me, peer));
            life.map(|life| RingStream { incoming, outgoing, life })
        });
        let streams = streams.collect();
        let medium = Rings { rank: me, seen: 0, spins, rung: Arc::default(), memory, _watch: watch };
        let all: Vec<usize> = (0..medium.memory.layout.world).collect();
        let rows = medium.memory.rows(rank, &all, all.len());
        Ok((Self::over(rank, streams, medium, limit), rows))
    }
}

/// Both rings between this rank and another.
#[derive(Debug)]
pub struct RingStream {
    incoming: RingReader,
    outgoing: RingWriter,
    life: Arc<Life>,
}

impl Read for RingStream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.incoming.read(to)? {
            0 => {}
            count => return Ok(count),
        }
        let Some(end) = self.life.end() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        // Bytes written before the rank died are still delivered, as on a socket.
        match self.incoming.read(to)? {
            0 => Err(end),
            count => Ok(count),
        }
    }
}

impl Write for RingStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(end) = self.life.end() {
            return Err(end);
        }
        match self.outgoing.write(parts.iter().map(|part| &**part))? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ByteStream for RingStream {
    const READ_AHEAD: bool = false;

    fn finish(&mut self) {
        self.life.finish();
    }
}

/// The shared memory and the bell on which one rank waits.
#[derive(Debug)]
pub struct Rings {
    rank: usize,
    memory: Arc<ShmMemory>,
    /// The bell count up to which all events have been processed.
    seen: u32,
    spins: u32,
    /// Set by the wakers of this process.
    rung: Arc<AtomicBool>,
    _watch: Watch,
}

impl Rings {
    /// Sleeps until the bell rings; returns false if the deadline has passed.
    fn sleep(&mut self, deadline: Option<Instant>) -> bool {
        let bell = self.memory.bell(self.rank);
        for _ in 0..self.spins {
            if bell.rings() != self.seen {
                break;
            }
            std::hint::spin_loop();
        }
        loop {
            // Read the count before the data that it announces, so that no change is missed.
            let rings = bell.rings();
            if rings != self.seen {
                self.seen = rings;
                return true;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            bell.sleep(rings, left);
        }
    }
}

impl Medium for Rings {
    type Stream = RingStream;

    fn poll(
        &mut self,
        _peers: &[Option<Peer<RingStream>>],
        pending: &mut [Pending],
        _bell: bool,
        deadline: Option<Instant>,
    ) -> bool {
        let in_time = self.sleep(deadline);
        // Checking every ring costs less than finding out which rank rang the bell.
        pending.iter_mut().for_each(|pending| pending.ready = true);
        in_time
    }

    fn take_ring(&mut self) -> bool {
        self.rung.swap(false, Ordering::AcqRel)
    }

    fn waker(&self) -> Waker {
        let (rung, memory, rank) = (Arc::clone(&self.rung), Arc::clone(&self.memory), self.rank);
        Waker::new(move || {
            rung.store(true, Ordering::Release);
            memory.bell(rank).ring();
        })
    }
}

#[cfg(test)]
mod tests;
