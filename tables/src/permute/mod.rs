//! Checkpoints whose contiguous placement is E: for engines that take no placement.
//!
//! In every MoE layer the new expert p is the old expert pi(p), where p / (N / G) is the group of pi(p): its tensors,
//! its row of the router and its entry of the router's bias. A token then is sent to the same experts under other
//! numbers, and a contiguous placement puts them where E wants them. Shared experts, attention and layers beyond the
//! model proper stay.
//!
//! Bytes are moved, never computed with: any element type, quantised or not. Where experts are tensors of their own
//! only names change, so every shard keeps its data and its size, and one shard after the other passes from one memory
//! map to one file. The output is read again and compared byte by byte ([`PermuteReport::digest`]); `config.json` comes
//! last, so a directory that has one is a whole, checked checkpoint.
//!
//! | module | what |
//! |---|---|
//! | `family` | names of experts and routers in each architecture |
//! | `config` | `config.json` against the tables; group-limited gating |
//! | `permutation` | pi from the placement |
//! | `source` | shards and index of the checkpoint |
//! | `plan` | which tensor moves how, and whether all are there |
//! | `target` | the files written |
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

/// The work done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PermuteReport {
    /// MoE layers permuted.
    pub moe_layers: usize,
    /// Tensors of the checkpoint, moved or not.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub data_bytes: u64,
    /// Shards written now.
    pub shards_written: usize,
    /// Shards taken over from an interrupted run.
    pub shards_kept: usize,
    /// Layers after the model's own (for speculation) that keep their experts: no tables place them.
    pub layers_kept: Vec<u16>,
    /// Entries of the checkpoint's directory that were not copied: directories, and weights in other forms.
    pub left_out: Vec<String>,
    /// SHA-256 over all tensors of the written files as they are read through the permutation, in the way of the
    /// tables' `digest`; it was checked to be that of the original checkpoint.
    pub digest: String,
}

/// Bytes done and bytes to do; each byte is written once and checked once.
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

/// Writes the checkpoint in `source`, permuted for the tables, to `out`: a new or empty directory, or one in which the
/// same was interrupted. `progress` is called with bytes done and bytes to do.
///
/// # Errors
/// Before anything is written: an unknown architecture, another number of experts or layers than the tables', replicas,
/// gating groups torn apart, a tensor that is missing, unexpected or of the wrong shape, a damaged shard or index, an
/// output directory inside the checkpoint or with other things in it. Later: files that cannot be written, and a
/// self-check that fails.
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

/// Writes tables for the permuted checkpoint, whose engine runs the contiguous placement: everything is as it was, but
/// expert p now is the one in slot p, so E is contiguous. T, prices and labels name tokens and groups, not experts, and
/// stay.
///
/// # Errors
/// For tables with replicas, or [`FormatError::Io`] with the path.
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
