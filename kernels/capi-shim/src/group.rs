//! Ranks meet here: the last one to launch runs the kernels of all.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use capi::plug::RankFacts;
use semmoe_kernels_cuda::Launch;
use semmoe_kernels_shim::{Compiler, Mutant, Sanitize, Shim, Step};

/// The most that a rank waits for the others to launch. Far above what a test needs: a defect of the test is then an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// The kernels, built at the first use.
pub(crate) fn shim() -> Result<&'static Shim, String> {
    static SHIM: OnceLock<Result<Shim, String>> = OnceLock::new();
    let build = || {
        let compiler = Compiler::find().ok_or("the CUDA kernels need a C++ compiler here: c++, g++ or clang++")?;
        Shim::build(&compiler, Sanitize::No).map_err(|error| error.to_string())
    };
    SHIM.get_or_init(build).as_ref().map_err(Clone::clone)
}

/// Runs one stream per rank to the end. A kernel that traps is no error: its report tells why.
pub(crate) fn run(streams: &[Vec<Launch>], seed: u64) -> Result<(), String> {
    let steps: Vec<Vec<Step<'_>>> =
        streams.iter().map(|launches| launches.iter().map(Step::Launch).collect()).collect();
    // SAFETY: all ranks are inside their calls, or gone: the memory that their arguments name is theirs to give until they return.
    unsafe { shim()?.run(&steps, seed, Mutant::None) }.map(|_| ()).map_err(|error| error.to_string())
}

/// The ranks of one set of signals.
pub(crate) struct Group {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

struct Meeting {
    ranks: Vec<Presence>,
    /// Rounds that ran.
    round: u64,
    /// How the last one ended.
    ended: Result<(), String>,
}

enum Presence {
    /// Not there yet, or between calls.
    Away,
    Launched(Vec<Launch>),
    Left,
}

impl Meeting {
    fn complete(&self) -> bool {
        !self.ranks.iter().any(|rank| matches!(rank, Presence::Away))
    }

    fn run(&mut self) {
        let take = |rank: &mut Presence| match std::mem::replace(rank, Presence::Away) {
            Presence::Launched(launches) => launches,
            Presence::Left => {
                *rank = Presence::Left;
                Vec::new()
            }
            Presence::Away => Vec::new(),
        };
        let streams: Vec<Vec<Launch>> = self.ranks.iter_mut().map(take).collect();
        self.round += 1;
        self.ended = run(&streams, self.round);
    }
}

impl Group {
    /// Finds or makes the group of these signals.
    pub(crate) fn join(facts: &RankFacts) -> Result<Arc<Self>, String> {
        static GROUPS: Mutex<BTreeMap<usize, Weak<Group>>> = Mutex::new(BTreeMap::new());
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.strong_count() > 0);
        let found = groups.get(&facts.group).and_then(Weak::upgrade).unwrap_or_else(|| {
            let ranks = (0..facts.world).map(|_| Presence::Away).collect();
            let meeting = Mutex::new(Meeting { ranks, round: 0, ended: Ok(()) });
            Arc::new(Self { meeting, changed: Condvar::new() })
        });
        groups.insert(facts.group, Arc::downgrade(&found));
        let mut meeting = found.lock();
        let ranks = meeting.ranks.len();
        if ranks != facts.world {
            return Err(format!("the group has {ranks} ranks, found {}", facts.world));
        }
        // It may have left before.
        meeting.ranks[facts.rank] = Presence::Away;
        drop(meeting);
        Ok(found)
    }

    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the launches of all ranks that have not left; returns when the kernels ended.
    pub(crate) fn launch(&self, rank: usize, launches: &[Launch]) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        let mut meeting = self.lock();
        meeting.ranks[rank] = Presence::Launched(launches.to_vec());
        let mine = meeting.round;
        loop {
            if meeting.round != mine {
                return meeting.ended.clone();
            }
            if meeting.complete() {
                meeting.run();
                self.changed.notify_all();
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                meeting.ranks[rank] = Presence::Away;
                return Err(format!("not all ranks launched within {} s", PATIENCE.as_secs()));
            }
            meeting = self.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The rank is missing from now on.
    pub(crate) fn leave(&self, rank: usize) {
        self.lock().ranks[rank] = Presence::Left;
        self.changed.notify_all();
    }
}
