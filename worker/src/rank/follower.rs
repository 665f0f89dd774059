//! Ranks other than rank 0, which execute rank 0's commands.

use std::time::Duration;

use semmoe_tables::RankId;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::config::{WorkerConfig, WorkerEvent};
use super::error::WorkerError;
use super::prepare::prepare;
use super::start;
use crate::control::link::{self, LinkSender};
use crate::control::message::{FromRank, ToRank};
use crate::control::{Patience, join};
use crate::engine::EngineEnd;
use crate::unit::{Lost, Shutdown};

/// Time limit for rank 0 to report which rank was lost first, after this rank has reported a loss.
const VERDICT_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for rank 0 to release this rank after it has left its loop, on top of the grace period.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

/// An event that a follower reacts to.
enum Notice {
    /// The engine's thread has ended.
    Engine(Result<EngineEnd, Lost>),
    /// Rank 0 has declared the unit failed.
    Aborted(String),
    /// The control link has ended.
    Closed(String),
}

pub(super) fn run(config: WorkerConfig, runtime: &Handle) -> Result<(), WorkerError> {
    let prepared = prepare(&config)?;
    let rank = RankId::new(config.rank);
    let patience = Patience::new(config.rendezvous_timeout, &config.shutdown);
    let (kv_pages, secret) = (prepared.limits.kv_pages, config.secret.as_ref());
    let joined = join(config.location(), rank, &prepared.identity, kv_pages, secret, &patience)?;
    let connected = start::connect(&config, &prepared, joined.ends)?;

    let (notify, notices) = mpsc::unbounded_channel();
    let (inbox, notice) = (connected.inbox.clone(), notify.clone());
    let link = link::start::<FromRank, ToRank>("control", joined.control, move |order| match order {
        Ok(order) => {
            // The engine cannot handle an abort, because it may be waiting for a lost rank.
            if let ToRank::Abort { cause } = &order {
                drop(notice.send(Notice::Aborted(cause.clone())));
            }
            inbox.send(order);
        }
        Err(end) => drop(notice.send(Notice::Closed(end.to_string()))),
    })
    .map_err(WorkerError::Runtime)?;

    let mut state =
        Follower { rank, link, notices, shutdown: config.shutdown.clone(), grace: config.grace, leaving: false };
    // The engine is kept alive until this function returns, because peers may still be finishing a step.
    let (sink, ended) = (state.link.clone(), move |end| drop(notify.send(Notice::Engine(end))));
    let emit = Box::new(move |message| sink.send(message));
    let _engine = match connected.start(&config, &prepared, joined.limits, emit, ended) {
        Ok(engine) => engine,
        Err(error) => {
            let cause = format!("rank {rank} was lost: it could not start: {error}");
            runtime.block_on(state.verdict(Lost { rank, cause }));
            return Err(error);
        }
    };
    (config.announce)(&WorkerEvent::Ready { rank: config.rank, pid: std::process::id(), http: None });
    state.link.send(FromRank::Ready);
    runtime.block_on(state.supervise())
}

struct Follower {
    rank: RankId,
    link: LinkSender<FromRank>,
    notices: mpsc::UnboundedReceiver<Notice>,
    shutdown: Shutdown,
    grace: Duration,
    /// Whether this process is stopping, so that it succeeds however it ends from now on.
    leaving: bool,
}

impl Follower {
    async fn supervise(&mut self) -> Result<(), WorkerError> {
        let mut deadline: Option<Instant> = None;
        loop {
            tokio::select! {
                notice = self.notices.recv() => match notice {
                    Some(Notice::Engine(Ok(EngineEnd::Stopped))) => {
                        self.leaving = true;
                        deadline.get_or_insert_with(|| Instant::now() + RELEASE_LIMIT);
                        self.link.send(FromRank::Stopped);
                    }
                    Some(_) if self.leaving => return Ok(()),
                    // The cause of the abort arrives in its own notice.
                    Some(Notice::Engine(Ok(EngineEnd::Aborted))) => {}
                    Some(Notice::Aborted(cause)) => return Err(WorkerError::Lost(cause)),
                    Some(Notice::Engine(Err(lost))) => {
                        let cause = self.verdict(lost).await;
                        return Err(WorkerError::Lost(cause));
                    }
                    Some(Notice::Closed(cause)) => return Err(WorkerError::Lost(front_lost(&cause))),
                    // The engine's thread keeps a sender as long as it runs.
                    None => return Err(WorkerError::Lost(format!("rank {} was lost: its engine has exited", self.rank))),
                },
                () = self.shutdown.requested(), if !self.leaving => {
                    self.leaving = true;
                    deadline = Some(Instant::now() + self.grace + RELEASE_LIMIT);
                    self.link.send(FromRank::Leaving);
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => return Ok(()),
            }
        }
    }

    /// Reports a loss to rank 0 and waits for its verdict on which rank was lost first. After a loss, all ranks exit,
    /// and ranks that exit later must not be blamed.
    async fn verdict(&mut self, lost: Lost) -> String {
        self.link.send(FromRank::Fatal { lost: lost.rank.get(), cause: lost.cause.clone() });
        let heard = async {
            loop {
                match self.notices.recv().await {
                    Some(Notice::Aborted(cause)) => return cause,
                    Some(Notice::Closed(cause)) => return front_lost(&cause),
                    Some(Notice::Engine(_)) => {}
                    None => std::future::pending().await,
                }
            }
        };
        timeout(VERDICT_LIMIT, heard).await.unwrap_or(lost.cause)
    }
}

fn front_lost(cause: &str) -> String {
    format!("rank 0 was lost: {cause}")
}
