//! Laws of the collectives, on the reference: shuffles undo each other, sums do not depend on the split, and everything
//! arrives once.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use half::{bf16, f16};
use proptest::prelude::*;
use semmoe_kernels::{
    Element, KernelError, NO_EXPERT, NO_ROW, ResidualNorm, RoutedTokens, RowSplit, SeenTokens, even_offsets,
    inverse_rms,
};
use semmoe_reference::data::{order, slices};
use semmoe_reference::{self as reference, Dispatched, reduce_scatter, reduce_scatter_norm};

/// Shapes with empty ranks, everything on one rank, odd sizes, no tokens at all.
fn destinations() -> impl Strategy<Value = (usize, Vec<u16>)> {
    (1usize..=8).prop_flat_map(|ranks| {
        let anywhere = prop::collection::vec(0..ranks as u16, 0..40);
        let together = (0..ranks as u16, 0usize..40).prop_map(|(rank, n)| vec![rank; n]);
        (Just(ranks), prop_oneof![3 => anywhere, 1 => together])
    })
}

/// `[n, H]` for each rank, from a small generator, with values for which rounding matters.
fn parts<T: Element>(ranks: usize, elements: usize, seed: u64) -> Vec<Vec<T>> {
    let mut state = seed | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::round(((state >> 40) as f32 - 8_388_608.0) / 70_000.0)
    };
    (0..ranks).map(|_| (0..elements).map(|_| next()).collect()).collect()
}

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// SRS then SAG is an all-reduce, bit for bit; a plain reduce-scatter returns equal rows in another order.
fn gather_undoes_scatter<T: Element>(ranks: usize, destinations: &[u16], hidden: usize, seed: u64) {
    let order = order(destinations, ranks);
    let parts = parts::<T>(ranks, destinations.len() * hidden, seed);
    let reduced = reference::all_reduce(&slices(&parts)).unwrap();
    let even = even_offsets(destinations.len(), ranks).unwrap();
    for split in [RowSplit::from(&order), RowSplit::contiguous(&even).unwrap()] {
        let scattered = reduce_scatter(&slices(&parts), hidden, split).unwrap();
        let gathered = reference::allgather(&slices(&scattered), hidden, split).unwrap();
        assert_eq!(bits(&gathered), bits(&reduced));
        for (rank, rows) in scattered.iter().enumerate() {
            assert_eq!(rows.len(), split.positions(rank).len() * hidden);
        }
    }
}

