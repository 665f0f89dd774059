//! Damaged files: never a panic, never a large allocation; an error, or a value that keeps every promise.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use proptest::prelude::*;
use semmoe_tables::*;

/// Records the largest single allocation of the test binary.
struct Watching;

static LARGEST_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The test files are a few kB; a reader's largest allocation is the list of experts seen (65,534 x 8 bytes).
const MAX_BYTES: usize = 4 << 20;

// SAFETY: forwards every call unchanged to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST_BYTES.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the system allocator's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` was allocated by `alloc` above, which uses the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Numbers likely to break a parser.
const HOSTILE: [&str; 12] = [
    "0",
    "1",
    "255",
    "256",
    "65535",
    "65536",
    "4294967295",
    "4294967296",
    "2305843009213693952",
    "18446744073709551615",
    "-1",
    "1e9",
];

#[derive(Clone, Debug)]
enum Damage {
    Truncate(usize),
    Flip {
        at: usize,
        bit: u8,
    },
    Set {
        at: usize,
        byte: u8,
    },
    Insert {
        at: usize,
        byte: u8,
    },
    /// Replaces a number of the header and corrects the header's length.
    Number {
        which: usize,
        by: usize,
    },
    /// Replaces eight bytes of the file; at 0 that is the header's length.
    Word {
        at: usize,
        word: u64,
    },
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = 0usize..4096;
    prop_oneof![
        at.clone().prop_map(Damage::Truncate),
        (at.clone(), 0u8..8).prop_map(|(at, bit)| Damage::Flip { at, bit }),
        (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Set { at, byte }),
        (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Insert { at, byte }),
        (0usize..64, 0usize..HOSTILE.len()).prop_map(|(which, by)| Damage::Number { which, by }),
        (prop_oneof![Just(0), at], any::<u64>()).prop_map(|(at, word)| Damage::Word { at, word }),
    ]
}

