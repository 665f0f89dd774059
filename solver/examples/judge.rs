//! Solves on one trace and judges on another: `judge SOLVE.trace JUDGE.trace [GROUPS...]`.
//!
//! The figures of this crate's README come from it.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::str::FromStr;
use std::time::Instant;

use semmoe_routing::PrefixSettings;
use semmoe_solver::{
    EvalInput, EvalOptions, Evaluation, GivenPlacement, Nodes, Objective, ReliabilityBin, RequestFigures, SolveOptions,
    SolveReport, evaluate, solve,
};
use semmoe_tables::{Attention, Phase, ProfileBuilder, Provenance, Trace};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let token_margin = flag(&mut arguments, "--token-margin")?.unwrap_or(0.02);
    let objective = objective(&mut arguments)?;
    let expert_load_limit = flag(&mut arguments, "--expert-load-limit")?.unwrap_or(1.10);
    let hold_out = flag(&mut arguments, "--hold-out")?.unwrap_or(0.0);
    let redundant = flag(&mut arguments, "--redundant")?.unwrap_or(0);
    let placement = placement(&mut arguments)?;
    let (nodes, judge_nodes) = nodes(&mut arguments)?;
    let prefix = PrefixSettings {
        blocks_per_rank: flag(&mut arguments, "--blocks-per-rank")?.unwrap_or(0),
        ..PrefixSettings::default()
    };
    let [solve_on, judge_on, groups @ ..] = &arguments[..] else {
        return Err(
            "usage: judge SOLVE.trace JUDGE.trace [GROUPS...] [--objective activations|ranks] [--token-margin X] \
             [--expert-load-limit X] [--redundant R] [--placement linear|round_robin] [--nodes M] [--inter-cost X] [--judge-nodes M] \
             [--blocks-per-rank B] [--hold-out X]"
                .into(),
        );
    };
    let groups: Vec<u16> = groups.iter().map(|groups| groups.parse()).collect::<Result<_, _>>()?;
    let groups = if groups.is_empty() { vec![4, 8] } else { groups };
    let (trace, other) = (Trace::open(Path::new(solve_on))?, Trace::open(Path::new(judge_on))?);
    let provenance = Provenance { source: "judge".into(), created: "2026-01-01T00:00:00Z".into() };
    let mut profile = ProfileBuilder::new(trace.model().clone(), provenance.clone(), Phase::All)?;
    profile.add_trace(&trace)?;
    let profile = profile.finish()?;

    for groups in groups {
        print_evenest(&other, usize::from(groups));
        for (attention, trace) in [(Attention::Dp, Some(&trace)), (Attention::Dp, None), (Attention::Tp, Some(&trace))]
        {
            let ranks_unknown = objective == Objective::Ranks && trace.is_none();
            if ranks_unknown || (redundant > 0 && attention == Attention::Tp) {
                continue;
            }
            let options = SolveOptions {
                objective,
                bounds: None,
                threads: 2,
                redundant,
                placement: placement.clone(),
                nodes,
                hold_out,
                token_margin,
                expert_load_limit,
                ..SolveOptions::new(groups, attention, provenance.clone())
            };
            let begin = Instant::now();
            let solved = solve(&profile, trace, &options, &mut |_| ControlFlow::Continue(()))?;
            let seconds = begin.elapsed().as_secs_f64();
            print(&format!("G={groups} {attention} | {seconds:.1} s"));
            print_report(&solved.report);
            let judged = evaluate(
                &solved.tables,
                EvalInput::Trace(&other),
                &EvalOptions { token_margin, prefix, nodes: judge_nodes, ..EvalOptions::default() },
            )?;
            print_judged(&judged);
        }
    }
    Ok(())
}

/// Consecutive requests that loads are compared over.
const STRETCH: usize = 64;

/// How even stretches are when each request goes to the rank that has the fewest tokens of the stretch so far: evenness
/// alone, online.
fn print_evenest(trace: &Trace, ranks: usize) {
    let tokens: Vec<usize> = (0..trace.requests()).map(|request| trace.request(request).token_ids().len()).collect();
    let mut loads = vec![0usize; ranks];
    let mut chosen: Vec<usize> = Vec::new();
    let (mut worst, mut sum, mut within, mut stretches) = (0f64, 0.0, 0, 0);
    for (request, length) in tokens.iter().enumerate() {
        if let Some(left) = request.checked_sub(STRETCH) {
            loads[chosen[left]] -= tokens[left];
        }
        let rank = (0..ranks).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        loads[rank] += length;
        chosen.push(rank);
        if request + 1 >= STRETCH {
            let most = loads.iter().max().copied().unwrap_or(0);
            let ratio = (most * ranks) as f64 / loads.iter().sum::<usize>().max(1) as f64;
            (worst, sum, stretches) = (worst.max(ratio), sum + ratio, stretches + 1);
            within += usize::from(ratio <= 1.2);
        }
    }
    let share = |part: f64| part / f64::from(stretches.max(1));
    print(&format!(
        "G={ranks} evenness alone in {STRETCH} requests: worst {worst:.3} mean {:.3}, {:.3} of the stretches within 1.2",
        share(sum),
        share(within as f64)
    ));
}

