//! Hybrid TP-EP: unfused and fused, against the reference, including the bytes between nodes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use half::bf16;
use proptest::prelude::*;
use semmoe_kernels::collectives::{
    CastCollectives, Collectives, DISPATCH_HEADER_BYTES, Exchange, HybridCollectives, Lockstep, MAX_CHUNKS,
    PrivateMemory, RowCollectives, Stage, StageName, StageObserver, UnitError, UnitLink, Wake, Waker,
};
use semmoe_kernels::{DispatchPlan, Element, NO_EXPERT, NodeGrid, RoutedTokens};
use semmoe_ranks::{LocalTransport, SharedHalves};
use semmoe_reference::{self as reference, NodeRows};

use crate::{GRIDS, Link, grid, links, on_ranks};

const EXPERTS: usize = 7;

/// How a unit exchanges rows.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Route {
    Messages,
    /// Unfused, with memory shared within a node.
    Shared,
    /// Fused, in this many chunks.
    Fused(usize),
}

/// One rank's tokens with their routes.
#[derive(Clone)]
struct Tokens<T> {
    x: Vec<T>,
    experts: Vec<i32>,
    weights: Vec<f32>,
}

/// The inputs of all ranks for one layer.
struct Layer<T> {
    hidden: usize,
    top_k: usize,
    node_of_expert: Vec<u32>,
    tokens: Vec<Tokens<T>>,
}

impl<T: Element> Layer<T> {
    fn new(grid: NodeGrid, hidden: usize, most: usize, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let top_k = random.usize(1..=EXPERTS);
        let tokens = (0..grid.ranks()).map(|_| {
            let count = if random.u8(0..4) == 0 { 0 } else { random.usize(0..=most) };
            let experts = (0..count).flat_map(|_| random.choose_multiple(0..EXPERTS as i32, top_k)).collect::<Vec<_>>();
            let x = (0..count * hidden).map(|_| T::round(if random.u8(..) < 20 { -0.0 } else { random.f32() - 0.5 }));
            let x = x.collect();
            Tokens { x, weights: experts.iter().map(|_| random.f32()).collect(), experts }
        });
        let tokens = tokens.collect();
        let node_of_expert = (0..EXPERTS).map(|_| random.u32(0..grid.nodes() as u32)).collect();
        Self { hidden, top_k, node_of_expert, tokens }
    }

    fn plan(&self, rank: usize, nodes: usize) -> DispatchPlan {
        let experts: Vec<u16> = self.tokens[rank].experts.iter().map(|&expert| expert as u16).collect();
        let hosts: Vec<u16> = self.node_of_expert.iter().map(|&node| node as u16).collect();
        let mut plan = DispatchPlan::default();
        plan.build(&experts, &self.tokens[rank].weights, self.top_k, &hosts, nodes).unwrap();
        plan
    }

    fn dispatched(&self, grid: NodeGrid) -> Vec<NodeRows<T>> {
        let routed: Vec<RoutedTokens<'_, T>> =
            self.tokens.iter().map(|Tokens { x, experts, weights }| RoutedTokens { x, experts, weights }).collect();
        reference::hybrid_dispatch(&routed, self.hidden, self.top_k, &self.node_of_expert, grid).unwrap()
    }
}

/// A slice's function of a row: different in every column, and for every slice.
fn slice_of<T: Element>(local: usize, row: &[T], pairs: impl Iterator<Item = (u16, f32)>, to: &mut [T]) {
    let gain: f32 = pairs.map(|(expert, weight)| weight * (1.3 + f32::from(expert) * 0.7 + local as f32)).sum();
    let column = |(at, value): (usize, &T)| T::round(value.widen() * gain + 0.01 * (at * (local + 1)) as f32);
    to.iter_mut().zip(row.iter().enumerate().map(column)).for_each(|(to, value)| *to = value);
}

/// A rank's results of one layer.
#[derive(PartialEq, Debug)]
struct Found {
    rows: Vec<u8>,
    pairs: Vec<(u32, u16, u32)>,
    out: Vec<u8>,
}