fn apply(file: &mut Vec<u8>, damage: &Damage) {
    let len = file.len();
    match *damage {
        _ if len == 0 => {}
        Damage::Truncate(at) => file.truncate(at % len),
        Damage::Flip { at, bit } => file[at % len] ^= 1 << bit,
        Damage::Set { at, byte } => file[at % len] = byte,
        Damage::Insert { at, byte } => file.insert(at % len, byte),
        Damage::Number { which, by } => replace_number(file, which, HOSTILE[by]),
        Damage::Word { at, word } => {
            let at = at % len;
            let end = (at + 8).min(len);
            file[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
        }
    }
}

fn replace_number(file: &mut Vec<u8>, which: usize, by: &str) {
    let Some(length) = file.first_chunk::<8>().map(|l| u64::from_le_bytes(*l) as usize) else { return };
    let Some(header) = file.get(8..8usize.saturating_add(length)).map(<[u8]>::to_vec) else { return };
    let digit = |i: usize| header.get(i).is_some_and(u8::is_ascii_digit);
    let starts: Vec<usize> = (0..header.len()).filter(|&i| digit(i) && (i == 0 || !digit(i - 1))).collect();
    if starts.is_empty() {
        return;
    }
    let start = starts[which % starts.len()];
    let end = (start..).find(|&i| !digit(i)).unwrap_or(header.len());
    let header = [&header[..start], by.as_bytes(), &header[end..]].concat();
    let data = file.split_off(8 + length);
    *file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
}

fn check_model(model: &ModelInfo) {
    assert!((1..=model.num_experts).contains(&model.top_k) && model.num_experts < u16::MAX);
    assert!(model.vocab_size > 0 && model.layers() > 0);
    assert!(model.layer_ids.is_sorted_by(|a, b| a < b));
    assert!(model.layers() as u64 * (u64::from(model.vocab_size) + 1) <= MAX_LAYER_ROWS);
}

fn check_trace(trace: &Trace) {
    let model = trace.model();
    check_model(model);
    let mut tokens = 0;
    for request in trace.iter() {
        tokens += request.token_ids().len();
        assert!(request.prompt_len() <= request.token_ids().len());
        assert!(request.token_ids().iter().all(|&t| t < model.vocab_size));
        for position in 0..request.token_ids().len() {
            for route in (0..model.layers()).filter_map(|l| request.route(position, LayerIdx::new(l as u16))) {
                let mut experts: Vec<ExpertId> = route.experts().collect();
                assert_eq!(experts.len(), usize::from(model.top_k));
                assert!(experts.iter().all(|e| e.get() < model.num_experts));
                experts.sort();
                assert!(experts.is_sorted_by(|a, b| a < b));
                assert!(route.weights().is_none_or(|w| w.iter().all(|w| w.is_finite())));
            }
        }
    }
    assert_eq!(tokens, trace.tokens());
}

fn check_profile(profile: &Profile) {
    let model = profile.model();
    check_model(model);
    assert_eq!(profile.token_counts().len(), model.vocab_size as usize);
    for token in (0..model.vocab_size).map(TokenId::new) {
        let most = u64::from(model.top_k) * profile.token_count(token);
        for layer in (0..model.layers()).map(|l| LayerIdx::new(l as u16)) {
            let row = profile.row(layer, token);
            assert!(row.experts.is_sorted_by(|a, b| a < b) && row.experts.iter().all(|&e| e < model.num_experts));
            assert!(row.activations() <= most && row.counts.iter().all(|&c| c > 0));
        }
    }
}

fn check_tables(tables: &Tables) {
    let model = tables.model();
    check_model(model);
    assert_eq!(tables.group_to_dp().len(), usize::from(tables.groups()));
    assert!(tables.group_to_dp().iter().all(|r| r.get() < tables.dp_ranks()));
    assert!(tables.price().iter().all(|p| p.is_finite()));
    let placement = tables.placement();
    assert_eq!((placement.layers(), placement.experts()), (model.layers(), model.num_experts));
    for layer in (0..model.layers()).map(|l| LayerIdx::new(l as u16)) {
        assert!(placement.layer(layer).iter().all(|&g| g < tables.groups()));
        for token in (0..model.vocab_size).map(TokenId::new) {
            if let Some(labels) = tables.token_groups(layer, token) {
                assert!(labels.groups.iter().all(|&g| g < tables.groups()));
            }
        }
    }
    for token in (0..model.vocab_size).map(TokenId::new) {
        assert!(tables.token_row(token).is_none_or(|row| row.iter().all(|s| (0.0..=1.0).contains(&s.to_f32()))));
    }
}

fn check_any(bytes: &[u8]) {
    if let Ok(trace) = Trace::from_bytes(bytes.to_vec()) {
        check_trace(&trace);
    }
    if let Ok(profile) = Profile::from_bytes(bytes.to_vec()) {
        check_profile(&profile);
    }
    if let Ok(tables) = Tables::from_bytes(bytes.to_vec()) {
        check_tables(&tables);
    }
    assert!(LARGEST_BYTES.load(Ordering::Relaxed) < MAX_BYTES);
}

fn files(seed: u64) -> [Vec<u8>; 5] {
    let model = model(8, 2, 6, &[1, 2, 4]);
    let mut builder = profile_builder(&model, Phase::All);
    builder.add_trace(&trace(&model, 6, seed)).unwrap();
    let slots = Replicas::new(&model, 2, 10, [0, 1, 2, 3, -1, 3, 4, 5, 6, 7].repeat(3)).unwrap();
    [
        trace_builder(&model, &requests(&model, 6, seed, true)).to_bytes().unwrap(),
        builder.to_bytes().unwrap(),
        dp_tables(&model, 4).to_bytes().unwrap(),
        tp_tables(&model, 2).to_bytes().unwrap(),
        dp_tables(&model, 2).replicas(slots).to_bytes().unwrap(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_files(which in 0usize..5, seed in 0u64..4, stated in any::<bool>(), damages in proptest::collection::vec(damage(), 1..4)) {
        let mut file = files(seed)[which].clone();
        if !stated {
            // Without the digest, only the rules of the format stand between damage and a reader.
            file = Parts::of(&file).without_meta("digest").bytes();
        }
        damages.iter().for_each(|damage| apply(&mut file, damage));
        check_any(&file);
    }

    #[test]
    fn anything_at_all(bytes in proptest::collection::vec(any::<u8>(), 0..64), json in ".{0,64}") {
        check_any(&bytes);
        check_any(&[&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &bytes].concat());
    }
}

#[test]
fn every_truncation_is_an_error() {
    for file in files(1) {
        for length in 0..file.len() {
            let part = file[..length].to_vec();
            assert!(Trace::from_bytes(part.clone()).is_err());
            assert!(Profile::from_bytes(part.clone()).is_err());
            assert!(Tables::from_bytes(part).is_err());
        }
    }
}

#[test]
fn every_hostile_number_in_every_place() {
    for file in files(1) {
        for which in 0..80 {
            for by in HOSTILE {
                let mut file = file.clone();
                replace_number(&mut file, which, by);
                check_any(&file);
            }
        }
    }
}

#[test]
fn offsets_near_the_end_of_the_numbers_do_not_overflow() {
    let dim = (1u64 << 61) - 1;
    let tensor =
        |i: u64| format!(r#""t{i}":{{"dtype":"U8","shape":[{dim}],"data_offsets":[{},{}]}}"#, i * dim, (i + 1) * dim);
    let tensors: Vec<String> = (0..8).map(tensor).collect();
    let header = format!(r#"{{"__metadata__":{{"format":"semmoe.trace","version":"1"}},{}}}"#, tensors.join(","));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert!(Trace::from_bytes(file).is_err());
}

#[test]
fn a_key_that_occurs_twice_is_an_error() {
    let file = &files(1)[1];
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(file[8..8 + length].to_vec()).unwrap();
    for (from, to) in [
        (r#""top_k":"2""#, r#""top_k":"2","top_k":"2""#),
        (r#"{"__metadata__""#, r#"{"count":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"__metadata__""#),
    ] {
        assert!(header.contains(from));
        let header = header.replacen(from, to, 1);
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &file[8 + length..]].concat();
        let error = Profile::from_bytes(file).unwrap_err().to_string();
        assert!(error.contains("duplicate"), "{error}");
    }
}
