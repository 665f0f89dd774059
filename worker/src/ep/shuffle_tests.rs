//! The collectives over threads against the reference, bit for bit; peers that disagree.

use std::sync::Arc;

use proptest::prelude::*;
use semmoe_kernels::{RankOrder, argsort_by_rank, even_offsets, reference};
use semmoe_tables::{LayerIdx, Placement};

use super::*;
use crate::ep::{Counters, LocalTransport};

fn ranks(world: usize) -> Vec<ExpertParallel> {
    let placement = Placement::contiguous(1, world as u16, world as u16).unwrap();
    let join = |transport| ExpertParallel::new(Box::new(transport), &placement, Arc::new(Counters::new(1))).unwrap();
    LocalTransport::mesh(world).into_iter().map(join).collect()
}

fn on_ranks<T: Send>(world: usize, work: impl Fn(usize, &mut ExpertParallel) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |mut ep: ExpertParallel| scope.spawn(move || work(ep.rank().index(), &mut ep));
        let threads: Vec<_> = ranks(world).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn both_are_their_reference_bit_for_bit_and_each_others_inverse(
        world in 1usize..5, tokens in 1usize..20, hidden in 1usize..9, seed: u64, shuffled: bool,
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut value = || if random.u8(..) < 20 { -0.0 } else { random.f32() - 0.5 };
        let parts: Vec<Vec<f32>> = (0..world).map(|_| (0..tokens * hidden).map(|_| value()).collect()).collect();
        let mut random = fastrand::Rng::with_seed(seed ^ 1);
        let destinations: Vec<u16> = (0..tokens).map(|_| random.u16(0..world as u16)).collect();
        let mut order = RankOrder::default();
        argsort_by_rank(&destinations, world, &mut order).unwrap();
        let offsets = even_offsets(tokens, world).unwrap();
        let split = if shuffled { RowSplit::from(&order) } else { RowSplit::contiguous(&offsets).unwrap() };
        let borrowed: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        let expected = reference::reduce_scatter(&borrowed, hidden, split).unwrap();
        let results = on_ranks(world, |rank, ep| {
            let mut own = vec![9.0; 3];
            ep.reduce_scatter(None, &parts[rank], hidden, split, &mut own).unwrap();
            let labels: Vec<u16> = split.positions(rank).flat_map(|at| [split.token(at) as u16, 7]).collect();
            let (mut rows, mut all) = (vec![9.0; tokens * hidden], vec![0; 2 * tokens]);
            let given = OwnRows { rows: &own, hidden, labels: &labels, width: 2, bound: 20 };
            ep.allgather(None, given, split, AllRows { rows: &mut rows, labels: &mut all }).unwrap();
            (own, rows, all, ep.counters().snapshot().collective_bytes)
        });
        let gathered: Vec<&[f32]> = expected.iter().map(Vec::as_slice).collect();
        let gathered = reference::allgather(&gathered, hidden, split).unwrap();
        for (rank, (own, rows, labels, bytes)) in results.into_iter().enumerate() {
            prop_assert_eq!(bits(&own), bits(&expected[rank]));
            prop_assert_eq!(bits(&rows), bits(&gathered));
            prop_assert_eq!(labels, (0..tokens as u16).flat_map(|token| [token, 7]).collect::<Vec<_>>());
            let (mine, peers) = (split.positions(rank).len(), world - 1);
            let sent = (tokens - mine) * hidden * 4 + 8 * peers;
            prop_assert_eq!(bytes, [sent as u64, (peers * (8 + mine * (hidden * 4 + 4))) as u64, 0]);
        }
    }
}

#[test]
fn ranks_that_disagree_find_out() {
    let (one, other) = ([0, 1, 2], [0, 2, 2]);
    let errors = on_ranks(2, |rank, ep| {
        let split = RowSplit::contiguous(if rank == 0 { &one } else { &other }).unwrap();
        ep.reduce_scatter(None, &[1.0, 2.0], 1, split, &mut Vec::new()).unwrap_err().to_string()
    });
    assert_eq!(errors[0], "rank 1 broke the protocol: it split the rows of a step in another way");
    assert!(errors[1].starts_with("rank 0 "));
    for (labels, bound, expected) in
        [(2, 5, "label 5 of a row, expected below 5"), (1, 9, "rows of 6 bytes, expected 8")]
    {
        let errors = on_ranks(2, |rank, ep| {
            let split = RowSplit::contiguous(&one).unwrap();
            let (width, labels) = if rank == 0 { (2, vec![1; 2]) } else { (2, vec![5; labels]) };
            let own = OwnRows { rows: &[1.0], hidden: 1, labels: &labels, width, bound };
            let mut all = ([0.0; 2], [0; 4]);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                ep.allgather(None, own, split, AllRows { rows: &mut all.0, labels: &mut all.1 })
            }));
            outcome.ok().and_then(Result::err).map(|error| error.to_string())
        });
        assert!(errors[0].as_ref().is_some_and(|error| error.contains(expected)), "{errors:?}");
    }
}

#[test]
fn their_times_count_for_their_layer_and_no_other() {
    let offsets = [0, 1, 2];
    for layer in [Some(LayerIdx::new(0)), None] {
        let timings = on_ranks(2, |_, ep| {
            let split = RowSplit::contiguous(&offsets).unwrap();
            ep.reduce_scatter(layer, &[1.0, 2.0], 1, split, &mut Vec::new()).unwrap();
            let before = ep.timings().layers[0];
            let own = OwnRows { rows: &[1.0], hidden: 1, labels: &[], width: 0, bound: 1 };
            ep.allgather(layer, own, split, AllRows { rows: &mut [0.0; 2], labels: &mut [] }).unwrap();
            ep.tell_all(b"x").unwrap();
            (before, ep.timings().layers[0])
        });
        for (before, after) in timings {
            use TimedCollective::{Combine, Dispatch, Gather, Scatter};
            let any = |timings: crate::ep::LayerTimings| {
                [Dispatch, Combine, Scatter, Gather].map(|collective| !timings.of(collective).is_zero())
            };
            let counted = layer.is_some();
            assert_eq!(any(before), [false, false, counted, false]);
            assert_eq!(any(after), [false, false, counted, counted]);
            assert_eq!(before.of(Scatter), after.of(Scatter));
        }
    }
}
