//! Ranks that never arrive or disagree, ids out of range, too little room: must stop with a report, never hang or
//! access invalid memory.

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::{
    Argsort, Buffer, Combine, Dispatch, Grid, Launch, LaunchError, Received, ReduceScatter, RowOrder, Rows, Split,
    Stopped, Team,
};
use semmoe_kernels_shim::{HostBuffer, Mutant, Shim, Step, StreamEnd};

use crate::support::{World, buffers, holding, poisoned, shim};

const GRID: Grid = Grid { blocks: 2, threads: 32 };

/// Runs one launch per rank, `None` for a rank that never arrives, and returns why each stopped.
fn stops(shim: &Shim, world: &World, launches: &[Option<Launch>]) -> Vec<Option<Stopped>> {
    let streams: Vec<Vec<Step<'_>>> = launches.iter().map(|launch| launch.iter().map(Step::Launch).collect()).collect();
    // SAFETY: the callers keep all memory until this returns, and zeroed the signals.
    let ends = unsafe { shim.run(&streams, 7, Mutant::None) }.unwrap();
    for (rank, end) in ends.iter().enumerate() {
        assert_eq!(*end == StreamEnd::Trapped, world.stopped(rank).is_some(), "rank {rank}");
    }
    (0..launches.len()).map(|rank| world.stopped(rank)).collect()
}

/// Three ranks with one buffer per role.
struct Reduce {
    world: World,
    parts: Vec<HostBuffer>,
    out: Vec<HostBuffer>,
}

impl Reduce {
    const TOKENS: u64 = 6;
    const HIDDEN: u64 = 8;

    fn new() -> Self {
        let elements = (Self::TOKENS * Self::HIDDEN) as usize;
        Self { world: World::new(3), parts: poisoned::<f32>(3, elements), out: poisoned::<f32>(3, elements) }
    }

    fn launch(&self, rank: usize, hidden: u64, split: Split<'_>, capacity: u64) -> Launch {
        let call = ReduceScatter {
            parts: &buffers(&self.parts),
            out: &[self.out[rank].buffer()],
            order: RowOrder {
                rows: Rows { tokens: Self::TOKENS, hidden, dtype: Dtype::F32 },
                split,
                capacity,
                multicast: None,
            },
        };
        call.launch(&self.world.team(rank).unwrap(), GRID).unwrap()
    }

