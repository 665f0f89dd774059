//! Files written and read in pieces equal those written and read at once.

use std::path::PathBuf;

use half::f16;
use proptest::prelude::*;
use semmoe_tables::{
    ExpertRows, LayerIdx, ModelInfo, Phase, Profile, ProfileBuilder, ProfileRow, ProfileWriter, TokenId, Trace,
    TraceBuilder, TraceRows, TraceWriter, UNKNOWN_EXPERT,
};

use crate::common::{self, provenance};

fn model(num_experts: u16) -> ModelInfo {
    common::model(num_experts, 2, 7, &[0, 2])
}

struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Directory(tempfile::tempdir().unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn names(&self) -> Vec<String> {
        std::fs::read_dir(self.0.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// A token with a pair of experts in each layer, or none.
type Token = (u32, [Option<u16>; 2]);

fn requests() -> impl Strategy<Value = Vec<(Vec<Token>, usize)>> {
    let route = proptest::option::weighted(0.8, 0u16..5);
    let token = (0u32..7, [route.clone(), route]);
    proptest::collection::vec((proptest::collection::vec(token, 0..6), 0usize..6), 0..5)
}

fn experts(tokens: &[Token]) -> Vec<u16> {
    let pair = |first: &Option<u16>| first.map_or([UNKNOWN_EXPERT; 2], |e| [e, (e + 1) % 5]);
    tokens.iter().flat_map(|(_, routes)| routes.iter().flat_map(pair)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn written_in_pieces_equals_written_at_once(requests in requests(), wide: bool, weighted: bool) {
        let directory = Directory::new();
        let (pieces, at_once) = (directory.path("pieces"), directory.path("at_once"));
        let model = model(if wide { 300 } else { 5 });
        let mut writer = TraceWriter::create(&pieces, model.clone(), provenance(), weighted).unwrap();
        let mut builder = TraceBuilder::new(model.clone(), provenance()).unwrap();
        for (tokens, prompt) in &requests {
            let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
            let experts = experts(tokens);
            let weights = weighted.then(|| vec![f16::ONE; experts.len()]);
            let prompt = (*prompt).min(ids.len()) as u32;
            writer.push(&ids, prompt, &experts, weights.as_deref()).unwrap();
            builder.push(&ids, prompt, &experts, weights.as_deref()).unwrap();
        }
        prop_assert_eq!((writer.requests(), writer.tokens()), (builder.requests(), builder.tokens() as u64));
        prop_assume!(!(weighted && requests.is_empty()));
        prop_assert_eq!(writer.finish().unwrap(), builder.write(&at_once).unwrap());
        prop_assert_eq!(std::fs::read(&pieces).unwrap(), std::fs::read(&at_once).unwrap());

        let trace = Trace::open(&pieces).unwrap();
        let mut counts = ProfileBuilder::new(model.clone(), provenance(), Phase::All).unwrap();
        counts.add_trace(&trace).unwrap();
        let profile = counts.finish().unwrap();
        let out = directory.path("profile");
        let written = ProfileWriter::create(&out, model.clone(), provenance(), Phase::All, profile.token_counts().to_vec());
        let mut written = written.unwrap();
        for layer in (0..2).map(LayerIdx::new) {
            for token in (0..7).map(TokenId::new) {
                written.push(layer, token, profile.row(layer, token)).unwrap();
            }
        }
        prop_assert_eq!(written.finish().unwrap(), profile.digest());
        profile.write(&directory.path("other")).unwrap();
        prop_assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(directory.path("other")).unwrap());
        Profile::open(&out).unwrap();
        let mut names = directory.names();
        names.sort();
        prop_assert_eq!(names, ["at_once", "other", "pieces", "profile"]);
    }
}

#[test]
fn a_bad_request_is_reported_from_a_bad_file() {
    let directory = Directory::new();
    let path = directory.path("trace");
    let mut builder = TraceBuilder::new(model(5), provenance()).unwrap();
    for first in 0..4 {
        builder.push(&[first, 6], 1, &[0, 1, 2, 3, 4, 0, 1, 2], None).unwrap();
    }
    let good = builder.to_bytes().unwrap();
    // Locates rows of the second and third request, and the id of the fourth.
    let experts_at = good.len() - 4 * 8;
    for (bad, at, byte, expected) in [
        (1, experts_at + 8 + 2, 5, "the tensor `experts` holds 5 at token 2, layer 1, slot 0, expected ids below 5"),
        (
            2,
            experts_at + 16 + 1,
            0,
            "the tensor `experts` holds 0 at token 4, layer 0, slot 1, expected distinct experts",
        ),
        (3, experts_at - 8, 7, "the tensor `token_ids` holds 7 at token 6, expected ids below 7"),
    ] {
        let mut bytes = good.clone();
        bytes[at] = byte;
        std::fs::write(&path, &bytes).unwrap();
        let whole = Trace::open(&path).unwrap_err().to_string();
        assert!(whole.contains(expected), "{whole}");
        let rows = TraceRows::open(&path).unwrap();
        let mut rules = rows.rules();
        for request in 0..4 {
            match rows.check(request, &mut rules) {
                Ok(()) => assert_ne!(request, bad),
                Err(error) => assert!(request == bad && error.to_string().starts_with(expected), "{error}"),
            }
        }
        rows.release(0..4);
        assert_eq!(rows.request(0).token_ids(), [0, 6]);
        assert!(matches!(rows.experts(0), ExpertRows::Narrow([0, 1, 2, 3, 4, 0, 1, 2])));
    }
    std::fs::write(&path, &good[..good.len() - 1]).unwrap();
    assert!(TraceRows::open(&path).is_err());
}

#[test]
fn rows_of_a_profile_must_be_in_order_and_possible() {
    let directory = Directory::new();
    let start =
        |counts: Vec<u64>| ProfileWriter::create(&directory.path("p"), model(5), provenance(), Phase::All, counts);
    let (one, token) = (LayerIdx::new(1), TokenId::new(2));
    let row = ProfileRow { experts: &[0, 3], counts: &[1, 1] };
    let mut writer = start(vec![0, 0, 1, 0, 0, 0, 0]).unwrap();
    writer.push(one, token, row).unwrap();
    for (layer, token) in [(one, token), (LayerIdx::new(0), token), (LayerIdx::new(2), token), (one, TokenId::new(7))] {
        assert!(writer.push(layer, token, row).unwrap_err().to_string().contains("ascending order"));
    }
    writer.push(one, TokenId::new(0), ProfileRow { experts: &[], counts: &[] }).unwrap();
    writer.finish().unwrap();

    let mut writer = start(vec![0, 0, 1, 0, 0, 0, 0]).unwrap();
    for (experts, counts) in [(&[3u16, 0], &[1, 1]), (&[0, 5], &[1, 1]), (&[0, 1], &[2, 2]), (&[0, 1], &[1, 2])] {
        assert!(writer.push(one, token, ProfileRow { experts, counts }).is_err());
    }
    assert!(writer.finish().unwrap_err().to_string().contains("this token has no route in any layer"));
    assert!(start(vec![0; 6]).is_err() && start(vec![1 << 48, 0, 0, 0, 0, 0, 0]).is_err());
    assert_eq!(directory.names(), ["p"]);
}
