//! Expert-parallel dispatch and combine, checked before any launch.

use semmoe_kernels::Dtype;

use crate::calls::{ELEMENT_ALIGNMENT, Rows, by_type, collective};
use crate::error::LaunchError;
use crate::launch::{Grid, Launch};
use crate::params::{CombineParams, DispatchParams, Local, MAX_LOCAL, PlanParams};
use crate::team::{Buffer, Team, in_range};

/// Maximum number of experts per token.
pub const MAX_TOP_K: u64 = 64;

/// Sends every token once to each rank that hosts one of its experts.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// L: n of each rank of the launch.
    pub tokens: &'a [u64],
    /// H
    pub hidden: u64,
    /// Element type of the rows.
    pub dtype: Dtype,
    /// k
    pub top_k: u64,
    /// N
    pub experts_in_all: u64,
    /// L x `[N]`; `None` if every rank has a part of each expert.
    pub rank_of_expert: Option<&'a [Buffer]>,
    /// L x `[n, H]`
    pub x: &'a [Buffer],
    /// L x `[n, k]` i32; -1 for an unused slot.
    pub experts: &'a [Buffer],
    /// L x `[n, k]` f32
    pub weights: &'a [Buffer],
    /// L x `[n, P]` i32, out: input of [`Combine`].
    pub sent_rows: &'a [Buffer],
    /// L x `[P + 1]` i32, out.
    pub source_offsets: &'a [Buffer],
    /// The memory for received rows.
    pub received: Received<'a>,
}

/// Each rank's memory for received rows, by rank.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Capacity of each rank's memory, in rows.
    pub capacity: u64,
    /// P x `[capacity, H]`
    pub rows: &'a [Buffer],
    /// P x `[capacity]` i32
    pub tokens: &'a [Buffer],
    /// P x `[capacity, k]` i32
    pub experts: &'a [Buffer],
    /// P x `[capacity, k]` f32
    pub weights: &'a [Buffer],
}

impl Dispatch<'_> {
    /// Returns the two launches, to be run in order on one stream: the plan in one block of `plan_threads`, then the
    /// exchange.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn launches(&self, team: &Team, grid: Grid, plan_threads: u32) -> Result<[Launch; 2], LaunchError> {
        let plan_grid = Grid { blocks: 1, threads: plan_threads }.check_sort()?;
        let plan = collective("semmoe_dispatch_plan", team, plan_grid, &self.plan(team)?)?;
        let kernel = if self.dtype.bytes() == 4 { "semmoe_dispatch_4" } else { "semmoe_dispatch_2" };
        let params = self.params(team)?;
        Ok([plan, collective(kernel, team, grid.check(team)?, &params)?])
    }

    /// L x `[n, k]`, 4 bytes each.
    fn slots(&self, what: &'static str, team: &Team, buffers: &[Buffer]) -> Result<Local, LaunchError> {
        team.locals(what, buffers, most(self.tokens).saturating_mul(self.top_k.saturating_mul(4)), 4)
    }

    fn plan(&self, team: &Team) -> Result<PlanParams, LaunchError> {
        let hosts_bytes = self.experts_in_all.saturating_mul(4);
        Ok(PlanParams {
            experts: self.slots("experts", team, self.experts)?,
            rank_of_expert: match self.rank_of_expert {
                Some(ranks) => team.locals("rank of expert", ranks, hosts_bytes, 4)?,
                None => [0; MAX_LOCAL],
            },
            places: sent_rows(team, self.tokens, self.sent_rows)?,
            signals: team.local_signals(),
            report: team.params().report,
            tokens: local_tokens(team, self.tokens)?,
            top_k: in_range("top-k", self.top_k, 1, MAX_TOP_K)?,
            experts_in_all: in_range("experts", self.experts_in_all, 1, i32::MAX as u64)?,
            ranks: team.ranks() as u32,
            padding: 0,
        })
    }

    fn params(&self, team: &Team) -> Result<DispatchParams, LaunchError> {
        let plan = self.plan(team)?;
        let Received { capacity, rows, tokens, experts, weights } = self.received;
        let all = Rows { tokens: most(self.tokens), hidden: self.hidden, dtype: self.dtype };
        let route_bytes = capacity.saturating_mul(self.top_k.saturating_mul(4));
        Ok(DispatchParams {
            team: team.params(),
            x: team.locals("x", self.x, all.bytes(), ELEMENT_ALIGNMENT)?,
            experts: plan.experts,
            weights: self.slots("weights", team, self.weights)?,
            rank_of_expert: plan.rank_of_expert,
            sent_rows: plan.places,
            source_offsets: team.locals("source offsets", self.source_offsets, (team.ranks() as u64 + 1) * 4, 4)?,
            rows: team.peers("received rows", rows, all.bytes_of(capacity), ELEMENT_ALIGNMENT)?,
            tokens: team.peers("received tokens", tokens, capacity.saturating_mul(4), 4)?,
            row_experts: team.peers("received experts", experts, route_bytes, 4)?,
            row_weights: team.peers("received weights", weights, route_bytes, 4)?,
            local_tokens: plan.tokens,
            hidden: in_range("hidden", self.hidden, 1, 1 << 20)?,
            top_k: plan.top_k,
            capacity: in_range("capacity", capacity, 0, i32::MAX as u64)?,
            padding: 0,
        })
    }
}

