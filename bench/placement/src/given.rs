//! Placements by other programs, as further rows; `python/programs.py` writes such files.
//!
//! A file is a JSON list of `{"held_out": PROFILE, "groups": G, "name": TEXT, "layers": [[group of each expert],
//! ...]}`. Each placement was computed without the profile of that file name, and is judged on it. Other keys are
//! ignored.

use std::path::Path;

use semmoe_tables::{Placement, Profile};
use serde_json::Value;

use crate::domains::domain;
use crate::error::BenchError;
use crate::methods::Placed;

/// One placement of a file.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// The domain to judge on.
    held_out: String,
    groups: u16,
    name: String,
    layers: Vec<Vec<u16>>,
}

/// Reads a file.
pub(crate) fn read(path: &Path) -> Result<Vec<Given>, BenchError> {
    let cannot =
        |error: &dyn std::fmt::Display| BenchError::Read { path: path.display().to_string(), cause: error.to_string() };
    let text = std::fs::read(path).map_err(|error| cannot(&error))?;
    let list: Vec<Value> = serde_json::from_slice(&text).map_err(|error| cannot(&error))?;
    let each = list.iter().map(|row| {
        given(row).ok_or_else(|| cannot(&"expected a list of objects with held_out, groups, name and layers of groups"))
    });
    each.collect()
}

fn given(row: &Value) -> Option<Given> {
    let number = |value: &Value| u16::try_from(value.as_u64()?).ok();
    let layer = |layer: &Value| layer.as_array()?.iter().map(number).collect::<Option<Vec<u16>>>();
    Some(Given {
        held_out: domain(Path::new(row["held_out"].as_str()?)),
        groups: number(&row["groups"])?,
        name: row["name"].as_str()?.to_owned(),
        layers: row["layers"].as_array()?.iter().map(layer).collect::<Option<_>>()?,
    })
}

/// The placements with this number of groups, by split; every split has the same names in the same order.
pub(crate) fn rows(
    all: &[Given],
    groups: u16,
    held_out: &[String],
    profile: &Profile,
) -> Result<Vec<Vec<Placed>>, BenchError> {
    let of = |name: &str| -> Vec<&Given> {
        all.iter().filter(|given| given.groups == groups && given.held_out == name).collect()
    };
    let names = |name: &str| of(name).iter().map(|given| given.name.as_str()).collect::<Vec<_>>();
    for name in held_out {
        if names(name) != names(&held_out[0]) {
            let found = format!("placements for {groups} groups {:?} and {:?}", names(&held_out[0]), names(name));
            return Err(BenchError::Input { found, expected: "expected the same methods for every profile held out" });
        }
    }
    let (layers, experts) = (profile.model().layers(), usize::from(profile.model().num_experts));
    let placed = |given: &Given| {
        if given.layers.len() != layers || given.layers.iter().any(|layer| layer.len() != experts) {
            let found = format!("placement {:?} for {:?} of another shape", given.name, given.held_out);
            return Err(BenchError::Input { found, expected: "expected the profiles' layers and experts" });
        }
        let placement = Placement::new(groups, given.layers.clone())?;
        Ok(Placed { name: given.name.clone(), placement, own: None })
    };
    held_out.iter().map(|name| of(name).into_iter().map(placed).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_what_is_missing_is_reported() {
        let row = serde_json::json!({"held_out": "m.book.profile.safetensors", "groups": 2, "name": "METIS", "layers": [[0, 1]]});
        let read = given(&row).unwrap();
        assert_eq!((read.held_out.as_str(), read.groups, read.layers), ("book", 2, vec![vec![0, 1]]));
        for key in ["held_out", "groups", "name", "layers"] {
            let mut bad = row.clone();
            bad[key] = serde_json::json!([[-1]]);
            assert!(given(&bad).is_none(), "{key}");
        }
    }
}
