//! Several ranks in one process, each on its own thread; they share the process's signals, standard input and runtime.

use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};

use tokio::runtime::Handle;

use super::config::{WorkerConfig, WorkerEvent};
use super::error::WorkerError;
use super::{follower, front};

type Outcome = Result<(), WorkerError>;

/// Runs `count` consecutive ranks, starting with the configured one, until all have ended.
pub(super) fn run(config: &WorkerConfig, count: u16, runtime: &Handle) -> Outcome {
    let (mut running, mut rendezvous) = (Vec::new(), config.rendezvous);
    let mut ranks = config.rank..config.rank + count;
    if config.rank == 0 {
        let (front, bound) = with_address(config.clone());
        running.extend(ranks.next().map(|_| start(front, runtime)));
        // If binding failed, rank 0 has ended and reports the error.
        match bound.recv() {
            Ok(address) => rendezvous = address,
            Err(_) => ranks = 0..0,
        }
    }
    running.extend(ranks.map(|rank| start(WorkerConfig { rank, rendezvous, ..config.clone() }, runtime)));
    let outcomes = running.into_iter().map(|rank| rank.and_then(ended)).collect();
    outcome(outcomes)
}

/// Returns rank 0's configuration, and a receiver for the address that it binds.
fn with_address(mut config: WorkerConfig) -> (WorkerConfig, mpsc::Receiver<std::net::SocketAddr>) {
    let (sender, bound) = mpsc::channel();
    let announce = Arc::clone(&config.announce);
    config.announce = Arc::new(move |event| {
        announce(event);
        if let WorkerEvent::Bound { rendezvous } = event {
            // If the process was asked to stop, nothing is waiting for the address.
            let _ = sender.send(*rendezvous);
        }
    });
    (config, bound)
}

fn start(config: WorkerConfig, runtime: &Handle) -> Result<JoinHandle<Outcome>, WorkerError> {
    let (runtime, shutdown) = (runtime.clone(), config.shutdown.clone());
    let (name, failed) = (format!("control-of-{}", config.rank), shutdown.clone());
    let work = move || {
        let front = config.rank == 0;
        let outcome = if front { front::run(config, &runtime) } else { follower::run(config, &runtime) };
        // Stop all ranks: none can continue without rank 0 or with a rank that failed on its own.
        if front || outcome.as_ref().is_err_and(is_own) {
            shutdown.request();
        }
        outcome
    };
    Builder::new().name(name).spawn(work).map_err(|error| {
        failed.request();
        WorkerError::Runtime(error)
    })
}

fn ended(rank: JoinHandle<Outcome>) -> Outcome {
    rank.join().unwrap_or_else(|_| Err(WorkerError::Lost("a rank of this process panicked".to_owned())))
}

/// Whether a rank failed on its own rather than because of another rank.
fn is_own(error: &WorkerError) -> bool {
    !matches!(error, WorkerError::Lost(_) | WorkerError::Rendezvous(_))
}

/// Returns the outcome of the first rank that failed on its own, otherwise that of the first rank.
fn outcome(mut outcomes: Vec<Outcome>) -> Outcome {
    let own = outcomes.iter().position(|outcome| outcome.as_ref().is_err_and(is_own));
    outcomes.swap_remove(own.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::path::Path;

    use super::*;
    use crate::unit::Shutdown;

    /// Runs two ranks of the bundled model on CPUs, because several ranks in a process do not need a GPU.
    fn two(listen: SocketAddr) -> (mpsc::Receiver<WorkerEvent>, Shutdown, JoinHandle<Outcome>) {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"));
        let (sender, events) = mpsc::channel();
        let mut config = WorkerConfig::new(model.to_owned(), 0, 2, ([127, 0, 0, 1], 0).into());
        config.listen = Some(listen);
        config.announce = Arc::new(move |event| {
            let _ = sender.send(*event);
        });
        let shutdown = config.shutdown.clone();
        let work = move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            run(&config, 2, runtime.handle())
        };
        (events, shutdown, std::thread::spawn(work))
    }

    #[test]
    fn all_ranks_of_a_process_come_up_and_leave_together() {
        let (events, shutdown, process) = two(([127, 0, 0, 1], 0).into());
        let mut ready = Vec::new();
        assert!(matches!(events.recv().unwrap(), WorkerEvent::Bound { .. }));
        while ready.len() < 2 {
            let WorkerEvent::Ready { rank, http, .. } = events.recv().unwrap() else { panic!("bound twice") };
            assert_eq!(rank == 0, http.is_some());
            ready.push(rank);
        }
        assert_eq!(ready, [1, 0], "rank 0 is ready when all are");
        shutdown.request();
        process.join().unwrap().unwrap();
    }

    #[test]
    fn a_rank_0_that_cannot_begin_ends_the_process() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (events, _, process) = two(taken.local_addr().unwrap());
        assert!(matches!(process.join().unwrap(), Err(WorkerError::Listen { .. })));
        assert!(events.recv().is_err());
    }

    #[test]
    fn the_rank_that_failed_by_itself_is_the_process_outcome() {
        let lost = || Err(WorkerError::Lost("rank 1 was lost".to_owned()));
        let own = || Err(WorkerError::arguments("too little memory"));
        assert!(outcome(vec![Ok(()), Ok(())]).is_ok());
        assert_eq!(outcome(vec![lost(), own()]).unwrap_err().exit_code(), 2);
        assert_eq!(outcome(vec![lost(), Ok(())]).unwrap_err().exit_code(), 3);
    }
}