fn bytes<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn run<T: Element>(layer: &Layer<T>, grid: NodeGrid, end: &mut dyn Collectives<T>) -> Result<Found, UnitError> {
    let (rank, hidden) = (end.rank(), layer.hidden);
    let plan = layer.plan(rank, grid.nodes());
    end.dispatch(&layer.tokens[rank].x, hidden, &plan)?;
    let received = end.received();
    let pairs = || received.pair_rows.iter().zip(received.experts).zip(received.weights);
    let mut rows = Vec::new();
    for (at, to) in received.sums.chunks_exact_mut(hidden).enumerate() {
        let row = received.rows.row(at);
        rows.extend(bytes(row));
        let of_row =
            pairs().filter(|((row, _), _)| **row as usize == at).map(|((_, expert), weight)| (*expert, *weight));
        slice_of(grid.local(rank), row, of_row, to);
    }
    let pairs = pairs().map(|((row, expert), weight)| (*row, *expert, weight.to_bits())).collect();
    drop(received);
    let mut out = vec![T::round(9.0); layer.tokens[rank].x.len()];
    end.combine(&plan, &mut out)?;
    Ok(Found { rows, pairs, out: bytes(&out) })
}

fn expected<T: Element>(layer: &Layer<T>, grid: NodeGrid) -> Vec<Found> {
    let nodes = layer.dispatched(grid);
    let pairs = |rows: &NodeRows<T>| -> Vec<(u32, u16, f32)> {
        let slots = rows.experts.iter().zip(&rows.weights).enumerate().filter(|(_, (expert, _))| **expert != NO_EXPERT);
        slots.map(|(slot, (&expert, &weight))| ((slot / layer.top_k) as u32, expert as u16, weight)).collect()
    };
    let of_rank = |rank| {
        let rows = &nodes[grid.node(rank)];
        let mut sums = rows.rows.clone();
        for (at, to) in sums.chunks_exact_mut(layer.hidden).enumerate() {
            let of_row = pairs(rows).into_iter().filter(|pair| pair.0 as usize == at).map(|pair| (pair.1, pair.2));
            slice_of(grid.local(rank), &rows.rows[at * layer.hidden..][..layer.hidden], of_row, to);
        }
        sums
    };
    let sums: Vec<Vec<T>> = (0..grid.ranks()).map(of_rank).collect();
    let sums: Vec<&[T]> = sums.iter().map(Vec::as_slice).collect();
    let counts: Vec<usize> = layer.tokens.iter().map(|tokens| tokens.x.len() / layer.hidden).collect();
    let out = reference::hybrid_combine(&sums, &nodes, &counts, layer.hidden, grid).unwrap();
    let found = |(rank, out): (usize, Vec<T>)| {
        let rows = &nodes[grid.node(rank)];
        let pairs = pairs(rows).into_iter().map(|(row, expert, weight)| (row, expert, weight.to_bits())).collect();
        Found { rows: bytes(&rows.rows), pairs, out: bytes(&out) }
    };
    out.into_iter().enumerate().map(found).collect()
}

/// Bytes between nodes, counted only from the routing: rows and pairs of each token on other nodes, both ways.
fn routed_bytes<T: Element>(layer: &Layer<T>, grid: NodeGrid, chunks: usize) -> u64 {
    let mut bytes = 0;
    for (rank, tokens) in layer.tokens.iter().enumerate() {
        let mut rows_to = vec![0; grid.nodes()];
        for experts in tokens.experts.chunks_exact(layer.top_k) {
            let nodes = experts.iter().map(|&expert| layer.node_of_expert[expert as usize] as usize);
            let remote: Vec<usize> = nodes.filter(|&node| node != grid.node(rank)).collect();
            bytes += remote.len() * (size_of::<f32>() + size_of::<u16>());
            for node in remote.into_iter().collect::<BTreeSet<_>>() {
                rows_to[node] += 1;
                bytes += 2 * layer.hidden * size_of::<T>() + size_of::<u16>();
            }
        }
        bytes += rows_to.iter().map(|&rows: &usize| rows.min(chunks) * DISPATCH_HEADER_BYTES).sum::<usize>();
    }
    bytes as u64
}

