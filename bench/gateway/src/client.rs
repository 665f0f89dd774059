//! The client: one thread, one request at a time on each connection, every answer compared with the engine's.

mod connection;
mod figures;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::poller::Poller;
use connection::{Connection, Step};
pub(crate) use figures::Figures;
use figures::Recorder;

/// Gives up after this long without any answer.
const SILENCE: Duration = Duration::from_secs(10);
/// Most connections of an open loop; arrivals beyond that queue, and their latency includes the wait.
const MAX_CONNECTIONS: usize = 512;

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// A fixed number of connections, each of which sends when its previous answer is complete.
    Closed { connections: usize },
    /// Random arrivals at this mean rate, independent of answers. Latency counts from the scheduled time.
    Open { per_second: f64, seed: u64 },
}

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) target: SocketAddr,
    /// Complete requests, and the ranges of their numbers.
    pub(crate) requests: Vec<(Vec<u8>, Range<usize>)>,
    /// The expected body of every answer.
    pub(crate) expected: Vec<u8>,
    pub(crate) arrivals: Arrivals,
    /// Number each request, so that no two are equal.
    pub(crate) fresh: bool,
    /// Requests sent during this time are not counted.
    pub(crate) warm_up: Duration,
    pub(crate) duration: Duration,
    /// Stops the measurement early.
    pub(crate) most_requests: u64,
}

/// Sends and measures; stops at the first wrong answer.
pub(crate) fn run(plan: &Plan) -> Result<Figures, BenchError> {
    Client::new(plan)?.run()
}

struct Client<'a> {
    plan: &'a Plan,
    poller: Poller,
    connections: Vec<Connection>,
    idle: Vec<usize>,
    /// Scheduled times of open-loop requests that still wait for a connection.
    due: VecDeque<Instant>,
    sent: u64,
    recorder: Recorder,
    begin: Instant,
    last_answer: Instant,
    buffer: Vec<u8>,
}

impl<'a> Client<'a> {
    fn new(plan: &'a Plan) -> Result<Self, BenchError> {
        let now = Instant::now();
        let mut client = Self {
            plan,
            poller: Poller::new()?,
            connections: Vec::new(),
            idle: Vec::new(),
            due: VecDeque::new(),
            sent: 0,
            recorder: Recorder::new(now + plan.warm_up, now + plan.warm_up + plan.duration),
            begin: now,
            last_answer: now,
            buffer: vec![0; 256 << 10],
        };
        if let Arrivals::Closed { connections } = plan.arrivals {
            for _ in 0..connections {
                client.open()?;
            }
        }
        Ok(client)
    }

    fn open(&mut self) -> Result<(), BenchError> {
        let connection = Connection::open(self.plan.target)?;
        self.poller.add(connection.socket(), self.connections.len() as u64)?;
        self.idle.push(self.connections.len());
        self.connections.push(connection);
        Ok(())
    }

    fn run(mut self) -> Result<Figures, BenchError> {
        let mut ready = Vec::new();
        let mut arrivals = Schedule::new(self.plan.arrivals, self.begin);
        loop {
            let now = Instant::now();
            let over = now >= self.recorder.end() || self.sent >= self.plan.most_requests;
            if !over {
                self.begin_requests(now, &mut arrivals)?;
            } else if self.idle.len() == self.connections.len() {
                return Ok(self.recorder.figures(self.sent, now));
            }
            if now.duration_since(self.last_answer) > SILENCE {
                let waiting = self.connections.len() - self.idle.len();
                return Err(BenchError::Silent { seconds: SILENCE.as_secs(), waiting });
            }
            let limit = if over { SILENCE } else { arrivals.wait(now).unwrap_or(SILENCE) };
            self.poller.wait(Some(limit), &mut ready)?;
            for key in ready.drain(..) {
                self.step(key as usize)?;
            }
        }
    }

    fn begin_requests(&mut self, now: Instant, arrivals: &mut Schedule) -> Result<(), BenchError> {
        match self.plan.arrivals {
            Arrivals::Closed { .. } => {
                while self.sent < self.plan.most_requests
                    && let Some(at) = self.idle.pop()
                {
                    self.send(at, now)?;
                }
            }
            Arrivals::Open { .. } => {
                arrivals.due(now, &mut self.due);
                if self.waiting() == 0 {
                    self.last_answer = now;
                }
                while self.sent < self.plan.most_requests
                    && let Some(scheduled) = self.due.pop_front()
                {
                    if self.idle.is_empty() && self.connections.len() < MAX_CONNECTIONS {
                        self.open()?;
                    }
                    let Some(at) = self.idle.pop() else {
                        self.due.push_front(scheduled);
                        break;
                    };
                    self.send(at, scheduled)?;
                }
            }
        }
        Ok(())
    }

    fn waiting(&self) -> usize {
        self.connections.len() - self.idle.len()
    }

    /// Sends the next request on connection `at`; its latency counts from `since`.
    fn send(&mut self, at: usize, since: Instant) -> Result<(), BenchError> {
        let (request, mark) = &self.plan.requests[(self.sent % self.plan.requests.len() as u64) as usize];
        let number = self.sent;
        self.sent += 1;
        let connection = &mut self.connections[at];
        connection.begin(number, since, request);
        if self.plan.fresh {
            connection.write_mark(mark.clone(), number);
        }
        if connection.is_closed() {
            // The server may close an idle connection.
            connection.reopen(self.plan.target)?;
            self.poller.add(connection.socket(), at as u64)?;
        }
        connection.flush()
    }

    fn step(&mut self, at: usize) -> Result<(), BenchError> {
        let connection = &mut self.connections[at];
        connection.flush()?;
        match connection.read(&mut self.buffer, &self.plan.expected)? {
            Step::Waits => {}
            Step::Done { since } => {
                let now = Instant::now();
                self.recorder.add(since, now);
                self.last_answer = now;
                // A closed loop sends at once, before the other connections are polled.
                let goes_on = matches!(self.plan.arrivals, Arrivals::Closed { .. })
                    && now < self.recorder.end()
                    && self.sent < self.plan.most_requests;
                if goes_on {
                    self.send(at, now)?;
                } else {
                    self.idle.push(at);
                }
            }
        }
        Ok(())
    }
}

/// The arrivals of an open loop.
struct Schedule {
    next: Option<Instant>,
    mean_gap_seconds: f64,
    random: fastrand::Rng,
}

impl Schedule {
    fn new(arrivals: Arrivals, begin: Instant) -> Self {
        let (next, mean_gap_seconds, seed) = match arrivals {
            Arrivals::Closed { .. } => (None, 0.0, 0),
            Arrivals::Open { per_second, seed } => (Some(begin), 1.0 / per_second.max(1e-3), seed),
        };
        Self { next, mean_gap_seconds, random: fastrand::Rng::with_seed(seed) }
    }

    /// Time until the next arrival; `None` in a closed loop.
    fn wait(&self, now: Instant) -> Option<Duration> {
        self.next.map(|next| next.saturating_duration_since(now))
    }

    /// Adds all arrivals due by now.
    fn due(&mut self, now: Instant, due: &mut VecDeque<Instant>) {
        while let Some(next) = self.next.filter(|next| *next <= now) {
            due.push_back(next);
            // Poisson arrivals: exponential gaps.
            let gap = -(1.0 - self.random.f64()).ln() * self.mean_gap_seconds;
            self.next = Some(next + Duration::from_secs_f64(gap));
        }
    }
}
