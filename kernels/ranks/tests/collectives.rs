//! Every collective between threads equals the reference bit for bit: any shape, any order of arrival, poisoned
//! buffers, several in a row.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{bits, dawdle, group, on_ranks, values};
use half::{bf16, f16};
use proptest::prelude::*;
use semmoe_kernels::{Element, ResidualNorm, RowSplit, even_offsets};
use semmoe_ranks::{Dispatch, Norm, Received, Routes, Span};
use semmoe_reference as reference;
use semmoe_reference::data::{Tokens, order, slices};

#[derive(Clone, Debug)]
struct Shape {
    ranks: usize,
    destinations: Vec<u16>,
    hidden: usize,
    seed: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    (1usize..=8).prop_flat_map(|ranks| {
        let anywhere = prop::collection::vec(0..ranks as u16, 0..30);
        let together = (0..ranks as u16, 0usize..30).prop_map(|(rank, n)| vec![rank; n]);
        (prop_oneof![3 => anywhere, 1 => together], 0usize..70, any::<u64>())
            .prop_map(move |(destinations, hidden, seed)| Shape { ranks, destinations, hidden, seed })
    })
}

/// Scatter, fused scatter, gather and all-reduce, three times in the same buffers.
fn reduces<T: Element>(shape: &Shape) {
    let Shape { ranks, ref destinations, hidden, seed } = *shape;
    let n = destinations.len();
    let order = order(destinations, ranks);
    let even = even_offsets(n, ranks).unwrap();
    let splits = [RowSplit::from(&order), RowSplit::contiguous(&even).unwrap()];
    let part = Span::<T>::new(0, n * hidden).unwrap();
    let whole = Span::<T>::new(part.next(), n * hidden).unwrap();
    let data: Vec<Vec<T>> = (0..ranks).map(|rank| values(n * hidden, seed ^ rank as u64)).collect();
    let (residual, weight) = (values::<T>(n * hidden, seed ^ 100), values::<T>(hidden, seed ^ 101));
    let found = on_ranks(group(ranks, whole.next()), |comm| {
        let rank = comm.rank().index();
        let mut random = fastrand::Rng::with_seed(seed ^ rank as u64);
        let mut found = Vec::new();
        for split in splits.into_iter().chain([splits[0]]) {
            let m = split.positions(rank).len();
            comm.view_mut(part).unwrap().copy_from_slice(&data[rank]);
            let mut out = vec![T::round(7.0); m * hidden];
            dawdle(&mut random);
            comm.reduce_scatter(part, hidden, split, &mut out).unwrap();
            let (mut residual_out, mut normed) = (out.clone(), out.clone());
            let (residual, weight) = (&residual[..], &weight[..]);
            let norm = Norm { residual, weight, epsilon: 1e-5, residual_out: &mut residual_out };
            dawdle(&mut random);
            comm.reduce_scatter_norm(part, hidden, split, norm, &mut normed).unwrap();
            dawdle(&mut random);
            comm.allgather(&out, hidden, split, whole).unwrap();
            let gathered = bits(comm.view(whole).unwrap());
            dawdle(&mut random);
            comm.all_reduce(part, whole).unwrap();
            let apart = bits(comm.view(whole).unwrap());
            dawdle(&mut random);
            comm.all_reduce(part, part).unwrap();
            let in_place = bits(comm.view(part).unwrap());
            found.push([bits(&out), bits(&residual_out), bits(&normed), gathered, apart, in_place]);
        }
        found
    });
    let reduced = bits(&reference::all_reduce(&slices(&data)).unwrap());
    for (turn, split) in splits.into_iter().chain([splits[0]]).enumerate() {
        let sums = reference::reduce_scatter(&slices(&data), hidden, split).unwrap();
        let norm = ResidualNorm { residual: &residual, weight: &weight, epsilon: 1e-5 };
        let normed = reference::reduce_scatter_norm(&slices(&data), hidden, split, norm).unwrap();
        for rank in 0..ranks {
            let expected = [bits(&sums[rank]), bits(&normed[rank].residual), bits(&normed[rank].normed)];
            assert_eq!(found[rank][turn][..3], expected, "rank {rank}, turn {turn}");
            for gathered in &found[rank][turn][3..] {
                assert_eq!(gathered, &reduced, "rank {rank}, turn {turn}");
            }
        }
    }
}

