//! The deployed placement reported by `/server_info`: the value of SGLang's argument `init_expert_location`.
//!
//! The value is `trivial`, inline JSON, or a file name. A JSON file is read if this process can access it under the
//! same name; whether it is still the file that the engine read at start cannot be determined.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use semmoe_tables::{Tables, export};
use serde::Deserialize;

use super::ServerInfo;
use crate::SharedError;

/// The running placement that an engine reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownPlacement {
    /// Experts in order: slot p contains expert p modulo the number of experts.
    Trivial,
    /// Inline JSON: the expert in each physical slot, per layer of the model.
    Map(Vec<Vec<i32>>),
}

/// Maximum size of a map. For scale, a map of 100 layers with 1,024 slots takes 500 kB.
const MAX_MAP_BYTES: u64 = 16 << 20;

/// The reason why an engine's placement is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unseen {
    /// The engine does not report it.
    #[error("the engine does not report its placement")]
    Unreported,
    /// The engine computes a placement itself, from counts or from something other than a map.
    #[error("init_expert_location contains something other than just a physical_to_logical_map")]
    NoMap,
    /// The file named by the engine cannot be read here.
    #[error("init_expert_location names '{name}', which the gateway cannot read: {source}")]
    File {
        /// The engine's name for the file (the first 200 characters).
        name: String,
        /// The problem, in one sentence.
        source: SharedError,
    },
}

/// How a reported placement differs from tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementDifference {
    /// The shapes differ.
    #[error("the placement has {found} {what}, but the tables have {expected}")]
    Shape {
        /// Layers or slots.
        what: &'static str,
        /// The engine's number.
        found: usize,
        /// The tables' number.
        expected: usize,
    },
    /// SGLang does not support these tables.
    #[error("these tables cannot be compared with SGLang's maps: {0}")]
    Incomparable(#[source] SharedError),
    /// A group in some layer has different experts.
    #[error("group {group} of layer {layer} has experts {found:?}, but the tables have {expected:?}")]
    Experts {
        /// The model's layer number.
        layer: usize,
        /// The EP rank.
        group: usize,
        /// The engine's experts in ascending order (the first 8).
        found: Vec<i32>,
        /// The tables' experts in ascending order (the first 8).
        expected: Vec<i32>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertLocation {
    physical_to_logical_map: Vec<Vec<i32>>,
}

impl ServerInfo {
    /// Returns the reported placement. If the engine names a file, reads it, with a time limit of `within`.
    ///
    /// # Errors
    /// [`Unseen`] if the placement is not reported or cannot be read.
    pub async fn shown_placement(&self, within: Duration) -> Result<ShownPlacement, Unseen> {
        match self.init_expert_location.as_deref().map(str::trim) {
            None => Err(Unseen::Unreported),
            Some("trivial") => Ok(ShownPlacement::Trivial),
            Some(inline) if inline.starts_with('{') => ShownPlacement::parse(inline.as_bytes()),
            Some(name) => {
                let path = name.to_owned();
                let read = tokio::task::spawn_blocking(move || read(Path::new(&path)));
                let bytes = match tokio::time::timeout(within, read).await {
                    Ok(Ok(read)) => read,
                    Ok(Err(error)) => Err(error.into()),
                    Err(_) => Err(format!("reading it took longer than {} s", within.as_secs_f64()).into()),
                };
                let unseen = |source| Unseen::File { name: name.chars().take(200).collect(), source };
                ShownPlacement::parse(&bytes.map_err(unseen)?)
            }
        }
    }
}

/// Reads a file named by an engine, which must be a regular file of bounded size.
fn read(path: &Path) -> Result<Vec<u8>, SharedError> {
    if !path.is_absolute() {
        return Err("the path is relative to the engine's working directory".into());
    }
    if path.extension().is_none_or(|extension| extension != "json") {
        return Err("only .json files can be read".into());
    }
    // Checked first, because opening a pipe would block until a writer appears.
    if !std::fs::metadata(path)?.is_file() {
        return Err("not a regular file".into());
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_MAP_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_MAP_BYTES {
        Err(format!("longer than {MAX_MAP_BYTES} bytes").into())
    } else {
        Ok(bytes)
    }
}

impl ShownPlacement {
    fn parse(json: &[u8]) -> Result<Self, Unseen> {
        let location: ExpertLocation = serde_json::from_slice(json).map_err(|_| Unseen::NoMap)?;
        Ok(Self::Map(location.physical_to_logical_map))
    }

    /// Compares the groups' experts in every MoE layer; the order of slots within a group does not matter.
    ///
    /// # Errors
    /// `PlacementDifference`: the first group that differs, or `Incomparable` for tables that SGLang does not support
    /// (padding, unknown layers).
    pub fn check(&self, tables: &Tables) -> Result<(), PlacementDifference> {
        let incomparable = |source| PlacementDifference::Incomparable(source);
        let expected = export::sglang(tables).map_err(|error| incomparable(error.into()))?;
        let expected = serde_json::from_str(&expected).map_err(|error| incomparable(error.into()))?;
        let ExpertLocation { physical_to_logical_map: expected } = expected;
        let experts = tables.placement().experts().max(1);
        let trivial = |row: &Vec<i32>| (0..row.len()).map(|slot| (slot % usize::from(experts)) as i32).collect();
        let found = match self {
            Self::Trivial => expected.iter().map(trivial).collect(),
            Self::Map(rows) => rows.clone(),
        };
        same("layers", found.len(), expected.len())?;
        for layer in tables.model().layer_ids.iter().map(|layer| usize::from(*layer)) {
            let (Some(found), Some(expected)) = (found.get(layer), expected.get(layer)) else { continue };
            same("slots in a layer", found.len(), expected.len())?;
            let slots = (expected.len() / usize::from(tables.groups().max(1))).max(1);
            for (group, (found, expected)) in found.chunks(slots).zip(expected.chunks(slots)).enumerate() {
                let (found, expected) = (sorted(found), sorted(expected));
                if found != expected {
                    let first = |experts: Vec<i32>| experts.into_iter().take(8).collect();
                    let (found, expected) = (first(found), first(expected));
                    return Err(PlacementDifference::Experts { layer, group, found, expected });
                }
            }
        }
        Ok(())
    }
}

fn same(what: &'static str, found: usize, expected: usize) -> Result<(), PlacementDifference> {
    if found == expected { Ok(()) } else { Err(PlacementDifference::Shape { what, found, expected }) }
}

fn sorted(experts: &[i32]) -> Vec<i32> {
    let mut experts = experts.to_vec();
    experts.sort_unstable();
    experts
}