/// Returns the ranks' weighted sums to the tokens' owners, added in rank order.
#[derive(Clone, Copy, Debug)]
pub struct Combine<'a> {
    /// L: n of each rank of the launch.
    pub tokens: &'a [u64],
    /// H
    pub hidden: u64,
    /// Element type of the rows.
    pub dtype: Dtype,
    /// Number of rows in each of `sums`.
    pub capacity: u64,
    /// P x `[capacity, H]`
    pub sums: &'a [Buffer],
    /// L x `[n, P]` i32, from [`Dispatch`].
    pub sent_rows: &'a [Buffer],
    /// L x `[n, H]`
    pub out: &'a [Buffer],
}

impl Combine<'_> {
    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self, team: &Team, grid: Grid) -> Result<Launch, LaunchError> {
        let all = Rows { tokens: most(self.tokens), hidden: self.hidden, dtype: self.dtype };
        let params = CombineParams {
            team: team.params(),
            sums: team.peers("sums", self.sums, all.bytes_of(self.capacity), ELEMENT_ALIGNMENT)?,
            sent_rows: sent_rows(team, self.tokens, self.sent_rows)?,
            out: team.locals("out", self.out, all.bytes(), ELEMENT_ALIGNMENT)?,
            local_tokens: local_tokens(team, self.tokens)?,
            hidden: in_range("hidden", self.hidden, 1, 1 << 20)?,
            capacity: in_range("capacity", self.capacity, 0, i32::MAX as u64)?,
        };
        let kernel = by_type(self.dtype, ["semmoe_combine_f32", "semmoe_combine_f16", "semmoe_combine_bf16"]);
        collective(kernel, team, grid.check(team)?, &params)
    }
}

/// Returns the maximum number of tokens, for which the buffers of all ranks of a launch are sized.
fn most(tokens: &[u64]) -> u64 {
    tokens.iter().copied().max().unwrap_or(0)
}

/// L x `[n, P]`, 4 bytes each.
fn sent_rows(team: &Team, tokens: &[u64], buffers: &[Buffer]) -> Result<Local, LaunchError> {
    team.locals("sent rows", buffers, most(tokens).saturating_mul(team.ranks() as u64 * 4), 4)
}

fn local_tokens(team: &Team, tokens: &[u64]) -> Result<[u32; MAX_LOCAL], LaunchError> {
    team.counts("tokens", tokens, i32::MAX as u64 / team.ranks() as u64)
}
