//! `semmoe tables permute`.

use std::path::Path;

use semmoe_tables::permute::{PermuteError, PermuteReport, permute, write_relabelled};
use semmoe_tables::{FormatError, Tables};

use super::{check_output, print_result};
use crate::args::PermuteArgs;
use crate::error::CliError;
use crate::progress::{Progress, Steps as _, say};

pub(crate) fn run(args: &PermuteArgs) -> Result<(), CliError> {
    let tables = Tables::open(&args.tables).map_err(CliError::input)?;
    if let Some(out_tables) = &args.out_tables {
        check_out_tables(args, out_tables)?;
    }
    let progress = Progress::start("permuting", 0);
    let report = permute(&tables, &args.checkpoint, &args.out, &mut |done, total| {
        progress.set_total(total);
        progress.set_done(done);
    })
    .map_err(|error| failure(error, &args.out))?;
    progress.finish(&describe(&report));
    for name in &report.left_out {
        say(&format!("left out: {name} (not a regular file, or weights in another format)"));
    }
    if let Some(out_tables) = &args.out_tables {
        let digest = write_relabelled(&tables, out_tables).map_err(CliError::failed)?;
        say(&format!("{}: tables for the new checkpoint, digest {digest}", out_tables.display()));
    }
    print_result(args.output, "tables permute", &report, || format!("{}: {}", args.out.display(), verdict(&report)))
}

/// Checks before the long operation that the tables do not overwrite the input, and are not written into a checkpoint,
/// where an engine could load them as weights.
fn check_out_tables(args: &PermuteArgs, out_tables: &Path) -> Result<(), CliError> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(CliError::input);
    let file = absolute(out_tables)?;
    for directory in [&args.out, &args.checkpoint] {
        if file.starts_with(absolute(directory)?) {
            let (file, directory) = (file.display(), directory.display());
            return Err(CliError::input(format!(
                "--out-tables {file} is inside the checkpoint {directory}, expected a file outside of it"
            )));
        }
    }
    check_output(out_tables, [&args.tables])
}

fn describe(report: &PermuteReport) -> String {
    format!(
        "{} MoE layers, {} tensors of {} bytes, {} files written, {} kept from an earlier run",
        report.moe_layers, report.tensors, report.data_bytes, report.shards_written, report.shards_kept
    )
}

fn verdict(report: &PermuteReport) -> String {
    format!("all bytes match the original, digest {}", report.digest)
}

/// Attributes every failure to the input, except failed writes and failed self-checks.
fn failure(error: PermuteError, out: &Path) -> CliError {
    match &error {
        PermuteError::Format(FormatError::Io { path, .. }) if path.starts_with(out) => CliError::failed(error),
        PermuteError::Differs { .. } => CliError::failed(error),
        _ => CliError::input(error),
    }
}
