//! Any shape, any E with replicas and empty slots, any number of switches.

use proptest::prelude::*;
use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::{ExpertArray, ExpertShape, Hosts, Layout, Move, NO_HOST, Part, Pool, Side, Switch};

use crate::sim::{Random, Sim, order};

#[derive(Clone, Copy, Debug)]
struct Case {
    nodes: usize,
    per_node: usize,
    experts: usize,
    layers: usize,
    /// Slots per rank beyond what all experts need.
    more_slots: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    (1usize..=3, 1usize..=4, 1usize..=11, 1usize..=4, 0usize..=2, any::<u64>()).prop_map(
        |(nodes, per_node, experts, layers, more_slots, seed)| Case {
            nodes,
            per_node,
            experts,
            layers,
            more_slots,
            seed,
        },
    )
}

/// Row-major, FP8 with scales, slice-major or odd arrays; widths that the ranks rarely divide.
fn shape(per_node: usize, random: &mut Random) -> ExpertShape {
    let (width, hidden) = (1 + random.below(9), 1 + random.below(5));
    match random.below(4) {
        0 => ExpertShape::rows(hidden, width, 2),
        1 => ExpertShape::fp8_blocks(hidden * 2, width * 2, 2, 4),
        2 => ExpertShape::slice_major(per_node, 1 + random.below(40)),
        _ => {
            let array =
                |random: &mut Random| ExpertArray { outer: 1 + random.below(4), inner_bytes: 1 + random.below(9) };
            ExpertShape::new(width, (0..1 + random.below(3)).map(|_| array(random)).collect())
        }
    }
    .unwrap()
}

/// Places every expert at random, some on several ranks; uses fewer slots than the pool has, if they suffice.
fn hosts(case: Case, slots: usize, random: &mut Random) -> Hosts {
    hosts_of(1, case, slots, random)
}

/// Places every expert at random on nodes of `width` ranks.
fn hosts_of(width: usize, case: Case, slots: usize, random: &mut Random) -> Hosts {
    let ranks = case.nodes * case.per_node / width;
    let slots = case.experts.min(slots * width);
    let least = case.experts.div_ceil(ranks);
    let slots = least + random.below(slots - least + 1);
    let layer = |random: &mut Random| {
        let mut places: Vec<usize> = (0..ranks * slots).collect();
        random.shuffle(&mut places);
        let mut layer = vec![NO_HOST; ranks * slots];
        for expert in 0..case.experts {
            layer[places[expert]] = expert as u16;
        }
        for &place in &places[case.experts..] {
            let (rank, expert) = (place / slots, random.below(case.experts) as u16);
            if random.below(2) == 0 && !layer[rank * slots..(rank + 1) * slots].contains(&expert) {
                layer[place] = expert;
            }
        }
        layer
    };
    Hosts::new(case.experts, ranks, (0..case.layers).map(|_| layer(random)).collect()).unwrap()
}

