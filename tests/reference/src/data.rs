//! Random inputs, and bitwise comparisons.
#![allow(clippy::unwrap_used, reason = "a part of tests")]

use bytemuck::Pod;
use fastrand::Rng;
use semmoe_kernels::{Element, NO_EXPERT, RankOrder, RoutedTokens, argsort_by_rank};

/// Typical rows with some special values: signed zeros, subnormals, infinities, NaN.
pub fn elements<T: Element>(rng: &mut Rng, count: usize) -> Vec<T> {
    let special = [0.0, -0.0, 1e-41, -3e-8, f32::INFINITY, 65519.0, 3e38, f32::NAN];
    let mut value = || match rng.u32(0..256) {
        n @ 0..8 => special[n as usize],
        _ => (rng.f32() - 0.5) * 8.0,
    };
    (0..count).map(|_| T::round(value())).collect()
}

/// One rank's tokens with their routes.
#[derive(Clone, Debug)]
pub struct Tokens<T> {
    /// `[n, H]`
    pub x: Vec<T>,
    /// `[n, k]`: distinct experts per token; some slots are unused.
    pub experts: Vec<i32>,
    /// `[n, k]`
    pub weights: Vec<f32>,
}

impl<T: Element> Tokens<T> {
    /// `n` tokens of `hidden` elements, each with `top_k` of `experts`.
    pub fn random(rng: &mut Rng, n: usize, hidden: usize, experts: usize, top_k: usize) -> Self {
        let mut all: Vec<i32> = (0..experts as i32).collect();
        let mut chosen = Vec::new();
        for _ in 0..n {
            rng.shuffle(&mut all);
            chosen.extend(all[..top_k].iter().map(|&expert| if rng.u32(0..5) == 0 { NO_EXPERT } else { expert }));
        }
        let weights = chosen.iter().map(|_| rng.f32()).collect();
        Self { x: elements(rng, n * hidden), experts: chosen, weights }
    }

    /// The tokens in the reference's type.
    pub fn routed(&self) -> RoutedTokens<'_, T> {
        RoutedTokens { x: &self.x, experts: &self.experts, weights: &self.weights }
    }
}

/// Sorts tokens by destination rank.
///
/// # Panics
/// A destination that is not a rank.
pub fn order(destinations: &[u16], ranks: usize) -> RankOrder {
    let mut order = RankOrder::default();
    argsort_by_rank(destinations, ranks, &mut order).unwrap();
    order
}

/// Borrows each rank's list, for the reference.
pub fn slices<T>(lists: &[Vec<T>]) -> Vec<&[T]> {
    lists.iter().map(Vec::as_slice).collect()
}

/// Compares bits.
///
/// # Errors
/// The first difference.
pub fn same<T: Pod>(what: &str, found: &[T], expected: &[T]) -> Result<(), String> {
    let differ = |(a, b): (&T, &T)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b);
    let first = found.iter().zip(expected).position(differ);
    if first.is_none() && found.len() == expected.len() {
        return Ok(());
    }
    Err(format!("{what}: {} found, {} expected, first difference at {first:?}", found.len(), expected.len()))
}