    fn plain(&self, rank: usize) -> Launch {
        self.launch(rank, Self::HIDDEN, Split::default(), Self::TOKENS)
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_with_the_epoch() {
    let Some(shim) = shim() else { return };
    let reduce = Reduce::new();
    let all = [0, 1, 2].map(|rank| Some(reduce.plain(rank)));
    assert_eq!(stops(shim, &reduce.world, &all), [None; 3], "the first call has all ranks");
    let found = stops(shim, &reduce.world, &[all[0], None, all[2]]);
    let late = |rank| Some(Stopped::EntryTimeout { rank, peer: 1, epoch: 2 });
    assert_eq!(found, [late(0), None, late(2)]);
    let sentence = found[0].unwrap().to_string();
    assert!(sentence.contains("rank 1") && sentence.contains("call 2"), "{sentence}");
}

#[test]
fn ranks_that_disagree_on_shapes_stop() {
    let Some(shim) = shim() else { return };
    let reduce = Reduce::new();
    let narrow = reduce.launch(1, 4, Split::default(), Reduce::TOKENS);
    let found = stops(shim, &reduce.world, &[Some(reduce.plain(0)), Some(narrow), Some(reduce.plain(2))]);
    for (rank, stop) in found.iter().enumerate() {
        // The rank that disagrees may see either of the others first; they may see that it has stopped.
        assert!(stop.is_some(), "rank {rank} went on");
    }
    assert!(found.iter().flatten().any(|stop| matches!(stop, Stopped::Disagree { epoch: 1, .. })), "{found:?}");
}

#[test]
fn a_rank_that_stops_inside_a_call_is_missed_at_its_end() {
    let Some(shim) = shim() else { return };
    let reduce = Reduce::new();
    // Only rank 1 finds its offsets invalid, after the ranks have synchronised.
    let wrong = holding(&[0u32, 2, 9, 9]);
    let right = holding(&[0u32, 2, 4, 6]);
    let launch = |rank: usize| {
        let offsets = [if rank == 1 { wrong.buffer() } else { right.buffer() }];
        Some(reduce.launch(rank, Reduce::HIDDEN, Split { permutation: None, offsets: Some(&offsets) }, Reduce::TOKENS))
    };
    let found = stops(shim, &reduce.world, &[launch(0), launch(1), launch(2)]);
    assert_eq!(found[1], Some(Stopped::Offsets { rank: 1, end: 9 }));
    for rank in [0, 2] {
        assert_eq!(found[rank], Some(Stopped::ExitTimeout { rank: rank as u32, peer: 1, epoch: 1 }));
    }
}

#[test]
fn orders_that_do_not_fit_stop_before_any_row_is_touched() {
    let Some(shim) = shim() else { return };
    let permutation = |values: [u32; 6]| holding(&values);
    let offsets = |values: [u32; 4]| holding(&values);
    let good = ([0, 1, 2, 3, 4, 5], [0, 6, 6, 6], 6);
    let cases = [
        ((good.0, good.1, 5), Stopped::Rows { rank: 0, peer: 0, rows: 6 }),
        ((good.0, [3, 2, 6, 6], 6), Stopped::Offsets { rank: 0, end: 2 }),
        (([0, 1, 2, 9, 4, 5], good.1, 6), Stopped::Permutation { rank: 0, position: 3 }),
        (([0, 1, 2, u32::MAX, 4, 5], good.1, 6), Stopped::Permutation { rank: 0, position: 3 }),
    ];
    for ((order, ends, capacity), expected) in cases {
        let reduce = Reduce::new();
        let (order, ends) = (permutation(order), offsets(ends));
        let (orders, all_ends) = ([order.buffer()], [ends.buffer()]);
        let split = Split { permutation: Some(&orders), offsets: Some(&all_ends) };
        let launch = |rank| Some(reduce.launch(rank, Reduce::HIDDEN, split, capacity));
        let found = stops(shim, &reduce.world, &[launch(0), launch(1), launch(2)]);
        assert_eq!(found[0], Some(expected));
    }
}

#[test]
fn destinations_out_of_range_stop_with_their_index() {
    let Some(shim) = shim() else { return };
    for (wide, found) in [(false, 3u32), (true, 3), (true, u32::MAX)] {
        let world = World::new(1);
        let narrow: Vec<u16> = (0..50).map(|i| if i == 41 { found as u16 } else { i % 3 }).collect();
        let broad: Vec<u32> = (0..50).map(|i| if i == 41 { found } else { i % 3 }).collect();
        let destinations = if wide { holding(&broad) } else { holding(&narrow) };
        let [permutation, inverse, offsets] = [50, 50, 4].map(|elements| poisoned::<u32>(1, elements));
        let call = Argsort {
            destinations: &[destinations.buffer()],
            destination_bytes: if wide { 4 } else { 2 },
            items: 50,
            ranks: 3,
            permutation: &buffers(&permutation),
            inverse: &buffers(&inverse),
            offsets: &buffers(&offsets),
        };
        let launch = call.launch(&world.team(0).unwrap(), Grid { blocks: 1, threads: 64 }).unwrap();
        assert_eq!(stops(shim, &world, &[Some(launch)]), [Some(Stopped::Destination { index: 41 })]);
    }
}

/// Two ranks with three tokens each, two experts, one slot.
struct Exchange {
    world: World,
    experts: [HostBuffer; 2],
    hosts: HostBuffer,
    x: Vec<HostBuffer>,
    weights: Vec<HostBuffer>,
    sent_rows: Vec<HostBuffer>,
    source_offsets: Vec<HostBuffer>,
    received: Vec<HostBuffer>,
}

impl Exchange {
    const HIDDEN: u64 = 8;

    fn new(experts: [[i32; 3]; 2], hosts: [u32; 2]) -> Self {
        Self {
            world: World::new(2),
            experts: experts.map(|experts| holding(&experts)),
            hosts: holding(&hosts),
            x: poisoned::<f32>(2, 24),
            weights: poisoned::<f32>(2, 3),
            sent_rows: poisoned::<i32>(2, 6),
            source_offsets: poisoned::<i32>(2, 3),
            received: poisoned::<f32>(2, 48),
        }
    }

    fn launches(&self, rank: usize, capacity: u64) -> [Launch; 2] {
        let received = buffers(&self.received);
        let call = Dispatch {
            tokens: &[3],
            hidden: Self::HIDDEN,
            dtype: Dtype::F32,
            top_k: 1,
            experts_in_all: 2,
            rank_of_expert: Some(&[self.hosts.buffer()]),
            x: &[self.x[rank].buffer()],
            experts: &[self.experts[rank].buffer()],
            weights: &[self.weights[rank].buffer()],
            sent_rows: &[self.sent_rows[rank].buffer()],
            source_offsets: &[self.source_offsets[rank].buffer()],
            received: Received { capacity, rows: &received, tokens: &received, experts: &received, weights: &received },
        };
        call.launches(&self.world.team(rank).unwrap(), GRID, 32).unwrap()
    }

    fn stops(&self, shim: &Shim, capacity: u64) -> Vec<Option<Stopped>> {
        let launches = [0, 1].map(|rank| self.launches(rank, capacity));
        let streams: Vec<Vec<Step<'_>>> = launches.iter().map(|two| two.iter().map(Step::Launch).collect()).collect();
        // SAFETY: this struct owns all memory.
        unsafe { shim.run(&streams, 3, Mutant::None) }.unwrap();
        (0..2).map(|rank| self.world.stopped(rank)).collect()
    }
}

#[test]
fn experts_and_hosts_out_of_range_stop() {
    let Some(shim) = shim() else { return };
    for (experts, hosts) in [([0, 2, 1], [0, 1]), ([0, -2, 1], [0, 1]), ([0, 1, 0], [0, 2])] {
        let exchange = Exchange::new([experts, [0, 0, 0]], hosts);
        assert_eq!(exchange.stops(shim, 6)[0], Some(Stopped::Destination { index: 1 }), "{experts:?} {hosts:?}");
    }
}

#[test]
fn too_many_rows_for_a_rank_stop_all_before_any_is_sent() {
    let Some(shim) = shim() else { return };
    let exchange = Exchange::new([[1, 1, 0], [1, 1, 1]], [0, 1]);
    let found = exchange.stops(shim, 4);
    assert_eq!(found, [0, 1].map(|rank| Some(Stopped::Rows { rank, peer: 1, rows: 5 })));
    assert!(exchange.received.iter().all(|memory| memory.bytes().iter().all(|&byte| byte == 0xff)));
}

#[test]
fn a_row_that_no_rank_has_stops_the_combine() {
    let Some(shim) = shim() else { return };
    let world = World::new(1);
    let sent_rows = holding(&[0i32, 4]);
    let (sums, out) = (poisoned::<f32>(1, 32), poisoned::<f32>(1, 16));
    let call = Combine {
        tokens: &[2],
        hidden: 8,
        dtype: Dtype::F32,
        capacity: 4,
        sums: &buffers(&sums),
        sent_rows: &[sent_rows.buffer()],
        out: &buffers(&out),
    };
    let launch = call.launch(&world.team(0).unwrap(), GRID).unwrap();
    assert_eq!(stops(shim, &world, &[Some(launch)]), [Some(Stopped::Rows { rank: 0, peer: 0, rows: 4 })]);
}

#[test]
fn what_the_host_can_see_is_refused_before_any_launch() {
    let reduce = Reduce::new();
    let team = reduce.world.team(0).unwrap();
    let parts = buffers(&reduce.parts);
    let out = [reduce.out[0].buffer()];
    let rows = Rows { tokens: 6, hidden: 8, dtype: Dtype::F32 };
    let order = RowOrder { rows, split: Split::default(), capacity: 6, multicast: None };
    let good = ReduceScatter { parts: &parts, out: &out, order };
    let ordered = |order| ReduceScatter { order, ..good };
    assert!(good.launch(&team, GRID).is_ok());

    let moved = |index: usize, by: u64| {
        let mut moved = parts.clone();
        moved[index] = Buffer { address: moved[index].address + by, ..moved[index] };
        moved
    };
    let (off, null) = (moved(1, 8), {
        let mut parts = parts.clone();
        parts[2].address = 0;
        parts
    });
    let too_long = Rows { tokens: u64::MAX, ..rows };
    let refusals = [
        (ReduceScatter { parts: &off, ..good }, GRID, "part 1 is at"),
        (ReduceScatter { parts: &null, ..good }, GRID, "part 2 is null"),
        (ReduceScatter { parts: &parts[..2], ..good }, GRID, "part: 2 buffers, expected 3"),
        (
            ordered(RowOrder { rows: Rows { tokens: 7, ..rows }, ..order }),
            GRID,
            "part 0 has 192 bytes, expected at least 224",
        ),
        (ordered(RowOrder { capacity: 7, ..order }), GRID, "out 0 has 192 bytes, expected at least 224"),
        (ordered(RowOrder { rows: too_long, ..order }), GRID, "tokens is"),
        (ordered(RowOrder { rows: Rows { hidden: 0, ..rows }, ..order }), GRID, "hidden is 0"),
        (ordered(RowOrder { capacity: u64::MAX, ..order }), GRID, "capacity is"),
        (good, Grid { blocks: 257, ..GRID }, "blocks is 257"),
        (good, Grid { threads: 33, ..GRID }, "threads modulo the warp size is 1"),
        (good, Grid { threads: 1024, ..GRID }, "threads is 1024"),
    ];
    for (call, grid, expected) in refusals {
        let error = call.launch(&team, grid).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }

    let small = Buffer { bytes: 100, ..parts[0] };
    assert!(matches!(
        Team::new(&[small], 0, &out, crate::support::TIMEOUT),
        Err(LaunchError::TooSmall { what: "signals", .. })
    ));
}
