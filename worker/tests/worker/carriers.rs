//! The carriers between processes equal the reference bit for bit: messages over TCP and over shared rings, and rows in
//! shared memory.

use crate::links::{PATIENT, tcp_streams};
use proptest::prelude::*;
use semmoe_kernels::collectives::{Collectives, GroupLink, Lockstep, PrivateMemory, RowCollectives, UnitLink};
use semmoe_ranks::SharedHalves;
use semmoe_reference::law::{self, Case, elements};
use semmoe_worker::ep::{ShmMemory, ShmTransport, TcpTransport};

type Units = fn(usize, usize) -> Vec<Box<dyn Collectives<f32>>>;

fn tcp_links(world: usize) -> Vec<TcpTransport> {
    let link = |(rank, streams)| TcpTransport::new(rank, streams, PATIENT).unwrap();
    tcp_streams(world).into_iter().enumerate().map(link).collect()
}

/// Each rank maps the memory separately, as processes do.
fn shared(world: usize, elements: usize) -> Vec<(ShmTransport, SharedHalves<f32>)> {
    let (file, _) = ShmMemory::create(world, elements, 5).unwrap();
    let join = |(rank, streams)| {
        let memory = ShmMemory::attach(&file, world, elements, 5).unwrap();
        ShmTransport::new(rank, memory, streams, PATIENT).unwrap()
    };
    tcp_streams(world).into_iter().enumerate().map(join).collect()
}

fn over_tcp(world: usize, _elements: usize) -> Vec<Box<dyn Collectives<f32>>> {
    let join =
        |(rank, link)| Box::new(RowCollectives::new(link, PrivateMemory::new(rank))) as Box<dyn Collectives<f32>>;
    tcp_links(world).into_iter().enumerate().map(join).collect()
}

fn over_memory(world: usize, elements: usize) -> Vec<Box<dyn Collectives<f32>>> {
    let join = |(link, rows)| Box::new(RowCollectives::new(link, rows)) as Box<dyn Collectives<f32>>;
    shared(world, elements).into_iter().map(join).collect()
}

/// Compares the groups of two nodes of two ranks with the reference: both inside at once, then both across.
fn groups_hold<L: Lockstep + 'static>(links: Vec<L>, case: Case) {
    let joined: Vec<UnitLink<L>> = std::thread::scope(|scope| {
        let threads: Vec<_> = links.into_iter().map(|link| scope.spawn(|| UnitLink::join(link, 2).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let end = |link: GroupLink<L>| -> Box<dyn Collectives<f32>> {
        let memory = PrivateMemory::new(link.rank());
        Box::new(RowCollectives::of_group(link, memory))
    };
    let inside = |ranks: [usize; 2]| ranks.map(|rank| end(joined[rank].inside())).into();
    let across = |ranks: [usize; 2]| ranks.map(|rank| end(joined[rank].across())).into();
    let hold = |groups: [Vec<_>; 2]| {
        std::thread::scope(|scope| {
            groups.map(|ends| scope.spawn(move || law::holds(ends, case))).map(|held| held.join().unwrap())
        });
    };
    hold([inside([0, 1]), inside([2, 3])]);
    hold([across([0, 2]), across([1, 3])]);
}

#[test]
fn groups_over_the_units_own_link_are_the_reference_bit_for_bit() {
    let case = Case { hidden: 33, tokens: 20, rounds: 20, seed: 4, norms_rounded_sums: false };
    groups_hold(tcp_links(4), case);
    groups_hold(shared(4, 0).into_iter().map(|(link, _)| link).collect(), case);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn every_carrier_is_the_reference_bit_for_bit(
        world in prop::sample::select(vec![1usize, 2, 3, 4, 8]), hidden in 1usize..70, tokens in 0usize..20, seed: u64,
    ) {
        let case = Case { hidden, tokens, rounds: 3, seed, norms_rounded_sums: false };
        for units in [over_tcp as Units, over_memory] {
            law::holds(units(world, elements(case, world)), case);
        }
    }
}
