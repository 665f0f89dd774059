//! Rejections, by their messages.

use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::{
    Checksums, ExpertArray, ExpertShape, Hosts, Layout, NO_HOST, PieceHash, PieceId, Pool, ReshardError, Side, Switch,
};

fn sentence<T: std::fmt::Debug>(result: Result<T, ReshardError>) -> String {
    result.unwrap_err().to_string()
}

fn pool(slots: usize) -> Result<Pool, ReshardError> {
    Pool::new(ExpertShape::slice_major(2, 8)?, NodeGrid::of_nodes(1, 2)?, 4, 2, slots)
}

#[test]
fn shapes_that_do_not_fit() {
    let none = Vec::new();
    let array = |outer, inner_bytes| vec![ExpertArray { outer, inner_bytes }];
    for (found, expected) in [
        (sentence(ExpertShape::fp8_blocks(256, 1500, 128, 4)), "intermediate size: 1500, expected a multiple of 128"),
        (sentence(ExpertShape::fp8_blocks(256, 128, 0, 4)), "hidden size: 256, expected a multiple of 0"),
        (sentence(ExpertShape::new(0, array(1, 1))), "steps per expert: 0"),
        (sentence(ExpertShape::new(1, none)), "arrays per expert: 0"),
        (sentence(ExpertShape::new(1, array(0, 1))), "rows per expert array: 0"),
        (sentence(ExpertShape::new(1, array(1, 0))), "bytes per step: 0"),
        (sentence(ExpertShape::new(1 << 40, array(1 << 40, 1))), "the experts of one rank exceed"),
        (sentence(ExpertShape::rows(usize::MAX, 2, 2)), "the experts of one rank exceed"),
        (sentence(NodeGrid::of_nodes(0, 8)), "nodes: 0, expected 1 to 65535"),
        (sentence(NodeGrid::of_nodes(8, 0)), "ranks per node: 0"),
        (sentence(NodeGrid::of_nodes(300, 300)), "ranks: 90000, expected 1 to 65535"),
        (sentence(pool(1)), "2 ranks with 1 slots each cannot hold 4 experts"),
        (sentence(pool(0)), "expert slots per rank: 0"),
    ] {
        assert!(found.starts_with(expected), "{found}");
    }
    let huge = ExpertShape::slice_major(2, 1 << 60).unwrap();
    assert_eq!(Pool::new(huge, NodeGrid::of_nodes(1, 2).unwrap(), 4, 2, 2), Err(ReshardError::TooLarge));
}

