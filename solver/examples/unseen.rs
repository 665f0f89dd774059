//! Solves on the first requests of a trace, so that tokens of the other trace were seen rarely or never, and judges on
//! that: `unseen SOLVE.trace JUDGE.trace CHECKPOINT_DIR [GROUPS...] [--requests 60,300]`. What T knows besides its
//! counts varies.
//!
//! The figures of this crate's README on embeddings come from it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, TokenStrings, evaluate, solve};
use semmoe_tables::{Attention, Embeddings, Phase, ProfileBuilder, Provenance, Trace, TraceBuilder};
use semmoe_text::Tokenizer;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let requests: Vec<usize> = match arguments.iter().position(|argument| argument == "--requests") {
        Some(at) if at + 1 < arguments.len() => {
            let counts = arguments.drain(at..at + 2).nth(1).unwrap_or_default();
            counts.split(',').map(str::parse).collect::<Result<_, _>>()?
        }
        _ => vec![60, 300],
    };
    let [solve_on, judge_on, checkpoint, groups @ ..] = &arguments[..] else {
        return Err("usage: unseen SOLVE.trace JUDGE.trace CHECKPOINT_DIR [GROUPS...] [--requests 60,300]".into());
    };
    let groups: Vec<u16> = groups.iter().map(|groups| groups.parse()).collect::<Result<_, _>>()?;
    let groups = if groups.is_empty() { vec![4, 8] } else { groups };
    let (all, other) = (Trace::open(Path::new(solve_on))?, Trace::open(Path::new(judge_on))?);
    let tokenizer = Tokenizer::from_file(&Path::new(checkpoint).join("tokenizer.json"))?;
    let strings = Arc::new(TokenStrings::new(tokenizer.pieces(), Some(tokenizer.sha256().to_owned())));
    let embeddings = Arc::new(Embeddings::open(Path::new(checkpoint), None)?);
    for requests in requests {
        let trace = TraceBuilder::select(&all, |at, _| at < requests)?;
        for &groups in &groups {
            for attention in [Attention::Tp, Attention::Dp] {
                let base = SolveOptions {
                    bounds: None,
                    threads: 2,
                    starts: 4,
                    ..SolveOptions::new(groups, attention, provenance())
                };
                let with = |name, strings: Option<&Arc<_>>, embeddings: Option<&Arc<_>>| {
                    let (token_strings, embeddings) = (strings.cloned(), embeddings.cloned());
                    (name, SolveOptions { token_strings, embeddings, ..base.clone() })
                };
                let variants = [
                    with("none", None, None),
                    with("strings", Some(&strings), None),
                    with("embeddings", None, Some(&embeddings)),
                    with("both", Some(&strings), Some(&embeddings)),
                ];
                for (name, options) in variants {
                    let judged = judge(&trace, &other, &options)?;
                    writeln!(std::io::stdout(), "{requests} requests, {groups} groups, {attention}, {name}: {judged}")?;
                }
            }
        }
    }
    Ok(())
}

fn provenance() -> Provenance {
    Provenance { source: "unseen".into(), created: "2026-01-01T00:00:00Z".into() }
}

fn judge(trace: &Trace, other: &Trace, options: &SolveOptions) -> Result<String, Box<dyn Error>> {
    let mut profile = ProfileBuilder::new(trace.model().clone(), provenance(), Phase::All)?;
    profile.add_trace(trace)?;
    let profile = profile.finish()?;
    let solved = solve(&profile, Some(trace), options, &mut |_| ControlFlow::Continue(()))?;
    let judged = evaluate(&solved.tables, EvalInput::Trace(other), &EvalOptions::default())?;
    let (mut unseen, mut tokens) = (0u64, 0u64);
    for token in other.iter().flat_map(|request| request.token_ids().iter()) {
        tokens += 1;
        unseen += u64::from(profile.token_counts()[*token as usize] == 0);
    }
    let predicted = judged.batch_predicted.map(|figures| format!(", all at once by T {:.4}", figures.request_lar));
    Ok(format!(
        "lar {:.4}{}, tokens {:.3}, unseen traffic {:.3}",
        judged.lar,
        predicted.unwrap_or_default(),
        judged.token_imbalance,
        unseen as f64 / tokens as f64
    ))
}