fn hybrid<L: Lockstep + 'static, T: Element>(
    link: UnitLink<L>,
    shared: Option<SharedHalves<T>>,
    route: Route,
) -> HybridCollectives<L, T> {
    let unit = Box::new(RowCollectives::new(link.clone(), PrivateMemory::new(link.rank())));
    match (route, shared) {
        (Route::Fused(chunks), _) => HybridCollectives::fused(link, unit, chunks).unwrap(),
        (_, Some(memory)) => HybridCollectives::unfused(link, unit, memory),
        (_, None) => {
            let memory = PrivateMemory::new(link.grid().local(link.rank()));
            HybridCollectives::unfused(link, unit, memory)
        }
    }
}

/// Ends over links that outlive them: no rank leaves while others are at work.
fn ends<T: Element>(
    links: &[Link],
    grid: NodeGrid,
    route: Route,
    room: usize,
) -> Vec<HybridCollectives<LocalTransport, T>> {
    let host = || SharedHalves::on_hosts(grid.width(), grid.width(), room).unwrap().into_iter().map(Some);
    let shared: Vec<Option<SharedHalves<T>>> = match route {
        Route::Shared => (0..grid.nodes()).flat_map(|_| host()).collect(),
        _ => (0..grid.ranks()).map(|_| None).collect(),
    };
    links.iter().zip(shared).map(|(link, shared)| hybrid(link.clone(), shared, route)).collect()
}

/// Runs consecutive layers on the same ends.
fn check<T: Element>(grid: NodeGrid, layers: &[Layer<T>], route: Route) {
    let room = layers.iter().flat_map(|layer| &layer.tokens).map(|tokens| tokens.x.len()).sum::<usize>();
    let links = links(grid);
    let begun: u64 = links.iter().map(|link| link.sent().between).sum();
    let found = on_ranks(ends::<T>(&links, grid, route, room), |_, mut end| -> Vec<Found> {
        layers.iter().map(|layer| run(layer, grid, &mut end).unwrap()).collect()
    });
    for (at, layer) in layers.iter().enumerate() {
        for (rank, expected) in expected(layer, grid).into_iter().enumerate() {
            assert_eq!(
                found[rank][at],
                expected,
                "rank {rank}, layer {at} on {grid:?} by {route:?}, {}",
                T::DTYPE.name()
            );
        }
    }
    let chunks = if let Route::Fused(chunks) = route { chunks } else { 1 };
    let crossed = links.iter().map(|link| link.sent().between).sum::<u64>() - begun;
    assert_eq!(crossed, layers.iter().map(|layer| routed_bytes(layer, grid, chunks)).sum::<u64>(), "{route:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn fused_and_unfused_are_the_reference_and_send_what_the_routing_says(
        shape in prop::sample::select(GRIDS.to_vec()), hidden in 1usize..40, tokens in 0usize..14, seed: u64,
        chunks in 1usize..6,
    ) {
        let grid = grid(shape);
        for route in [Route::Messages, Route::Shared, Route::Fused(chunks)] {
            let layers = [1, 2].map(|layer| Layer::<f32>::new(grid, hidden, tokens, seed ^ layer));
            check(grid, &layers, route);
            let layers = [3, 4].map(|layer| Layer::<bf16>::new(grid, hidden, tokens, seed ^ layer));
            check(grid, &layers, route);
        }
    }
}

#[test]
fn rows_that_travel_in_another_type_are_those_of_that_type() {
    let grid = grid([2, 2]);
    let narrow = Layer::<bf16>::new(grid, 9, 10, 5);
    let wide = |tokens: &Tokens<bf16>| Tokens {
        x: tokens.x.iter().map(|value| value.widen()).collect(),
        experts: tokens.experts.clone(),
        weights: tokens.weights.clone(),
    };
    let tokens = narrow.tokens.iter().map(wide).collect();
    let layer = Layer { hidden: 9, top_k: narrow.top_k, node_of_expert: narrow.node_of_expert.clone(), tokens };
    let out = |rank: usize| -> Vec<f32> {
        let out = &expected(&narrow, grid)[rank].out;
        let values = out.chunks_exact(2).map(bytemuck::pod_read_unaligned::<bf16>);
        values.map(|value| value.widen()).collect()
    };
    for route in [Route::Messages, Route::Fused(3)] {
        let links = links(grid);
        on_ranks(ends::<bf16>(&links, grid, route, 0), |rank, end| {
            let mut end = CastCollectives::<f32, bf16>::new(Box::new(end));
            assert_eq!(run(&layer, grid, &mut end).unwrap().out, bytes(&out(rank)), "{route:?}");
        });
    }
}

