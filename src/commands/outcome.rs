//! The summary that `solve` and `evaluate` print last: figures without tables, figures expected with them, a verdict,
//! and the next command.

use std::fmt::{self, Display};
use std::path::Path;

use semmoe_profiler::html::GroupLoads;
use semmoe_profiler::{Grade, Verdict};
use semmoe_solver::{Evaluation, SolveReport, Unit};
use serde::Serialize;

/// Tables that save less than this fraction of the bytes between ranks are not worth deploying.
const MIN_SAVED: f64 = 0.03;
/// New requests should gain at least this fraction of the gain on the requests used for the solve.
const MIN_CARRIED_OVER: f64 = 0.7;
/// The verdict mentions the token load if its max/mean exceeds this.
const UNEVEN_TOKENS: f64 = 1.2;
/// Fraction of the step time spent on communication in the verdict's example.
const EXAMPLE_SHARE: f64 = 0.3;

/// The data that the tables were evaluated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum JudgedOn {
    /// Requests held out of the solve.
    HeldOut,
    /// The data used to solve.
    Input,
    /// A file given by the user.
    File,
}

/// The result of `solve`, `evaluate` or `profile show` as JSON.
#[derive(Serialize)]
pub(crate) struct Document<'a, T> {
    /// The tables written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) out: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<&'a Outcome>,
    pub(crate) verdict: &'a Verdict,
    #[serde(flatten)]
    pub(crate) figures: &'a T,
}

/// A figure without tables and with tables.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Change {
    /// With random routing and contiguous placement; `None` if unknown.
    pub(crate) before: Option<f64>,
    pub(crate) expected: f64,
}

/// The complete summary.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) judged_on: JudgedOn,
    /// Whether whole requests or single tokens were routed.
    unit: Unit,
    /// Fraction of activations on the token's own rank.
    local_activation_rate: Change,
    /// Upper bound on the rate: over all placements for the solved traffic; over routings with balanced tokens and
    /// sequences for a file.
    bound: Option<f64>,
    /// Number of remote ranks that a token is sent to; `None` for a profile.
    remote_ranks_per_token: Option<Change>,
    /// Fraction of the dispatch and combine bytes saved, computed from the remote ranks per token. If those are
    /// unknown, the fraction of remote activations saved, which is larger.
    bytes_saved: f64,
    /// Maximum over mean.
    token_load: Change,
    /// Maximum over mean across groups, averaged over layers.
    expert_load: Change,
}

impl Outcome {
    /// Summarizes an evaluation; `groups` are the loads of the evaluated or of the solved traffic.
    pub(crate) fn of_evaluation(judged: &Evaluation, judged_on: JudgedOn, groups: &GroupLoads) -> Self {
        let ranks = judged.remote_ranks_per_token.zip(judged.remote_ranks_blocks);
        let ranks = ranks.map(|(expected, before)| Change { before: Some(before), expected });
        let round_robin = judged.policies.as_ref().and_then(|policies| policies.get("round_robin"));
        let outcome = Self::new(
            judged_on,
            judged.unit,
            // Not `lar_random`, which is for the tables' own placement, including its replicas.
            Change { before: Some(1.0 / groups.groups() as f64), expected: judged.lar },
            ranks,
            Change { before: round_robin.map(|figures| figures.request_imbalance), expected: judged.token_imbalance },
            groups,
        );
        Self { bound: judged.bound.map(|bound| bound.lar), ..outcome }
    }

    /// Summarizes a solve: on the held-out requests if any, otherwise on its input.
    pub(crate) fn of_solve(report: &SolveReport, groups: &GroupLoads) -> Self {
        let bound = report.bound_spectral.zip(report.bound_sdp).map(|(spectral, sdp)| spectral.min(sdp));
        let outcome = match &report.held_out.figures {
            Some(judged) => Self::of_evaluation(judged, JudgedOn::HeldOut, groups),
            None => Self::new(
                JudgedOn::Input,
                report.unit,
                Change { before: Some(1.0 / groups.groups() as f64), expected: report.lar },
                None,
                Change { before: None, expected: report.token_imbalance },
                groups,
            ),
        };
        Self { bound, ..outcome }
    }

    fn new(
        judged_on: JudgedOn,
        unit: Unit,
        local_activation_rate: Change,
        remote_ranks_per_token: Option<Change>,
        token_load: Change,
        groups: &GroupLoads,
    ) -> Self {
        let left = |of: Change, remote: fn(f64) -> f64| {
            of.before.map(remote).filter(|before| *before > 0.0).map_or(1.0, |before| remote(of.expected) / before)
        };
        let kept = remote_ranks_per_token
            .map_or_else(|| left(local_activation_rate, |rate| 1.0 - rate), |ranks| left(ranks, |ranks| ranks));
        let (before, expected) = groups.max_over_mean();
        Self {
            judged_on,
            unit,
            local_activation_rate,
            bound: None,
            remote_ranks_per_token,
            bytes_saved: 1.0 - kept,
            token_load,
            expert_load: Change { before, expected },
        }
    }

