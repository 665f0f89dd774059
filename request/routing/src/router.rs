//! Accounts and prefix table combined: routes a prompt to a rank, and reverses the assignment if the engine refuses it.

use crate::accounts::{Accounts, TablePrice, Work};
use crate::hash::scramble;
use crate::policy::{Choice, Policy, RankLoad, Request};
use crate::prefix_table::{PrefixSettings, PrefixTable};
use crate::settings::Settings;

/// The known properties of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prompt<'a> {
    /// Number of tokens. Zero counts as one.
    pub tokens: u64,
    /// Maximum number of generated tokens, if the client set a limit.
    pub most_output: Option<u64>,
    /// Number of sequences (`n` in the OpenAI API). Zero counts as one.
    pub sequences: u32,
    /// Expected local share per rank, as in [`Request::share`].
    pub share: Option<&'a [f64]>,
    /// Hashes of the prompt's full blocks, from [`block_hashes`](crate::block_hashes); empty if unknown.
    pub blocks: &'a [u64],
    /// Hash of the session name.
    pub key: Option<u64>,
    /// Whether the caller will report that the prompt has been computed ([`Accounts::computed`]). If so, the prompt
    /// counts as backlog until that report; otherwise it never does.
    pub reports: bool,
}

/// Salt that keeps session hashes distinct from block hashes.
const SESSION: u64 = 0x5e55_1011;

/// Reusable scratch space for a decision.
#[derive(Debug, Default)]
pub struct Scratch {
    loads: Vec<RankLoad>,
    cached: Vec<u64>,
    session: Vec<u64>,
}

/// The chosen rank, the inputs to the choice, and the load that the request adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The policy's answer.
    pub choice: Choice,
    /// The load that the request adds to that rank.
    pub work: Work,
    /// Leading prompt tokens that the rank is estimated to have cached; `None` if the policy does not use the estimate.
    pub cached: Option<u64>,
    /// The session's pseudo-block in the estimated prefix caches; `None` if the policy does not use them or there is no
    /// session.
    pub session: Option<u64>,
}

/// Routes requests to the ranks of one model and maintains the state that decisions depend on. Can be shared between
/// threads.
#[derive(Debug)]
pub struct Router {
    accounts: Accounts,
    prefixes: Option<PrefixTable>,
}

impl Router {
    /// Creates a router with idle ranks; see [`Accounts::new`] and [`PrefixTable::new`].
    pub fn new(ranks: u16, table_prices: &[TablePrice], settings: &Settings, prefix: &PrefixSettings) -> Self {
        Router { accounts: Accounts::new(ranks, table_prices, settings), prefixes: PrefixTable::new(ranks, prefix) }
    }

    /// Creates a router for a new set of ranks that continues from this one: see [`Accounts::succeed`] and
    /// [`PrefixTable::succeed`].
    pub fn succeed(
        &self,
        from: &[Option<u16>],
        table_prices: &[TablePrice],
        settings: &Settings,
        prefix: &PrefixSettings,
    ) -> Self {
        self.next(self.accounts.succeed(from, table_prices, settings), from, prefix)
    }

    /// Creates a router for the same ranks that decides alongside this one, as a shadow policy does: it starts from
    /// this router's state, but counts requests independently. See [`Accounts::fork`].
    pub fn fork(
        &self,
        from: &[Option<u16>],
        table_prices: &[TablePrice],
        settings: &Settings,
        prefix: &PrefixSettings,
    ) -> Self {
        self.next(self.accounts.fork(from, table_prices, settings), from, prefix)
    }

    fn next(&self, accounts: Accounts, from: &[Option<u16>], prefix: &PrefixSettings) -> Self {
        Router { accounts, prefixes: PrefixTable::succeed(self.prefixes.as_ref(), from, prefix) }
    }

    /// Groups the router's ranks into units of these sizes; see [`Accounts::in_units`].
    #[must_use]
    pub fn in_units(self, sizes: &[u16]) -> Self {
        Router { accounts: self.accounts.in_units(sizes), ..self }
    }

    /// Loads and prices.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Returns the estimated prefix caches; `None` if they are disabled.
    pub fn prefixes(&self) -> Option<&PrefixTable> {
        self.prefixes.as_ref()
    }

    /// Lets a policy choose among the available ranks that `admit` accepts. Takes no lock, and allocates nothing once
    /// `scratch` has room for all ranks.
    pub fn decide(
        &self,
        policy: &dyn Policy,
        prompt: &Prompt<'_>,
        sequence: u64,
        admit: Option<&dyn Fn(u16) -> bool>,
        scratch: &mut Scratch,
    ) -> Option<Decision> {
        self.accounts.read(&mut scratch.loads);
        if let Some(admit) = admit {
            for (rank, load) in (0..).zip(&mut scratch.loads) {
                load.available &= admit(rank);
            }
        }
        let Prompt { tokens, sequences, share, key, .. } = *prompt;
        let prefixes = self.prefixes.as_ref().filter(|_| policy.needs().cached);
        let session = prefixes.and(key).map(|key| scramble(key ^ SESSION));
        let looked_up = session.is_some() || !prompt.blocks.is_empty();
        let mut settled = false;
        let cached = prefixes.filter(|_| looked_up).map(|prefixes| {
            scratch.cached.resize(self.accounts.ranks(), 0);
            prefixes.cached(prompt.blocks, &mut scratch.cached);
            if let Some(session) = session {
                scratch.session.resize(self.accounts.ranks(), 0);
                prefixes.cached(&[session], &mut scratch.session);
                for (cached, block) in scratch.cached.iter_mut().zip(&scratch.session) {
                    settled |= *block > 0;
                    *cached = (*block).min(tokens).max(*cached);
                }
            }
            &scratch.cached[..]
        });
        let output = self.accounts.expected_output(prompt.most_output);
        let request = Request { tokens, output, sequences, share, cached, key, settled };
        let choice = policy.choose(&request, &scratch.loads, sequence)?;
        let rank = usize::from(choice.rank);
        let pending = if prompt.reports { request.uncached(rank, scratch.loads.len()) } else { 0 };
        let cached = cached.map(|cached| cached[rank].min(tokens.saturating_sub(1)));
        let work = Work { tokens, pending, output: u32::try_from(output).unwrap_or(u32::MAX), sequences };
        Some(Decision { choice, work, cached, session })
    }

    /// Adds a decision to the accounts, and records that its rank will cache the prompt. `remember` is false for ranks
    /// whose engine has no prefix cache. Returns how many of the prompt's blocks are new to the rank's estimated cache.
    pub fn assign(&self, decision: &Decision, blocks: &[u64], remember: bool) -> usize {
        let rank = decision.choice.rank;
        self.accounts.assign(rank, decision.work);
        let Some(prefixes) = self.prefixes.as_ref().filter(|_| remember) else { return 0 };
        if let Some(session) = decision.session {
            prefixes.record(rank, &[session]);
        }
        if blocks.is_empty() { 0 } else { prefixes.record(rank, blocks).unwrap_or(0) }
    }

    /// Reverses an [`assign`](Self::assign) that added this `work` and `new` blocks, because the engine refused the
    /// request and so neither computed nor cached its prompt.
    pub fn take_back(&self, rank: u16, work: Work, blocks: &[u64], new: usize) {
        self.accounts.take_back(rank, work);
        if let Some(prefixes) = self.prefixes.as_ref().filter(|_| new > 0) {
            prefixes.take_back(rank, blocks, new);
        }
    }
}
