//! The tables that belong to a permuted checkpoint.

use std::path::Path;

use crate::container::Layout;
use crate::{FormatError, Placement, Tables};

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
