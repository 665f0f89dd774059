//! Accounts and prefix table together: one decision from a prompt to a rank, and back.

use crate::accounts::{Accounts, TablePrice, Work};
use crate::hash::scramble;
use crate::policy::{Choice, Policy, RankLoad, Request};
use crate::prefix_table::{PrefixSettings, PrefixTable};
use crate::settings::Settings;

/// Knowledge about a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prompt<'a> {
    /// Its tokens. Zero counts as one.
    pub tokens: u64,
    /// The most tokens that it may generate, where the client set a limit.
    pub most_output: Option<u64>,
    /// Sequences that it runs as, `n` of the OpenAI routes. Zero counts as one.
    pub sequences: u32,
    /// Expected local share per rank, as in [`Request::share`].
    pub share: Option<&'a [f64]>,
    /// Names of its whole blocks, as [`block_hashes`](crate::block_hashes) gives them; empty where they are not known.
    pub blocks: &'a [u64],
    /// Hash of the session's name.
    pub key: Option<u64>,
    /// Whether the caller will report that the prompt has been computed ([`Accounts::computed`]), so that it can count
    /// as backlog until then. Otherwise it never does.
    pub reports: bool,
}

/// Keeps the names of sessions apart from those of blocks.
const SESSION: u64 = 0x5e55_1011;

/// Room for one decision, reused from one to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    loads: Vec<RankLoad>,
    cached: Vec<u64>,
    session: Vec<u64>,
}

/// A rank, why, and what the request adds to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The policy's answer.
    pub choice: Choice,
    /// The load it adds to that rank.
    pub work: Work,
    /// Leading tokens that the rank is believed to hold; `None` where no policy reads it.
    pub cached: Option<u64>,
    /// The session, as a block of its own in the believed prefix caches; `None` where no policy reads them.
    pub session: Option<u64>,
}

/// The ranks of one model: decides, and keeps what decisions read. Shared between threads as it is.
#[derive(Debug)]
pub struct Router {
    accounts: Accounts,
    prefixes: Option<PrefixTable>,
}

impl Router {
    /// Idle ranks; see [`Accounts::new`] and [`PrefixTable::new`].
    pub fn new(ranks: u16, table_prices: &[TablePrice], settings: &Settings, prefix: &PrefixSettings) -> Self {
        Router { accounts: Accounts::new(ranks, table_prices, settings), prefixes: PrefixTable::new(ranks, prefix) }
    }

    /// A router of other ranks that goes on from this one: see [`Accounts::succeed`] and [`PrefixTable::succeed`].
    pub fn succeed(
        &self,
        from: &[Option<u16>],
        table_prices: &[TablePrice],
        settings: &Settings,
        prefix: &PrefixSettings,
    ) -> Self {
        self.next(self.accounts.succeed(from, table_prices, settings), from, prefix)
    }

    /// A router of the same ranks that decides beside this one, as a shadow does: it knows what this one knows, but
    /// counts requests for itself. See [`Accounts::fork`].
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

    /// The same, with ranks that run as units of these sizes; see [`Accounts::in_units`].
    #[must_use]
    pub fn in_units(self, sizes: &[u16]) -> Self {
        Router { accounts: self.accounts.in_units(sizes), ..self }
    }

    /// Loads and prices.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// The believed prefix caches; `None` where none are kept.
    pub fn prefixes(&self) -> Option<&PrefixTable> {
        self.prefixes.as_ref()
    }

    /// Lets a policy choose among the available ranks that `admit` lets pass. Takes no lock, and allocates nothing once
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

    /// Counts a decision in, and notes that its rank will hold the prompt. `remember` is false for ranks whose engine
    /// keeps no prefixes. Returns how many of the prompt's blocks the rank is not believed to have held before.
    pub fn assign(&self, decision: &Decision, blocks: &[u64], remember: bool) -> usize {
        let rank = decision.choice.rank;
        self.accounts.assign(rank, decision.work);
        let Some(prefixes) = self.prefixes.as_ref().filter(|_| remember) else { return 0 };
        if let Some(session) = decision.session {
            prefixes.record(rank, &[session]);
        }
        if blocks.is_empty() { 0 } else { prefixes.record(rank, blocks).unwrap_or(0) }
    }

    /// The engine refused a request that [`assign`](Self::assign) counted in with this `work` and found `new` blocks
    /// of: the rank neither computed nor holds it.
    pub fn take_back(&self, rank: u16, work: Work, blocks: &[u64], new: usize) {
        self.accounts.take_back(rank, work);
        if let Some(prefixes) = self.prefixes.as_ref().filter(|_| new > 0) {
            prefixes.take_back(rank, blocks, new);
        }
    }
}