#[test]
fn layouts_that_do_not_fit() {
    let hosts = |layer: &[u16]| Hosts::new(4, 2, vec![vec![0, 1, 2, 3], layer.to_vec()]);
    for (found, expected) in [
        (sentence(hosts(&[0, 1, 2])), "expert slots per layer: 3, expected 4"),
        (sentence(hosts(&[0, 1, 2, 4])), "layer 1, slot 3 hosts expert 4, but the model has only 4"),
        (sentence(hosts(&[0, 1, 2, NO_HOST])), "layer 1: no rank hosts expert 3"),
        (sentence(hosts(&[0, 0, 2, 3])), "layer 1: rank 0 hosts expert 0 twice"),
        (sentence(Hosts::new(4, 3, vec![vec![0, 1, 2, 3]])), "expert slots per layer: 4, expected a multiple of 3"),
        (sentence(Hosts::new(4, 2, Vec::new())), "expert slots per host: 0, expected 1 to 65535"),
        (sentence(Hosts::contiguous(0, 2, 1)), "experts: 0, expected 1 to 65535"),
    ] {
        assert_eq!(found, expected);
    }
    let pool = pool(2).unwrap();
    let ep = Layout::Ep(Hosts::contiguous(4, 2, 2).unwrap());
    let refuse = |from: &Layout, to: &Layout| sentence(Switch::new(&pool, from, to, Side::High));
    let layout = |experts, ranks, layers| Layout::Ep(Hosts::contiguous(experts, ranks, layers).unwrap());
    let wide = Layout::Ep(Hosts::new(4, 2, vec![vec![0, 1, NO_HOST, 2, 3, 0]; 2]).unwrap());
    let nodes = |nodes, layers| Layout::Hybrid(Hosts::contiguous(4, nodes, layers).unwrap());
    let one_node = pool.clone().with_hybrid(&[2]).unwrap();
    let hybrid = |to: &Layout| sentence(Switch::new(&one_node, &ep, to, Side::High));
    for (found, expected) in [
        (refuse(&ep, &layout(5, 2, 2)), "experts of the layout: 5, expected 4"),
        (refuse(&layout(4, 4, 2), &Layout::Tp), "ranks of the layout: 4, expected 2"),
        (refuse(&Layout::Tp, &layout(4, 2, 3)), "layers of the layout: 3, expected 2"),
        (refuse(&ep, &wide), "the layout needs 3 expert slots on each rank, but the buffer has room for 2"),
        (
            sentence(Switch::new(&pool.clone().ep_only(), &ep, &Layout::Tp, Side::Low)),
            "the buffer has room for EP layouts only",
        ),
        (refuse(&Layout::Tp, &Layout::Tp), "the experts are already in this sliced layout"),
        (refuse(&ep, &Layout::Groups(1)), "the buffer has no room for groups of 1 ranks"),
        (refuse(&ep, &nodes(1, 2)), "the buffer has no room for a hybrid layout of 1 nodes"),
        (hybrid(&nodes(2, 2)), "the buffer has no room for a hybrid layout of 2 nodes"),
        (hybrid(&nodes(1, 3)), "layers of the layout: 3, expected 2"),
        (sentence(pool.clone().with_hybrid(&[3])), "ranks per node: 2, expected a multiple of 3"),
        (sentence(pool.clone().with_hybrid(&[0])), "ranks per node: 2, expected a multiple of 0"),
        (sentence(pool.clone().with_groups(&[3])), "ranks per node: 2, expected a multiple of 3"),
        (sentence(pool.clone().with_groups(&[0])), "ranks per node: 2, expected a multiple of 0"),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn digests_differ_where_switches_do() {
    let pool = pool(3).unwrap().with_hybrid(&[1, 2]).unwrap();
    let hosts = |layer: [u16; 4]| Hosts::new(4, 2, vec![layer.to_vec(); 2]).unwrap();
    let (a, b) = (Layout::Ep(hosts([0, 1, 2, 3])), Layout::Ep(hosts([0, 1, 3, 2])));
    let apart = |layer| Layout::Hybrid(hosts(layer));
    let together = Layout::Hybrid(Hosts::new(4, 1, vec![vec![0, 1, 2, 3]; 2]).unwrap());
    let digest = |from: &Layout, to: &Layout, side| Switch::new(&pool, from, to, side).unwrap().digest();
    let all = [
        digest(&a, &b, Side::High),
        digest(&b, &a, Side::High),
        digest(&a, &b, Side::Low),
        digest(&a, &Layout::Tp, Side::High),
        digest(&Layout::Tp, &a, Side::High),
        digest(&a, &apart([0, 1, 2, 3]), Side::High),
        digest(&a, &apart([0, 1, 3, 2]), Side::High),
        digest(&a, &together, Side::High),
    ];
    for (index, digest) in all.iter().enumerate() {
        assert!(!all[..index].contains(digest), "{all:?}");
    }
    assert_eq!(all[0], digest(&a.clone(), &b.clone(), Side::High));
}

#[test]
fn checksums_see_any_changed_byte_and_copies_that_differ() {
    let hash = |bytes: &[u8]| {
        let mut hash = PieceHash::default();
        hash.update(bytes);
        hash.finish()
    };
    let bytes: Vec<u8> = (0..200).collect();
    for at in 0..bytes.len() {
        let mut other = bytes.clone();
        other[at] ^= 1;
        assert_ne!(hash(&bytes), hash(&other), "byte {at}");
    }
    assert_ne!(hash(&bytes[..199]), hash(&[&bytes[..199], &[0]].concat()));
    // Parts of a row.
    let mut parts = PieceHash::default();
    parts.update(&bytes[..128]);
    parts.update(&bytes[128..]);
    assert_eq!(parts.finish(), hash(&bytes));

    let pool = pool(2).unwrap();
    let piece = PieceId { layer: 1, expert: 2, slice: 1 };
    let (mut mine, mut others) = (Checksums::new(&pool), Checksums::new(&pool));
    assert_eq!(mine.expected(piece).unwrap_err().to_string(), "layer 1, expert 2, slice 1 has no checksum");
    others.record(piece, 5).unwrap();
    mine.merge(others.words()).unwrap();
    mine.merge(others.words()).unwrap();
    assert_eq!(mine.expected(piece), Ok(5));
    let expected =
        "layer 1, expert 2, slice 1 has checksum 0x0000000000000006, but another copy has 0x0000000000000005";
    assert_eq!(mine.record(piece, 6).unwrap_err().to_string(), expected);
    assert_eq!(mine.merge(&[0; 3]).unwrap_err().to_string(), "checksums: 3, expected 16");
}