proptest! {
    #[test]
    fn sag_after_srs_is_all_reduce((ranks, to) in destinations(), hidden in 1usize..9, seed: u64) {
        gather_undoes_scatter::<f32>(ranks, &to, hidden, seed);
        gather_undoes_scatter::<f16>(ranks, &to, hidden, seed);
        gather_undoes_scatter::<bf16>(ranks, &to, hidden, seed);
    }

    #[test]
    fn srs_puts_each_token_on_its_rank_in_order((ranks, to) in destinations()) {
        // Rank 0 contributes the token's number, the others zero: the sum identifies each row's token.
        let mut parts = vec![vec![0.0f32; to.len()]; ranks];
        parts[0] = (0..to.len()).map(|token| token as f32).collect();
        let order = order(&to, ranks);
        let rows = reduce_scatter(&slices(&parts), 1, RowSplit::from(&order)).unwrap();
        for (rank, rows) in rows.iter().enumerate() {
            let tokens = (0..to.len()).filter(|&token| usize::from(to[token]) == rank).map(|token| token as f32);
            prop_assert_eq!(rows, &tokens.collect::<Vec<_>>());
        }
    }

    #[test]
    fn fused_norm_is_the_norm_of_the_fused_sum((ranks, to) in destinations(), hidden in 1usize..40, seed: u64) {
        let parts = parts::<f32>(ranks + 2, to.len().max(1) * hidden, seed);
        let (all, residual, weight) = (&parts[..ranks], &parts[ranks], &parts[ranks + 1][..hidden]);
        let all: Vec<&[f32]> = all.iter().map(|part| &part[..to.len() * hidden]).collect();
        let residual = &residual[..to.len() * hidden];
        let order = order(&to, ranks);
        let split = RowSplit::from(&order);
        let sums = reduce_scatter(&all, hidden, split).unwrap();
        let fused = reduce_scatter_norm(&all, hidden, split, ResidualNorm { residual, weight, epsilon: 1e-6 }).unwrap();
        for (rank, (sums, fused)) in sums.iter().zip(&fused).enumerate() {
            for (i, position) in split.positions(rank).enumerate() {
                let residual = &residual[split.token(position) * hidden..];
                let row: Vec<f32> = sums[i * hidden..][..hidden].iter().zip(residual).map(|(a, b)| a + b).collect();
                prop_assert_eq!(&fused.residual[i * hidden..][..hidden], &row[..]);
                let scale = inverse_rms(&row, 1e-6);
                let normed: Vec<f32> = row.iter().zip(weight).map(|(value, weight)| value * scale * weight).collect();
                prop_assert_eq!(&fused.normed[i * hidden..][..hidden], &normed[..]);
            }
        }
    }

    #[test]
    fn combine_of_what_dispatch_sent_is_the_sum_over_experts(
        ranks in 1usize..=8, total in 1usize..10, hidden in 1usize..5, seed: u64,
        counts in prop::collection::vec(0usize..12, 8),
    ) {
        let top_k = 1 + seed as usize % total;
        let hosts: Vec<u32> = (0..total).map(|e| ((seed >> (3 * e)) % ranks as u64) as u32).collect();
        let x: Vec<Vec<f32>> = (0..ranks).map(|r| parts::<f32>(1, counts[r] * hidden, seed + r as u64).remove(0)).collect();
        let experts: Vec<Vec<i32>> = (0..ranks).map(|r| (0..counts[r] * top_k).map(|slot| {
            // Distinct within a token; one in five slots is unused.
            let expert = (slot % top_k + slot / top_k + r) % total;
            if (slot as u64 + seed).is_multiple_of(5) { NO_EXPERT } else { expert as i32 }
        }).collect()).collect();
        let weights: Vec<Vec<f32>> = experts.iter().map(|e| (0..e.len()).map(|i| (i % 7) as f32 + 1.0).collect()).collect();
        let tokens: Vec<_> = (0..ranks)
            .map(|r| RoutedTokens { x: &x[r], experts: &experts[r], weights: &weights[r] }).collect();
        let dispatched = reference::dispatch(&tokens, hidden, top_k, &hosts).unwrap();
        check_received(&dispatched, &tokens, &hosts, top_k, hidden);
        // Expert e multiplies by e + 1; small integers make the order of additions irrelevant.
        let whole: Vec<Vec<f32>> = x.iter().map(|x| x.iter().map(|v| v.round()).collect()).collect();
        let tokens: Vec<_> = (0..ranks)
            .map(|r| RoutedTokens { x: &whole[r], experts: &experts[r], weights: &weights[r] }).collect();
        let sums: Vec<Vec<f32>> = reference::dispatch(&tokens, hidden, top_k, &hosts).unwrap().iter().map(|d| {
            let factor = |row: usize| (0..top_k).map(|slot| row * top_k + slot)
                .filter(|&at| d.experts[at] != NO_EXPERT)
                .map(|at| d.weights[at] * (d.experts[at] + 1) as f32).sum::<f32>();
            d.rows.iter().enumerate().map(|(i, value)| factor(i / hidden) * value).collect()
        }).collect();
        let sent: Vec<&[i32]> = dispatched.iter().map(|d| &d.sent_rows[..]).collect();
        let out = reference::combine(&slices(&sums), &sent, hidden).unwrap();
        for (rank, out) in out.iter().enumerate() {
            let factor = |token: usize| (token * top_k..(token + 1) * top_k)
                .filter(|&at| experts[rank][at] != NO_EXPERT)
                .map(|at| weights[rank][at] * (experts[rank][at] + 1) as f32).sum::<f32>();
            let expected: Vec<f32> = whole[rank].iter().enumerate().map(|(i, v)| factor(i / hidden) * v).collect();
            prop_assert_eq!(out, &expected);
        }
    }
}

