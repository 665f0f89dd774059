//! Files read back as written, equal content gives equal bytes, and a foreign reader agrees.

use crate::common;
use crate::common::*;
use half::f16;
use proptest::prelude::*;
use semmoe_tables::*;

fn raw(request: TraceRequest<'_>, model: &ModelInfo, weights: bool) -> RawRequest {
    let (mut experts, mut all_weights) = (Vec::new(), Vec::new());
    for position in 0..request.token_ids().len() {
        for layer in 0..model.layers() {
            let route = request.route(position, LayerIdx::new(layer as u16));
            let k = usize::from(model.top_k);
            experts.extend(route.map_or(vec![UNKNOWN_EXPERT; k], |r| r.experts().map(ExpertId::get).collect()));
            all_weights
                .extend(route.and_then(|r| r.weights().map(<[f16]>::to_vec)).unwrap_or_else(|| vec![f16::ZERO; k]));
        }
    }
    RawRequest {
        token_ids: request.token_ids().to_vec(),
        prompt_len: request.prompt_len() as u32,
        experts,
        weights: weights.then_some(all_weights),
    }
}

fn same(a: &RawRequest, b: &RawRequest) -> bool {
    (&a.token_ids, a.prompt_len, &a.experts, &a.weights) == (&b.token_ids, b.prompt_len, &b.experts, &b.weights)
}

proptest! {
    #[test]
    fn traces(model in any_model(), count in 0usize..5, seed: u64, weights: bool) {
        let requests = requests(&model, count, seed, weights);
        let builder = trace_builder(&model, &requests);
        let bytes = builder.to_bytes().unwrap();
        prop_assert_eq!(&bytes, &trace_builder(&model, &requests).to_bytes().unwrap());
        let trace = Trace::from_bytes(bytes).unwrap();
        prop_assert_eq!(trace.model(), &model);
        prop_assert_eq!(trace.provenance(), &provenance());
        prop_assert_eq!(trace.requests(), count);
        prop_assert_eq!(trace.tokens(), builder.tokens());
        let weights = weights && count > 0;
        for (request, expected) in trace.iter().zip(&requests) {
            prop_assert!(same(&raw(request, &model, weights), expected));
        }
        let all = TraceBuilder::select(&trace, |_, _| true).unwrap();
        prop_assert_eq!(all.digest(), trace.digest());
        let odd = TraceBuilder::select(&trace, |number, _| number % 2 == 1).unwrap();
        prop_assert_eq!(odd.requests(), count / 2);
    }

    #[test]
    fn profiles(model in any_model(), seed: u64) {
        let requests = requests(&model, 4, seed, false);
        let trace = trace_builder(&model, &requests).finish().unwrap();
        let phases = [Phase::Prefill, Phase::Decode, Phase::All].map(|phase| {
            let mut builder = profile_builder(&model, phase);
            builder.add_trace(&trace).unwrap();
            let bytes = builder.to_bytes().unwrap();
            let profile = Profile::from_bytes(bytes.clone()).unwrap();
            assert_eq!((profile.phase(), profile.model()), (phase, &model));
            let mut again = profile_builder(&model, phase);
            again.add_profile(&profile).unwrap();
            assert_eq!(again.to_bytes().unwrap(), bytes);
            profile
        });
        // Counted naively from the pushed requests.
        let [prefill, decode, all] = &phases;
        let (layers, k) = (model.layers(), usize::from(model.top_k));
        let mut activations = 0u64;
        let mut tokens = 0u64;
        for request in &requests {
            for routes in request.experts.chunks(layers * k) {
                tokens += u64::from(routes.iter().any(|&e| e != UNKNOWN_EXPERT));
                activations += routes.iter().filter(|&&e| e != UNKNOWN_EXPERT).count() as u64;
            }
        }
        let mut counted = 0;
        for layer in (0..layers).map(|l| LayerIdx::new(l as u16)) {
            for token in (0..model.vocab_size).map(TokenId::new) {
                let [p, d, a] = [prefill, decode, all].map(|profile| profile.row(layer, token));
                prop_assert_eq!(p.activations() + d.activations(), a.activations());
                counted += a.activations();
            }
        }
        prop_assert_eq!(counted, activations);
        prop_assert_eq!(all.total_tokens(), tokens);
        prop_assert_eq!(prefill.total_tokens() + decode.total_tokens(), tokens);
    }

    #[test]
    fn tables(n in 1u16..6, groups in 1u16..5, vocab in 1u32..9, layers in 1u16..4) {
        let layer_ids: Vec<u16> = (0..layers).map(|l| l * 2).collect();
        let model = model(n * groups, 1, vocab, &layer_ids);
        let price: Vec<f32> = (0..groups).map(f32::from).collect();
        let priced = dp_tables(&model, groups).sequence_price(price.clone()).finish().unwrap();
        prop_assert_eq!(priced.sequence_price(), price);
        for builder in [dp_tables(&model, groups), tp_tables(&model, groups)] {
            let bytes = builder.to_bytes().unwrap();
            prop_assert_eq!(&bytes, &builder.to_bytes().unwrap());
            let tables = Tables::from_bytes(bytes).unwrap();
            prop_assert_eq!(tables.model(), &model);
            prop_assert_eq!(tables.groups(), groups);
            prop_assert_eq!(tables.placement_digest(), tables.placement().digest());
            prop_assert_eq!(tables.price().len(), usize::from(groups));
            prop_assert!(tables.sequence_price().is_empty(), "a file without them opens");
            prop_assert_eq!(tables.token_row(TokenId::new(vocab)), None);
            let is_dp = tables.attention() == Attention::Dp;
            for token in (0..vocab).map(TokenId::new) {
                prop_assert_eq!(tables.token_row(token).map(<[f16]>::len), is_dp.then_some(usize::from(groups)));
            }
        }
    }
}

