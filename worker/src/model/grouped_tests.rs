//! Attention against its formula in f64, with widths that fill no vector, and a partly filled cache.

use super::*;
use crate::ep::StepPhase;
use crate::model::checkpoint::TensorKind;
use crate::model::config::{Rope, RopeLayout};
use crate::model::kv::{CacheShape, KvPool};
use crate::model::step::Wants;
use crate::threads::with_threads;

const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const DIM: usize = 20;
const EPS: f32 = 1e-6;
const THETA: f64 = 100.0;
const QUERY_WIDTH: usize = KV_HEADS * GROUP * DIM;
const WIDTH: usize = QUERY_WIDTH + 2 * KV_HEADS * DIM;

fn layer(norms: HeadNorms) -> Grouped {
    let scale = 1.0 / (DIM as f32).sqrt();
    let heads = Heads { kv_heads: KV_HEADS, group: GROUP, key_width: DIM, value_width: DIM, scale };
    let (queries, keys) = (QUERY_WIDTH, KV_HEADS * DIM);
    let projected = Projected { queries, keys, first_query: 0, first_key: 0 };
    Grouped { heads, projected, qkv: Linear::pack(&[TensorKind::F32.of(&[])], 1), norms: Some(norms), clip: None }
}

fn cache_shape() -> CacheShape {
    CacheShape { layers: 2, kv_heads: KV_HEADS, key_width: DIM, value_width: DIM, max_positions: 300 }
}

/// One head, normed and rotated.
fn turned(head: &[f32], norm: &[f32], position: usize) -> Vec<f64> {
    let dim = head.len();
    let mean = head.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / dim as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    let normed: Vec<f64> = head.iter().zip(norm).map(|(&v, &w)| f64::from(v) * scale * f64::from(w)).collect();
    let half = dim / 2;
    let angle = |i: usize| position as f64 * THETA.powf(-2.0 * i as f64 / dim as f64);
    let rotated = |i: usize| {
        let (sin, cos) = angle(i % half).sin_cos();
        if i < half { normed[i] * cos - normed[i + half] * sin } else { normed[i] * cos + normed[i - half] * sin }
    };
    (0..dim).map(rotated).collect()
}

/// The output of one query head at one position, over all positions up to it.
fn naive(qkv: &[f32], norms: &HeadNorms, position: usize, query_head: usize) -> Vec<f64> {
    let row = |p: usize| &qkv[p * WIDTH..][..WIDTH];
    let keys_at = QUERY_WIDTH + query_head / GROUP * DIM;
    let values_at = keys_at + KV_HEADS * DIM;
    let query = turned(&row(position)[query_head * DIM..][..DIM], &norms.query, position);
    let score = |p: usize| {
        let key = turned(&row(p)[keys_at..][..DIM], &norms.key, p);
        query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (DIM as f64).sqrt()
    };
    let weights: Vec<f64> = (0..=position).map(|p| score(p).exp()).collect();
    let total: f64 = weights.iter().sum();
    let element = |i: usize| (0..=position).map(|p| weights[p] / total * f64::from(row(p)[values_at + i])).sum();
    (0..DIM).map(element).collect()
}

/// The outputs of all tokens of equal sequences, processed in pieces of `piece` tokens.
fn attended(layer: &Grouped, angles: &RotaryTable, qkv: &[f32], piece: usize, sequences: usize) -> Vec<f32> {
    let pool = KvPool::new(cache_shape(), usize::MAX, false);
    let mut caches: Vec<KvCache> = (0..sequences).map(|_| pool.alone()).collect();
    let mut scratch = AttentionScratch::default();
    let mut all = vec![Vec::new(); sequences];
    for qkv in qkv.chunks(piece * WIDTH) {
        let tokens = vec![0; qkv.len() / WIDTH];
        assert!(caches.iter_mut().all(|cache| cache.reserve(tokens.len())));
        let item = |kv| StepItem { kv, tokens: &tokens, wants: Wants::Nothing, phase: StepPhase::Prefill };
        let mut items: Vec<StepItem<'_>> = caches.iter_mut().map(item).collect();
        let offsets: Vec<usize> = (0..=sequences).map(|at| at * tokens.len()).collect();
        let (rows, items, offsets) = (sequences * tokens.len(), &mut items[..], &offsets[..]);
        let mut out = vec![f32::NAN; rows * QUERY_WIDTH];
        let mut step = AttentionStep { layer: 1, angles, normed: &[], rows, items, offsets };
        layer.attend(&mut step, &qkv.repeat(sequences), &mut out, &mut scratch);
        caches.iter_mut().for_each(|cache| cache.commit(&tokens, &vec![0; tokens.len()]));
        all.iter_mut()
            .zip(out.chunks_exact(tokens.len() * QUERY_WIDTH))
            .for_each(|(all, out)| all.extend_from_slice(out));
    }
    all.concat()
}

#[test]
fn attention_is_its_formula_however_the_tokens_come_and_on_any_number_of_threads() {
    let tokens = 290;
    let mut random = fastrand::Rng::with_seed(4);
    let mut numbers = |count: usize| (0..count).map(|_| random.f32() * 2.0 - 1.0).collect::<Vec<f32>>();
    let layer = layer(HeadNorms { query: numbers(DIM), key: numbers(DIM), eps: EPS });
    let qkv = numbers(tokens * WIDTH);
    let mut angles = RotaryTable::new(DIM, &Rope { theta: THETA, layout: RopeLayout::Halves, yarn: None });
    angles.grow(tokens);

    let out = attended(&layer, &angles, &qkv, tokens, 1);
    for (piece, sequences, threads) in
        [(1, 1, 1), (19, 1, 1), (256, 1, 1), (tokens, 3, 1), (tokens, 1, 3), (tokens, 3, 2), (64, 3, 3)]
    {
        let others = with_threads(threads, || attended(&layer, &angles, &qkv, piece, sequences)).unwrap();
        for other in others.chunks_exact(out.len()) {
            assert!(other == out, "{sequences} sequences in pieces of {piece} on {threads} threads");
        }
    }
    for position in [0, 1, 31, 32, 255, 256, 289] {
        for head in 0..KV_HEADS * GROUP {
            let found = &out[position * QUERY_WIDTH + head * DIM..][..DIM];
            for (found, expected) in found.iter().zip(naive(&qkv, layer.norms.as_ref().unwrap(), position, head)) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "position {position}, head {head}");
            }
        }
    }
}
