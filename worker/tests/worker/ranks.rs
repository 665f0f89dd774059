//! Several ranks in lockstep: exact counts, idle ranks, and results that do not depend on the batch.

use std::path::Path;
use std::sync::atomic::Ordering;

use crate::common::{
    Rank, contiguous, contiguous_of, fixture, golden, local_mesh, metered_mesh, model_dir, on_ranks, shuffled,
};
use semmoe_tables::RankId;
use semmoe_worker::ep::{ByPlace, Counters, StepPhase, Wake};
use semmoe_worker::model::{KvCache, ModelConfig, StepError, StepItem, Wants, with_threads};

fn total(counted: &[Counters], of: impl Fn(&Counters) -> ByPlace) -> ByPlace {
    let sum = |part: fn(ByPlace) -> u64| counted.iter().map(|c| part(of(c))).sum();
    ByPlace { local: sum(|it| it.local), remote: sum(|it| it.remote) }
}

#[test]
fn activations_bytes_and_tokens_are_counted_exactly() {
    let golden = golden();
    let prompts: Vec<&[u32]> = golden.iter().map(|g| &g.ids[..]).collect();
    let prompt_tokens: u64 = prompts.iter().map(|p| p.len() as u64).sum();
    let steps = 4;
    for placement in [contiguous(1), contiguous(2), shuffled(4, 3)] {
        let world = usize::from(placement.groups());
        let (transports, meters) = metered_mesh(placement.groups());
        let counted = on_ranks(transports, &placement, |mut rank| {
            let mine: Vec<&[u32]> = prompts.iter().copied().skip(rank.rank).step_by(world).collect();
            rank.greedy(&mine, steps);
            rank.counted()
        });
        let (layers, top_k, hidden) = (7, 4, 256u64);
        let decoded = (prompts.len() * (steps - 1)) as u64;
        let tokens = prompt_tokens + decoded;
        assert_eq!(counted.iter().map(|c| c.prefill_tokens).sum::<u64>(), prompt_tokens);
        assert_eq!(counted.iter().map(|c| c.decode_tokens).sum::<u64>(), decoded);
        for (phase, tokens) in [(StepPhase::Prefill, prompt_tokens), (StepPhase::Decode, decoded)] {
            for layer in 0..layers {
                let sum = total(&counted, |c| c.layers[layer].of(phase).activations);
                assert_eq!(sum.local + sum.remote, tokens * top_k, "layer {layer} on {world} ranks");
                let bytes = total(&counted, |c| c.layers[layer].of(phase).bytes);
                // A row is sent to and returned from each of its ranks: at least one, at most one per expert.
                let (least, most) = (tokens * (8 * hidden + 2 + 6), tokens * top_k * (8 * hidden + 2 + 6 + 8));
                assert!((least..=most).contains(&(bytes.local + bytes.remote)), "{bytes:?} in layer {layer}");
            }
        }
        // The transport carried exactly the counted bytes.
        let sent: u64 = meters.iter().map(|[sent_bytes, _]| sent_bytes.load(Ordering::Relaxed)).sum();
        assert_eq!(total(&counted, |c| c.total().bytes).remote, sent);
        for [_, collectives] in &meters {
            assert_eq!(collectives.load(Ordering::Relaxed), (2 * layers * steps) as u64);
        }
        let all = total(&counted, |c| c.total().activations);
        if world == 1 {
            assert_eq!((all.remote, sent), (0, 0));
            // Every token is one row in dispatch and one in combine: H floats each way, and its pairs.
            let headers = (layers * steps * 8) as u64;
            let rows = tokens * layers as u64 * (2 * 4 * hidden + 2 + top_k * 6);
            assert_eq!(counted[0].total().bytes.local, headers + rows);
        } else {
            assert!(all.local > 0 && all.remote > 0);
        }
    }
}

