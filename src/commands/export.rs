//! `semmoe tables export`.

use std::path::Path;

use semmoe_tables::export::{Eplb, sglang, sglang_flags, vllm, vllm_flags, write};
use semmoe_tables::{FormatError, Tables};

use super::{check_output, print};
use crate::args::{ExportArgs, ExportFormat};
use crate::error::CliError;
use crate::progress::say;

/// Stands for the file in printed arguments while there is none.
const NO_FILE: &str = "FILE";

pub(crate) fn run(args: &ExportArgs) -> Result<(), CliError> {
    if args.format == ExportFormat::Vllm && !args.experimental {
        return Err(CliError::input(
            "no release of vLLM reads a placement (pull request 49572 is open), expected --experimental to export it for that",
        ));
    }
    let tables = Tables::open(&args.tables).map_err(CliError::input)?;
    let Some(out) = &args.out else {
        let text = text(&tables, args.format).map_err(CliError::input)?;
        print(text.trim_end())?;
        say_flags(&tables, args.format, NO_FILE);
        return Ok(());
    };
    check_output(out, &[&args.tables])?;
    write_to(&tables, args.format, out)?;
    let engine = flags(&tables, args.format, &out.display().to_string());
    print(&engine.unwrap_or_else(|| format!("{}: phy2log, log2phy, logcnt", out.display())))
}

fn write_to(tables: &Tables, format: ExportFormat, out: &Path) -> Result<(), CliError> {
    if format == ExportFormat::Eplb && out.extension().is_some_and(|extension| extension == "safetensors") {
        return Eplb::new(tables).map_err(CliError::input)?.write_safetensors(out).map_err(CliError::failed);
    }
    write(&text(tables, format).map_err(CliError::input)?, out).map_err(CliError::failed)
}

fn text(tables: &Tables, format: ExportFormat) -> Result<String, FormatError> {
    match format {
        ExportFormat::Sglang => sglang(tables),
        ExportFormat::Eplb => Ok(Eplb::new(tables)?.to_json()),
        ExportFormat::Vllm => vllm(tables),
    }
}

/// The engine with its arguments; EPLB is a library and has none.
fn flags(tables: &Tables, format: ExportFormat, file: &str) -> Option<String> {
    match format {
        ExportFormat::Sglang => Some(format!("python -m sglang.launch_server {}", sglang_flags(tables, file))),
        ExportFormat::Eplb => None,
        ExportFormat::Vllm => Some(format!("vllm serve {}", vllm_flags(tables, file))),
    }
}

fn say_flags(tables: &Tables, format: ExportFormat, file: &str) {
    if let Some(flags) = flags(tables, format, file) {
        say(&format!("with the above in {file}: {flags}"));
    }
}
