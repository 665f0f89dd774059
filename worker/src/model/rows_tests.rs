//! Splits against a plain implementation of the rule, with tables that cover some tokens.

use half::f16;
use proptest::prelude::*;
use semmoe_tables::{ModelInfo, NO_GROUP, Placement, Provenance, TablesBuilder, TpParts};

use super::*;

const LAYERS: usize = 4;
const EXPERTS: u16 = 8;
const GROUPS: u16 = 4;
const VOCABULARY: usize = 24;
const TOP_K: usize = 3;

/// Two labels for most tokens, none for every fifth; A for some pairs of groups.
fn tables(seed: u64) -> Tables {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut labels = |count: usize, unknown: usize| {
        let (mut groups, mut probs) = (Vec::new(), Vec::new());
        for row in 0..count {
            let first = random.u16(0..GROUPS);
            let share = 0.5 + 0.4 * random.f64();
            let known = row % unknown != 0;
            groups.extend(if known { [first, (first + 1) % GROUPS] } else { [NO_GROUP; 2] });
            probs.extend(if known { [share, 0.9 - share].map(f16::from_f64) } else { [f16::ZERO; 2] });
        }
        (groups, probs)
    };
    let (token_group, token_prob) = labels(LAYERS * VOCABULARY, 5);
    let pairs = usize::from(GROUPS * GROUPS);
    let (mut transition_group, mut transition_prob) = labels(LAYERS * pairs, 3);
    transition_group[..4 * pairs].fill(NO_GROUP);
    transition_prob[..4 * pairs].fill(f16::ZERO);
    let parts = TpParts { labels: 2, token_group, token_prob, transition_group, transition_prob };
    let info = ModelInfo {
        model: "m".into(),
        tokenizer_sha256: None,
        num_experts: EXPERTS,
        top_k: TOP_K as u16,
        vocab_size: VOCABULARY as u32,
        num_hidden_layers: LAYERS as u16,
        layer_ids: (0..LAYERS as u16).collect(),
    };
    let provenance = Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() };
    let layers = (0..LAYERS as u16).map(|l| (0..EXPERTS).map(|e| (e + l) % GROUPS).collect()).collect();
    let placement = Placement::new(GROUPS, layers).unwrap();
    TablesBuilder::tp(info, provenance, placement, parts, vec![0.0; 4]).finish().unwrap()
}

/// The group with most of a token's experts, the lowest one on ties.
fn main_group(tables: &Tables, layer: usize, routes: &[u16]) -> GroupId {
    let groups = tables.placement().layer(LayerIdx::new(layer as u16));
    let held =
        |group: u16| routes[layer * TOP_K..][..TOP_K].iter().filter(|e| groups[usize::from(**e)] == group).count();
    GroupId::new((0..GROUPS).rev().max_by_key(|&group| held(group)).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_go_where_the_tables_say_as_far_as_parts_are_even(
        seed in 0u64..8, tokens in prop::collection::vec(0..VOCABULARY as u32, 1..40), routes_seed: u64, layer in 0..LAYERS,
    ) {
        let tables = Arc::new(tables(seed));
        let mut random = fastrand::Rng::with_seed(routes_seed);
        let routes: Vec<u16> = (0..tokens.len() * LAYERS).flat_map(|_| {
            let first = random.u16(0..EXPERTS);
            [first, (first + 1) % EXPERTS, (first + 4) % EXPERTS]
        }).collect();
        let mut plan = RowPlan::new(usize::from(GROUPS), Some(Arc::clone(&tables)));
        let id = LayerIdx::new(layer as u16);
        // State of another layer must not matter.
        plan.split(Some(LayerIdx::new(0)), PlanInput { tokens: &tokens, routes: &routes, top_k: TOP_K });
        plan.split(Some(id), PlanInput { tokens: &tokens, routes: &routes, top_k: TOP_K });

        let mut expected = EvenGroups::new(GROUPS);
        let mut wanted = vec![None; tokens.len()];
        for (row, &token) in tokens.iter().enumerate() {
            let routes = &routes[row * LAYERS * TOP_K..][..LAYERS * TOP_K];
            let before = (layer >= 2).then(|| (main_group(&tables, layer - 2, routes), main_group(&tables, layer - 1, routes)));
            expected.push(|shares| tables.group_shares(id, TokenId::new(token), before, shares));
            wanted[row] = tables.likeliest_group(id, TokenId::new(token), before).map(|likely| likely.group.index());
        }
        expected.settle();

        let split = plan.current();
        let (most, mut all) = (tokens.len().div_ceil(usize::from(GROUPS)), 0);
        for rank in 0..usize::from(GROUPS) {
            let rows: Vec<usize> = split.positions(rank).map(|position| split.token(position)).collect();
            prop_assert!(rows.is_sorted(), "the order of tokens stays");
            prop_assert!(rows.len() <= most);
            prop_assert!(rows.iter().all(|&row| usize::from(expected.groups()[row]) == rank));
            let counts = plan.counts(rank);
            prop_assert_eq!(counts.by_tables, rows.iter().filter(|&&row| wanted[row] == Some(rank)).count() as u64);
            prop_assert_eq!(counts.evenly, rows.iter().filter(|&&row| wanted[row].is_none()).count() as u64);
            prop_assert_eq!(counts.by_tables + counts.moved + counts.evenly, rows.len() as u64);
            prop_assert_eq!(counts.fullest, (0..usize::from(GROUPS)).map(|rank| split.positions(rank).len() as u64).max().unwrap());
            let fullest_wanted = (0..usize::from(GROUPS)).map(|rank| wanted.iter().filter(|w| **w == Some(rank)).count()).max().unwrap();
            prop_assert_eq!(counts.fullest_wanted, fullest_wanted.max(most) as u64);
            all += rows.len();
        }
        prop_assert_eq!(all, tokens.len());
    }
}

#[test]
fn without_tables_and_in_dense_layers_parts_are_even_and_in_order() {
    let tokens = [1, 2, 3, 4, 6];
    let routes = [0; 5 * LAYERS * TOP_K];
    let input = PlanInput { tokens: &tokens, routes: &routes, top_k: TOP_K };
    for (tables, layer) in [(None, Some(LayerIdx::new(1))), (Some(Arc::new(tables(1))), None)] {
        let mut plan = RowPlan::new(4, tables);
        plan.split(layer, input);
        assert_eq!(plan.current().offsets(), [0, 2, 3, 4, 5]);
        assert_eq!(plan.current().permutation(), None);
        assert_eq!(plan.counts(0), RowCounts { evenly: 2, fullest: 2, fullest_wanted: 2, ..RowCounts::default() });
    }
}