/// Events in order.
#[derive(Default)]
struct Events(Vec<(bool, Stage)>);

/// Stores events where the test finds them.
struct Recorder(Arc<Mutex<Events>>);

impl StageObserver for Recorder {
    fn began(&mut self, stage: Stage) {
        self.0.lock().unwrap().0.push((true, stage));
    }

    fn ended(&mut self, stage: Stage) {
        self.0.lock().unwrap().0.push((false, stage));
    }
}

impl Events {
    fn at(&self, is_start: bool, name: StageName, piece: usize) -> usize {
        self.0.iter().position(|event| *event == (is_start, Stage { name, piece })).unwrap()
    }

    /// Whether both were running at the same time.
    fn overlap(&self, one: Stage, other: Stage) -> bool {
        self.at(true, one.name, one.piece) < self.at(false, other.name, other.piece)
            && self.at(true, other.name, other.piece) < self.at(false, one.name, one.piece)
    }
}

fn events(route: Route) -> Vec<Events> {
    let grid = grid([3, 2]);
    let layer = Layer::<f32>::new(grid, 4, 12, 3);
    let links = links(grid);
    on_ranks(ends::<f32>(&links, grid, route, 0), |rank, end| {
        let (events, plan) = (Arc::new(Mutex::new(Events::default())), layer.plan(rank, 3));
        let mut end = end.observed_by(Box::new(Recorder(Arc::clone(&events))));
        let x = &layer.tokens[rank].x;
        end.dispatch(x, 4, &plan).unwrap();
        end.received().sums.fill(0.0);
        end.combine(&plan, &mut vec![0.0; x.len()]).unwrap();
        std::mem::take(&mut *events.lock().unwrap())
    })
}

#[test]
fn stages_of_both_levels_overlap_where_they_are_fused() {
    use StageName::{Combine, Dispatch, Gather, Reduce};
    let stage = |name, piece| Stage { name, piece };
    for events in events(Route::Messages) {
        let expected =
            [Dispatch, Gather, Reduce, Combine].map(|name| [(true, stage(name, 0)), (false, stage(name, 0))]);
        assert_eq!(events.0, expected.concat());
    }
    // Two rounds of two chunks cross.
    for events in events(Route::Fused(2)) {
        let count = |name| events.0.iter().filter(|(_, stage)| stage.name == name).count();
        assert_eq!([Dispatch, Gather, Reduce, Combine].map(count), [2 * 4, 2 * 5, 2 * 4, 2 * 4]);
        for piece in 0..4 {
            assert!(events.overlap(stage(Dispatch, piece), stage(Gather, piece)));
            // Rows that crossed are gathered in the next step, and added rows cross in the next.
            assert!(events.at(false, Dispatch, piece) < events.at(true, Gather, piece + 1));
            assert!(events.at(false, Reduce, piece) < events.at(true, Combine, piece));
        }
        for piece in 0..3 {
            assert!(events.overlap(stage(Combine, piece), stage(Reduce, piece + 1)));
        }
    }
}

/// Corrupts what its rank sends in one exchange.
struct Spoiling {
    link: LocalTransport,
    exchanges: usize,
    spoilt: usize,
    how: fn(&mut Vec<u8>),
}

impl Lockstep for Spoiling {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn world(&self) -> usize {
        self.link.world()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        self.exchanges += 1;
        let Exchange { peers, outgoing, incoming, arrived } = exchange;
        let mut outgoing = outgoing.to_vec();
        if self.exchanges == self.spoilt {
            outgoing.iter_mut().for_each(self.how);
        }
        self.link.group_all_to_all(Exchange { peers, outgoing: &outgoing, incoming, arrived })
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.link.wait()
    }

