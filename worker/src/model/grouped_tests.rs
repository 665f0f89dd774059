//! Attention against its formula in f64, with widths that fill no vector, and a cache that was begun before.

use super::*;
use crate::model::checkpoint::TensorData;
use crate::model::config::{Rope, RopeLayout};
use crate::model::kv::{CacheShape, KvPool};

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
    Grouped { heads, projected, qkv: Linear::pack(&[TensorData::F32(&[])], 1), norms: Some(norms), clip: None }
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

/// The sum of one query head at one position over all positions up to it.
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

#[test]
fn attention_is_its_formula_however_the_tokens_come() {
    let tokens = 290;
    let mut random = fastrand::Rng::with_seed(4);
    let mut numbers = |count: usize| (0..count).map(|_| random.f32() * 2.0 - 1.0).collect::<Vec<f32>>();
    let layer = layer(HeadNorms { query: numbers(DIM), key: numbers(DIM), eps: EPS });
    let qkv = numbers(tokens * WIDTH);
    let mut angles = RotaryTable::new(DIM, &Rope { theta: THETA, layout: RopeLayout::Halves, yarn: None });
    angles.grow(tokens);

    let mut first: Option<Vec<f32>> = None;
    for piece in [tokens, 1, 19, 256] {
        let (mut cache, mut scratch) =
            (KvPool::new(cache_shape(), usize::MAX, false).alone(), AttentionScratch::default());
        let mut out = vec![f32::NAN; tokens * QUERY_WIDTH];
        for (qkv, out) in qkv.chunks(piece * WIDTH).zip(out.chunks_mut(piece * QUERY_WIDTH)) {
            let count = qkv.len() / WIDTH;
            assert!(cache.reserve(count));
            layer.attend((1, &angles), qkv, &mut cache, out, &mut scratch);
            cache.commit(&vec![0; count], &vec![0; count]);
        }
        match &first {
            Some(whole) => assert!(out == *whole, "in pieces of {piece}"),
            None => first = Some(out),
        }
    }
    let out = first.unwrap();
    for position in [0, 1, 31, 32, 255, 256, 289] {
        for head in 0..KV_HEADS * GROUP {
            let found = &out[position * QUERY_WIDTH + head * DIM..][..DIM];
            for (found, expected) in found.iter().zip(naive(&qkv, layer.norms.as_ref().unwrap(), position, head)) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "position {position}, head {head}");
            }
        }
    }
}
