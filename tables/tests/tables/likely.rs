//! The rule for T and A equals the sum of logarithms written out.

use crate::common::*;
use half::f16;
use proptest::prelude::*;
use semmoe_tables::*;

/// Up to four labels of `groups` groups, as a file may hold them: best first, distinct, adding up to at most one.
fn any_labels(groups: u16) -> impl Strategy<Value = (Vec<u16>, Vec<f16>)> {
    let weights = proptest::collection::vec(0u32..1000, usize::from(groups));
    // 0.0: labels that were rounded to zero.
    let kept = prop_oneof![1 => Just(0.0), 9 => 0.0f64..=1.0];
    (weights, 1usize..=4, kept).prop_map(move |(weights, labels, kept)| {
        let total = f64::from(weights.iter().sum::<u32>().max(1));
        let mut order: Vec<u16> = (0..groups).collect();
        order.sort_by_key(|&group| std::cmp::Reverse(weights[usize::from(group)]));
        order.truncate(labels);
        let prob = |&group: &u16| f16::from_f64(kept * f64::from(weights[usize::from(group)]) / total);
        let probs = order.iter().map(prob).collect();
        (order, probs)
    })
}

/// All shares, from the definition: groups without a label divide the rest evenly, capped at the last label, and no
/// group is impossible.
fn written_out(labels: &GroupLabels<'_>, groups: u16) -> Vec<f64> {
    let least = f16::MIN_POSITIVE.to_f64();
    let labelled: f64 = labels.probs.iter().map(|prob| prob.to_f64()).sum();
    let left = (1.0 - labelled) / f64::from((groups - labels.groups.len() as u16).max(1));
    let mut shares = vec![left.min(labels.probs[labels.probs.len() - 1].to_f64()).max(least); groups.into()];
    for (&group, prob) in labels.groups.iter().zip(labels.probs) {
        shares[usize::from(group)] = prob.to_f64().max(least);
    }
    shares
}

proptest! {
    #[test]
    fn the_rule_is_the_sum_of_logarithms(
        (groups, t, a) in (4u16..12).prop_flat_map(|groups| (Just(groups), any_labels(groups), any_labels(groups)))
    ) {
        let (t, a) = (GroupLabels { groups: &t.0, probs: &t.1 }, GroupLabels { groups: &a.0, probs: &a.1 });
        let logs: Vec<f64> =
            written_out(&t, groups).iter().zip(written_out(&a, groups)).map(|(t, a)| t.ln() + a.ln()).collect();
        let sum: f64 = logs.iter().map(|log| log.exp()).sum();
        let likely = likeliest_group(Some(t), Some(a), groups).unwrap();
        let best = logs.iter().copied().fold(f64::MIN, f64::max);
        prop_assert!((logs[likely.group.index()] - best).abs() < 1e-9, "{logs:?} {likely:?}");
        prop_assert!((likely.share - best.exp() / sum).abs() < 1e-9, "{logs:?} {likely:?}");
    }

    #[test]
    fn shares_of_all_groups_have_the_likeliest_group(
        (groups, t, a) in (4u16..12).prop_flat_map(|groups| (Just(groups), any_labels(groups), any_labels(groups))),
        known: [bool; 2],
    ) {
        let t = known[0].then_some(GroupLabels { groups: &t.0, probs: &t.1 });
        let a = known[1].then_some(GroupLabels { groups: &a.0, probs: &a.1 });
        let mut shares = vec![0.0; groups.into()];
        let found = group_shares(t, a, &mut shares);
        let expected = likeliest_group(t, a, groups);
        prop_assert_eq!(found.map(|likely| likely.group), expected.map(|likely| likely.group));
        let one = |labels: Option<GroupLabels<'_>>| labels.map_or(vec![1.0; groups.into()], |l| written_out(&l, groups));
        let mut products: Vec<f64> = one(t).iter().zip(one(a)).map(|(t, a)| t * a).collect();
        if known == [true, true] {
            let sum: f64 = products.iter().sum();
            products.iter_mut().for_each(|product| *product /= sum);
            prop_assert!((found.unwrap().share - expected.unwrap().share).abs() < 1e-12);
        } else {
            prop_assert_eq!(found, expected);
        }
        prop_assert!(shares.iter().zip(&products).all(|(share, product)| (share - product).abs() < 1e-12));
    }

    #[test]
    fn one_without_the_other_is_taken_as_it_is((groups, labels) in (4u16..12).prop_flat_map(|g| (Just(g), any_labels(g)))) {
        let labels = GroupLabels { groups: &labels.0, probs: &labels.1 };
        let expected = Some(LikelyGroup { group: GroupId::new(labels.groups[0]), share: labels.probs[0].to_f64() });
        prop_assert_eq!(likeliest_group(Some(labels), None, groups), expected);
        prop_assert_eq!(likeliest_group(None, Some(labels), groups), expected);
        prop_assert_eq!(likeliest_group(None, None, groups), None);
    }

    #[test]
    fn an_even_a_leaves_what_t_says((groups, labels) in prop_oneof![Just(4u16), Just(8)].prop_flat_map(|g| (Just(g), any_labels(g)))) {
        let labels = GroupLabels { groups: &labels.0, probs: &labels.1 };
        let even: Vec<u16> = (0..4).collect();
        let even = GroupLabels { groups: &even, probs: &[f16::from_f64(1.0 / f64::from(groups)); 4] };
        let likely = likeliest_group(Some(labels), Some(even), groups).unwrap();
        prop_assert_eq!(likely.group.get(), labels.groups[0]);
    }
}

