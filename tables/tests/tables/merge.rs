//! Profiles of one model and phase add up: in any grouping, in any order, and never past the end of a counter.

use crate::common::*;
use proptest::prelude::*;
use semmoe_tables::*;

fn merged<'a>(model: &ModelInfo, parts: impl IntoIterator<Item = &'a Profile>) -> Profile {
    let mut builder = profile_builder(model, Phase::All);
    parts.into_iter().for_each(|part| builder.add_profile(part).unwrap());
    builder.finish().unwrap()
}

proptest! {
    #[test]
    fn merging_is_associative_and_order_free(model in any_model(), seeds: [u64; 3]) {
        let [a, b, c] = seeds.map(|seed| profile(&model, seed));
        let mut whole = profile_builder(&model, Phase::All);
        seeds.iter().for_each(|&seed| whole.add_trace(&trace(&model, 5, seed)).unwrap());
        let whole = whole.finish().unwrap().digest();
        prop_assert_eq!(&merged(&model, [&merged(&model, [&a, &b]), &c]).digest(), &whole);
        prop_assert_eq!(&merged(&model, [&a, &merged(&model, [&b, &c])]).digest(), &whole);
        prop_assert_eq!(&merged(&model, [&c, &a, &b]).digest(), &whole);
        prop_assert_eq!(&merged(&model, [&merged(&model, []), &b, &c, &a]).digest(), &whole);
    }
}

proptest! {
    #[test]
    fn what_was_merged_can_be_taken_out_again(model in any_model(), seeds: [u64; 2]) {
        let [a, b] = seeds.map(|seed| profile(&model, seed));
        let both = merged(&model, [&a, &b]);
        prop_assert_eq!(both.without(&b).unwrap().unwrap().digest(), a.digest());
        prop_assert_eq!(a.without(&a).unwrap().unwrap().total_tokens(), 0);
        // Either the subtraction is refused, or the rest is valid.
        match a.without(&b).unwrap() {
            Some(rest) => prop_assert_eq!(merged(&model, [&rest, &b]).digest(), a.digest()),
            None => prop_assert!(b.total_tokens() > 0),
        }
        if a.total_tokens() > 0 {
            prop_assert!(a.without(&both).unwrap().is_none() || b.total_tokens() == 0);
        }
    }
}

#[test]
fn only_what_can_be_the_counts_of_tokens_is_left() {
    let tiny = model(4, 2, 3, &[0]);
    let counted = |routes: &[(u32, [u16; 2])]| {
        let mut builder = TraceBuilder::new(tiny.clone(), provenance()).unwrap();
        routes.iter().for_each(|(token, experts)| builder.push(&[*token], 1, experts, None).unwrap());
        let mut profile = profile_builder(&tiny, Phase::All);
        profile.add_trace(&builder.finish().unwrap()).unwrap();
        profile.finish().unwrap()
    };
    let whole = counted(&[(1, [0, 1]), (1, [2, 3]), (2, [0, 1])]);
    let cases = [
        (&[(1, [2, 3])][..], true),
        (&[], true),
        // Exceeds the occurrences of a token, of one of its experts, of an expert it never had.
        (&[(0, [0, 1])], false),
        (&[(2, [0, 1]), (2, [0, 1])], false),
        (&[(2, [0, 3])], false),
    ];
    for (part, is_part) in cases {
        assert_eq!(whole.without(&counted(part)).unwrap().is_some(), is_part, "{part:?}");
    }
    // Every count would stay positive, but one occurrence cannot activate an expert twice.
    let whole = counted(&[(1, [0, 1]), (1, [0, 2]), (1, [0, 3])]);
    assert!(whole.without(&counted(&[(1, [1, 2]), (1, [0, 3])])).unwrap().is_none());
}

#[test]
fn parts_of_other_models_and_phases_are_errors() {
    let tiny = model(4, 2, 5, &[0]);
    let decode = profile_builder(&tiny, Phase::Decode).finish().unwrap();
    let error = profile(&tiny, 1).without(&decode).unwrap_err().to_string();
    assert_eq!(error, "the profile's phase is decode, expected all");
    let error = profile(&tiny, 1).without(&profile(&model(4, 2, 6, &[0]), 1)).unwrap_err().to_string();
    assert!(error.contains("vocab_size"), "{error}");
}

#[test]
fn a_count_that_overflows_is_an_error() {
    let model = model(2, 1, 1, &[0]);
    let mut builder = TraceBuilder::new(model.clone(), provenance()).unwrap();
    builder.push(&[0], 1, &[1], None).unwrap();
    let mut first = profile_builder(&model, Phase::All);
    first.add_trace(&builder.finish().unwrap()).unwrap();
    let mut profile = first.finish().unwrap();
    for _ in 0..31 {
        profile = merged(&model, [&profile, &profile]);
    }
    assert_eq!(profile.row(LayerIdx::new(0), TokenId::new(0)).counts, [1 << 31]);
    let mut builder = profile_builder(&model, Phase::All);
    builder.add_profile(&profile).unwrap();
    let error = builder.add_profile(&profile).unwrap_err();
    assert_eq!(error.to_string(), "the count of expert 1 in layer 0 for token 0 does not fit into 32 bits");
}

#[test]
fn only_profiles_of_one_model_and_phase_add_up() {
    let tiny = model(4, 2, 5, &[0]);
    let mut decode = profile_builder(&tiny, Phase::Decode);
    let error = decode.add_profile(&profile(&tiny, 1)).unwrap_err().to_string();
    assert_eq!(error, "the profile's phase is all, expected decode");
    let mut builder = profile_builder(&tiny, Phase::All);
    let error = builder.add_profile(&profile(&model(4, 2, 6, &[0]), 1)).unwrap_err().to_string();
    assert!(error.contains("`vocab_size` is 6 in one and 5 in the other"), "{error}");
}

#[test]
fn contradicting_tokenizers_are_refused_in_any_order() {
    let unknown = model(4, 2, 5, &[0]);
    let with = |digit: &str| ModelInfo { tokenizer_sha256: Some(digit.repeat(64)), ..unknown.clone() };
    let profiles = [&unknown, &with("a"), &with("b")].map(|model| profile(model, 7));
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut builder = profile_builder(&unknown, Phase::All);
        let results = order.map(|i| builder.add_profile(&profiles[i]).is_ok());
        assert_eq!(results.iter().filter(|ok| !**ok).count(), 1, "{order:?}");
    }
    let mut builder = profile_builder(&unknown, Phase::All);
    builder.add_profile(&profiles[1]).unwrap();
    assert_eq!(builder.finish().unwrap().model(), &with("a"));
}
