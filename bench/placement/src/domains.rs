//! Leave-one-domain-out evaluation: solves on the profiles of all other domains.

use std::path::{Path, PathBuf};

use semmoe_solver::{EvalInput, EvalOptions, SolveOptions, TokenAssigner, evaluate};
use semmoe_tables::{Attention, Profile, ProfileBuilder};

use crate::error::BenchError;
use crate::given;
use crate::judge::{Figures, Labels, hindsight, judge};
use crate::markdown::{Table, load, rate};
use crate::methods::{OURS, Placed, Setting, VANILLA, provenance, solve_options, token_methods};

/// How T is derived from the counts on a placement, identically for every method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Limits groups to 1.02 of the mean tokens; otherwise every token takes its likeliest group.
    pub(crate) balanced: bool,
    /// Uses similar token strings as the prior of rare and unseen tokens.
    pub(crate) similar: bool,
}

impl Rule {
    /// With and without a quota, and with the tokenizer's strings if available.
    pub(crate) fn all(strings: bool) -> Vec<Self> {
        let similar = if strings { &[true, false][..] } else { &[false] };
        similar.iter().flat_map(|&similar| [true, false].map(|balanced| Rule { balanced, similar })).collect()
    }

    fn options(self, setting: &Setting) -> SolveOptions {
        let mut options = solve_options(setting, Attention::Tp);
        options.token_margin = if self.balanced { options.token_margin } else { 1000.0 };
        options.token_strings = options.token_strings.filter(|_| self.similar);
        options
    }

    fn describe(self) -> &'static str {
        match (self.balanced, self.similar) {
            (true, true) => "best T = even tokens on the solving data, rare and unseen tokens by similar strings",
            (true, false) => "best T = even tokens on the solving data, no tokenizer",
            (false, true) => "best T = each token's likeliest group, rare and unseen tokens by similar strings",
            (false, false) => "best T = each token's likeliest group, no tokenizer",
        }
    }
}

/// One row of a comparison: a method with one T.
pub(crate) struct Row {
    pub(crate) name: String,
    /// On the data solved from.
    pub(crate) solving: Figures,
    /// On held-out data.
    pub(crate) held_out: Figures,
    pub(crate) hindsight: f64,
}

/// Counts to solve from, and counts of other data to judge on.
pub(crate) struct Split<'a> {
    pub(crate) solving: Profile,
    pub(crate) held_out: &'a Profile,
}

/// All rows for one split and one rule for T.
pub(crate) fn compare(
    all: &[Placed],
    split: &Split<'_>,
    setting: &Setting,
    rule: Rule,
) -> Result<Vec<Row>, BenchError> {
    let Split { solving, held_out } = split;
    let mut rows = Vec::new();
    let options = rule.options(setting);
    let assigner = TokenAssigner::new(solving, &options)?;
    for placed in all {
        if placed.name == VANILLA {
            rows.push(row(format!("{VANILLA}, random tokens"), placed, solving, held_out, &Labels::Random));
        }
        if placed.name != OURS && placed.own.is_some() {
            rows.push(own(placed, solving, held_out)?);
        }
        let plan = assigner.assign(&placed.placement)?;
        rows.push(row(format!("{} + best T", placed.name), placed, solving, held_out, &Labels::Plan(&plan)));
    }
    Ok(rows)
}

fn row(name: String, placed: &Placed, solving: &Profile, held_out: &Profile, labels: &Labels<'_>) -> Row {
    Row {
        name,
        solving: judge(solving, &placed.placement, labels),
        held_out: judge(held_out, &placed.placement, labels),
        hindsight: hindsight(held_out, &placed.placement),
    }
}

/// With the algorithm's own T.
fn own(placed: &Placed, solving: &Profile, held_out: &Profile) -> Result<Row, BenchError> {
    let figures = |profile: &Profile| -> Result<Figures, BenchError> {
        let Some(solved) = &placed.own else { return Ok(Figures::default()) };
        let found = evaluate(&solved.tables, EvalInput::Profile(profile), &EvalOptions::default())?;
        let layers: Vec<f64> = found.lar_per_layer.iter().flatten().copied().collect();
        Ok(Figures {
            lar: layers.iter().sum::<f64>() / layers.len().max(1) as f64,
            expert_load: found.expert_load_imbalance,
            token_load: found.token_imbalance,
        })
    };
    Ok(Row {
        name: format!("{}, its own T", placed.name),
        solving: figures(solving)?,
        held_out: figures(held_out)?,
        hindsight: hindsight(held_out, &placed.placement),
    })
}