/// Arbitrary bytes, by position in the complete expert. Bytes of a slice are counted from its first column.
fn truth(part: &Part, row: usize, byte: usize) -> u8 {
    let piece = part.piece;
    let words = [piece.layer, piece.expert.into(), piece.slice.into(), part.array, row, byte];
    words.into_iter().fold(7u64, |hash, word| (hash ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        as u8
}

fn pool(case: Case, random: &mut Random) -> Pool {
    let grid = NodeGrid::of_nodes(case.nodes, case.per_node).unwrap();
    let slots = case.experts.div_ceil(grid.ranks()) + case.more_slots;
    Pool::new(shape(case.per_node, random), grid, case.experts, case.layers, slots).unwrap()
}

fn slots(pool: &Pool, case: Case) -> usize {
    case.experts.div_ceil(pool.grid().ranks()) + case.more_slots
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    /// A walk over TP, groups, and any E over ranks or hybrid nodes, then all the way back: each layout holds every
    /// expert's bytes, and the end equals the beginning.
    #[test]
    fn a_walk_over_layouts_and_back_is_the_identity(case in cases(), side in prop::sample::select(vec![Side::Low, Side::High])) {
        let mut random = Random(case.seed);
        let widths: Vec<usize> = (1..=case.per_node).filter(|width| case.per_node.is_multiple_of(*width)).collect();
        let groups = &widths[..widths.len() - 1];
        let pool = pool(case, &mut random).with_groups(groups).unwrap().with_hybrid(&widths).unwrap();
        let sliced = |at: usize| groups.get(at).map_or(Layout::Tp, |width| Layout::Groups(*width));
        let mut layouts = vec![Layout::Ep(hosts(case, slots(&pool, case), &mut random))];
        for _ in 0..6 {
            let slices = sliced(random.below(groups.len() + 1));
            let kind = if layouts.last() == Some(&slices) { random.below(2) } else { random.below(4) };
            layouts.push(match kind {
                0 => Layout::Ep(hosts(case, slots(&pool, case), &mut random)),
                1 => {
                    let width = widths[random.below(widths.len())];
                    Layout::Hybrid(hosts_of(width, case, slots(&pool, case), &mut random))
                }
                _ => slices,
            });
        }
        let first = Sim::load(&pool, &layouts[0], side, &truth);
        let mut sim = first.clone();
        let mut switches = Vec::new();
        for pair in layouts.windows(2) {
            let switch = Switch::new(&pool, &pair[0], &pair[1], sim.side).unwrap();
            prop_assert!(sim.run(&switch, order(&switch), &mut random).is_some());
            prop_assert!(sim.holds(&pair[1], &truth));
            switches.push(switch.inverse());
        }
        for switch in switches.iter().rev() {
            prop_assert!(sim.run(switch, order(switch), &mut random).is_some());
            prop_assert!(sim.holds(switch.to(), &truth));
        }
        prop_assert!(sim == first, "the buffers differ after the way back");
    }

    /// The other order of layers overwrites unread data, in either direction.
    #[test]
    fn the_wrong_order_is_caught(case in cases(), side in prop::sample::select(vec![Side::Low, Side::High])) {
        let case = Case { layers: case.layers + 1, ..case };
        let mut random = Random(case.seed);
        let pool = pool(case, &mut random);
        let ep = Layout::Ep(hosts(case, slots(&pool, case), &mut random));
        let other = Layout::Ep(hosts(case, slots(&pool, case), &mut random));
        for (from, to) in [(&ep, &Layout::Tp), (&Layout::Tp, &ep), (&ep, &other)] {
            // With many empty slots, a TP slot may be so much smaller that any order fits.
            let (before, after) = (pool.slot_bytes(from), pool.slot_bytes(to));
            let switch = Switch::new(&pool, from, to, side).unwrap();
            let mut sim = Sim::load(&pool, from, side, &truth);
            let caught = sim.run(&switch, order(&switch).rev(), &mut random).is_none();
            prop_assert_eq!(caught, case.layers * (before + after) > pool.bytes());
        }
    }

    /// K slots and one spare: 1 + 1/K, times (N + R) / N with R redundant expert slots, times the overhead of empty
    /// columns and slots.
    #[test]
    fn memory_is_one_spare_slot(
        per_node in 1usize..=8, each in 1usize..=8, redundant in 0usize..=3, layers in 1usize..=64, bytes in 1usize..=64,
    ) {
        let (experts, slots) = (each * per_node, each + redundant);
        let shape = ExpertShape::slice_major(per_node, bytes).unwrap();
        let pool = Pool::new(shape, NodeGrid::of_nodes(1, per_node).unwrap(), experts, layers, slots).unwrap();
        // N experts, each once, over P ranks.
        let least = experts * bytes * layers;
        prop_assert_eq!(pool.bytes() * layers * experts, least * (layers + 1) * (experts + redundant * per_node));
    }

    /// Without TP any E fits into K + 1 slots, and the free part is exactly what no slot occupies.
    #[test]
    fn ep_alone_needs_one_slot_more_than_layers(case in cases(), side in prop::sample::select(vec![Side::Low, Side::High])) {
        let mut random = Random(case.seed);
        let pool = pool(case, &mut random).ep_only();
        let (from, to) = [(); 2].map(|()| Layout::Ep(hosts(case, slots(&pool, case), &mut random))).into();
        prop_assert_eq!(pool.bytes(), (case.layers + 1) * pool.slot_bytes(&from));
        let switch = Switch::new(&pool, &from, &to, side).unwrap();
        let mut sim = Sim::load(&pool, &from, side, &truth);
        prop_assert!(sim.run(&switch, order(&switch), &mut random).is_some() && sim.holds(&to, &truth));
        // Back to the first side: nothing leaves its rank.
        let back = Switch::new(&pool, &to, &to, side.other()).unwrap();
        let mut moves = Vec::new();
        back.moves(0, &mut moves);
        prop_assert!(!moves.is_empty() && moves.iter().all(|moved| moved.from.rank == moved.to.rank));
        let free = pool.free(&to, side.other());
        prop_assert_eq!(free.len(), pool.slot_bytes(&to));
        for layer in 0..case.layers {
            let slot = pool.slot(&to, side.other(), layer);
            prop_assert!(slot.end <= free.start || free.end <= slot.start);
        }
    }

    /// For experts with one copy, a node receives each slice that it lacks once: ParaSMoE equation 5. Nothing crosses
    /// nodes on the way back.
    #[test]
    fn bytes_between_nodes_are_the_least(nodes in 1usize..=4, per_node in 1usize..=4, each in 1usize..=3, seed: u64) {
        let experts = nodes * per_node * each;
        let case = Case { nodes, per_node, experts, layers: 1, more_slots: 0, seed };
        let mut random = Random(seed);
        let shape = ExpertShape::slice_major(per_node, 10).unwrap();
        let pool = Pool::new(shape, NodeGrid::of_nodes(nodes, per_node).unwrap(), experts, 1, each).unwrap();
        let ep = Layout::Ep(hosts(case, each, &mut random));
        let switch = Switch::new(&pool, &ep, &Layout::Tp, Side::High).unwrap();
        let mut moves = Vec::new();
        let mut crossing = |switch: &Switch<'_>, rank: usize| {
            switch.moves(0, &mut moves);
            let grid = pool.grid();
            let crossing = moves.iter().filter(|m| m.to.rank == rank && grid.node(m.from.rank) != grid.node(rank));
            crossing.map(|m| m.total_bytes()).sum::<usize>()
        };
        for rank in 0..nodes * per_node {
            prop_assert_eq!(crossing(&switch, rank), experts * 10 * (nodes - 1) / nodes);
            prop_assert_eq!(crossing(&switch.inverse(), rank), 0);
        }
    }
}

/// Hybrid nodes have the experts that their ranks have under EP, so no byte leaves a node, in either direction. To TP
/// each slice that a node lacks crosses once.
#[test]
fn hybrid_nodes_take_what_their_ranks_have() {
    let shape = ExpertShape::slice_major(6, 8).unwrap();
    let grid = NodeGrid::of_nodes(1, 6).unwrap();
    let pool = Pool::new(shape, grid, 6, 1, 2).unwrap().with_hybrid(&[2]).unwrap();
    // Expert 0 has a copy on ranks 0 and 5; nodes are of two ranks.
    let ep = Layout::Ep(
        Hosts::new(6, 6, vec![vec![0, NO_HOST, 3, NO_HOST, 1, 2, 4, NO_HOST, 5, NO_HOST, 0, NO_HOST]]).unwrap(),
    );
    let hybrid = Layout::Hybrid(Hosts::new(6, 3, vec![vec![0, 3, NO_HOST, 1, 2, 4, 0, 5, NO_HOST]]).unwrap());
    let mut moves = Vec::new();
    let mut crossing = |switch: &Switch<'_>| {
        switch.moves(0, &mut moves);
        moves.iter().filter(|moved| moved.from.rank / 2 != moved.to.rank / 2).map(Move::total_bytes).sum::<usize>()
    };
    let switch = Switch::new(&pool, &ep, &hybrid, Side::Low).unwrap();
    assert_eq!([crossing(&switch), crossing(&switch.inverse())], [0, 0]);
    let switch = Switch::new(&pool, &hybrid, &Layout::Tp, Side::Low).unwrap();
    // Each of six ranks needs a slice of each of six experts, and has those of its node's.
    assert_eq!(crossing(&switch), 6 * 6 * 8 - 2 * (2 + 3 + 2) * 8);
    // Back, a node lacks four of the six slices of each of its experts.
    assert_eq!(crossing(&switch.inverse()), 7 * 4 * 8);
}