/// Waits as an engine does and joins every step with nothing, until the unit ends.
fn idle(mut rank: Rank) -> (u64, RankId) {
    let mut joined = 0;
    loop {
        match rank.ep.wait() {
            Ok(Wake::Peer) => {}
            Ok(Wake::Local) => panic!("nobody rang"),
            Err(error) => return (joined, RankId::new(error.rank() as u16)),
        }
        match rank.model.step(&mut [], &mut rank.ep) {
            Ok(_) => joined += 1,
            Err(StepError::Transport(error)) => return (joined, RankId::new(error.rank() as u16)),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_rank_with_work_takes_idle_ranks_along_without_a_coordinator() {
    let golden = golden();
    let placement = shuffled(4, 9);
    let results = on_ranks(local_mesh(4), &placement, |mut rank| {
        if rank.rank != 1 {
            return idle(rank);
        }
        let texts = rank.greedy(&[&golden[1].ids], 16);
        assert_eq!(texts[0], golden[1].greedy);
        (16, RankId::new(1))
    });
    // The last rank to leave does not matter: the first one to go is named, the one that had work.
    assert_eq!(results, [(16, RankId::new(1)); 4]);
}

#[test]
fn a_ring_wakes_only_its_own_rank() {
    let results = on_ranks(local_mesh(2), &contiguous(2), |mut rank| {
        if rank.rank == 1 {
            return idle(rank);
        }
        let waker = rank.ep.waker();
        waker.ring();
        waker.ring();
        assert_eq!(rank.ep.wait().unwrap(), Wake::Local);
        std::thread::scope(|scope| {
            scope.spawn(|| waker.ring());
            assert_eq!(rank.ep.wait().unwrap(), Wake::Local);
        });
        (0, RankId::new(0))
    });
    assert_eq!(results[1], (0, RankId::new(0)));
}

/// Processes one sequence in pieces of the given sizes; returns the logits after the last, and all routes.
fn in_pieces(rank: &mut Rank, tokens: &[u32], sizes: impl Iterator<Item = usize>) -> (Vec<f32>, Vec<u16>) {
    let mut kv = rank.model.new_sequence();
    let (mut logits, mut routes) = (Vec::new(), Vec::new());
    let mut rest = tokens;
    for size in sizes {
        let (piece, later) = rest.split_at(size.min(rest.len()));
        rest = later;
        if piece.is_empty() {
            break;
        }
        let wants = if later.is_empty() { Wants::Logits } else { Wants::Nothing };
        let mut items = [StepItem { kv: &mut kv, tokens: piece, wants, phase: StepPhase::Prefill }];
        let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
        routes.extend_from_slice(out.routes(0));
        logits = out.logits(0).map(<[f32]>::to_vec).unwrap_or_default();
    }
    assert_eq!(kv.len(), tokens.len());
    (logits, routes)
}

fn long_prompt(tokens: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(11);
    (0..tokens).map(|_| random.u32(0..10_000)).collect()
}

#[test]
fn a_prompt_gives_the_same_bits_however_it_is_cut() {
    let mut rank = Rank::alone();
    let prompt = long_prompt(300);
    let (whole, routes, _) = rank.prefill(&prompt);
    for size in [1, 7, 16, 33, 128, 299] {
        let (logits, cut_routes) = in_pieces(&mut rank, &prompt, std::iter::repeat(size));
        assert!(logits == whole, "in pieces of {size}");
        assert_eq!(cut_routes, routes, "in pieces of {size}");
    }
    let mut random = fastrand::Rng::with_seed(2);
    let (logits, _) = in_pieces(&mut rank, &prompt, std::iter::repeat_with(|| random.usize(1..60)));
    assert!(logits == whole, "in pieces by chance");
}

#[test]
fn a_sequence_gives_the_same_bits_in_any_company() {
    let golden = golden();
    let prompts: Vec<&[u32]> = golden.iter().map(|g| &g.ids[..]).collect();
    let placement = shuffled(2, 5);
    let run = |beside: usize, on_other: usize| {
        on_ranks(local_mesh(2), &placement, |mut rank| {
            let prompts: Vec<&[u32]> = match rank.rank {
                0 => std::iter::once(prompts[3]).chain(prompts.iter().copied().take(beside)).collect(),
                _ => prompts.iter().copied().take(on_other).collect(),
            };
            let mut kvs: Vec<KvCache> = prompts.iter().map(|_| rank.model.new_sequence()).collect();
            let items = kvs.iter_mut().zip(&prompts);
            let mut items: Vec<StepItem<'_>> = items
                .map(|(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill })
                .collect();
            let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
            if rank.rank == 0 { out.logits(0).unwrap().to_vec() } else { Vec::new() }
        })
        .swap_remove(0)
    };
    let alone = run(0, 0);
    for (beside, on_other) in [(1, 0), (0, 5), (5, 3)] {
        assert!(run(beside, on_other) == alone, "{beside} beside it, {on_other} on the other rank");
    }
}

#[test]
fn a_truncated_cache_is_as_if_the_rest_had_never_been() {
    let mut rank = Rank::alone();
    let prompt = long_prompt(80);
    let (expected, _, _) = rank.prefill(&prompt[..50]);
    let (_, _, mut kv) = rank.prefill(&prompt);
    kv.truncate(49);
    let mut items = [StepItem { kv: &mut kv, tokens: &prompt[49..50], wants: Wants::Logits, phase: StepPhase::Decode }];
    let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
    assert!(out.logits(0).unwrap() == expected);
}

#[test]
fn items_that_cannot_be_computed_are_refused_before_anything_happens() {
    let mut rank = Rank::alone();
    let (_, _, mut kv) = rank.prefill(&[1, 2, 3]);
    let before = rank.counted();
    let too_long = vec![1; 2046];
    for (tokens, reason) in [
        (&[][..], "it has no tokens"),
        (&[5, 10_240], "token id 10240 is outside the vocabulary of 10240 tokens"),
        (&too_long, "2046 tokens, but its sequence has room for only 2045"),
    ] {
        let mut other = rank.model.new_sequence();
        let mut items = [
            StepItem { kv: &mut other, tokens: &[1], wants: Wants::Logits, phase: StepPhase::Prefill },
            StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill },
        ];
        let error = rank.model.step(&mut items, &mut rank.ep).map(|_| ()).unwrap_err();
        assert!(matches!(error, StepError::Item { item: 1, .. }));
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!((kv.len(), other.len()), (3, 0));
    }
    assert_eq!(rank.counted(), before);
    let full = in_pieces(&mut rank, &vec![7; 2048], std::iter::repeat(1024)).0;
    assert!(full.iter().all(|logit| logit.is_finite()), "the longest sequence is served");
}

/// The logits after prompts of different lengths, up to `longest` tokens, and after one more token of each.
fn logits_of_a_batch(model_dir: &Path, sequences: usize, longest: usize) -> Vec<f32> {
    let config = ModelConfig::load(model_dir).unwrap();
    let mut rank = Rank::of(model_dir, local_mesh(1).remove(0), &contiguous_of(&config, 1));
    let mut caches: Vec<KvCache> = (0..sequences).map(|_| rank.model.new_sequence()).collect();
    let token = |sequence: usize, at: usize| ((31 * sequence + 7 * at + at * at) % config.vocab_size) as u32;
    let prompt = |sequence| (0..longest - 5 * sequence).map(|at| token(sequence, at)).collect();
    let prompts: Vec<Vec<u32>> = (0..sequences).map(prompt).collect();
    let next: Vec<Vec<u32>> = (0..sequences).map(|sequence| vec![token(sequence, 1)]).collect();
    let mut logits = Vec::new();
    for (tokens, phase) in [(prompts, StepPhase::Prefill), (next, StepPhase::Decode)] {
        let item = |(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase };
        let mut items: Vec<StepItem<'_>> = caches.iter_mut().zip(tokens.iter().map(Vec::as_slice)).map(item).collect();
        let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
        (0..sequences).for_each(|item| logits.extend_from_slice(out.logits(item).unwrap()));
    }
    logits
}

/// Threads share a step's attention and experts, and change no bit of any logit.
#[test]
fn logits_do_not_depend_on_the_number_of_threads() {
    let (bundled, latent) = (model_dir(), fixture("deepseek-v3"));
    for (model_dir, sequences, longest) in [(&bundled, 5, 150), (&bundled, 1, 300), (&latent, 10, 60)] {
        let alone = logits_of_a_batch(model_dir, sequences, longest);
        for threads in [2, 3] {
            let shared = with_threads(threads, || logits_of_a_batch(model_dir, sequences, longest)).unwrap();
            assert!(shared == alone, "{}: {sequences} sequences on {threads} threads", model_dir.display());
        }
    }
}
