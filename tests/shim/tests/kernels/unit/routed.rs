//! A dispatch that the GPU plans sends what one that the host plans sends, and its sums come back to the same tokens.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::collectives::{ReceivedIn, UnitError};
use semmoe_kernels::{DispatchPlan, Element};
use semmoe_kernels_cuda::unit::{ArrivedRows, RoutedTokens};
use semmoe_kernels_cuda::{Buffer, Rows};
use semmoe_kernels_shim::HostBuffer;
use semmoe_reference::law::on_ranks;

use super::{RoutedEnd, TOP_K, on_device, on_host, routed_peers, shim};
use crate::support::holding;

const EXPERTS: usize = 11;
const HIDDEN: usize = 24;

/// One rank's tokens, with their experts.
struct Tokens<T> {
    x: Vec<T>,
    /// `[n, k]`
    experts: Vec<u16>,
    weights: Vec<f32>,
}

impl<T: Element> Tokens<T> {
    /// Experts are chosen among `chosen`, so that some ranks may get no rows.
    fn new(count: usize, chosen: usize, rng: &mut Rng) -> Self {
        let x = (0..count * HIDDEN).map(|_| T::round(rng.f32() - 0.5)).collect();
        let choose = |_| {
            let mut all: Vec<u16> = (0..chosen as u16).collect();
            rng.shuffle(&mut all);
            all.truncate(TOP_K);
            all
        };
        let experts: Vec<u16> = (0..count).flat_map(choose).collect();
        let weights = experts.iter().map(|&expert| f32::from(expert) / 16.0 + 0.5).collect();
        Self { x, experts, weights }
    }
}

/// The rows of one rank: their elements, experts and weights.
#[derive(PartialEq, Debug)]
struct Found<T> {
    rows: Vec<T>,
    routes: Vec<Vec<(u16, f32)>>,
    /// `[n, H]`: what came back.
    out: Vec<T>,
}

fn rank_of(ranks: usize) -> Vec<u16> {
    (0..EXPERTS).map(|expert| (expert * 7 % ranks) as u16).collect()
}

/// One rank of a unit, and where it sends its tokens.
#[derive(Clone, Copy)]
struct Unit {
    rank: usize,
    ranks: usize,
    /// Every rank has a part of each expert.
    everywhere: bool,
    capacity: usize,
}

/// Stands in for the experts.
fn sums_of<T: Element>(rows: &[T], rank: usize) -> Vec<T> {
    rows.iter().map(|value| T::round(value.widen() * (rank + 2) as f32)).collect()
}

fn planned_by_host<T: Element>(end: &mut RoutedEnd<T>, unit: Unit, tokens: &Tokens<T>) -> Found<T> {
    let Unit { rank, ranks, everywhere, .. } = unit;
    let (experts, weights, mut plan) = (&tokens.experts, &tokens.weights, DispatchPlan::default());
    match everywhere {
        true => plan.build_everywhere(experts, weights, TOP_K, ranks),
        false => plan.build(experts, weights, TOP_K, &rank_of(ranks), ranks),
    }
    .unwrap();
    end.dispatch(on_device(&tokens.x), HIDDEN, &plan).unwrap();
    let (rows, routes) = {
        let ReceivedIn { rows, pair_rows, experts, weights, sums } = end.received();
        let rows = on_host(rows.rows).to_vec();
        let mut routes = vec![Vec::new(); rows.len() / HIDDEN];
        for ((&row, &expert), &weight) in pair_rows.iter().zip(experts).zip(weights) {
            routes[row as usize].push((expert, weight));
        }
        on_host(sums).copy_from_slice(&sums_of(&rows, rank));
        (rows, routes)
    };
    let out = vec![T::round(f32::NAN); tokens.x.len()];
    end.combine(&plan, on_device(&out)).unwrap();
    Found { rows, routes, out }
}

fn routes_of(buffers: &[HostBuffer; 3], tokens: usize, capacity: usize) -> RoutedTokens {
    let [experts, weights, rank_of_expert] = buffers.each_ref().map(HostBuffer::buffer);
    RoutedTokens {
        rows: Rows { tokens: tokens as u64, hidden: HIDDEN as u64, dtype: f32::DTYPE },
        top_k: TOP_K as u64,
        num_experts: EXPERTS as u64,
        experts,
        weights,
        rank_of_expert: Some(rank_of_expert),
        capacity: capacity as u64,
    }
}

fn words<N: bytemuck::Pod>(buffer: Buffer, count: usize) -> Vec<N> {
    // SAFETY: device memory is host memory, and the shim's streams have finished when a call returns.
    let words = unsafe { std::slice::from_raw_parts(buffer.address as *const N, count) };
    words.to_vec()
}

