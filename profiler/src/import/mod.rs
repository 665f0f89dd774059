//! Imports routing recorded by other tools: as a trace if it includes tokens, as expert loads if it only has counts.
//!
//! | module | contents |
//! |---|---|
//! | `options` | what to import, and the outcome |
//! | `error`, `tally` | rejected files; skipped records, and how many are tolerated |
//! | `passes`, `physical` | converts SGLang's `per_token` records to requests; maps physical experts to logical ones |
//! | `routes` | converts arrays of routes to requests |
//! | `counts`, `loads` | counts without tokens: the load of every expert, compared with a profile |
//!
//! A profile states which experts a *token* activates, so expert counts without tokens cannot become a profile. They
//! become a file of expert loads, which shows how balanced an engine's traffic is and how well a profile represents it.
//!
//! Files are safetensors. `python/semmoe_convert.py` creates them from `.pt`, `.npy` and `.npz`, naming each array
//! after its path: a dump contains `records.N.FIELD` and `last_physical_to_logical_map`, or `logical_count`.

mod counts;
mod error;
mod loads;
mod options;
mod passes;
mod physical;
mod routes;
mod tally;

use std::path::Path;

use semmoe_tables::{Array, Arrays, ModelInfo, Profile, Provenance, TraceBuilder};

use error::ContentError;
pub use error::ImportError;
pub use loads::{LayerLoads, Loads};
pub use options::{Format, ImportOptions, ImportReport, Imported};

use crate::ProfilerError;
use crate::error::check_share;
use tally::Tally;

/// Imports files into a single trace, or into a single file of expert loads.
///
/// # Errors
/// If a file is unusable as a whole, too many records are bad, or the output cannot be written. Nothing is written in
/// these cases.
pub fn import(options: &ImportOptions) -> Result<ImportReport, ProfilerError> {
    if options.files.is_empty() {
        return Err(ProfilerError::NoInput("file"));
    }
    check_share("max_bad", options.max_bad)?;
    if options.format == Format::Eplb {
        let mut counts = counts::Counts::new(&options.model);
        options.files.iter().try_for_each(|path| counts.add_file(path))?;
        return write_loads(options, counts, Tally::default());
    }
    let mut tally = Tally::default();
    let mut trace = TraceBuilder::new(options.model.clone(), provenance(options))?;
    let mut counts = counts::Counts::new(&options.model);
    let mut passes = passes::Passes::new(&options.model);
    for path in &options.files {
        match options.format {
            Format::Routes => routes::add_file(path, &mut trace, &mut tally)?,
            Format::Sglang | Format::Eplb => {
                let arrays = open(path)?;
                match arrays.get("logical_count") {
                    Some(_) => counts.add_arrays(path, &arrays)?,
                    None => passes.add_file(path, &arrays, &mut trace, &mut tally)?,
                }
            }
        }
    }
    tally.check(options.max_bad)?;
    match (counts.files > 0, trace.requests() > 0 || tally.records > 0) {
        (true, true) => Err(ImportError::Mixed.into()),
        (true, false) => write_loads(options, counts, tally),
        (false, _) => write_trace(options, &trace, tally),
    }
}

/// Opens a file of arrays.
fn open(path: &Path) -> Result<Arrays, ProfilerError> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if let Some(kind @ ("pt" | "pth" | "npy" | "npz")) = extension {
        let (kind, file) = (kind.to_owned(), path.display().to_string());
        return Err(ImportError::content(path)(ContentError::Unconverted { kind, file }).into());
    }
    Ok(Arrays::open(path)?)
}

/// Returns an array, if present; it must contain integers.
fn integers<'a>(arrays: &'a Arrays, name: &str) -> Result<Option<Array<'a>>, ContentError> {
    match arrays.get(name) {
        Some(array) if !array.is_integer() => {
            Err(ContentError::unexpected(format!("`{name}` contains {:?}", array.dtype()), "integers"))
        }
        found => Ok(found),
    }
}

fn write_trace(options: &ImportOptions, trace: &TraceBuilder, tally: Tally) -> Result<ImportReport, ProfilerError> {
    if trace.requests() == 0 {
        return Err(ImportError::Nothing(options.files.len()).into());
    }
    let digest = trace.write(&options.out)?;
    let imported = Imported::Trace { digest, requests: trace.requests(), tokens: trace.tokens() };
    Ok(report(options, imported, tally))
}

fn write_loads(
    options: &ImportOptions,
    counts: counts::Counts<'_>,
    tally: Tally,
) -> Result<ImportReport, ProfilerError> {
    let mut loads = Loads::new(&options.model, &provenance(options), counts.sums);
    if let Some(path) = &options.against {
        let profile = Profile::open(path)?;
        loads.compare(&profile).map_err(|error| error.in_file(path))?;
    }
    loads.write(&options.out)?;
    Ok(report(options, Imported::Loads(loads), tally))
}

fn report(options: &ImportOptions, imported: Imported, tally: Tally) -> ImportReport {
    let Tally { records, repeated, bad_count: bad_records, bad } = tally;
    ImportReport { out: options.out.clone(), files: options.files.len(), imported, records, repeated, bad_records, bad }
}

/// Builds the provenance, which names the first few files.
fn provenance(options: &ImportOptions) -> Provenance {
    const NAMED: usize = 8;
    let names: Vec<_> = options
        .files
        .iter()
        .take(NAMED)
        .map(|path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
        .collect();
    let more =
        if options.files.len() > NAMED { format!(" and {} more", options.files.len() - NAMED) } else { String::new() };
    let source = format!("imported ({}) from {}{more}", options.format.name(), names.join(", "));
    Provenance { source: source.chars().take(1000).collect(), created: options.created.clone() }
}

/// Returns a dump's row for each MoE layer. Its `found` rows must be all layers of the model, or only the MoE layers.
/// `what` is the start of the error message.
fn layer_rows(what: &str, model: &ModelInfo, found: u64) -> Result<Vec<usize>, ContentError> {
    let layers = model.layers();
    if found == u64::from(model.num_hidden_layers) {
        return Ok(model.layer_ids.iter().map(|layer| usize::from(*layer)).collect());
    }
    if found == layers as u64 {
        return Ok((0..layers).collect());
    }
    let expected = format!("all {} layers of the model or its {layers} MoE layers", model.num_hidden_layers);
    Err(ContentError::unexpected(format!("{what} {found} layers"), expected))
}