/// Every (token, rank) with an expert there arrived once, at the row in `sent_rows`; padding is correct.
fn check_received(
    dispatched: &[Dispatched<f32>],
    tokens: &[RoutedTokens<'_, f32>],
    hosts: &[u32],
    top_k: usize,
    hidden: usize,
) {
    let ranks = tokens.len();
    for (source, from) in tokens.iter().enumerate() {
        for token in 0..from.x.len() / hidden {
            for (there, to) in dispatched.iter().enumerate() {
                let slots = (token * top_k..(token + 1) * top_k)
                    .filter(|&s| from.experts[s] != NO_EXPERT && hosts[from.experts[s] as usize] as usize == there);
                let expected: Vec<(i32, f32)> = slots.map(|s| (from.experts[s], from.weights[s])).collect();
                let row = dispatched[source].sent_rows[token * ranks + there];
                assert_eq!(row == NO_ROW, expected.is_empty());
                if row == NO_ROW {
                    continue;
                }
                let row = row as usize;
                assert!((to.source_offsets[source] as usize..to.source_offsets[source + 1] as usize).contains(&row));
                assert_eq!(to.tokens[row] as usize, token);
                assert_eq!(&to.rows[row * hidden..][..hidden], &from.x[token * hidden..][..hidden]);
                let at = row * top_k..(row + 1) * top_k;
                let found = to.experts[at.clone()].iter().copied().zip(to.weights[at].iter().copied());
                let padding = std::iter::repeat_n((NO_EXPERT, 0.0), top_k - expected.len());
                assert_eq!(found.collect::<Vec<_>>(), expected.into_iter().chain(padding).collect::<Vec<_>>());
            }
        }
    }
    for to in dispatched {
        assert_eq!(to.source_offsets.len(), ranks + 1);
        assert_eq!(to.source_offsets[ranks] as usize, to.tokens.len());
    }
}

#[test]
fn splits_that_are_none_are_refused() {
    let mut seen = SeenTokens::default();
    let out_of_range = |what, index, found, bound| KernelError::OutOfRange { what, index, found, bound };
    for (found, expected) in [
        (RowSplit::contiguous(&[]), KernelError::NoRanks),
        (RowSplit::contiguous(&[0]), KernelError::NoRanks),
        (RowSplit::contiguous(&[1, 2]), out_of_range("offset", 0, 1, 1)),
        (RowSplit::contiguous(&[0, 3, 2]), KernelError::Descending { index: 2, found: 2, before: 3 }),
        (RowSplit::shuffled(&[0, 2], &[0, 2], &mut seen), out_of_range("token at position", 1, 2, 2)),
        (RowSplit::shuffled(&[1, 1], &[0, 2], &mut seen), KernelError::Twice { index: 1, token: 1 }),
        (
            RowSplit::shuffled(&[0], &[0, 2], &mut seen),
            KernelError::Length { what: "permutation", found: 1, expected: 2 },
        ),
    ] {
        assert_eq!(found, Err(expected));
    }
    // State of one call must not affect the next.
    for _ in 0..3 {
        RowSplit::shuffled(&[1, 0], &[0, 2], &mut seen).unwrap();
    }
}

#[test]
fn digests_tell_splits_apart() {
    let mut seen = SeenTokens::default();
    let mut digests: Vec<u64> = Vec::new();
    for (permutation, offsets) in [
        (vec![0, 1, 2, 3, 4, 5], vec![0, 3, 6]),
        (vec![0, 1, 2, 3, 5, 4], vec![0, 3, 6]),
        (vec![4, 1, 2, 3, 0, 5], vec![0, 3, 6]),
        (vec![1, 0, 2, 3, 4, 5], vec![0, 3, 6]),
        (vec![0, 1, 2, 3, 4, 5], vec![0, 2, 6]),
        (vec![0, 1, 2, 3, 4, 5], vec![0, 3, 6, 6]),
    ] {
        digests.push(RowSplit::shuffled(&permutation, &offsets, &mut seen).unwrap().digest());
    }
    digests.push(RowSplit::contiguous(&[0, 3, 6]).unwrap().digest());
    let distinct: std::collections::BTreeSet<_> = digests.iter().collect();
    assert_eq!(distinct.len(), digests.len());
}
