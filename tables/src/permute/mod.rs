//! Permutes checkpoints so that a contiguous placement equals E, for engines that accept no placement.
//!
//! In every MoE layer, the new expert p is the old expert pi(p), where p / (N / G) is the group of pi(p): its tensors,
//! its router row and its entry in the router's bias move along. Tokens reach the same experts under new numbers, and a
//! contiguous placement puts these experts on the groups that E specifies. Shared experts, attention and layers beyond
//! the main model are unchanged.
//!
//! Bytes are moved but never interpreted, so any element type works, quantised or not. Where experts are separate
//! tensors, only names change: every shard keeps its data and its size, and shards are copied one by one from a memory
//! map. The output is read back and compared byte by byte ([`PermuteReport::digest`]). `config.json` is written last,
//! so a directory that contains it is a complete, checked checkpoint.
//!
//! | module | contents |
//! |---|---|
//! | `family` | names of experts and routers in each architecture |
//! | `config` | checks of `config.json` against the tables; group-limited gating |
//! | `permutation` | pi, derived from the placement |
//! | `source` | shards and index of the checkpoint |
//! | `plan` | the move of each tensor, and a check that all are present |
//! | `target` | the output files |
//! | `verify` | the self-check |

mod config;
mod error;
mod family;
mod permutation;
mod plan;
mod source;
mod target;
mod verify;

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

pub use error::PermuteError;
pub use permutation::Permutation;

use crate::container::{INDEX, Layout};
use crate::{FormatError, Placement, Tables};
use config::Config;
use plan::Plan;
use source::{CONFIG, Source};
use target::Target;

/// Summary of a permutation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PermuteReport {
    /// Number of MoE layers permuted.
    pub moe_layers: usize,
    /// Number of tensors in the checkpoint, including those that do not move.
    pub tensors: usize,
    /// Total size of the tensors, in bytes.
    pub data_bytes: u64,
    /// Number of shards written by this run.
    pub shards_written: usize,
    /// Number of shards reused from an interrupted run.
    pub shards_kept: usize,
    /// Layers beyond the main model (for speculative decoding). Their experts stay in place, because tables do not
    /// place them.
    pub layers_kept: Vec<u16>,
    /// Entries of the checkpoint's directory that were not copied: directories, and weights in other formats.
    pub left_out: Vec<String>,
    /// SHA-256 over all written tensors as read through the permutation, computed like the tables' `digest`; checked to
    /// equal the digest of the original checkpoint.
    pub digest: String,
}

/// Reports the bytes done and the total; each byte is written once and checked once.
pub(crate) struct Meter<'a> {
    done: u64,
    total: u64,
    report: &'a mut dyn FnMut(u64, u64),
}

impl Meter<'_> {
    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.report)(self.done, self.total);
    }
}

/// Writes the checkpoint in `source`, permuted for the tables, to `out`: a new or empty directory, or one from an
/// interrupted run of this permutation. `progress` receives the bytes done and the total.
///
/// # Errors
/// Before writing: an unknown architecture, a number of experts or layers that differs from the tables, replicas, split
/// gating groups, a tensor that is missing, unexpected or of the wrong shape, a damaged shard or index, an output
/// directory inside the checkpoint or with other content. Later: files that cannot be written, and a failed self-check.
pub fn permute(
    tables: &Tables,
    source: &Path,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PermuteReport, PermuteError> {
    let config = Config::read(source, tables)?;
    let permutation = &config.permutation;
    let plan = Plan { family: config.family, permutation, hidden_layers: config.hidden_layers };
    let source = Source::open(source)?;
    let layers_kept = plan.check(&source)?;
    let (copied, left_out) = source.others()?;
    let shards = source.shards.iter().map(|shard| shard.name.as_str());
    let expected: BTreeSet<&str> = shards.chain(copied.iter().map(String::as_str)).chain([CONFIG, INDEX]).collect();
    let target = Target::prepare(out, &source.dir, &expected)?;

    let data_bytes = source.data_len();
    let mut meter = Meter { done: 0, total: data_bytes.saturating_mul(2), report: progress };
    let mut shards_written = 0;
    for shard in &source.shards {
        shards_written += usize::from(target.shard(&plan, shard, &mut meter)?);
    }
    target.index(&plan, &source)?;
    copied.iter().try_for_each(|name| target.copy(&source.dir, name))?;
    let written = Source::open(&target.dir)?;
    let digest = verify::verify(&plan, &source, &written, &mut meter)?;
    target.copy(&source.dir, CONFIG)?;
    Ok(PermuteReport {
        moe_layers: permutation.layers.len(),
        tensors: source.shard_of.len(),
        data_bytes,
        shards_written,
        shards_kept: source.shards.len() - shards_written,
        layers_kept,
        left_out,
        digest,
    })
}

/// Writes tables for the permuted checkpoint, whose engine uses the contiguous placement. Only expert numbers change:
/// expert p is now the one in slot p, so E is contiguous. T, prices and labels refer to tokens and groups, not experts,
/// so they stay the same.
///
/// # Errors
/// If the tables have replicas, or the file cannot be written.
pub fn write_relabelled(tables: &Tables, path: &Path) -> Result<String, FormatError> {
    if tables.physical_to_logical().is_some() {
        return Err(FormatError::field("physical_to_logical", "present", "E: a permuted checkpoint has no replicas"));
    }
    let model = tables.model();
    let placement = Placement::contiguous(model.layers(), model.num_experts, tables.groups())?;
    let Layout { mut metadata, mut tensors } = tables.container.layout();
    metadata.insert("placement_digest".to_owned(), placement.digest());
    tensors.retain(|tensor| tensor.name != "E");
    tensors.push(placement.tensor());
    Layout { metadata, tensors }.write(path)
}
