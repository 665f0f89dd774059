//! The buffers that reshard.py, the executable specification, leaves: `data/reshard/golden.txt`, made by `golden.py`
//! beside it.

use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::{ExpertShape, Hosts, Layout, Part, Pool, Side, Switch};

use crate::sim::{Random, Sim, order};

const GOLDEN: &str = include_str!("../data/reshard/golden.txt");

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn buffers_are_those_of_the_reference_bit_for_bit() {
    let lines: Vec<Vec<&str>> = GOLDEN.lines().map(|line| line.split(' ').collect()).collect();
    let shapes: Vec<_> = lines.chunk_by(|a, b| a[..6] == b[..6]).collect();
    assert_eq!(shapes.len(), 6);
    for ranks in shapes {
        let numbers: Vec<usize> = ranks[0][..7].iter().map(|number| number.parse().unwrap()).collect();
        let [nodes, per_node, experts, width, hidden, layers, elements] = numbers[..] else { unreachable!() };
        let grid = NodeGrid::of_nodes(nodes, per_node).unwrap();
        let shape = ExpertShape::rows(hidden, width, 2).unwrap();
        let pool = Pool::new(shape, grid, experts, layers, experts / grid.ranks()).unwrap();
        assert_eq!(pool.bytes(), 2 * elements, "one spare EP slot");
        let ep = Layout::Ep(Hosts::contiguous(experts, grid.ranks(), layers).unwrap());

        // gate and up [K, E, 2, I, H], down [K, E, H, I], in elements of 2 bytes.
        let truth = |part: &Part, row: usize, byte: usize| {
            let first = cluster_steps(width, per_node, part.piece.slice.into());
            let expert = part.piece.layer * experts + usize::from(part.piece.expert);
            let index = match part.array {
                0 => ((expert * 2 + row) * width + first) * hidden + byte / 2,
                _ => (expert * hidden + row) * width + first + byte / 2,
            };
            let index = index as u64 + ((part.array as u64) << 32);
            ((index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16).to_le_bytes()[byte % 2]
        };
        let mut sim = Sim::load(&pool, &ep, Side::High, &truth);
        let compare = |sim: &Sim<'_>, column: usize| {
            for (rank, line) in ranks.iter().enumerate() {
                let found = format!("{:016x}", fnv(&sim.buffers[rank]));
                assert_eq!((rank.to_string().as_str(), found.as_str()), (line[7], line[column]), "{numbers:?}");
            }
        };
        let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High).unwrap();
        compare(&sim, 8);
        sim.run(&switch, order(&switch), &mut Random(1)).unwrap();
        compare(&sim, 9);
        sim.run(&switch.inverse(), order(&switch.inverse()), &mut Random(2)).unwrap();
        compare(&sim, 8);
    }
}

/// The first column of a slice, counted one by one.
fn cluster_steps(width: usize, slices: usize, slice: usize) -> usize {
    (0..slice).map(|slice| width / slices + usize::from(slice < width % slices)).sum()
}
