//! SGLang's expert distribution recorder: which of its modes wrote a file.

use std::path::Path;

use crate::pickle::{Document, TorchFile, Value};

use super::ImportError;
use super::error::Wrong;

/// A dump, opened.
pub(super) enum Dump {
    /// Mode `per_token`: forward passes with their tokens.
    PerToken { file: TorchFile, records: Vec<Value>, map: Value },
    /// Mode `stat` or `stat_approx`: [steps, layers, logical experts].
    Stat { file: TorchFile, counts: Value },
}

/// Opens a dump.
pub(super) fn open(path: &Path) -> Result<Dump, ImportError> {
    let file = TorchFile::open(path).map_err(|error| Wrong::Read(error).in_file(path))?;
    mode(file).map_err(|error| error.in_file(path))
}

fn mode(file: TorchFile) -> Result<Dump, Wrong> {
    let (document, root) = (file.document(), file.document().root());
    if let Some(counts) = document.get(root, "logical_count") {
        return Ok(Dump::Stat { file, counts });
    }
    let (Some(records), Some(map)) =
        (document.get(root, "records"), document.get(root, "last_physical_to_logical_map"))
    else {
        let found = Document::kind(root);
        return Err(Wrong::Content(format!(
            "{found} without `records` or `logical_count`, expected a dump of SGLang's recorder"
        )));
    };
    let (Value::List(_), Some(items)) = (records, document.items(records)) else {
        return Err(Wrong::Content(format!("`records` is {}, expected a list", Document::kind(records))));
    };
    // All records of a dump are of one mode.
    let has_routes = |record: &Value| document.get(*record, "topk_ids_of_layer").is_some();
    if !items.is_empty() && !items.iter().any(has_routes) {
        let cause = "its records have no `topk_ids_of_layer`: the mode per_pass counts experts without tokens; record with --expert-distribution-recorder-mode per_token, or stat for loads";
        return Err(Wrong::Content(cause.into()));
    }
    let records = items.to_vec();
    Ok(Dump::PerToken { file, records, map })
}
