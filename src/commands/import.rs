//! `semmoe profile import`.

use semmoe_profiler::import::{Format, ImportOptions, ImportReport, Imported, Loads, import};
use semmoe_text::{Tokenizer, tokenizer_file};

use super::profile::{failure, list_bad};
use super::{check_output, print_result};
use crate::args::{ImportArgs, ImportFormat};
use crate::error::CliError;
use crate::progress::say;
use crate::stamp::created;

pub(crate) fn run(args: ImportArgs) -> Result<(), CliError> {
    let format = match args.format {
        ImportFormat::Sglang => Format::Sglang,
        ImportFormat::Eplb => Format::Eplb,
        ImportFormat::Routes => Format::Routes,
    };
    check_output(&args.out, args.files.iter().chain(&args.against))?;
    let mut model = semmoe_profiler::model_config(&args.model_config).map_err(failure)?;
    model.model = args.model;
    if let Some(path) = &args.tokenizer {
        let tokenizer = Tokenizer::from_file(&tokenizer_file(path)).map_err(CliError::input)?;
        model.tokenizer_sha256 = Some(tokenizer.sha256().to_owned());
    }
    let (files, out, max_bad, against) = (args.files, args.out, args.max_bad, args.against);
    let options = ImportOptions { format, files, out, model, created: created(), max_bad, against };
    let report = import(&options).map_err(failure)?;
    list_bad(&report.bad);
    if report.bad_records > report.bad.len() as u64 {
        say(&format!("left out: {} more", report.bad_records - report.bad.len() as u64));
    }
    print_result(args.output, "profile import", &report, || describe(&report))
}

fn describe(report: &ImportReport) -> String {
    let ImportReport { out, files, records, repeated, bad_records, .. } = report;
    let out = out.display();
    match &report.imported {
        Imported::Trace { digest, requests, tokens } => format!(
            "{out}: a trace of {requests} requests, {tokens} tokens from {records} records in {files} files ({repeated} repeated, \
             {bad_records} left out), digest {digest}"
        ),
        Imported::Loads(loads) => format!(
            "{out}: expert loads from {files} files; a profile or tables would require counts per token\n{}",
            table(loads)
        ),
    }
}

fn table(loads: &Loads) -> String {
    let mut text = "layer  activations  busiest expert  max/mean  entropy  distance to the profile".to_owned();
    for layer in &loads.layers {
        let distance = layer.distance.map_or("-".to_owned(), |distance| format!("{distance:.3}"));
        text.push_str(&format!(
            "\n{:>5}  {:>11}  {:>14}  {:>8.2}  {:>7.3}  {distance:>23}",
            layer.layer_id,
            layer.activations,
            layer.busiest.get(),
            layer.max_over_mean,
            layer.entropy
        ));
    }
    text
}
