//! Attention against its formula in f64, with widths that fill no vector, and a cache that was begun before.

use super::*;
use crate::model::ModelConfig;

const SHAPE: HeadShape = HeadShape { kv_heads: 2, group: 3, head_dim: 20, eps: 1e-6 };
const THETA: f64 = 100.0;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 8,
        hidden: 8,
        num_layers: 2,
        heads: SHAPE.kv_heads * SHAPE.group,
        kv_heads: SHAPE.kv_heads,
        head_dim: SHAPE.head_dim,
        max_positions: 300,
        rms_norm_eps: SHAPE.eps,
        rope_theta: THETA,
        tied_embeddings: true,
        num_experts: 1,
        top_k: 1,
        expert_width: 8,
        dense_width: 8,
        normalise_top_k: true,
        moe_layers: vec![0, 1],
        eos_token_ids: Vec::new(),
    }
}

/// One head, normed and rotated.
fn turned(head: &[f32], norm: &[f32], position: usize) -> Vec<f64> {
    let dim = head.len();
    let mean = head.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / dim as f64;
    let scale = 1.0 / (mean + f64::from(SHAPE.eps)).sqrt();
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
    let (dim, width) = (SHAPE.head_dim, SHAPE.qkv_width());
    let row = |p: usize| &qkv[p * width..][..width];
    let keys_at = SHAPE.query_width() + query_head / SHAPE.group * dim;
    let values_at = keys_at + SHAPE.kv_heads * dim;
    let query = turned(&row(position)[query_head * dim..][..dim], &norms.query, position);
    let score = |p: usize| {
        let key = turned(&row(p)[keys_at..][..dim], &norms.key, p);
        query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
    };
    let weights: Vec<f64> = (0..=position).map(|p| score(p).exp()).collect();
    let total: f64 = weights.iter().sum();
    let element = |i: usize| (0..=position).map(|p| weights[p] / total * f64::from(row(p)[values_at + i])).sum();
    (0..dim).map(element).collect()
}

#[test]
fn attention_is_its_formula_however_the_tokens_come() {
    let (tokens, width, out_width) = (290, SHAPE.qkv_width(), SHAPE.query_width());
    let mut random = fastrand::Rng::with_seed(4);
    let mut numbers = |count: usize| (0..count).map(|_| random.f32() * 2.0 - 1.0).collect::<Vec<f32>>();
    let norms = HeadNorms { query: numbers(SHAPE.head_dim), key: numbers(SHAPE.head_dim) };
    let qkv = numbers(tokens * width);
    let mut angles = RotaryTable::new(SHAPE.head_dim, THETA);
    angles.grow(tokens);
    let attention = Attention { shape: SHAPE, norms: &norms, angles: &angles, layer: 1 };

    let mut first: Option<Vec<f32>> = None;
    for piece in [tokens, 1, 19, 256] {
        let (mut cache, mut scratch) = (KvCache::new(&config()), AttentionScratch::default());
        let mut out = vec![f32::NAN; tokens * out_width];
        for (qkv, out) in qkv.chunks(piece * width).zip(out.chunks_mut(piece * out_width)) {
            let count = qkv.len() / width;
            cache.reserve(count);
            attention.attend(qkv, &mut cache, out, &mut scratch);
            cache.commit(count);
        }
        match &first {
            Some(whole) => assert!(out == *whole, "in pieces of {piece}"),
            None => first = Some(out),
        }
    }
    let out = first.unwrap();
    for position in [0, 1, 31, 32, 255, 256, 289] {
        for head in 0..SHAPE.kv_heads * SHAPE.group {
            let found = &out[position * out_width + head * SHAPE.head_dim..][..SHAPE.head_dim];
            for (found, expected) in found.iter().zip(naive(&qkv, &norms, position, head)) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "position {position}, head {head}");
            }
        }
    }
}
