//! Routing policies, prices and load accounts: pure.
//!
//! The crate decides on which attention-DP rank a request should run (paper section 3.3, Algorithm 2; see
//! [`affinity`] for what differs and why). It holds no clock, no sockets and no randomness, so that the gateway, the
//! offline evaluation and simulations share one implementation and one behaviour.
//!
//! * [`Policy`]: reads a [`Request`] and the [`RankLoad`]s, returns a [`Choice`]; choosing has no side effects.
//! * [`Accounts`]: what changes when a choice is carried out: tokens in flight, recent tokens, online prices.
//! * [`policy`], [`policy_with`] and [`NAMES`]: the one registry of policies by name.
//! * [`Settings`]: the few numbers that steer them, with their measured defaults.
//!
//! A caller loops over three calls:
//!
//! ```
//! use semmoe_routing::{Accounts, Request, Settings, policy_with};
//!
//! let settings = Settings::default();
//! let affinity = policy_with("affinity", &settings)?;
//! let mut accounts = Accounts::new(4, &[], &settings);
//!
//! let share = [0.2, 0.5, 0.2, 0.1]; // mean of the prompt's rows of T
//! let request = Request { tokens: 120, share: Some(&share) };
//! let sequence = 0; // counts the requests
//! let choice = affinity.choose(&request, accounts.loads(), accounts.prices(), sequence).expect("a rank is available");
//! accounts.assign(choice.rank, request.tokens);
//! // ... the request runs ...
//! accounts.release(choice.rank, request.tokens);
//! assert_eq!(choice.rank, 1);
//! # Ok::<(), semmoe_routing::UnknownPolicy>(())
//! ```

mod accounts;
pub mod affinity;
pub mod affinity_paper;
pub mod load_only;
mod policy;
mod registry;
mod round_robin;
mod settings;

pub use accounts::Accounts;
pub use affinity::Affinity;
pub use affinity_paper::AffinityPaper;
pub use load_only::{LeastLoad, PowerOfTwo, Random};
pub use policy::{Choice, Policy, RankLoad, Request};
pub use registry::{NAMES, UnknownPolicy, policy, policy_with};
pub use round_robin::RoundRobin;
pub use settings::{Settings, SettingsError};