    /// The worst problem that prevents a good verdict, if any.
    fn trouble(&self, solve: Option<&SolveReport>) -> Option<(Grade, String)> {
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let Change { before, expected } = self.local_activation_rate;
        let gain = |rate: f64| rate - before.unwrap_or(0.0);
        if self.bytes_saved < MIN_SAVED {
            let more = "record more prompts from your own traffic, or try fewer groups";
            return Some((Grade::Poor, format!("That is too little to be worth deploying: {more}.")));
        }
        if self.judged_on == JudgedOn::Input {
            let why = "The tables were evaluated on the traffic used for the solve, which overstates LAR: use other requests.";
            return Some((Grade::Fair, why.to_owned()));
        }
        if let Some(report) = solve.filter(|report| gain(expected) < MIN_CARRIED_OVER * gain(report.lar)) {
            let share = percent(gain(expected) / gain(report.lar));
            return Some((
                Grade::Fair,
                format!(
                    "New requests gain only {share} as much as the requests used for the solve: more prompts would help."
                ),
            ));
        }
        if let Some(report) = solve.filter(|report| !report.expert_load_limit_met) {
            let worst = report.expert_load_imbalance_worst_layer;
            let why = format!("In the worst layer a group serves {worst:.2} times the mean: try --redundant.");
            return Some((Grade::Fair, why));
        }
        let uneven = self.token_load.expected;
        (uneven > UNEVEN_TOKENS)
            .then(|| (Grade::Fair, format!("The busiest rank gets {uneven:.2} times the mean number of tokens.")))
    }

    /// Judges whether the tables are worth deploying. `solve` is the report of the solve that produced them, if known;
    /// `next` contains the command to suggest for good tables and the one for all others.
    pub(crate) fn verdict(&self, solve: Option<&SolveReport>, next: [String; 2]) -> Verdict {
        let Change { before, expected } = self.local_activation_rate;
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let on = match self.judged_on {
            JudgedOn::HeldOut => "On held-out requests, ",
            JudgedOn::Input => "On the solver's input, ",
            JudgedOn::File => "On this file, ",
        };
        let was = before.map_or_else(String::new, |before| format!(" ({} before)", percent(before)));
        let local = percent(expected);
        let mut text = if self.bytes_saved > 0.0 {
            let times = 1.0 / (1.0 - EXAMPLE_SHARE * self.bytes_saved);
            let saved = percent(self.bytes_saved);
            let example = format!(
                "a step that spends {:.0}% of its time on them becomes at most {times:.2} times as fast",
                100.0 * EXAMPLE_SHARE
            );
            let what = self.what_moves();
            format!(
                "{on}{local} of the activations stay on their rank{was}, which saves {saved} of the {what} between ranks: {example}."
            )
        } else {
            format!("{on}{local} of the activations stay on their rank{was}, which saves no bytes between ranks.")
        };
        let (grade, more) = self.trouble(solve).unwrap_or((Grade::Good, String::new()));
        if !more.is_empty() {
            text.push(' ');
            text.push_str(&more);
        }
        let [good, other] = next;
        Verdict { grade, text, next: if grade == Grade::Good { good } else { other } }
    }

    /// The unit of traffic saved. A token is sent only once to a rank that has several of its experts, so its bytes are
    /// unknown unless remote ranks were counted.
    fn what_moves(&self) -> &'static str {
        if self.remote_ranks_per_token.is_some() { "bytes" } else { "activations" }
    }

    /// One row per figure: name, before, expected, bound.
    fn rows(&self) -> Vec<[String; 4]> {
        let row = |name: &str, Change { before, expected }: Change, digits: usize| {
            let shown = |value: f64| format!("{value:.digits$}");
            [name.to_owned(), before.map_or_else(|| "-".to_owned(), shown), shown(expected), String::new()]
        };
        let mut rate = row("local activation rate", self.local_activation_rate, 4);
        rate[3] = self.bound.map_or_else(String::new, |bound| format!("{bound:.4}"));
        let mut rows = vec![rate];
        rows.extend(self.remote_ranks_per_token.map(|ranks| row("remote ranks per token", ranks, 3)));
        let moved = Change { before: Some(1.0), expected: 1.0 - self.bytes_saved };
        rows.push(row(&format!("{} between ranks", self.what_moves()), moved, 2));
        rows.push(row("token load, max over mean", self.token_load, 3));
        rows.push(row("expert load, max over mean", self.expert_load, 3));
        rows
    }

    const HEAD: [&str; 4] = ["", "before", "expected", "bound"];

    /// The summary as HTML for a page.
    pub(crate) fn html(&self) -> String {
        let cells = |tag: &str, cells: &[String]| -> String {
            cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect()
        };
        let rows = self
            .rows()
            .into_iter()
            .map(|[name, figures @ ..]| format!("<tr><th>{name}</th>{}</tr>", cells("td", &figures)));
        let head = cells("th", &Self::HEAD.map(str::to_owned));
        let body = rows.collect::<String>();
        format!(
            "<div class=\"wide\"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n<p>{}</p>\n",
            self.note()
        )
    }

    fn note(&self) -> String {
        let judged = match self.judged_on {
            JudgedOn::HeldOut => "held out of the solve",
            JudgedOn::Input => "from the traffic used for the solve",
            JudgedOn::File => "from the file",
        };
        let units = match self.unit {
            Unit::Request => format!("requests {judged}, each routed by the affinity policy"),
            Unit::Token => format!("tokens {judged}, each on its most likely rank, the best that T can achieve"),
        };
        let bound = match self.judged_on {
            _ if self.bound.is_none() => "",
            JudgedOn::File => {
                "; bound: over all ways to distribute these requests with at most 1.05 times the mean tokens and 1.10 times the mean sequences"
            }
            _ => "; bound: over all placements, on the traffic used for the solve",
        };
        format!("before: random routing and contiguous placement; expected: {units}{bound}")
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, [name, before, expected, bound]: [&str; 4]| {
            writeln!(f, "{}", format!("{name:<28}{before:>10}{expected:>10}{bound:>10}").trim_end())
        };
        let [name, before, expected, bound] = Self::HEAD;
        line(f, [name, before, expected, if self.bound.is_some() { bound } else { "" }])?;
        self.rows().iter().try_for_each(|row| line(f, row.each_ref().map(String::as_str)))?;
        write!(f, "{}", self.note())
    }
}
