//! Leave-one-out over profiles of several domains: solves on all but one, judges on that one.
//! `heldout TOKENIZER.json PROFILE PROFILE... [--groups 4,8] [--starts 8] [--grid]`. With `--grid` it
//! varies the settings of the prior, over all ordered pairs of domains.
//!
//! The figures of this crate's README on unseen tokens come from it.

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, TokenStrings, UnseenTokens, evaluate, solve};
use semmoe_tables::{Attention, Profile, ProfileBuilder, Provenance};
use semmoe_text::Tokenizer;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let groups = flag(&mut arguments, "--groups")?.unwrap_or_else(|| "4,8".into());
    let groups: Vec<u16> = groups.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let starts: u32 = flag(&mut arguments, "--starts")?.map_or(Ok(8), |starts| starts.parse())?;
    let grid = arguments.iter().position(|argument| argument == "--grid").map(|at| arguments.remove(at)).is_some();
    let [tokenizer, paths @ ..] = &arguments[..] else {
        return Err("usage: heldout TOKENIZER.json PROFILE PROFILE... [--groups 4,8] [--starts 8] [--grid]".into());
    };
    let tokenizer = Tokenizer::from_file(Path::new(tokenizer))?;
    let strings = Arc::new(TokenStrings::new(tokenizer.pieces(), Some(tokenizer.sha256().to_owned())));
    let profiles: Vec<Profile> = paths.iter().map(|path| Profile::open(Path::new(path))).collect::<Result<_, _>>()?;
    let provenance = Provenance { source: "heldout".into(), created: "2026-01-01T00:00:00Z".into() };

    let mut out = std::io::stdout();
    for groups in groups {
        let options = SolveOptions::new(groups, Attention::Tp, provenance.clone());
        let base = SolveOptions { starts, threads: 2, bounds: None, ..options };
        let variants = if grid { grid_of(&base, &strings) } else { priors(&base, &strings) };
        let mut means = vec![0.0; variants.len()];
        let splits = if grid { pairs(profiles.len()) } else { all_but_one(profiles.len()) };
        for (solve_on, held) in &splits {
            let merged = merge(solve_on.iter().map(|&index| &profiles[index]), &provenance)?;
            for ((name, options), mean) in variants.iter().zip(&mut means) {
                let solved = solve(&merged, None, options, &mut |_| ControlFlow::Continue(()))?;
                let judged = evaluate(&solved.tables, EvalInput::Profile(&profiles[*held]), &EvalOptions::default())?;
                *mean += judged.lar / splits.len() as f64;
                writeln!(
                    out,
                    "{groups} groups, {solve_on:?} -> {held}: {name:<24} lar {:.4} tokens {:.3} experts {:.3}",
                    judged.lar, judged.token_imbalance, judged.expert_load_imbalance
                )?;
            }
        }
        for ((name, _), mean) in variants.iter().zip(means) {
            writeln!(out, "{groups} groups, mean: {name:<24} lar {mean:.4}")?;
        }
    }
    Ok(())
}

type Variants = Vec<(String, SolveOptions)>;

/// The priors that unseen tokens can be given.
fn priors(base: &SolveOptions, strings: &Arc<TokenStrings>) -> Variants {
    vec![
        ("none".into(), base.clone()),
        ("layer".into(), SolveOptions { unseen: UnseenTokens::LayerShare, ..base.clone() }),
        ("strings".into(), SolveOptions { token_strings: Some(Arc::clone(strings)), ..base.clone() }),
    ]
}

/// One setting varied at a time, around the defaults.
fn grid_of(base: &SolveOptions, strings: &Arc<TokenStrings>) -> Variants {
    let base = SolveOptions { token_strings: Some(Arc::clone(strings)), ..base.clone() };
    let mut grid = vec![("defaults".to_owned(), base.clone())];
    let mut add = |name: &str, value: f64, change: &dyn Fn(&mut SolveOptions)| {
        let mut options = base.clone();
        change(&mut options);
        grid.push((format!("{name} {value}"), options));
    };
    for penalty in [1.0, 10.0] {
        add("penalty", penalty, &|o| o.ridge.penalty = penalty);
    }
    for cap in [2.0, 16.0] {
        add("cap", cap, &|o| o.ridge.occurrences_cap = cap);
    }
    for m in [1.0, 2.0, 10.0] {
        add("pseudo", m, &|o| o.prior_occurrences = m);
    }
    grid
}

/// Profiles to solve on, and the one to judge on.
type Split = (Vec<usize>, usize);

fn all_but_one(profiles: usize) -> Vec<Split> {
    (0..profiles).map(|held| ((0..profiles).filter(|&index| index != held).collect(), held)).collect()
}

/// All ordered pairs: settings chosen on the pairs without a profile have not seen it.
fn pairs(profiles: usize) -> Vec<Split> {
    let ordered = (0..profiles).flat_map(|solve_on| (0..profiles).map(move |held| (vec![solve_on], held)));
    ordered.filter(|(solve_on, held)| solve_on[0] != *held).collect()
}

fn merge<'a>(profiles: impl Iterator<Item = &'a Profile>, provenance: &Provenance) -> Result<Profile, Box<dyn Error>> {
    let mut merged: Option<ProfileBuilder> = None;
    for profile in profiles {
        let builder = match &mut merged {
            Some(builder) => builder,
            None => merged.insert(ProfileBuilder::new(profile.model().clone(), provenance.clone(), profile.phase())?),
        };
        builder.add_profile(profile)?;
    }
    Ok(merged.ok_or("needs at least two profiles")?.finish()?)
}

/// Takes `name VALUE` out of the arguments.
fn flag(arguments: &mut Vec<String>, name: &str) -> Result<Option<String>, Box<dyn Error>> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(None) };
    let value = arguments.get(at + 1).ok_or_else(|| format!("{name} needs a value"))?.clone();
    arguments.drain(at..at + 2);
    Ok(Some(value))
}