/// Of three columns one rank of a node has two, so a slot of a node is larger than one of EP, and moves to another one.
#[test]
fn hybrid_nodes_have_room_for_another_placement() {
    let shape = ExpertShape::new(3, vec![ExpertArray { outer: 1, inner_bytes: 1 }]).unwrap();
    let pool = Pool::new(shape, NodeGrid::of_nodes(1, 4).unwrap(), 4, 2, 1).unwrap();
    // Slots: 3 bytes in EP, 4 in TP and on nodes; two layers and a spare one.
    assert_eq!((pool.bytes(), pool.clone().with_hybrid(&[2]).unwrap().bytes()), (2 * 4 + 3, 2 * 4 + 4));
    let pool = pool.with_hybrid(&[2]).unwrap();
    let nodes = |layer: [u16; 4]| Layout::Hybrid(Hosts::new(4, 2, vec![layer.to_vec(); 2]).unwrap());
    let (from, to) = (nodes([0, 1, 2, 3]), nodes([1, 2, 0, 3]));
    let switch = Switch::new(&pool, &from, &to, Side::Low).unwrap();
    let mut sim = Sim::load(&pool, &from, Side::Low, &truth);
    assert!(sim.run(&switch, order(&switch), &mut Random(1)).is_some() && sim.holds(&to, &truth));
}