fn planned_by_gpu<T: Element>(end: &mut RoutedEnd<T>, unit: Unit, tokens: &Tokens<T>) -> Found<T> {
    let Unit { rank, ranks, everywhere, capacity } = unit;
    let ids: Vec<i32> = tokens.experts.iter().map(|&expert| expert.into()).collect();
    let hosts: Vec<u32> = rank_of(ranks).into_iter().map(u32::from).collect();
    let count = tokens.x.len() / HIDDEN;
    let buffers = [holding(&ids), holding(&tokens.weights), holding(&hosts)];
    let mut call = routes_of(&buffers, count, capacity);
    call.rows.dtype = T::DTYPE;
    if everywhere {
        call.rank_of_expert = None;
    }
    let arrived = end.dispatch_routed(&call, on_device(&tokens.x)).unwrap();
    let ArrivedRows { rows, sums, experts, weights, count } = arrived;
    let count = words::<u32>(count, 1)[0] as usize;
    let rows = words::<T>(rows, count * HIDDEN);
    let experts = words::<i32>(experts, count * TOP_K);
    let weights = words::<f32>(weights, count * TOP_K);
    let pairs = |(experts, weights): (&[i32], &[f32])| {
        let used = experts.iter().position(|&expert| expert < 0).unwrap_or(TOP_K);
        assert!(used > 0 && experts[used..].iter().all(|&expert| expert == -1), "{experts:?}");
        experts[..used].iter().map(|&expert| expert as u16).zip(weights.iter().copied()).collect()
    };
    let routes = experts.chunks(TOP_K).zip(weights.chunks(TOP_K)).map(pairs).collect();
    let of_rows = Buffer { bytes: (count * HIDDEN * size_of::<T>()) as u64, ..sums };
    // SAFETY: as above.
    let to: &mut [T] = unsafe { std::slice::from_raw_parts_mut(of_rows.address as *mut T, count * HIDDEN) };
    to.copy_from_slice(&sums_of(&rows, rank));
    let out = vec![T::round(f32::NAN); tokens.x.len()];
    end.combine_routed(&call, on_device(&out)).unwrap();
    Found { rows, routes, out }
}

fn both_agree<T: Element>(ranks: usize, counts: &[usize], chosen: usize) {
    let capacity: usize = counts.iter().sum();
    let left = on_ranks(routed_peers::<T>(ranks, HIDDEN, |_| capacity.max(1)), |rank, mut end| {
        let tokens = Tokens::<T>::new(counts[rank], chosen, &mut Rng::with_seed(rank as u64));
        let mut left = 0;
        for everywhere in [false, true, false] {
            let unit = Unit { rank, ranks, everywhere, capacity };
            let expected = planned_by_host(&mut end, unit, &tokens);
            let found = planned_by_gpu(&mut end, unit, &tokens);
            assert_eq!(found, expected, "rank {rank} of {ranks}");
            left += found.out.iter().filter(|value| value.widen().is_nan()).count();
        }
        left
    });
    assert_eq!(left, vec![0; ranks], "all tokens got their sums");
}

#[test]
fn the_gpu_plans_what_the_host_plans() {
    if shim().is_none() {
        return;
    }
    for (ranks, counts) in [(2, vec![5, 9]), (3, vec![0, 7, 1]), (4, vec![3, 40, 0, 2])] {
        both_agree::<f32>(ranks, &counts, EXPERTS);
        both_agree::<bf16>(ranks, &counts, EXPERTS);
    }
    // All experts are on few ranks; no rank has a token.
    both_agree::<f32>(4, &[6, 1, 2, 3], TOP_K);
    both_agree::<f32>(2, &[0, 0], EXPERTS);
}

#[test]
fn what_does_not_fit_is_refused_or_stops() {
    if shim().is_none() {
        return;
    }
    let buffers =
        |expert: i32| [holding(&[expert; 4 * TOP_K]), holding(&[1.0f32; 4 * TOP_K]), holding(&[0u32; EXPERTS])];
    let x = vec![0.0f32; 4 * HIDDEN];
    let refused = |expert, capacity| {
        on_ranks(routed_peers::<f32>(2, HIDDEN, |_| 8), |_, mut end| {
            let buffers = buffers(expert);
            let call = routes_of(&buffers, 4, capacity);
            let dispatched = end.dispatch_routed(&call, on_device(&x)).map(drop);
            dispatched.and_then(|()| end.combine_routed(&call, on_device(&x))).unwrap_err()
        })
    };
    let texts = |errors: Vec<UnitError>| errors.iter().map(ToString::to_string).collect::<Vec<_>>();
    for error in texts(refused(0, 9)) {
        assert!(error.contains("216 row elements exceed the 192 that fit in its memory"), "{error}");
    }
    // Eight rows arrive at rank 0.
    for error in texts(refused(0, 7)) {
        assert!(error.contains("rank 0 would receive 8 rows, which exceeds its capacity"), "{error}");
    }
    for error in texts(refused(EXPERTS as i32, 8)) {
        assert!(error.contains("destination or expert ") && error.contains("is out of range"), "{error}");
    }
}
