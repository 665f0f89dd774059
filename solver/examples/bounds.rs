//! How far a solve is from what any placement could reach:
//! `bounds [--attention dp|tp] [--trace FILE] GROUPS,... PROFILE...`.
//!
//! The profiles are added up. Without GROUPS in the list it takes 4, 8 and 16. The figures of this crate's README come
//! from it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use semmoe_solver::{SolveOptions, bounds, solve};
use semmoe_tables::{Attention, Profile, ProfileBuilder, Trace};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let attention = match flag(&mut arguments, "--attention")?.as_deref() {
        None | Some("tp") => Attention::Tp,
        Some("dp") => Attention::Dp,
        Some(other) => return Err(format!("--attention takes dp or tp, not {other}").into()),
    };
    let trace = flag(&mut arguments, "--trace")?.map(|path| Trace::open(Path::new(&path))).transpose()?;
    let [groups, paths @ ..] = &arguments[..] else {
        return Err("usage: bounds [--attention dp|tp] [--trace FILE] GROUPS,... PROFILE...".into());
    };
    let profile = merged(paths)?;
    for groups in groups.split(',') {
        let provenance = profile.provenance().clone();
        let options =
            SolveOptions { threads: 2, bounds: None, ..SolveOptions::new(groups.parse()?, attention, provenance) };
        let begin = Instant::now();
        let report = solve(&profile, trace.as_ref(), &options, &mut |_| ControlFlow::Continue(()))?.report;
        let solving = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let bounds = bounds(&profile, trace.as_ref(), &options)?;
        print(&format!(
            "G={groups} {attention} unit={} | lar {:.4} B1 {:.4} B2 {:.4} gap {:.4} ({:?}) | solve {solving:.1} s, bounds {:.1} s",
            report.unit,
            report.lar,
            bounds.spectral,
            bounds.sdp,
            1.0 - report.lar / bounds.best(),
            bounds.scope,
            begin.elapsed().as_secs_f64(),
        ));
        for (layer, of_layer) in profile.model().layer_ids.iter().zip(&bounds.layers) {
            print(&format!("    layer {layer}: B1 {:.4} B2 {:.4}", of_layer.spectral, of_layer.sdp));
        }
    }
    Ok(())
}

fn merged(paths: &[String]) -> Result<Profile, Box<dyn Error>> {
    let profiles = paths.iter().map(|path| Profile::open(Path::new(path))).collect::<Result<Vec<_>, _>>()?;
    let first = profiles.first().ok_or("no profile given")?;
    let mut all = ProfileBuilder::new(first.model().clone(), first.provenance().clone(), first.phase())?;
    profiles.iter().try_for_each(|profile| all.add_profile(profile))?;
    Ok(all.finish()?)
}

/// Takes `name VALUE` out of the arguments.
fn flag(arguments: &mut Vec<String>, name: &str) -> Result<Option<String>, Box<dyn Error>> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(None) };
    let value = arguments.get(at + 1).cloned().ok_or_else(|| format!("{name} needs a value"))?;
    arguments.drain(at..at + 2);
    Ok(Some(value))
}

fn print(line: &str) {
    // A closed pipe is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{line}");
}