    fn waker(&self) -> Waker {
        self.link.waker()
    }
}

#[test]
fn spoilt_messages_end_the_unit_and_name_the_rank_that_sent_them() {
    let grid = grid([2, 2]);
    let mut layer = Layer::<f32>::new(grid, 3, 0, 1);
    (layer.top_k, layer.node_of_expert) = (2, vec![0, 0, 0, 1, 1, 1, 1]);
    layer.tokens = vec![Tokens { x: vec![0.5; 12], experts: [0, 4].repeat(4), weights: vec![0.5; 8] }; 4];
    let ways: [fn(&mut Vec<u8>); 3] = [
        |message| message.truncate(message.len().saturating_sub(1)),
        |message| message.push(0),
        |message| message.iter_mut().take(8).for_each(|byte| *byte = 0xff),
    ];
    // One exchange joins the unit; then three steps each way, or one of each group.
    for (route, exchanges) in [(Route::Fused(2), 6), (Route::Messages, 4)] {
        for (exchange, how) in (2..2 + exchanges).flat_map(|exchange| ways.map(|how| (exchange, how))) {
            let errors = on_ranks(LocalTransport::mesh(4), |rank, link| {
                let spoilt = if rank == 1 { exchange } else { 0 };
                let link = UnitLink::join(Spoiling { link, exchanges: 0, spoilt, how }, 2).unwrap();
                let mut end: HybridCollectives<_, f32> = hybrid(link, None, route);
                run(&layer, grid, &mut end).err()
            });
            let noticed = errors.iter().flatten().count();
            // The third way may spoil only row values, which are not checked.
            assert!(noticed > 0 || std::ptr::fn_addr_eq(how, ways[2]), "{route:?}, exchange {exchange}");
            let first = errors.iter().flatten().filter(|error| matches!(error, UnitError::Protocol { .. }));
            assert!(first.clone().all(|error| error.rank() == 1), "{route:?}, exchange {exchange}: {errors:?}");
        }
    }
}

#[test]
fn a_rank_lost_in_any_step_ends_the_unit() {
    let grid = grid([2, 2]);
    let layer = Layer::<f32>::new(grid, 3, 9, 2);
    for route in [Route::Messages, Route::Fused(2)] {
        let ends = ends::<f32>(&links(grid), grid, route, 0);
        let errors = on_ranks(ends, |rank, mut end| {
            if rank == 3 {
                let plan = layer.plan(rank, 2);
                end.dispatch(&layer.tokens[rank].x, 3, &plan).unwrap();
                return None;
            }
            run(&layer, grid, &mut end).err()
        });
        for (rank, error) in errors.iter().enumerate().take(3) {
            let error = error.as_ref().unwrap_or_else(|| panic!("rank {rank} continues, {route:?}"));
            assert!(matches!(error, UnitError::PeerLost { .. }), "{error}");
        }
    }
}

#[test]
fn chunks_and_plans_that_do_not_fit_are_refused() {
    let link = || links(grid([1, 1])).remove(0);
    let unit = || Box::new(RowCollectives::new(LocalTransport::mesh(1).remove(0), PrivateMemory::<f32>::new(0)));
    for chunks in [0, MAX_CHUNKS + 1] {
        let error = HybridCollectives::fused(link(), unit(), chunks).err().unwrap();
        assert_eq!(error.to_string(), format!("rank 0: {chunks} chunks of rows, expected 1 to {MAX_CHUNKS}"));
    }
    let mut end = HybridCollectives::fused(link(), unit(), 1).unwrap();
    let mut plan = DispatchPlan::default();
    plan.build(&[0], &[1.0], 1, &[0], 2).unwrap();
    let error = end.dispatch(&[1.0, 2.0], 2, &plan).unwrap_err();
    assert_eq!(error.to_string(), "rank 0: the nodes of the plan: 2 elements, expected 1");
    assert_eq!(end.dispatch(&[1.0], 2, &plan).unwrap_err().to_string(), "rank 0: the rows: 1 elements, expected 2");
}
