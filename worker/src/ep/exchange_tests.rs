//! Counts and times. `tests/carriers.rs` tests the collectives themselves over all carriers.

use super::*;
use semmoe_ranks::LocalTransport;
use semmoe_tables::Placement;

fn on_two_ranks<T: Send>(work: impl Fn(usize, &mut ExpertParallel) -> T + Sync) -> Vec<T> {
    let placement = Placement::contiguous(1, 2, 2).unwrap();
    let join = |link| ExpertParallel::new(Box::new(link), &placement).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let start = |mut ep: ExpertParallel| scope.spawn(move || work(ep.rank().index(), &mut ep));
        let threads: Vec<_> = LocalTransport::mesh(2).into_iter().map(join).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// One of each collective for three tokens of width 2; the first token is rank 0's.
fn split_once(ep: &mut ExpertParallel, layer: Option<LayerIdx>) -> Timings {
    let offsets = [0, 1, 3];
    let split = RowSplit::contiguous(&offsets).unwrap();
    let mine = split.positions(ep.rank().index()).len();
    ep.part(6).unwrap().fill(1.0);
    let mut rows = vec![0.0; 2 * mine];
    ep.reduce_scatter(layer, 2, split, None, &mut rows).unwrap();
    assert_eq!(rows, vec![2.0; 2 * mine]);
    let before = ep.timings().clone();
    let labels = vec![1; mine];
    let own = OwnRows { rows: &rows, hidden: 2, labels: &labels, width: 1, bound: 2 };
    ep.allgather(layer, own, split, AllRows { rows: &mut [0.0; 6], labels: &mut [0; 3] }).unwrap();
    ep.allgather_bytes(b"word").unwrap();
    before
}

#[test]
fn bytes_are_those_of_messages_to_the_other_ranks() {
    let counted = on_two_ranks(|_, ep| {
        split_once(ep, None);
        ep.counters().collective_bytes
    });
    // Each carries a digest; rows of 8 bytes, labels of 2.
    assert_eq!(counted, [[8 + 2 * 8, 8 + 8 + 2, 4], [8 + 8, 8 + 2 * (8 + 2), 4]]);
}

#[test]
fn times_count_for_their_layer_and_no_other() {
    use TimedCollective::{Combine, Dispatch, Gather, Scatter};
    for layer in [Some(LayerIdx::new(0)), None] {
        let timings = on_two_ranks(|_, ep| (split_once(ep, layer).layers[0], ep.timings().layers[0]));
        for (before, after) in timings {
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

#[test]
fn a_row_for_an_expert_of_another_rank_is_refused_by_the_one_that_gets_it() {
    struct NoExperts;
    impl LocalExperts for NoExperts {
        fn threads(&self, _pairs: usize) -> usize {
            1
        }

        fn apply(&self, _slot: usize, _x: &[f32], _out: &mut [f32], _work: &mut Vec<f32>) {}
    }
    let errors = on_two_ranks(|rank, ep| {
        // Rank 1 assumes that expert 1 is on rank 0.
        if rank == 1 {
            ep.layers[0].rank_of = vec![0, 0];
        }
        let experts = vec![1; rank];
        let weights = vec![1.0; rank];
        let phases = vec![StepPhase::Decode; rank];
        let batch = RoutedBatch {
            x: &vec![1.0; 2 * rank],
            experts: &experts,
            weights: &weights,
            phases: &phases,
            top_k: 1,
            hidden: 2,
        };
        ep.moe(LayerIdx::new(0), batch, &NoExperts, &mut vec![0.0; 2 * rank]).err().map(|error| error.to_string())
    });
    let expected = "rank 1 broke the protocol: received a token for expert 1, which is not on this rank";
    assert_eq!(errors[0].as_deref(), Some(expected));
}

#[test]
fn routes_of_other_ranks_are_checked() {
    // The result on rank 0. Rank 1 sends routes to `expert`, of its rows from `first` on.
    let found = |first: u32, expert: u16| {
        let errors = on_two_ranks(|rank, ep| {
            let offsets = [0, if rank == 0 { 1 } else { first }, 3];
            let mut routes = if rank == 0 { [1, 0, 0, 0, 0, 0] } else { [expert; 6] };
            let gathered = ep.gather_routes(RowSplit::contiguous(&offsets).unwrap(), 2, 2, &mut routes);
            gathered.map(|()| routes.to_vec()).map_err(|error| error.to_string())
        });
        errors.into_iter().next().unwrap()
    };
    assert_eq!(found(1, 1), Ok(vec![1, 0, 1, 1, 1, 1]));
    let (short, unknown) = (found(2, 1).unwrap_err(), found(1, 2).unwrap_err());
    assert!(short.contains("rank 1") && short.contains("4 bytes of routes instead of 8"), "{short}");
    assert!(
        unknown.contains("rank 1") && unknown.contains("a route to expert 2, but there are 2 experts"),
        "{unknown}"
    );
}
