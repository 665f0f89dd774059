//! The carriers between processes are the reference, bit for bit: messages over TCP and over shared rings, and rows in shared memory.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../kernels/ranks/tests/law/mod.rs"]
mod law;
mod links;

use law::{Case, elements};
use links::{PATIENT, tcp_streams};
use proptest::prelude::*;
use semmoe_kernels::collectives::{Collectives, PrivateMemory, RowCollectives};
use semmoe_worker::ep::{ShmMemory, ShmTransport, TcpTransport};

type Units = fn(usize, usize) -> Vec<Box<dyn Collectives<f32>>>;

fn over_tcp(world: usize, _elements: usize) -> Vec<Box<dyn Collectives<f32>>> {
    let join = |(rank, streams)| {
        let link = TcpTransport::new(rank, streams, PATIENT).unwrap();
        Box::new(RowCollectives::new(link, PrivateMemory::new(rank))) as Box<dyn Collectives<f32>>
    };
    tcp_streams(world).into_iter().enumerate().map(join).collect()
}

/// Each rank maps the memory for itself, as processes do.
fn over_memory(world: usize, elements: usize) -> Vec<Box<dyn Collectives<f32>>> {
    let (file, _) = ShmMemory::create(world, elements, 5).unwrap();
    let join = |(rank, streams)| {
        let memory = ShmMemory::attach(&file, world, elements, 5).unwrap();
        let (link, rows) = ShmTransport::new(rank, memory, streams, PATIENT).unwrap();
        Box::new(RowCollectives::new(link, rows)) as Box<dyn Collectives<f32>>
    };
    tcp_streams(world).into_iter().enumerate().map(join).collect()
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
