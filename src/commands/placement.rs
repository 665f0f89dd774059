//! Placements given as an option: `linear`, `round_robin`, or a file.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use semmoe_solver::GivenPlacement;
use semmoe_tables::export::read_sglang;
use semmoe_tables::{ModelInfo, Tables};

use super::read_text;
use crate::error::CliError;

/// Several times the size of the largest published model's placement.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// Reads the placement given by `--placement` for a model and a number of groups.
pub(crate) fn given(named: &Path, model: &ModelInfo, groups: u16) -> Result<GivenPlacement, CliError> {
    match named.to_str() {
        Some("linear") => Ok(GivenPlacement::Linear),
        Some("round_robin") => Ok(GivenPlacement::RoundRobin),
        _ if is_container(named)? => from_tables(named, model),
        _ => from_json(named, model, groups),
    }
}

/// Whether a file looks like a safetensors container: an eight-byte length, then a JSON header.
fn is_container(path: &Path) -> Result<bool, CliError> {
    let cannot = |error| CliError::input(format!("cannot read the placement {}: {error}", path.display()));
    let mut start = Vec::new();
    File::open(path).and_then(|file| file.take(9).read_to_end(&mut start)).map_err(cannot)?;
    Ok(start.get(8) == Some(&b'{'))
}

fn from_tables(path: &Path, model: &ModelInfo) -> Result<GivenPlacement, CliError> {
    let tables = Tables::open(path).map_err(CliError::input)?;
    model.check_compatible(tables.model()).map_err(|error| {
        CliError::input(format!("the profile and the placement {} are for {error}", path.display()))
    })?;
    Ok(match tables.physical_to_logical() {
        Some(slots) => GivenPlacement::Slots(Arc::new(slots.clone())),
        None => GivenPlacement::Experts(Arc::new(tables.placement().clone())),
    })
}

fn from_json(path: &Path, model: &ModelInfo, groups: u16) -> Result<GivenPlacement, CliError> {
    let text = read_text(path, "placement", MAX_JSON_BYTES)?;
    let slots = read_sglang(&text, model, groups).map_err(|error| CliError::input(error.in_file(path)))?;
    Ok(match slots.to_placement() {
        Some(placement) => GivenPlacement::Experts(Arc::new(placement)),
        None => GivenPlacement::Slots(Arc::new(slots)),
    })
}