/// Merges profiles of one model.
pub(crate) fn merged<'a>(profiles: impl Iterator<Item = &'a Profile>) -> Result<Profile, BenchError> {
    let mut builder: Option<ProfileBuilder> = None;
    for profile in profiles {
        let mut next = match builder.take() {
            Some(builder) => builder,
            None => ProfileBuilder::new(profile.model().clone(), provenance(), profile.phase())?,
        };
        next.add_profile(profile)?;
        builder = Some(next);
    }
    let empty = || BenchError::Input { found: "no profile".into(), expected: "expected at least one to solve on" };
    Ok(builder.ok_or_else(empty)?.finish()?)
}

/// The domain in a file's name: the part before ".profile.safetensors", after the previous dot.
pub(crate) fn domain(path: &Path) -> String {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let stem = name.strip_suffix(".profile.safetensors").unwrap_or(&name);
    stem.rsplit('.').next().unwrap_or(stem).to_owned()
}

/// Prints the comparison for every group count and rule for T.
pub(crate) fn run(paths: &[PathBuf], groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let profiles = paths.iter().map(|path| Profile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<String> = paths.iter().map(|path| domain(path)).collect();
    let mut splits = Vec::with_capacity(profiles.len());
    for (index, held_out) in profiles.iter().enumerate() {
        let others = profiles.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, profile)| profile);
        splits.push(Split { solving: merged(others)?, held_out });
    }
    for &groups in groups {
        let setting = Setting { groups, ..setting.clone() };
        let title = format!(
            "**{}, {groups} groups**: solved on the other domains, judged on the one named",
            profiles[0].model().model
        );
        compare_all(&title, &names, &splits, &setting)?;
    }
    Ok(())
}

/// Every method on every split.
pub(crate) fn compare_all(
    title: &str,
    names: &[String],
    splits: &[Split<'_>],
    setting: &Setting,
) -> Result<(), BenchError> {
    let mut methods =
        splits.iter().map(|split| token_methods(&split.solving, setting)).collect::<Result<Vec<_>, _>>()?;
    let given = given::rows(&setting.given, setting.groups, names, &splits[0].solving)?;
    for (methods, given) in methods.iter_mut().zip(given) {
        // Keeps the solver's row last.
        methods.splice(methods.len() - 1..methods.len() - 1, given);
    }
    let certified =
        methods.iter().flatten().filter_map(|placed| placed.own.as_ref()?.report.bound_sdp.zip(Some(placed)));
    let mut bounds = Table::new(
        format!("{title}; the solver's value on the solving data and its bound"),
        &["judged on", "LAR", "bound", "gap"],
    );
    for ((bound, placed), name) in certified.zip(names) {
        let Some(solved) = &placed.own else { continue };
        let (lar, gap) = (solved.report.lar, solved.report.gap.unwrap_or(1.0));
        bounds.rows.push(vec![name.clone(), rate(lar), rate(bound), load(gap)]);
    }
    for rule in Rule::all(setting.strings.is_some()) {
        let each = methods.iter().zip(splits).map(|(all, split)| compare(all, split, setting, rule));
        let rows = each.collect::<Result<Vec<_>, _>>()?;
        print(&format!("{title}; {}", rule.describe()), names, &rows)?;
    }
    Ok(bounds.print()?)
}

/// One row per method: held-out LAR of every split, and means over splits.
pub(crate) fn print(title: &str, names: &[String], splits: &[Vec<Row>]) -> Result<(), BenchError> {
    let mut columns = vec!["method"];
    columns.extend(names.iter().map(String::as_str));
    columns.extend(["mean", "solving", "expert load solving", "held out", "token load solving", "held out", "any T"]);
    let mut table = Table::new(title, &columns);
    for (index, first) in splits[0].iter().enumerate() {
        let mean =
            |value: fn(&Row) -> f64| splits.iter().map(|rows| value(&rows[index])).sum::<f64>() / splits.len() as f64;
        let mut row = vec![first.name.clone()];
        row.extend(splits.iter().map(|rows| rate(rows[index].held_out.lar)));
        row.push(rate(mean(|row| row.held_out.lar)));
        row.push(rate(mean(|row| row.solving.lar)));
        row.push(load(mean(|row| row.solving.expert_load)));
        row.push(load(mean(|row| row.held_out.expert_load)));
        row.push(load(mean(|row| row.solving.token_load)));
        row.push(load(mean(|row| row.held_out.token_load)));
        row.push(rate(mean(|row| row.hindsight)));
        table.rows.push(row);
    }
    Ok(table.print()?)
}
