//! Evaluation: the figures equal those of a plain count, and carry their documented names.

use std::collections::{BTreeSet, HashMap};

use crate::common::{options, planted, profile_of, provenance, solve_trace};
use half::f16;
use semmoe_solver::{EvalInput, EvalOptions, Evaluation, Margins, SolveError, Unit, evaluate};
use semmoe_tables::{
    Attention, EvenGroups, GroupId, GroupLabels, LayerIdx, LikelyGroup, NO_GROUP, PlacedBy, Placement, PromptSplit,
    Tables, TablesBuilder, TokenId, TpParts, Trace, TraceRequest,
};

/// Contiguous placement, and T without evidence.
fn neutral(trace: &Trace, groups: u16) -> Tables {
    let model = trace.model();
    let placement = Placement::contiguous(model.layers(), model.num_experts, groups).unwrap();
    let shares = vec![f16::from_f64(1.0 / f64::from(groups)); model.vocab_size as usize * usize::from(groups)];
    TablesBuilder::dp(model.clone(), provenance(), placement, shares, vec![0.0; groups.into()]).finish().unwrap()
}

#[test]
fn round_robin_figures_equal_a_plain_count() {
    let trace = planted(4, 101, 0.8, 1);
    let tables = neutral(&trace, 4);
    let judged = evaluate(&tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    let (mut local, mut all, mut tokens) = (0u64, 0u64, [0u64; 4]);
    for (r, request) in trace.iter().enumerate() {
        tokens[r % 4] += request.token_ids().len() as u64;
        for position in 0..request.token_ids().len() {
            for layer in (0..3).map(LayerIdx::new) {
                for expert in request.route(position, layer).into_iter().flat_map(|route| route.experts()) {
                    all += 1;
                    local += u64::from(tables.placement().group_of(layer, expert).index() == r % 4);
                }
            }
        }
    }
    let figures = judged.policies.as_ref().unwrap()["round_robin"];
    assert_eq!(judged.activations, all);
    assert!((figures.request_lar - local as f64 / all as f64).abs() < 1e-12);
    let imbalance = *tokens.iter().max().unwrap() as f64 * 4.0 / tokens.iter().sum::<u64>() as f64;
    assert!((figures.request_imbalance - imbalance).abs() < 1e-12);
    assert!((judged.lar_random - 0.25).abs() < 1e-12);
}

#[test]
fn affinity_finds_planted_kinds_and_stays_balanced() {
    let (trace, other) = (planted(4, 400, 0.9, 2), planted(4, 600, 0.9, 3));
    let tables = solve_trace(&trace, &options(4, Attention::Dp)).unwrap().tables;
    let judged = evaluate(&tables, EvalInput::Trace(&other), &EvalOptions::default()).unwrap();
    assert_eq!(judged.unit, Unit::Request);
    let policies = judged.policies.as_ref().unwrap();
    let (affinity, robin) = (policies["affinity"], policies["round_robin"]);
    assert_eq!(judged.lar, affinity.request_lar);
    assert_eq!(judged.token_imbalance, affinity.request_imbalance);
    assert!(affinity.request_lar > 0.8 && robin.request_lar < 0.35, "{judged:?}");
    assert!(affinity.request_imbalance < 1.12, "{judged:?}");
    let batch = judged.batch_optimum.unwrap();
    assert!(batch.request_lar >= judged.batch_predicted.unwrap().request_lar - 1e-3, "{judged:?}");
    assert!(batch.request_imbalance < 1.03, "{judged:?}");
    let remote = judged.remote_ranks_per_token.unwrap();
    assert!(
        (remote - affinity.remote_ranks_per_token).abs() < 1e-12 && remote < 0.5 * robin.remote_ranks_per_token,
        "{judged:?}"
    );
    assert!(remote > 0.0 && remote < 2.0 * (1.0 - judged.lar) + 1e-9, "two experts, at most one message each");
}

/// The group of a token in a layer by Algorithm 3, by a plain reading of the tables.
fn group_by_algorithm_3(tables: &Tables, request: TraceRequest<'_>, position: usize, layer: u16) -> Option<usize> {
    let token = TokenId::new(request.token_ids()[position]);
    let before = groups_before(tables, request, position, layer);
    tables.likeliest_group(LayerIdx::new(layer), token, before).map(|likely| likely.group.index())
}

fn groups_before(
    tables: &Tables,
    request: TraceRequest<'_>,
    position: usize,
    layer: u16,
) -> Option<(GroupId, GroupId)> {
    let main = |layer: u16| {
        let layer = LayerIdx::new(layer);
        let mut held = [0; 4];
        for expert in request.route(position, layer)?.experts() {
            held[tables.placement().group_of(layer, expert).index()] += 1;
        }
        let most = held.iter().max().unwrap();
        held.iter().position(|count| count == most).map(|group| GroupId::new(group as u16))
    };
    layer.checked_sub(2).and_then(|older| Some((main(older)?, main(older + 1)?)))
}

/// The paper's A_p, counted plainly: the activations on each group, by half of the requests, layer, and the groups in
/// the two previous layers.
#[derive(Default)]
struct Printed(HashMap<(usize, u16, GroupId, GroupId), [f64; 4]>);

impl Printed {
    fn half(request: TraceRequest<'_>) -> usize {
        usize::from(PromptSplit::EVALUATE.position(request) < 0.5)
    }

    fn of(tables: &Tables, trace: &Trace) -> Self {
        let mut counts = Self::default();
        for request in trace.iter() {
            for (position, layer) in (0..request.token_ids().len()).flat_map(|at| (0..3).map(move |layer| (at, layer)))
            {
                let id = LayerIdx::new(layer);
                let before = groups_before(tables, request, position, layer);
                let (Some((b, a)), Some(route)) = (before, request.route(position, id)) else { continue };
                for expert in route.experts() {
                    let group = tables.placement().group_of(id, expert).index();
                    counts.0.entry((Self::half(request), layer, b, a)).or_default()[group] += 1.0;
                }
            }
        }
        counts
    }

    /// The label from the other half, and its confidence, as a file would store it.
    fn after(&self, tables: &Tables, request: TraceRequest<'_>, position: usize, layer: u16) -> Option<(u16, f16)> {
        let (b, a) = groups_before(tables, request, position, layer)?;
        let counts = self.0.get(&(1 - Self::half(request), layer, b, a))?;
        let most = (1..4).fold(0, |most, group| if counts[group] > counts[most] { group } else { most });
        Some((most as u16, f16::from_f64(counts[most] / counts.iter().sum::<f64>())))
    }

    /// The paper's line 2: groups and shares from T or A, whichever is more certain.
    fn labels(
        &self,
        tables: &Tables,
        request: TraceRequest<'_>,
        at: usize,
        layer: u16,
    ) -> Option<(Vec<u16>, Vec<f16>)> {
        let t = tables.token_groups(LayerIdx::new(layer), TokenId::new(request.token_ids()[at]));
        match (t, self.after(tables, request, at, layer)) {
            (Some(t), Some(a)) if t.probs[0] <= a.1 => Some((vec![a.0], vec![a.1])),
            (None, Some(a)) => Some((vec![a.0], vec![a.1])),
            (t, _) => t.map(|t| (t.groups.to_vec(), t.probs.to_vec())),
        }
    }

    /// The shares of the more confident table alone: those of its labels, and the rest for the groups without one.
    fn shares(
        &self,
        tables: &Tables,
        request: TraceRequest<'_>,
        at: usize,
        layer: u16,
        shares: &mut [f64],
    ) -> Option<LikelyGroup> {
        shares.fill(1.0);
        let (groups, probs) = self.labels(tables, request, at, layer)?;
        let labels = GroupLabels { groups: &groups, probs: &probs };
        (0..4).for_each(|group| shares[usize::from(group)] = labels.share_of(group, 4));
        Some(LikelyGroup { group: GroupId::new(groups[0]), share: probs[0].to_f64() })
    }
}

/// Random T and A, some without evidence; A only if there are two previous layers.
fn labels_by_chance(trace: &Trace) -> Tables {
    let model = trace.model();
    let mut random = fastrand::Rng::with_seed(5);
    let mut labels = |rows: usize, silent: usize| {
        let (mut group, mut prob) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let (first, share) = (random.u16(0..4), 0.5 + 0.3 * random.f64());
            let known = row >= silent && random.usize(..5) > 0;
            group.extend([first, (first + 1) % 4].map(|group| if known { group } else { NO_GROUP }));
            prob.extend([share, 0.9 - share].map(|share| f16::from_f64(if known { share } else { 0.0 })));
        }
        (group, prob)
    };
    let (token_group, token_prob) = labels(3 * model.vocab_size as usize, 0);
    let (transition_group, transition_prob) = labels(3 * 16, 2 * 16);
    let parts = TpParts { labels: 2, token_group, token_prob, transition_group, transition_prob };
    let placement = Placement::contiguous(3, model.num_experts, 4).unwrap();
    TablesBuilder::tp(model.clone(), provenance(), placement, parts, vec![0.0; 4]).finish().unwrap()
}

