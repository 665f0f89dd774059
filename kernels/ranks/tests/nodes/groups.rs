//! Groups of ranks over the link of their unit.

use half::bf16;
use proptest::prelude::*;
use semmoe_kernels::collectives::{
    Collectives, GroupLink, LevelBytes, Lockstep, PrivateMemory, RowCollectives, UnitLink,
};
use semmoe_kernels::{Element, NodeGrid, RowSplit};
use semmoe_ranks::{LocalTransport, SharedHalves};

use crate::{GRIDS, Link, grid, links, on_ranks};
use semmoe_reference::law::{self, Case, elements};

type End<T> = Box<dyn Collectives<T>>;

fn messages<T: Element>(link: GroupLink<LocalTransport>) -> End<T> {
    let memory = PrivateMemory::new(link.rank());
    Box::new(RowCollectives::of_group(link, memory))
}

/// The ends of every node's group; with `room` they share memory for that many elements.
fn inside<T: Element>(links: &[Link], grid: NodeGrid, room: Option<usize>) -> Vec<Vec<End<T>>> {
    let of_node = |node| {
        let links = grid.inside(node).map(|rank| links[rank].inside());
        let Some(room) = room else { return links.map(messages).collect() };
        let memory = SharedHalves::on_hosts(grid.width(), grid.width(), room).unwrap();
        links.zip(memory).map(|(link, memory)| Box::new(RowCollectives::of_group(link, memory)) as End<T>).collect()
    };
    (0..grid.nodes()).map(of_node).collect()
}

fn across<T: Element>(links: &[Link], grid: NodeGrid) -> Vec<Vec<End<T>>> {
    (0..grid.width()).map(|local| grid.across(local).map(|rank| messages(links[rank].across())).collect()).collect()
}

/// Compares all groups with the reference, concurrently.
fn hold<T: Element>(groups: Vec<Vec<End<T>>>, case: Case) {
    on_ranks(groups, |group, ends| law::holds(ends, Case { seed: case.seed.wrapping_add(group as u64), ..case }));
}

fn groups_are_the_reference<T: Element>(grid: NodeGrid, case: Case, is_shared: bool) {
    let links = links(grid);
    let room = is_shared.then(|| elements(case, grid.ranks()));
    let unit: Vec<End<T>> = links
        .iter()
        .map(|link| Box::new(RowCollectives::new(link.clone(), PrivateMemory::new(link.rank()))) as End<T>)
        .collect();
    hold(inside::<T>(&links, grid, room), case);
    hold(across::<T>(&links, grid), case);
    law::holds(unit, case);
    hold(inside::<T>(&links, grid, room), case);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn every_group_is_the_reference_bit_for_bit(
        shape in prop::sample::select(GRIDS.to_vec()), hidden in 1usize..40, tokens in 0usize..12, seed: u64, is_shared: bool,
    ) {
        let case = Case { hidden, tokens, rounds: 2, seed, norms_rounded_sums: false };
        groups_are_the_reference::<f32>(grid(shape), case, is_shared);
        groups_are_the_reference::<bf16>(grid(shape), case, is_shared);
    }
}

#[test]
fn ranks_that_divide_the_unit_in_other_ways_find_out() {
    let errors = on_ranks(LocalTransport::mesh(4), |rank, mut link| match rank {
        3 => link.all_to_all(&vec![vec![7; 3]; 4], &mut vec![Vec::new(); 4]).err().map(|error| error.to_string()),
        _ => UnitLink::join(link, if rank == 1 { 4 } else { 2 }).err().map(|error| error.to_string()),
    });
    let expected = [
        Some("rank 1 broke the protocol: it divides the unit into 4 nodes, expected 2"),
        Some("rank 0 broke the protocol: it divides the unit into 2 nodes, expected 4"),
        Some("rank 1 broke the protocol: it divides the unit into 4 nodes, expected 2"),
        None,
    ];
    assert_eq!(errors.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
    let errors = on_ranks(LocalTransport::mesh(2), |rank, mut link| match rank {
        0 => UnitLink::join(link, 2).err(),
        _ => link.all_to_all(&vec![vec![7; 3]; 2], &mut vec![Vec::new(); 2]).err(),
    });
    let expected = "rank 1 broke the protocol: it does not divide the unit into nodes, expected 2 nodes";
    assert_eq!(errors[0].as_ref().map(ToString::to_string).as_deref(), Some(expected));
    let error = UnitLink::join(LocalTransport::mesh(1).remove(0), 2).err().unwrap();
    assert_eq!(error.to_string(), "rank 0: 1 ranks cannot be split evenly over 2 nodes");
}

#[test]
fn errors_within_a_group_name_ranks_as_the_unit_does() {
    let grid = grid([2, 2]);
    let links = links(grid);
    let errors = on_ranks(links.clone(), |rank, link| {
        let (one, other) = ([0, 1, 2], [0, 2, 2]);
        let split = RowSplit::contiguous(if rank == 2 { &other } else { &one }).unwrap();
        let mut end = messages::<f32>(link.inside());
        end.part(2).unwrap().fill(1.0);
        let local = grid.local(rank);
        end.reduce_scatter(1, split, None, &mut vec![0.0; split.positions(local).len()]).err()
    });
    assert_eq!((&errors[0], &errors[1]), (&None, &None), "the other node's group works on");
    for (rank, blamed) in [(2, 3), (3, 2)] {
        let expected = format!("rank {blamed} broke the protocol: it split the rows of the step differently");
        assert_eq!(errors[rank].as_ref().map(ToString::to_string), Some(expected));
    }
}

#[test]
fn bytes_are_counted_by_level() {
    let links = links(grid([2, 3]));
    let counted = on_ranks(links.clone(), |_, mut link| {
        let began = link.sent();
        let exchange = |link: &mut dyn Lockstep, bytes: usize| {
            let world = link.world();
            link.all_to_all(&vec![vec![0; bytes]; world], &mut vec![Vec::new(); world]).unwrap();
        };
        exchange(&mut link.inside(), 10);
        exchange(&mut link.across(), 100);
        exchange(&mut link, 1000);
        let sent = link.sent();
        LevelBytes { inside: sent.inside - began.inside, between: sent.between - began.between }
    });
    assert_eq!(counted, [LevelBytes { inside: 2 * 1010, between: 100 + 3000 }; 6]);
}