#[test]
fn a_decides_where_t_wavers() {
    let half = |prob: f64| f16::from_f64(prob);
    let (t, a) = ([half(0.5), half(0.4)], [half(0.6), half(0.2)]);
    let (t, a) = (GroupLabels { groups: &[2, 0], probs: &t }, GroupLabels { groups: &[0, 1], probs: &a });
    // 0.4 x 0.6 against 0.5 x 0.1 and 0.05 x 0.2 and 0.05 x 0.1.
    let likely = likeliest_group(Some(t), Some(a), 4).unwrap();
    assert_eq!(likely.group.get(), 0);
    assert!((likely.share - 0.24 / (0.24 + 0.05 + 0.01 + 0.005)).abs() < 1e-3, "{likely:?}");
}

#[test]
fn tables_look_both_up() {
    let model = model(8, 2, 6, &[0, 1, 2]);
    let tables = tp_tables(&model, 4).finish().unwrap();
    let group = GroupId::new;
    for layer in (0..3).map(LayerIdx::new) {
        for token in (0..7).map(TokenId::new) {
            for (older, newer) in [(0, 0), (1, 3), (3, 2)].map(|(older, newer)| (group(older), group(newer))) {
                let (t, a) = (tables.token_groups(layer, token), tables.next_groups(layer, older, newer));
                let likely = tables.likeliest_group(layer, token, Some((older, newer)));
                assert_eq!(likely, likeliest_group(t, a, 4));
                let (mut shares, mut expected) = ([0.0; 4], [0.0; 4]);
                let found = tables.group_shares(layer, token, Some((older, newer)), &mut shares);
                assert_eq!(found, group_shares(t, a, &mut expected));
                assert_eq!(shares, expected);
                assert_eq!(tables.likeliest_group(layer, token, None), likeliest_group(t, None, 4));
            }
        }
    }
    let dp = dp_tables(&model, 4).finish().unwrap();
    assert_eq!(dp.likeliest_group(LayerIdx::new(0), TokenId::new(0), None), None);
}

#[test]
fn a_tokens_group_holds_most_of_its_experts_and_of_equals_is_the_lowest() {
    let placement = Placement::new(3, vec![vec![0, 0, 1, 1, 2, 2], vec![2, 1, 0, 2, 1, 0]]).unwrap();
    let mut counts = Vec::new();
    let mut main = |layer: u16, experts: &[u16]| {
        let experts = experts.iter().map(|&expert| ExpertId::new(expert));
        placement.main_group(LayerIdx::new(layer), experts, &mut counts).get()
    };
    // Scratch left over from one call does not affect the next.
    for (layer, experts, expected) in
        [(0, &[4, 5, 0][..], 2), (0, &[3, 0, 5], 0), (0, &[5, 3], 1), (1, &[0, 1, 3], 2), (1, &[1], 1), (1, &[], 0)]
    {
        assert_eq!(main(layer, experts), expected, "{experts:?} in layer {layer}");
    }
}
