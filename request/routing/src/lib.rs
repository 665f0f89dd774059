//! Routing policies, prices, load accounts and estimated prefix caches, without I/O.
//!
//! The crate decides which attention-DP rank should run a request (paper section 3.3, Algorithm 2;
//! [`policies::affinity`] explains the differences). It uses no clock, sockets or randomness, so the gateway, the
//! offline evaluation and simulations share one implementation and behave identically.
//!
//! * [`Policy`]: reads a [`Request`] and the [`RankLoad`]s, returns a [`Choice`]; choosing has no side effects.
//! * [`cost`]: the cost that `affinity` and `prefix` minimise.
//! * [`Accounts`]: the state updated as requests are assigned: tokens in flight, recent tokens, online prices.
//! * [`PrefixTable`]: the prompt blocks that each rank is estimated to cache, identified by [`block_hashes`].
//! * [`Router`]: accounts and prefix table combined, for callers that map a prompt to a rank.
//! * [`policy`], [`policy_with`] and [`NAMES`]: the policy registry.
//! * [`Comparison`] and [`Canary`]: ways to try a policy before trusting it.
//! * [`Settings`]: the parameters of policies and accounts, with defaults chosen by measurement.
//!
//! A caller makes three calls for each request:
//!
//! ```
//! use semmoe_routing::{PrefixSettings, Prompt, Router, Scratch, Settings, block_hashes, policy_with};
//!
//! let (settings, prefix) = (Settings::default(), PrefixSettings::default());
//! let affinity = policy_with("affinity", &settings)?;
//! let router = Router::new(4, &[], &settings, &prefix);
//! let mut scratch = Scratch::default();
//!
//! let ids: Vec<u32> = (0..120).collect(); // the prompt
//! let share = [0.2, 0.5, 0.2, 0.1]; // mean of its rows of T
//! let mut blocks = Vec::new();
//! block_hashes(&ids, prefix.block_tokens, &mut blocks);
//! let prompt = Prompt { tokens: 120, share: Some(&share), blocks: &blocks, ..Prompt::default() };
//! let sequence = 0; // counts the requests
//! let decision = router.decide(affinity.as_ref(), &prompt, sequence, None, &mut scratch);
//! let decision = decision.expect("a rank is available");
//! router.assign(&decision, &blocks, true);
//! // ... the request runs ...
//! router.accounts().release(decision.choice.rank, decision.work);
//! assert_eq!(decision.choice.rank, 1);
//! # Ok::<(), semmoe_routing::PolicyError>(())
//! ```

pub mod accounts;
mod canary;
mod comparison;
pub mod cost;
mod hash;
pub mod policies;
mod policy;
pub mod prefix_table;
mod router;
mod settings;

pub use accounts::{Accounts, TablePrice, Work};
pub use canary::Canary;
pub use comparison::{Comparison, Report, ReportSide};
pub use cost::{Cap, Cost, CostParts, Costs};
pub use hash::hash_key;
pub use policies::{Affinity, NAMES, PolicyError, RoundRobin, policy, policy_with};
pub use policy::{Choice, Needs, Policy, RankLoad, Request};
pub use prefix_table::{PrefixSettings, PrefixTable, block_hashes};
pub use router::{Decision, Prompt, Router, Scratch};
pub use settings::{Settings, SettingsError};

/// The README, included so that its example runs as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