#[test]
fn tp_views_lend_the_used_labels() {
    let model = model(4, 1, 5, &[0, 1]);
    let tables = tp_tables(&model, 2).finish().unwrap();
    let view = |layer, token| tables.token_groups(LayerIdx::new(layer), TokenId::new(token));
    assert_eq!(tables.labels(), 2);
    assert_eq!(view(0, 0), None);
    assert_eq!(view(0, 1).map(|l| (l.groups.to_vec(), l.probs.to_vec())), Some((vec![1], vec![f16::from_f64(0.75)])));
    assert_eq!(view(0, 2).map(|l| l.groups.to_vec()), Some(vec![0]));
    assert_eq!((view(2, 1), view(0, 5)), (None, None));
    let next = |layer, older, newer| tables.next_groups(LayerIdx::new(layer), GroupId::new(older), GroupId::new(newer));
    assert_eq!(next(1, 0, 0).map(|l| l.groups.to_vec()), Some(vec![0]));
    assert_eq!((next(1, 1, 0), next(1, 2, 0)), (None, None));
}

#[test]
fn replicas_have_a_primary_group_and_a_digest_of_their_own() {
    let model = model(4, 1, 2, &[0]);
    let slots = vec![0, 1, 3, 1, 2, -1];
    let replicas = Replicas::new(&model, 2, 6, slots.clone()).unwrap();
    assert_eq!(replicas.primary().layer(LayerIdx::new(0)), [0, 1, 1, 0]);
    let holders: Vec<_> = replicas.groups_of(LayerIdx::new(0), ExpertId::new(1)).collect();
    assert_eq!(holders, [GroupId::new(0), GroupId::new(1)]);
    let tables = dp_tables(&model, 2).replicas(replicas.clone()).finish().unwrap();
    assert_eq!(tables.physical_to_logical(), Some(&replicas));
    assert_eq!(tables.placement_digest(), replicas.digest());
    assert_ne!(tables.placement_digest(), tables.placement().digest());
    for (slots, part) in [
        (vec![0, 1, 3, 1, -1, -1], "no slot for expert 2"),
        (vec![1, 0, 3, 1, 2, -1], "more than 1"),
        (vec![0, 1, 4, 1, 2, 3], "experts below 4"),
        (vec![0, 1, -2, 1, 2, 3], "experts below 4"),
        (vec![0, 1, 1, 1, 2, 3], "more than 1"),
        (vec![0, 1], "expected [1, 6]"),
    ] {
        let error = Replicas::new(&model, 2, 6, slots).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_foreign_layout_reads_the_same_and_is_rewritten_canonically() {
    let model = model(6, 2, 7, &[1, 3]);
    let trace = trace_builder(&model, &requests(&model, 4, 9, true)).to_bytes().unwrap();
    let profile = profile(&model, 3);
    let profile = {
        let mut builder = profile_builder(&model, Phase::All);
        builder.add_profile(&profile).unwrap();
        builder.to_bytes().unwrap()
    };
    let tables = dp_tables(&model, 3).to_bytes().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("25ba49dc72dc9ba25b25751806ca0213f776d736d34b630122306fe5a781c34c");
    let foreign = |bytes: &[u8]| Parts::of(bytes).bytes();
    let written = || std::fs::read(&path).unwrap();

    let digest = Trace::from_bytes(foreign(&trace)).unwrap().write(&path).unwrap();
    assert_eq!((written(), digest), (trace.clone(), Trace::open(&path).unwrap().digest()));
    let digest = Profile::from_bytes(foreign(&profile)).unwrap().write(&path).unwrap();
    assert_eq!((written(), digest), (profile, Profile::open(&path).unwrap().digest()));
    let digest = Tables::from_bytes(foreign(&tables)).unwrap().write(&path).unwrap();
    assert_eq!((written(), digest.as_str()), (tables, Tables::open(&path).unwrap().digest()));
}

#[test]
fn a_misaligned_file_is_copied() {
    let model = model(300, 2, 7, &[1, 3]);
    let bytes = trace_builder(&model, &requests(&model, 4, 9, true)).to_bytes().unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shifted");
    for shift in 1..8usize {
        let split = 8 + length as usize;
        let spaces = vec![b' '; shift];
        let new_length = (length + shift as u64).to_le_bytes();
        let shifted = [&new_length, &bytes[8..split], &spaces, &bytes[split..]].concat();
        std::fs::write(&path, &shifted).unwrap();
        let expected = Trace::from_bytes(bytes.clone()).unwrap();
        for trace in [Trace::open(&path).unwrap(), Trace::from_bytes(shifted).unwrap()] {
            assert_eq!(trace.digest(), expected.digest());
            for (a, b) in trace.iter().zip(expected.iter()) {
                assert!(same(&raw(a, &model, true), &raw(b, &model, true)));
            }
        }
    }
}

#[test]
fn the_wide_form_is_read_for_few_experts() {
    let model = model(4, 2, 7, &[0]);
    let narrow = trace_builder(&model, &requests(&model, 4, 5, false)).to_bytes().unwrap();
    let mut parts = Parts::of(&narrow);
    let experts = parts.tensors.iter_mut().find(|(name, ..)| name == "experts").unwrap();
    let wide = experts.3.iter().flat_map(|&id| if id == 255 { [255, 255] } else { [id, 0] }).collect();
    (experts.1, experts.3) = (safetensors::Dtype::U16, wide);
    let wide = Trace::from_bytes(parts.without_meta("digest").bytes()).unwrap();
    let again = TraceBuilder::select(&wide, |_, _| true).unwrap();
    assert_eq!(again.digest(), Trace::from_bytes(narrow).unwrap().digest());
}

/// The expected digests were computed by the Python code in the README.
#[test]
fn digests_are_those_of_the_specification() {
    let model = model(8, 2, 6, &[1, 2]);
    let trace = trace(&model, 6, 42);
    let tables = dp_tables(&model, 4).finish().unwrap();
    assert_eq!(trace.digest(), "25ba49dc72dc9ba25b25751806ca0213f776d736d34b630122306fe5a781c34c");
    assert_eq!(tables.digest(), "59e17a3811d2ed876de7a652a9236ff87167096fa51b3764ff0b41842e8bed14");
    assert_eq!(tables.placement_digest(), "ead4b99d88c1773f581df2efa8e11e32e3fdbe768e6bca56a18e4e4a67ba9198");
}

#[test]
fn a_stored_digest_is_checked_and_its_absence_is_reported() {
    let model = model(4, 2, 7, &[0, 2]);
    let trace = trace_builder(&model, &requests(&model, 4, 5, false)).to_bytes().unwrap();
    let profile = {
        let mut builder = profile_builder(&model, Phase::All);
        builder.add_profile(&common::profile(&model, 3)).unwrap();
        builder.to_bytes().unwrap()
    };
    let tables = dp_tables(&model, 2).to_bytes().unwrap();
    let refused = |tensor: &str, file: &[u8], open: &dyn Fn(Vec<u8>) -> Result<bool, FormatError>| {
        let parts = Parts::of(file);
        assert!(open(file.to_vec()).unwrap(), "a new file states its digest");
        assert!(!open(parts.clone().without_meta("digest").bytes()).unwrap(), "an old file does not, and opens");
        for stated in [parts.clone().meta("digest", "00"), parts.damage(tensor, 0, &[1, 0])] {
            let error = open(stated.bytes()).unwrap_err().to_string();
            assert!(error.contains("`digest`") && error.contains("the digest of the tensors"), "{error}");
        }
    };
    // Values that the format allows, so only the digest reveals the damage.
    refused("prompt_lengths", &trace, &|bytes| Trace::from_bytes(bytes).map(|file| file.has_stored_digest()));
    refused("price", &tables, &|bytes| Tables::from_bytes(bytes).map(|file| file.has_stored_digest()));
    let stated = Parts::of(&profile).meta("digest", "00").bytes();
    assert!(Profile::from_bytes(stated).unwrap_err().to_string().contains("`digest`"));
    assert!(Profile::from_bytes(profile).unwrap().has_stored_digest());
}
