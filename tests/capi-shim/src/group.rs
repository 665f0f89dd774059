//! The ranks that share one set of signals, and the kernels that they run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use capi::plug::RankFacts;
use semmoe_kernels_cuda::Launch;
use semmoe_kernels_shim::{Compiler, Group, Mutant, Shim, Step};

/// Ranks that launch together.
pub(crate) type Launches = Group<Vec<Launch>>;

/// The kernels, built at the first use.
pub(crate) fn shim() -> Result<&'static Shim, String> {
    static SHIM: OnceLock<Result<Shim, String>> = OnceLock::new();
    let build = || {
        let compiler = Compiler::find().ok_or("the CUDA kernels need a C++ compiler here: c++, g++ or clang++")?;
        Shim::build(&compiler).map_err(|error| error.to_string())
    };
    SHIM.get_or_init(build).as_ref().map_err(Clone::clone)
}

/// Runs one stream per rank to completion. A trapped kernel is not an error here: its report has the reason.
pub(crate) fn run(streams: &[Vec<Launch>], seed: u64) -> Result<(), String> {
    let steps: Vec<Vec<Step<'_>>> =
        streams.iter().map(|launches| launches.iter().map(Step::Launch).collect()).collect();
    // SAFETY: every rank is inside a call or freed, so the memory in its arguments is not used otherwise until the
    // calls return.
    unsafe { shim()?.run(&steps, seed, Mutant::None) }.map(|_| ()).map_err(|error| error.to_string())
}

/// Finds or creates the group of these signals.
pub(crate) fn join(facts: &RankFacts) -> Result<Arc<Launches>, String> {
    static GROUPS: Mutex<BTreeMap<usize, Weak<Launches>>> = Mutex::new(BTreeMap::new());
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|_, group| group.strong_count() > 0);
    let found = groups.get(&facts.group).and_then(Weak::upgrade).unwrap_or_else(|| {
        let run = |streams: Vec<Option<Vec<Launch>>>, round| {
            run(&streams.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>(), round)
        };
        Arc::new(Group::new(facts.world, run))
    });
    groups.insert(facts.group, Arc::downgrade(&found));
    match found.ranks() {
        ranks if ranks == facts.world => {
            // It may have left before.
            found.enter(facts.rank);
            Ok(found)
        }
        ranks => Err(format!("the group has {ranks} ranks, found {}", facts.world)),
    }
}
