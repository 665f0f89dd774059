//! `semmoe tables export`.

use std::path::Path;

use semmoe_engines::Version;
use semmoe_tables::export::{
    Eplb, SglangSpelling, ascend, ascend_flags, sglang, sglang_flags, tensorrt_llm, tensorrt_llm_options, vllm,
    vllm_flags, write,
};
use semmoe_tables::{FormatError, Tables};
use serde::Serialize;

use super::{check_output, print_result};
use crate::args::{ExportArgs, ExportFormat};
use crate::error::CliError;
use crate::progress::say;

/// The first SGLang version that supports `--attn-dp-size`.
const ATTN_DP_SIZE_SINCE: Version = Version::new(0, 5, 22);

const SGLANG_NOTE: &str = "locality saves traffic only with an all-to-all backend: add --moe-a2a-backend deepep (with none, the \
                           default, every rank processes the tokens of all ranks)";

/// Placeholder for the file name in printed arguments if there is no file.
const NO_FILE: &str = "FILE";

pub(crate) fn run(args: &ExportArgs) -> Result<(), CliError> {
    if args.format == ExportFormat::Vllm && !args.experimental {
        return Err(CliError::input(
            "no vLLM release reads a placement yet (pull request 49572 is open): pass --experimental to export one anyway",
        ));
    }
    if args.sglang_version.is_some() && args.format != ExportFormat::Sglang {
        return Err(CliError::input("--sglang-version requires --format sglang"));
    }
    let tables = Tables::open(&args.tables).map_err(CliError::input)?;
    let (file, placement) = match &args.out {
        Some(out) => {
            check_output(out, [&args.tables])?;
            write_to(&tables, args.format, out)?;
            (out.display().to_string(), None)
        }
        None => (NO_FILE.to_owned(), Some(text(&tables, args.format).map_err(CliError::input)?)),
    };
    let command = command(&tables, args, &file);
    let engine = command.as_deref();
    let exported = Exported { file: args.out.as_deref(), placement: placement.as_deref(), engine };
    print_result(args.output, "tables export", &exported, || {
        let library = || format!("{file}: phy2log, log2phy, logcnt");
        placement.clone().or(command.clone()).unwrap_or_else(library)
    })?;
    if let Some(command) = engine.filter(|_| placement.is_some() && !args.output.json) {
        say(&format!("save the above as {file}, then run: {command}"));
    }
    if args.format == ExportFormat::Sglang {
        say(SGLANG_NOTE);
    }
    Ok(())
}

#[derive(Serialize)]
struct Exported<'a> {
    /// Null if the placement was written to standard output.
    file: Option<&'a Path>,
    /// The placement's text if there is no file.
    placement: Option<&'a str>,
    /// The engine's command line; null for EPLB, which is a library.
    engine: Option<&'a str>,
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
        ExportFormat::TensorrtLlm => tensorrt_llm(tables),
        ExportFormat::Ascend => ascend(tables),
        ExportFormat::Vllm => vllm(tables),
    }
}

/// The engine's command line; `None` for EPLB, which is a library.
fn command(tables: &Tables, args: &ExportArgs, file: &str) -> Option<String> {
    match args.format {
        ExportFormat::Sglang => {
            let flags = sglang_flags(tables, file, spelling(args.sglang_version));
            Some(format!("python -m sglang.launch_server {flags}"))
        }
        ExportFormat::Eplb => None,
        ExportFormat::TensorrtLlm => {
            let options = tensorrt_llm_options(tables, file);
            let ranks = tables.groups();
            Some(format!(
                "trtllm-serve --tp_size {ranks} --ep_size {ranks} --extra_llm_api_options OPTIONS, where OPTIONS is a file that contains {options}"
            ))
        }
        ExportFormat::Ascend => Some(format!("vllm serve {}", ascend_flags(file))),
        ExportFormat::Vllm => Some(format!("vllm serve {}", vllm_flags(tables, file))),
    }
}

fn spelling(version: Option<Version>) -> SglangSpelling {
    match version {
        Some(version) if version < ATTN_DP_SIZE_SINCE => SglangSpelling::EnableDpAttention,
        _ => SglangSpelling::AttnDpSize,
    }
}