/// Dispatch and combine, twice.
fn exchanges<T: Element>(ranks: usize, hidden: usize, experts_total: usize, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let top_k = random.usize(1..=experts_total);
    let hosts: Vec<u32> = (0..experts_total).map(|_| random.u32(0..ranks as u32)).collect();
    let counts: Vec<usize> = (0..ranks).map(|_| random.usize(0..3) * random.usize(0..9)).collect();
    let tokens: Vec<Tokens<T>> =
        counts.iter().map(|&n| Tokens::random(&mut random, n, hidden, experts_total, top_k)).collect();
    let routed: Vec<_> = tokens.iter().map(Tokens::routed).collect();
    let expected = reference::dispatch(&routed, hidden, top_k, &hosts).unwrap();
    let sent: Vec<&[i32]> = expected.iter().map(|dispatched| &dispatched.sent_rows[..]).collect();
    let received_rows: Vec<&[T]> = expected.iter().map(|dispatched| &dispatched.rows[..]).collect();
    let combined = reference::combine(&received_rows, &sent, hidden).unwrap();
    // Exactly the capacity that the fullest rank needs.
    let capacity = expected.iter().map(|dispatched| dispatched.tokens.len()).max().unwrap();
    let (places, bytes) = places::<T>(capacity, hidden, top_k);
    on_ranks(group(ranks, bytes), |comm| {
        let rank = comm.rank().index();
        let mut random = fastrand::Rng::with_seed(seed ^ rank as u64);
        for _ in 0..2 {
            let mut source_offsets = vec![77; ranks + 1];
            let mut sent_rows = vec![77; counts[rank] * ranks];
            let routes = Routes { tokens: tokens[rank].routed(), rank_of_expert: &hosts, top_k, hidden };
            dawdle(&mut random);
            let out = Dispatch { source_offsets: &mut source_offsets, sent_rows: &mut sent_rows };
            comm.dispatch(routes, places, out).unwrap();
            let (expected, r) = (&expected[rank], expected[rank].tokens.len());
            assert_eq!((&source_offsets, &sent_rows), (&expected.source_offsets, &expected.sent_rows));
            assert_eq!(bits(&comm.view(places.rows).unwrap()[..r * hidden]), bits(&expected.rows));
            assert_eq!(comm.view(places.tokens).unwrap()[..r], expected.tokens);
            assert_eq!(comm.view(places.experts).unwrap()[..r * top_k], expected.experts);
            assert_eq!(comm.view(places.weights).unwrap()[..r * top_k], expected.weights);
            let mut out = vec![T::round(9.0); counts[rank] * hidden];
            dawdle(&mut random);
            comm.combine(places.rows, hidden, &sent_rows, &mut out).unwrap();
            assert_eq!(bits(&out), bits(&combined[rank]));
        }
    });
}

fn places<T: Element>(capacity: usize, hidden: usize, top_k: usize) -> (Received<T>, usize) {
    let rows = Span::new(0, capacity * hidden).unwrap();
    let tokens = Span::new(rows.next(), capacity).unwrap();
    let experts = Span::new(tokens.next(), capacity * top_k).unwrap();
    let weights = Span::new(experts.next(), capacity * top_k).unwrap();
    (Received { rows, tokens, experts, weights }, weights.next())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn reductions_equal_the_reference(shape in shape()) {
        reduces::<f32>(&shape);
        reduces::<f16>(&shape);
        reduces::<bf16>(&shape);
    }

    #[test]
    fn exchanges_equal_the_reference(ranks in 1usize..=8, hidden in 0usize..40, experts in 1usize..12, seed: u64) {
        exchanges::<f32>(ranks, hidden, experts, seed);
        exchanges::<f16>(ranks, hidden, experts, seed);
        exchanges::<bf16>(ranks, hidden, experts, seed);
    }
}

#[test]
fn wide_rows_equal_the_reference_too() {
    let destinations: Vec<u16> = (0..50).map(|token| (token * 7 % 4) as u16).collect();
    reduces::<bf16>(&Shape { ranks: 4, destinations: destinations.clone(), hidden: 5000, seed: 1 });
    reduces::<f32>(&Shape { ranks: 3, destinations: vec![1; 9], hidden: 2049, seed: 2 });
    exchanges::<bf16>(8, 2048, 64, 3);
}
