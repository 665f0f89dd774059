//! Routing: the choice of experts.

use super::params::RouteParams;
use super::{address, address_or_null, apart, bytes_of};
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::team::{Buffer, in_range};

/// Maximum number of experts from which a router chooses.
pub const MAX_EXPERTS: u64 = 1024;
/// Maximum number of experts per row, one per lane of a warp.
pub const MAX_CHOSEN: u64 = 32;
/// Maximum number of expert groups, one per lane of a warp.
pub const MAX_GROUPS: u64 = 32;
/// Threads per block, one warp per row (`ROUTE_THREADS`).
const ROUTE_THREADS: u32 = 128;

/// How logits are converted to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid.
    Sigmoid,
}

/// How a group of experts is scored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupScore {
    /// By the best expert's score.
    Best,
    /// By the sum of the two best experts' scores.
    TwoBest,
}

/// Restricts the choice to the best groups of experts. Groups are ranges of ids of equal size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupLimit {
    /// Number of groups, which must divide the number of experts.
    pub groups: u64,
    /// Number of groups to choose from; together they must have at least as many experts as are chosen.
    pub kept: u64,
    /// How groups are scored.
    pub by: GroupScore,
}

/// Chooses each row's experts with the highest scores, equal ones by ascending id, and computes their weights. NaN
/// loses to every number.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// `[rows, num_experts]` f32
    pub logits: Buffer,
    /// `[num_experts]` f32, added to sigmoid scores, only for the choice
    pub correction: Option<Buffer>,
    /// How logits are converted to scores.
    pub scoring: Scoring,
    /// Whether a row's weights are normalised to sum to 1 before they are scaled.
    pub normalise: bool,
    /// Factor applied to every weight.
    pub scale: f32,
    /// Restricts the choice to some expert groups.
    pub groups: Option<GroupLimit>,
    /// `[rows, top_k]` u16, highest score first
    pub experts: Buffer,
    /// `[rows, top_k]` f32
    pub weights: Buffer,
    /// `[rows, top_k]` i32: the experts in the form that [`Dispatch`](crate::Dispatch) reads.
    pub ids: Option<Buffer>,
    /// Rows.
    pub rows: u64,
    /// Number of experts.
    pub num_experts: u64,
    /// Experts per row.
    pub top_k: u64,
}

impl Route {
    fn check_groups(&self) -> Result<[u32; 2], LaunchError> {
        let Some(limit) = self.groups else { return Ok([0; 2]) };
        let groups = in_range("groups of experts", limit.groups, 1, self.num_experts.min(MAX_GROUPS))?;
        in_range("experts modulo the number of groups", self.num_experts % limit.groups, 0, 0)?;
        let least = self.top_k.div_ceil(self.num_experts / limit.groups);
        Ok([groups, in_range("groups kept", limit.kept, least, limit.groups)?])
    }

    /// # Errors
    /// See [`LaunchError`]; also if a softmax has a correction.
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let num_experts = in_range("experts", self.num_experts, 1, MAX_EXPERTS)?;
        let top_k = in_range("experts per token", self.top_k, 1, self.num_experts.min(MAX_CHOSEN))?;
        let corrected = u64::from(self.correction.is_some() && self.scoring == Scoring::Softmax);
        in_range("number of softmax corrections", corrected, 0, 0)?;
        let [groups, kept] = self.check_groups()?;
        let chosen = bytes_of(&[self.rows, self.top_k]);
        let params = RouteParams {
            logits: address("logits", self.logits, bytes_of(&[self.rows, self.num_experts, 4]), 4)?,
            correction: address_or_null("correction", self.correction, self.num_experts * 4, 4)?,
            experts: address("experts", self.experts, bytes_of(&[chosen, 2]), 2)?,
            weights: address("weights", self.weights, bytes_of(&[chosen, 4]), 4)?,
            ids: address_or_null("ids", self.ids, bytes_of(&[chosen, 4]), 4)?,
            rows: in_range("rows", self.rows, 0, i32::MAX as u64)?,
            num_experts,
            top_k,
            groups,
            kept,
            two_best: u32::from(self.groups.is_some_and(|limit| limit.by == GroupScore::TwoBest)),
            sigmoid: u32::from(self.scoring == Scoring::Sigmoid),
            normalise: u32::from(self.normalise),
            scale: self.scale,
            padding: 0,
        };
        let kernel = match num_experts {
            0..=128 => "semmoe_route_128",
            129..=256 => "semmoe_route_256",
            _ => "semmoe_route_1024",
        };
        apart(kernel, [self.rows.div_ceil(u64::from(ROUTE_THREADS / 32)), 1], ROUTE_THREADS, &params)
    }
}
