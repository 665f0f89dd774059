//! Carriers between threads: messages, shared memory, and shared memory within hosts with messages between them.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use half::bf16;
use proptest::prelude::*;
use semmoe_kernels::collectives::{
    AllRows, CastCollectives, Collectives, Norm, OwnRows, PrivateMemory, RowCollectives, RowMemory, UnitError,
};
use semmoe_kernels::{DispatchPlan, Element, RowSplit};
use semmoe_ranks::{LocalTransport, SharedHalves};
use semmoe_reference::law::{self, Case, elements, on_ranks};

type End<T> = Box<dyn Collectives<T>>;

/// Ends whose ranks share memory within hosts of `host` ranks; 0 = none do.
fn ends<T: Element>(world: usize, host: usize, elements: usize) -> Vec<End<T>> {
    let links = LocalTransport::mesh(world);
    if host == 0 {
        let join = |(rank, link)| Box::new(RowCollectives::new(link, PrivateMemory::new(rank))) as End<T>;
        return links.into_iter().enumerate().map(join).collect();
    }
    let memory = SharedHalves::on_hosts(world, host, elements).unwrap();
    links.into_iter().zip(memory).map(|(link, memory)| Box::new(RowCollectives::new(link, memory)) as End<T>).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn every_carrier_is_the_reference_bit_for_bit(
        world in prop::sample::select(vec![1usize, 2, 3, 4, 8]), hidden in 1usize..70, tokens in 0usize..20, seed: u64,
        host in prop::sample::select(vec![0usize, 2, 3, 64]),
    ) {
        let case = Case { hidden, tokens, rounds: 3, seed, norms_rounded_sums: false };
        let room = elements(case, world);
        law::holds::<f32>(ends(world, host, room), case);
        law::holds::<bf16>(ends(world, host, room), case);
        // f32 rows that travel as bf16 equal those of bf16, as widening is exact.
        let rounded = ends(world, host, room).into_iter().map(|end| {
            let wide = Box::new(CastCollectives::<f32, bf16>::new(end));
            Box::new(CastCollectives::<bf16, f32>::new(wide)) as End<bf16>
        });
        law::holds(rounded.collect(), Case { norms_rounded_sums: true, ..case });
    }
}

#[test]
fn ranks_that_disagree_find_out() {
    let (one, other) = ([0, 1, 2], [0, 2, 2]);
    for host in [0, 2] {
        let errors = on_ranks(ends::<f32>(2, host, 8), |rank, mut end| {
            let split = RowSplit::contiguous(if rank == 0 { &one } else { &other }).unwrap();
            end.part(2).unwrap().fill(1.0);
            end.reduce_scatter(1, split, None, &mut vec![0.0; split.positions(rank).len()]).unwrap_err().to_string()
        });
        assert_eq!(errors[0], "rank 1 broke the protocol: it split the rows of the step differently");
        assert!(errors[1].starts_with("rank 0 "));
    }
}

#[test]
fn labels_out_of_bounds_and_missing_ones_are_refused_by_the_rank_that_sent_them() {
    let split = [0, 1, 2];
    for (host, width, label, expected) in
        [(0, 2, 5, "row label 5, expected below 5"), (2, 2, 5, "row label 5"), (2, 1, 1, "rows of 2 bytes, expected 4")]
    {
        let errors = on_ranks(ends::<f32>(2, host, 8), |rank, mut end| {
            let split = RowSplit::contiguous(&split).unwrap();
            let (width, labels) = if rank == 0 { (2, vec![1; 2]) } else { (width, vec![label; width]) };
            let bound = if rank == 0 { 5 } else { 9 };
            let own = OwnRows { rows: &[1.0], hidden: 1, labels: &labels, width, bound };
            let all = AllRows { rows: &mut [0.0; 2], labels: &mut vec![0; 2 * width] };
            end.allgather(own, split, all).err()
        });
        let error = errors[0].as_ref().unwrap();
        assert!(error.rank() == 1 && error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn operands_beyond_the_memory_are_refused_before_anything_is_sent() {
    let offsets = [0, 3];
    let split = RowSplit::contiguous(&offsets).unwrap();
    let mut end = ends(1, 1, 5).remove(0);
    let refused = |outcome: Result<(), UnitError>, expected: &str| {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, UnitError::Operands { rank: 0, .. }) && error.to_string().contains(expected),
            "{error}"
        );
    };
    refused(end.part(6).map(drop), "6 row elements exceed the 5 that fit in its memory");
    end.part(4).unwrap();
    refused(end.reduce_scatter(2, split, None, &mut [0.0; 6]), "the part: 4 elements, expected 6");
    refused(end.reduce_scatter(1, split, None, &mut [0.0; 3]), "the part: 4 elements, expected 3");
    end.part(3).unwrap();
    for (residual, weight, own, expected) in [
        (2, 1, 3, "the residual: 2 elements, expected 3"),
        (3, 2, 3, "the norm's weight: 2 elements, expected 1"),
        (3, 1, 2, "the residual out: 2 elements, expected 3"),
    ] {
        let (residual, weight) = (&vec![0.0; residual], &vec![0.0; weight]);
        let norm = Norm { residual, weight, epsilon: 1e-6, residual_out: &mut vec![0.0; own] };
        refused(end.reduce_scatter(1, split, Some(norm), &mut [0.0; 3]), expected);
    }
    let mut plan = DispatchPlan::default();
    plan.build(&[0, 0], &[1.0; 2], 1, &[0], 1).unwrap();
    refused(end.dispatch(&[0.0; 3], 2, &plan), "the rows: 3 elements, expected 4");
    plan.build(&[0, 0, 0], &[1.0; 3], 1, &[0], 1).unwrap();
    refused(end.dispatch(&[0.0; 6], 2, &plan), "6 row elements");
}

#[test]
fn memory_without_room_for_what_all_ranks_send_is_an_error_of_the_rank_that_has_it() {
    // Rank 0 receives 4 rows of 2, and has room for 5 elements.
    let errors = on_ranks(ends::<f32>(2, 2, 5), |_, mut end| {
        let mut plan = DispatchPlan::default();
        plan.build(&[0, 0], &[1.0; 2], 1, &[0], 2).unwrap();
        end.dispatch(&[0.0; 4], 2, &plan).err()
    });
    assert!(errors[0].as_ref().is_some_and(|error| error.rank() == 0), "{errors:?}");
    assert_eq!(errors[1], None);
}

#[test]
fn memory_says_who_is_within_reach() {
    for (rank, memory) in SharedHalves::<f32>::on_hosts(5, 2, 1).unwrap().into_iter().enumerate() {
        let reached: Vec<usize> = (0..5).filter(|&peer| memory.reaches(peer)).collect();
        let expected: &[usize] = [&[0, 1][..], &[2, 3], &[4]][rank / 2];
        assert_eq!((reached.as_slice(), memory.limit()), (expected, Some(1)));
    }
}