/// Experts on several ranks: a rank reads its own copy, and remote copies are read equally often.
#[test]
fn replicas_are_read_at_home_first_then_evenly() {
    let shape = ExpertShape::slice_major(6, 8).unwrap();
    let pool = Pool::new(shape, NodeGrid::of_nodes(1, 6).unwrap(), 4, 1, 2).unwrap();
    // Ranks 0 to 2 have experts 0 and 1 each, ranks 3 to 5 have 2 and 3.
    let ep = Layout::Ep(Hosts::new(4, 6, vec![vec![0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]]).unwrap());
    let mut moves = Vec::new();
    Switch::new(&pool, &ep, &Layout::Tp, Side::High).unwrap().moves(0, &mut moves);
    let mut sources = [0; 6];
    for moved in &moves {
        let home = usize::from(moved.expert >= 2) * 3;
        if (home..home + 3).contains(&moved.to.rank) {
            assert_eq!(moved.from.rank, moved.to.rank, "its own copy");
        } else {
            sources[moved.from.rank] += 1;
        }
    }
    // 3 ranks x 2 experts from each half, over its 3 ranks.
    assert_eq!(sources, [2; 6]);
}

/// Why there is a barrier after each layer: a rank that starts the next layer early destroys what another still reads.
#[test]
fn a_rank_that_skips_the_barrier_is_caught() {
    let shape = ExpertShape::slice_major(2, 8).unwrap();
    let pool = Pool::new(shape, NodeGrid::of_nodes(1, 2).unwrap(), 4, 2, 2).unwrap();
    let hosts = |layer: [u16; 4]| Layout::Ep(Hosts::new(4, 2, vec![layer.to_vec(); 2]).unwrap());
    let (ep, other) = (hosts([0, 1, 2, 3]), hosts([3, 0, 1, 2]));
    for (from, to) in [(&ep, &Layout::Tp), (&Layout::Tp, &ep), (&ep, &other)] {
        for side in [Side::Low, Side::High] {
            let switch = Switch::new(&pool, from, to, side).unwrap();
            let arrives = |early: bool| {
                let mut sim = Sim::load(&pool, from, side, &truth);
                let (mut first, mut second) = (Vec::new(), Vec::new());
                switch.moves(switch.layer(0), &mut first);
                switch.moves(switch.layer(1), &mut second);
                let of = |moves: &[Move], rank: usize| {
                    moves.iter().copied().filter(move |m| m.to.rank == rank).collect::<Vec<_>>()
                };
                let turns = match early {
                    true => [of(&first, 0), of(&second, 0), of(&first, 1), of(&second, 1)],
                    false => [of(&first, 0), of(&first, 1), of(&second, 0), of(&second, 1)],
                };
                turns.iter().flatten().for_each(|moved| sim.carry(moved));
                sim.side = side.other();
                sim.holds(to, &truth)
            };
            assert!(arrives(false) && !arrives(true));
        }
    }
}