#[test]
fn figures_of_tokens_equal_a_plain_count() {
    let (trace, other) = (planted(4, 60, 0.7, 11), planted(4, 40, 0.7, 12));
    let solved = evaluated_plainly(&solve_trace(&trace, &options(4, Attention::Tp)).unwrap().tables, &other);
    assert!(solved.remote_ranks_per_token < solved.remote_ranks_random.map(|random| 0.8 * random), "{solved:?}");
    let by_chance = evaluated_plainly(&labels_by_chance(&other), &other);
    let printed = by_chance.lar_paper_rule.unwrap();
    for other in [by_chance.lar, by_chance.lar_t_only.unwrap()] {
        assert!((printed - other).abs() > 1e-6, "three rules: {by_chance:?}");
    }
    assert!((by_chance.lar - by_chance.lar_t_only.unwrap()).abs() > 1e-6, "A has its say: {by_chance:?}");
}

/// Recounts what `evaluate` reports about tokens.
fn evaluated_plainly(tables: &Tables, other: &Trace) -> Evaluation {
    let judged = evaluate(tables, EvalInput::Trace(other), &EvalOptions::default()).unwrap();
    // Local activations and remote groups, where the tables put a token, and summed over all four groups.
    let (mut local, mut remote, mut all, mut routes) = ([0.0; 3], [0.0; 3], 0.0, 0.0);
    let (experts, mut blocks) = (usize::from(tables.model().num_experts), 0.0);
    let printed = Printed::of(tables, other);
    for request in other.iter() {
        for (position, layer) in (0..request.token_ids().len()).flat_map(|at| (0..3).map(move |layer| (at, layer))) {
            let Some(route) = request.route(position, LayerIdx::new(layer)) else { continue };
            let groups: Vec<usize> = route
                .experts()
                .map(|expert| tables.placement().group_of(LayerIdx::new(layer), expert).index())
                .collect();
            let figures = |own: usize| {
                let distinct: BTreeSet<usize> = groups.iter().copied().filter(|&group| group != own).collect();
                (groups.iter().filter(|&&group| group == own).count() as f64, distinct.len() as f64)
            };
            let held: BTreeSet<usize> = route.experts().map(|expert| expert.index() / (experts / 4)).collect();
            blocks += (0..4).map(|own| held.iter().filter(|&&group| group != own).count() as f64 / 4.0).sum::<f64>();
            let everywhere = (0..4).map(figures).fold((0.0, 0.0), |sum, at| (sum.0 + at.0 / 4.0, sum.1 + at.1 / 4.0));
            let own = group_by_algorithm_3(tables, request, position, layer);
            let printed = printed.labels(tables, request, position, layer).map(|(groups, _)| groups[0].into());
            let printed = printed.map_or(everywhere, figures);
            for (at, (here, there)) in [own.map_or(everywhere, figures), everywhere, printed].into_iter().enumerate() {
                local[at] += here;
                remote[at] += there;
            }
            all += groups.len() as f64;
            routes += 1.0;
        }
    }
    for (found, expected) in [
        (judged.lar, local[0] / all),
        (judged.lar_random, local[1] / all),
        (judged.lar_paper_rule.unwrap(), local[2] / all),
        (judged.remote_ranks_per_token.unwrap(), remote[0] / routes),
        (judged.remote_ranks_random.unwrap(), remote[1] / routes),
        (judged.remote_ranks_blocks.unwrap(), blocks / routes),
    ] {
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }
    judged
}