fn print_report(report: &SolveReport) {
    print(&format!(
        "    unit={}, {} unit steps | in: lar {:.4} gap {:.1e} remote ranks {:.3} tokens {:.3} experts {:.3} (worst {:.3}) split {}",
        report.unit,
        report.iterations,
        report.lar,
        report.dual_gap,
        report.remote_ranks_per_token.unwrap_or(f64::NAN),
        report.token_imbalance,
        report.expert_load_imbalance,
        report.expert_load_imbalance_worst_layer,
        report.split_units
    ));
    let held_out = &report.held_out;
    print(&format!("    {}", held_out.note));
    if let Some(prior) = held_out.prior {
        print(&format!("    {prior:?}"));
    }
    for layer in &held_out.transitions {
        print(&format!("    {layer:?}"));
    }
}

fn print_judged(judged: &Evaluation) {
    print(&format!(
        "    out: lar {:.4} random {:.4} remote ranks {:.3} experts {:.3} (max/median {:.3}) tokens {:.3}",
        judged.lar,
        judged.lar_random,
        judged.remote_ranks_per_token.unwrap_or(f64::NAN),
        judged.expert_load_imbalance,
        judged.expert_load_imbalance_max_over_median,
        judged.token_imbalance
    ));
    if let (Some(rate), Some(inter)) = (judged.node_local_rate, judged.inter_node_activations_per_token) {
        print(&format!(
            "    out: on the own node {rate:.4}, on other nodes {inter:.3} activations per token and layer"
        ));
    }
    if let Some(lar) = judged.lar_t_only {
        print(&format!("    out: by T alone {lar:.4}"));
    }
    if let Some(lar) = judged.lar_paper_rule {
        print(&format!("    out: by the surer of T and A, as the paper has it, {lar:.4}"));
    }
    let curves = [("tokens", &judged.calibration.tokens), ("requests", &judged.calibration.requests)];
    for (what, curve) in curves.iter().filter_map(|(what, curve)| Some((what, curve.as_ref()?))) {
        let bin = |bin: &ReliabilityBin| format!("{} x {:.3} was {:.3}", bin.count, bin.predicted, bin.observed);
        let bins: Vec<String> = curve.bins.iter().map(bin).collect();
        print(&format!(
            "    out: calibration error of {what} {:.4}: {}",
            curve.expected_calibration_error,
            bins.join(", ")
        ));
    }
    let references = [
        ("argmax", judged.argmax),
        ("windows", judged.windowed),
        ("predicted", judged.batch_predicted),
        ("optimum", judged.batch_optimum),
    ];
    let policies = judged.policies.iter().flatten().map(|(name, figures)| (name.as_str(), Some(*figures)));
    for (name, figures) in policies.chain(references) {
        if let Some(RequestFigures {
            request_lar,
            request_imbalance,
            burst_imbalance,
            burst_imbalance_mean,
            cached_share,
            ..
        }) = figures
        {
            let cached = cached_share.map_or_else(String::new, |cached| format!(" cached {cached:.4}"));
            print(&format!(
                "    out: {name} {request_lar:.4} imbalance {request_imbalance:.3} in 64 requests: worst {burst_imbalance:.3} \
                 mean {burst_imbalance_mean:.3}{cached}"
            ));
        }
    }
}

fn objective(arguments: &mut Vec<String>) -> Result<Objective, Box<dyn Error>> {
    match flag::<String>(arguments, "--objective")?.as_deref() {
        None | Some("activations") => Ok(Objective::Activations),
        Some("ranks") => Ok(Objective::Ranks),
        Some(other) => Err(format!("--objective takes activations or ranks, not {other}").into()),
    }
}

fn placement(arguments: &mut Vec<String>) -> Result<Option<GivenPlacement>, Box<dyn Error>> {
    match flag::<String>(arguments, "--placement")?.as_deref() {
        None => Ok(None),
        Some("linear") => Ok(Some(GivenPlacement::Linear)),
        Some("round_robin") => Ok(Some(GivenPlacement::RoundRobin)),
        Some(other) => Err(format!("--placement takes linear or round_robin, not {other}").into()),
    }
}

/// Those to solve for, and those to judge by.
fn nodes(arguments: &mut Vec<String>) -> Result<(Option<Nodes>, Option<u16>), Box<dyn Error>> {
    let nodes: Option<u16> = flag(arguments, "--nodes")?;
    let inter_cost = flag(arguments, "--inter-cost")?.unwrap_or(Nodes::DEFAULT_INTER_COST);
    let judge_nodes = flag(arguments, "--judge-nodes")?.or(nodes);
    Ok((nodes.map(|nodes| Nodes { nodes, inter_cost }), judge_nodes))
}

/// Takes `name VALUE` out of the arguments.
fn flag<T: FromStr<Err: Error + 'static>>(
    arguments: &mut Vec<String>,
    name: &str,
) -> Result<Option<T>, Box<dyn Error>> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(None) };
    let value = arguments.get(at + 1).ok_or_else(|| format!("{name} needs a value"))?.parse()?;
    arguments.drain(at..at + 2);
    Ok(Some(value))
}

fn print(line: &str) {
    use std::io::Write;
    // A closed pipe is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{line}");
}
