//! Ranks as threads of this process, over the worker's own transports.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use semmoe_kernels::collectives::{Collectives, PrivateMemory, RowCollectives};
use semmoe_worker::TransportChoice;
use semmoe_worker::ep::{ShmMemory, ShmTransport, TcpTransport};

use crate::error::CliError;

/// One rank's handle to the collectives.
pub(super) type Unit = Box<dyn Collectives<f32>>;

/// A rank that does not respond for this long has failed.
const LIMIT: Duration = Duration::from_secs(60);
/// A measurement is the median of this many final blocks.
const BLOCKS: f64 = 5.0;
const MAX_BLOCKS: usize = 64;

/// Number of ranks in a measurement, and the transport for their rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Team {
    pub(super) ranks: usize,
    pub(super) carrier: TransportChoice,
    /// Number of row elements to allocate in shared memory.
    pub(super) elements: usize,
}

impl Team {
    /// Connects the ranks and returns the collectives of each.
    pub(super) fn units(self) -> Result<Vec<Unit>, CliError> {
        let links = links(self.ranks).map_err(|error| CliError::failed(format!("loopback connections: {error}")))?;
        let shared = match self.carrier {
            TransportChoice::Tcp => None,
            _ => Some(ShmMemory::create(self.ranks, self.elements, 1).map_err(CliError::failed)?.0),
        };
        let unit = |(rank, links)| -> Result<Unit, CliError> {
            let Some(file) = &shared else {
                let link = TcpTransport::new(rank, links, LIMIT).map_err(CliError::failed)?;
                return Ok(Box::new(RowCollectives::new(link, PrivateMemory::new(rank))));
            };
            let memory = ShmMemory::attach(file, self.ranks, self.elements, 1).map_err(CliError::failed)?;
            let (link, rows) = ShmTransport::new(rank, memory, links, LIMIT).map_err(CliError::failed)?;
            Ok(Box::new(RowCollectives::new(link, rows)))
        };
        links.into_iter().enumerate().map(unit).collect()
    }
}

/// Connects every pair of ranks: `links[a][b]` is a's link to b.
fn links(ranks: usize) -> io::Result<Vec<Vec<Option<TcpStream>>>> {
    let mut links: Vec<Vec<Option<TcpStream>>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    for (a, b) in (0..ranks).flat_map(|a| (0..a).map(move |b| (a, b))) {
        links[a][b] = Some(TcpStream::connect(listener.local_addr()?)?);
        links[b][a] = Some(listener.accept()?.0);
    }
    Ok(links)
}

/// A barrier at which the threads of a measurement agree on its length.
#[derive(Debug)]
pub(super) struct Meeting {
    ranks: usize,
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MeetingState {
    arrived: usize,
    meetings: u64,
    /// Rank 0's numbers for this meeting and the previous one, which some ranks may still be reading.
    numbers: [u32; 2],
    /// Set once a rank has failed, so no further meeting can complete.
    broken: bool,
}

impl Meeting {
    fn new(ranks: usize) -> Self {
        Self { ranks, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits for all ranks; returns rank 0's number.
    fn agree(&self, rank: usize, number: u32) -> Result<u32, CliError> {
        let mut state = self.lock();
        let slot = (state.meetings % 2) as usize;
        if rank == 0 {
            state.numbers[slot] = number;
        }
        state.arrived += 1;
        let meeting = state.meetings;
        if state.arrived == self.ranks {
            state.arrived = 0;
            state.meetings += 1;
            self.changed.notify_all();
        }
        while state.meetings == meeting && !state.broken {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.broken {
            Err(CliError::failed("another rank failed during the measurement"))
        } else {
            Ok(state.numbers[slot])
        }
    }

    fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Breaks the meeting if its rank fails or panics.
struct Attendance<'a>(&'a Meeting, bool);

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.lock().broken = true;
            self.0.changed.notify_all();
        }
    }
}

/// Runs every rank on its own thread and returns rank 0's result or the first error.
pub(super) fn on_ranks<E: Send, T: Send>(
    ends: Vec<E>,
    work: impl Fn(usize, E, &Meeting) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    let meeting = Meeting::new(ends.len());
    std::thread::scope(|scope| {
        let run = |(rank, end)| {
            let (work, meeting) = (&work, &meeting);
            scope.spawn(move || {
                let mut attendance = Attendance(meeting, false);
                let outcome = work(rank, end, meeting);
                attendance.1 = outcome.is_ok();
                outcome
            })
        };
        let threads: Vec<_> = ends.into_iter().enumerate().map(run).collect();
        let outcomes = threads.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(CliError::failed("a rank's thread panicked: this is a bug in semmoe")))
        });
        let outcomes: Vec<T> = outcomes.collect::<Result<_, _>>()?;
        outcomes.into_iter().next().ok_or_else(|| CliError::failed("no ranks to measure"))
    })
}

/// Measures the seconds of one round: the median over blocks that take about `time` in total. Blocks start at one round
/// and grow, so an unusually fast first round does not cause a long measurement. All ranks must make the same calls.
pub(super) fn seconds(
    rank: usize,
    meeting: &Meeting,
    time: Duration,
    mut round: impl FnMut() -> Result<(), CliError>,
) -> Result<f64, CliError> {
    // The first round runs with cold caches.
    round()?;
    let (mut times, mut rounds, began) = (Vec::new(), meeting.agree(rank, 1)?, Instant::now());
    while rounds > 0 {
        let block = Instant::now();
        (0..rounds).try_for_each(|_| round())?;
        let took = block.elapsed().as_secs_f64();
        times.push(took / f64::from(rounds));
        let more = began.elapsed() < time && times.len() < MAX_BLOCKS;
        let longer = took * BLOCKS < time.as_secs_f64();
        rounds = meeting.agree(rank, if more { rounds << u32::from(longer) } else { 0 })?;
    }
    // The last blocks are the longest, so they are the most accurate.
    let mut last = times.split_off(times.len().saturating_sub(BLOCKS as usize));
    last.sort_by(f64::total_cmp);
    Ok(last[last.len() / 2])
}