#[test]
fn figures_of_steps_equal_a_plain_count() {
    let trace = planted(4, 60, 0.7, 11);
    let tables = labels_by_chance(&trace);
    for step_tokens in [1, 10, 100_000] {
        let options = EvalOptions { step_tokens: Some(step_tokens), ..EvalOptions::default() };
        let judged = evaluate(&tables, EvalInput::Trace(&trace), &options).unwrap();
        let steps = judged.steps.unwrap();
        assert_eq!(steps.step_tokens, step_tokens);
        let [lar, lar_t_only, lar_paper_rule, fullest, wanted, moved] = counted_in_steps(&tables, &trace, step_tokens);
        for (found, expected) in [
            (judged.lar, lar),
            (judged.lar_t_only.unwrap(), lar_t_only),
            (judged.lar_paper_rule.unwrap(), lar_paper_rule),
            (steps.fullest_group, fullest),
            (steps.fullest_group_wanted, wanted),
            (steps.moved, moved),
        ] {
            assert!((found - expected).abs() < 1e-12, "steps of {step_tokens}: {found} {expected}");
        }
    }
    let alone = evaluate(&tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    assert!(alone.steps.is_none());
}

/// Local rate by T and A, by T alone and by the printed rule, the fullest group over the mean with and without even
/// groups, and the share that moved.
fn counted_in_steps(tables: &Tables, trace: &Trace, step_tokens: usize) -> [f64; 6] {
    // Routes are known in all layers or in none.
    let known = |request: TraceRequest<'_>, at: &usize| request.route(*at, LayerIdx::new(0)).is_some();
    let tokens = trace.iter().flat_map(|request| (0..request.token_ids().len()).map(move |at| (request, at)));
    let tokens: Vec<_> = tokens.filter(|(request, at)| known(*request, at)).collect();
    let printed = Printed::of(tables, trace);
    let (mut local, mut all, mut rows, mut fullest, mut wanted, mut moved) = ([0.0; 3], 0.0, 0.0, 0.0, 0.0, 0.0);
    for (step, layer) in tokens.chunks(step_tokens).flat_map(|step| (0..3).map(move |layer| (step, layer))) {
        let id = LayerIdx::new(layer);
        let mut even = [EvenGroups::new(4), EvenGroups::new(4), EvenGroups::new(4)];
        for &(request, at) in step {
            let token = TokenId::new(request.token_ids()[at]);
            let before = [groups_before(tables, request, at, layer), None];
            for (even, before) in even.iter_mut().zip(before) {
                even.push(|shares| tables.group_shares(id, token, before, shares));
            }
            even[2].push(|shares| printed.shares(tables, request, at, layer, shares));
        }
        even.iter_mut().for_each(EvenGroups::settle);
        for (row, &(request, at)) in step.iter().enumerate() {
            for expert in request.route(at, id).unwrap().experts() {
                let group = tables.placement().group_of(id, expert).get();
                local
                    .iter_mut()
                    .zip(&even)
                    .for_each(|(local, even)| *local += f64::from(u8::from(even.groups()[row] == group)));
                all += 1.0;
            }
            moved += f64::from(u8::from(even[0].placed_by(row) == PlacedBy::Evening));
            rows += 1.0;
        }
        fullest += f64::from(even[0].fullest());
        wanted += f64::from(even[0].fullest_wanted());
    }
    [local[0] / all, local[1] / all, local[2] / all, 4.0 * fullest / rows, 4.0 * wanted / rows, moved / rows]
}

#[test]
fn profile_and_trace_agree_where_both_can_be_asked() {
    let trace = planted(4, 200, 0.8, 4);
    let tables = solve_trace(&trace, &options(4, Attention::Tp)).unwrap().tables;
    let by_trace = evaluate(&tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    let profile = profile_of(&trace);
    let by_profile = evaluate(&tables, EvalInput::Profile(&profile), &EvalOptions::default()).unwrap();
    assert!((by_trace.lar - by_profile.lar).abs() < 1e-12);
    assert_eq!(by_trace.activations, by_profile.activations);
    assert!((by_trace.expert_load_imbalance - by_profile.expert_load_imbalance).abs() < 1e-12);
    assert!(by_profile.remote_ranks_per_token.is_none() && by_trace.remote_ranks_per_token.is_some());
    assert!(by_profile.policies.is_none() && by_trace.policies.is_none());
}

#[test]
fn the_document_has_the_names_of_the_design() {
    let trace = planted(4, 50, 0.8, 5);
    let judged = evaluate(&neutral(&trace, 4), EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    let json = serde_json::to_value(&judged).unwrap();
    for name in [
        "lar",
        "lar_per_layer",
        "lar_random",
        "remote_ranks_per_token",
        "expert_load_imbalance",
        "token_imbalance",
        "policies",
        "batch_optimum",
        "bound",
    ] {
        assert!(json.get(name).is_some(), "{name} is missing in {json}");
    }
    for policy in EvalOptions::default().policies {
        let policy = policy.as_str();
        assert!(
            json["policies"][policy]["request_lar"].is_f64() && json["policies"][policy]["request_imbalance"].is_f64()
        );
    }
    assert!(json["batch_optimum"]["request_lar"].is_f64());
}

#[test]
fn waiting_for_a_window_lies_between_in_turn_and_unlimited() {
    let trace = planted(4, 200, 0.8, 8);
    let solved = solve_trace(&trace, &options(4, Attention::Dp)).unwrap();
    let judged = evaluate(&solved.tables, EvalInput::Trace(&trace), &EvalOptions::default()).unwrap();
    let (argmax, windowed) = (judged.argmax.unwrap(), judged.windowed.unwrap());
    let policies = judged.policies.unwrap();
    assert!(argmax.request_lar >= windowed.request_lar, "{argmax:?} {windowed:?}");
    assert!(windowed.request_lar > policies["round_robin"].request_lar, "{windowed:?} {policies:?}");
    assert!(windowed.request_lar >= policies["affinity_paper"].request_lar, "{windowed:?} {policies:?}");
    assert!(windowed.request_imbalance <= 1.1, "{windowed:?}");
}

#[test]
fn the_bound_is_above_what_t_reaches_and_tighter_limits_lower_it() {
    let trace = planted(4, 200, 0.8, 9);
    let solved = solve_trace(&trace, &options(4, Attention::Dp)).unwrap();
    let of = |tokens, sequences| {
        let options =
            EvalOptions { policies: Vec::new(), bound: Margins { tokens, sequences }, ..EvalOptions::default() };
        evaluate(&solved.tables, EvalInput::Trace(&trace), &options).map(|judged| judged.bound.unwrap())
    };
    let (even, free) = (of(0.05, 0.10).unwrap(), of(0.05, 3.0).unwrap());
    assert!(even.lar_by_t <= even.lar + 1e-9 && even.gap < 1e-6, "{even:?}");
    assert!(even.lar_by_t > 0.6 && even.lar <= free.lar + 1e-9, "{even:?} {free:?}");
    assert!(of(0.05, 0.0).unwrap_err().to_string().contains("bound.sequences"));
}

#[test]
fn wrong_input_is_reported() {
    let trace = planted(4, 20, 0.8, 6);
    let tables = neutral(&trace, 4);
    let mut renamed = trace.model().clone();
    renamed.vocab_size += 1;
    let mut other = semmoe_tables::TraceBuilder::new(renamed, provenance()).unwrap();
    other.push(&[1], 1, &[0, 1, 0, 1, 0, 1], None).unwrap();
    let other = other.finish().unwrap();
    let error = evaluate(&tables, EvalInput::Trace(&other), &EvalOptions::default()).unwrap_err();
    assert!(error.to_string().contains("vocab_size"), "{error}");
    let options = EvalOptions { policies: vec!["best".into()], ..EvalOptions::default() };
    let error = evaluate(&tables, EvalInput::Trace(&trace), &options).unwrap_err();
    assert!(matches!(error, SolveError::Policy(_)), "{error}");
    for (step_tokens, input, named) in
        [(16, EvalInput::Profile(&profile_of(&trace)), "a profile"), (0, EvalInput::Trace(&trace), "step_tokens")]
    {
        let options = EvalOptions { step_tokens: Some(step_tokens), ..EvalOptions::default() };
        let error = evaluate(&tables, input, &options).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
    let empty = semmoe_tables::TraceBuilder::new(trace.model().clone(), provenance()).unwrap().finish().unwrap();
    let error = evaluate(&tables, EvalInput::Trace(&empty), &EvalOptions::default()).unwrap_err();
    assert!(matches!(error, SolveError::NoTokens { what: "trace" }), "{error}");
}
