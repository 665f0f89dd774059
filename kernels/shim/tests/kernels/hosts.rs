//! Ranks on several hosts: the kernels run on the shim, and a recorded NCCL moves what it was told to.

mod network;

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::reference::{self, NO_EXPERT, RoutedTokens};
use semmoe_kernels::{Element, RowSplit};
use semmoe_kernels_cuda::hosts::{Counts, Hosts, HostsError, Routed, Segments, Shuffled};
use semmoe_kernels_cuda::{Buffer, Rows, Stopped, Team};
use semmoe_kernels_shim::HostBuffer;

use crate::support::{Case, Spread, World, elements, holding, order, read, same, shim};
use network::{Event, Gpu, Recorder, Script, play};

/// One rank's team: itself alone.
fn alone(world: &World, rank: usize) -> Team {
    let everything = world.team(rank).unwrap();
    let own = Buffer { address: world.signals_of(rank), bytes: semmoe_kernels_cuda::SIGNAL_BYTES };
    assert_eq!(everything.local(), 1);
    Team::new(&[own], 0, &[world.reports[rank].buffer()], crate::support::TIMEOUT).unwrap()
}

/// Runs one call on every rank, and then what all of them recorded.
fn on_all(
    world: &World,
    ranks: usize,
    mut call: impl FnMut(usize, &mut Hosts<'_, Recorder, Gpu>) -> Result<(), HostsError>,
) -> Result<(), String> {
    let scripts: Vec<Script> = (0..ranks).map(|_| Script::default()).collect();
    for (rank, script) in scripts.iter().enumerate() {
        let (team, runner) = (alone(world, rank), Gpu(script.clone()));
        let mut wire = Recorder::new(rank, ranks, script.clone());
        let mut hosts = Hosts { wire: &mut wire, runner: &runner, team: &team, stream: std::ptr::null_mut() };
        call(rank, &mut hosts).map_err(|error| error.to_string())?;
    }
    play(shim().expect("asked before"), world, &scripts)
}

fn empty() -> Buffer {
    Buffer::default()
}

/// Shuffled there and back: sums of one rank after the other, as the network of this test adds them, are the reference's.
fn shuffles<T: Element>(case: &Case, seed: u64) -> Result<(), String> {
    let Case { ranks, tokens, hidden, .. } = *case;
    let mut rng = Rng::with_seed(seed);
    let world = World::new(ranks);
    let order = order(&mut rng, case);
    let shuffled = case.spread != Spread::Plain;
    let parts: Vec<Vec<T>> = (0..ranks).map(|_| elements(&mut rng, tokens * hidden)).collect();
    let poisoned = |count: usize| -> Vec<HostBuffer> {
        (0..ranks).map(|_| HostBuffer::poisoned(count * size_of::<T>())).collect()
    };
    let memory: Vec<HostBuffer> = parts.iter().map(|part| holding(part)).collect();
    let (scratch, out, gathered) = (poisoned(tokens * hidden), poisoned(tokens * hidden), poisoned(tokens * hidden));
    let permutation = holding(order.permutation());
    let rows = Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: T::DTYPE };
    let call = |rank: usize| Shuffled {
        rows,
        permutation: shuffled.then_some(permutation.buffer()),
        offsets: order.offsets(),
        scratch: if shuffled { scratch[rank].buffer() } else { empty() },
    };
    // SAFETY: all memory is this function's.
    on_all(&world, ranks, |rank, hosts| unsafe {
        hosts.reduce_scatter(&call(rank), memory[rank].buffer(), out[rank].buffer())
    })?;
    // SAFETY: as above.
    on_all(&world, ranks, |rank, hosts| unsafe {
        hosts.allgather(&call(rank), out[rank].buffer(), gathered[rank].buffer())
    })?;
    let split = if shuffled { RowSplit::from(&order) } else { RowSplit::contiguous(order.offsets()).unwrap() };
    let slices: Vec<&[T]> = parts.iter().map(Vec::as_slice).collect();
    let expected = reference::reduce_scatter(&slices, hidden, split).unwrap();
    for (out, expected) in out.iter().zip(&expected) {
        same("sums", &read::<T>(out)[..expected.len()], expected)?;
    }
    let all = reference::all_reduce(&slices).unwrap();
    gathered.iter().try_for_each(|gathered| same("gathered", &read::<T>(gathered), &all))
}

#[test]
fn reduce_scatter_and_allgather_over_nccl() {
    if shim().is_none() {
        return;
    }
    for (index, ranks) in [1, 2, 3, 4].into_iter().enumerate() {
        for case in [
            Case::new(ranks, 13, 24),
            Case { spread: Spread::AllOn(ranks / 2), ..Case::new(ranks, 5, 7) },
            Case { spread: Spread::Plain, ..Case::new(ranks, 6, 8) },
        ] {
            let result = match index % 3 {
                0 => shuffles::<bf16>(&case, index as u64),
                1 => shuffles::<f32>(&case, index as u64),
                _ => shuffles::<f16>(&case, index as u64),
            };
            result.unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// One rank's tokens and memory in an exchange.
struct Rank<T> {
    x: Vec<T>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    given: [HostBuffer; 3],
    places: HostBuffer,
    counts: HostBuffer,
}

const EXPERTS: usize = 12;
const TOP_K: usize = 4;

impl<T: Element> Rank<T> {
    fn new(rng: &mut Rng, ranks: usize, tokens: usize, hidden: usize) -> Self {
        let x = elements::<T>(rng, tokens * hidden);
        let mut experts = Vec::new();
        for _ in 0..tokens {
            let mut all: Vec<i32> = (0..EXPERTS as i32).collect();
            rng.shuffle(&mut all);
            experts.extend(all[..TOP_K].iter().map(|&e| if rng.u32(0..5) == 0 { NO_EXPERT } else { e }));
        }
        let weights: Vec<f32> = experts.iter().map(|_| rng.f32()).collect();
        let given = [holding(&x), holding(&experts), holding(&weights)];
        let places = HostBuffer::poisoned(tokens * ranks * 4);
        Self { x, experts, weights, given, places, counts: HostBuffer::poisoned(8 * ranks) }
    }

    fn routed(&self, hidden: usize, hosts: &HostBuffer) -> Routed {
        Routed {
            tokens: (self.experts.len() / TOP_K) as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE,
            top_k: TOP_K as u64,
            experts_in_all: EXPERTS as u64,
            rank_of_expert: hosts.buffer(),
            x: self.given[0].buffer(),
            experts: self.given[1].buffer(),
            weights: self.given[2].buffer(),
            places: self.places.buffer(),
        }
    }

    /// What the plan told: sent, received.
    fn counts(&self) -> [Vec<u32>; 2] {
        let all = read::<u32>(&self.counts);
        let (sent, received) = all.split_at(all.len() / 2);
        [sent.to_vec(), received.to_vec()]
    }
}

fn segments<T>(rows: usize, hidden: usize) -> [HostBuffer; 4] {
    [hidden * size_of::<T>(), 4, 4 * TOP_K, 4 * TOP_K].map(|bytes| HostBuffer::poisoned(rows * bytes))
}

fn places_of(memory: &[HostBuffer; 4]) -> Segments {
    let [rows, tokens, experts, weights] = memory.each_ref().map(HostBuffer::buffer);
    Segments { rows, tokens, experts, weights }
}

/// Uneven ranks, one of them without tokens; buffers have exactly the rows that come.
fn exchange<T: Element>(ranks: usize, hidden: usize, all_on: Option<u32>, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let world = World::new(ranks);
    let rank_of_expert: Vec<u32> = (0..EXPERTS).map(|_| all_on.unwrap_or_else(|| rng.u32(0..ranks as u32))).collect();
    let hosts = holding(&rank_of_expert);
    let sides: Vec<Rank<T>> = (0..ranks)
        .map(|rank| {
            let tokens = if rank == 1 { 0 } else { rng.usize(1..9) };
            Rank::new(&mut rng, ranks, tokens, hidden)
        })
        .collect();
    // SAFETY: all memory is this function's.
    on_all(&world, ranks, |rank, group| unsafe {
        group.plan(&sides[rank].routed(hidden, &hosts), sides[rank].counts.buffer())
    })?;
    let counts: Vec<[Vec<u32>; 2]> = sides.iter().map(Rank::counts).collect();
    let total = |list: &[u32]| list.iter().sum::<u32>() as usize;
    let staging: Vec<_> = counts.iter().map(|[sent, _]| segments::<T>(total(sent), hidden)).collect();
    let received: Vec<_> = counts.iter().map(|[_, received]| segments::<T>(total(received), hidden)).collect();
    let told = |rank: usize| Counts { sent: &counts[rank][0], received: &counts[rank][1] };
    // SAFETY: as above.
    on_all(&world, ranks, |rank, group| unsafe {
        let (staging, received) = (places_of(&staging[rank]), places_of(&received[rank]));
        group.dispatch(&sides[rank].routed(hidden, &hosts), told(rank), &staging, &received)
    })?;
    let routed: Vec<RoutedTokens<'_, T>> =
        sides.iter().map(|s| RoutedTokens { x: &s.x, experts: &s.experts, weights: &s.weights }).collect();
    let expected = reference::dispatch(&routed, hidden, TOP_K, &rank_of_expert).unwrap();
    for (found, expected) in received.iter().zip(&expected) {
        same("rows", &read::<T>(&found[0]), &expected.rows)?;
        same("tokens", &read::<u32>(&found[1]), &expected.tokens)?;
        same("experts", &read::<i32>(&found[2]), &expected.experts)?;
        same("weights", &read::<f32>(&found[3]), &expected.weights)?;
    }
    let sums: Vec<Vec<T>> = expected.iter().map(|e| elements(&mut rng, e.tokens.len() * hidden)).collect();
    let sums_at: Vec<HostBuffer> = sums.iter().map(|sums| holding(sums)).collect();
    let out: Vec<HostBuffer> = sides.iter().map(|s| HostBuffer::poisoned(s.x.len() * size_of::<T>())).collect();
    // SAFETY: as above.
    on_all(&world, ranks, |rank, group| unsafe {
        let (sums, staging) = (sums_at[rank].buffer(), staging[rank][0].buffer());
        group.combine(&sides[rank].routed(hidden, &hosts), told(rank), sums, staging, out[rank].buffer())
    })?;
    let slices: Vec<&[T]> = sums.iter().map(Vec::as_slice).collect();
    let sent: Vec<&[i32]> = expected.iter().map(|e| e.sent_rows.as_slice()).collect();
    let combined = reference::combine(&slices, &sent, hidden).unwrap();
    out.iter().zip(&combined).try_for_each(|(out, expected)| same("combined", &read::<T>(out), expected))
}

#[test]
fn dispatch_and_combine_over_nccl_equal_the_reference() {
    if shim().is_none() {
        return;
    }
    for (ranks, all_on) in [(1, None), (2, None), (3, None), (4, Some(2)), (8, None)] {
        exchange::<bf16>(ranks, 16, all_on, 3).unwrap_or_else(|error| panic!("{ranks} ranks, bf16: {error}"));
        exchange::<f32>(ranks, 5, all_on, 4).unwrap_or_else(|error| panic!("{ranks} ranks, f32: {error}"));
        exchange::<f16>(ranks, 264, all_on, 5).unwrap_or_else(|error| panic!("{ranks} ranks, f16: {error}"));
    }
}

/// One rank of three, whose calls must all be refused.
struct Refused {
    world: World,
    script: Script,
    side: Rank<f32>,
    hosts: HostBuffer,
    memory: [HostBuffer; 4],
}

impl Refused {
    fn new() -> Self {
        let side = Rank::new(&mut Rng::with_seed(1), 3, 5, 8);
        let hosts = holding(&[0u32; EXPERTS]);
        Self { world: World::new(3), script: Script::default(), side, hosts, memory: segments::<f32>(10, 8) }
    }

    fn with(
        &self,
        call: impl FnOnce(&mut Hosts<'_, Recorder, Gpu>, Routed, Segments) -> Result<(), HostsError>,
    ) -> String {
        let (team, runner) = (alone(&self.world, 0), Gpu(self.script.clone()));
        let mut wire = Recorder::new(0, 3, self.script.clone());
        let mut hosts = Hosts { wire: &mut wire, runner: &runner, team: &team, stream: std::ptr::null_mut() };
        let error = call(&mut hosts, self.side.routed(8, &self.hosts), places_of(&self.memory)).unwrap_err();
        error.to_string()
    }
}

#[test]
fn what_does_not_fit_is_refused_before_any_launch() {
    let case = Refused::new();
    let dispatch = |sent: &[u32], received: &[u32], change: fn(&mut Routed, &mut Segments)| {
        case.with(|hosts, mut call, mut segments| {
            let staging = segments;
            change(&mut call, &mut segments);
            // SAFETY: nothing is launched.
            unsafe { hosts.dispatch(&call, Counts { sent, received }, &staging, &segments) }
        })
    };
    let nothing = |_: &mut Routed, _: &mut Segments| {};
    let refusals = [
        (dispatch(&[1, 2], &[1, 2, 3], nothing), "counts of sent rows are 2, expected 3"),
        (dispatch(&[1, 2, 3], &[1], nothing), "counts of received rows are 1, expected 3"),
        (dispatch(&[1, 2, 6], &[1, 0, 0], nothing), "rows for one rank are 6, expected 5"),
        (dispatch(&[1, 2, 3], &[2, 0, 0], nothing), "rows from this rank to itself are 2, expected 1"),
        (dispatch(&[5, 5, 5], &[5, 0, 0], nothing), "segment rows has 320 bytes, expected at least 480"),
        (dispatch(&[1, 0, 0], &[1, 5, 5], nothing), "segment rows has 320 bytes, expected at least 352"),
        (dispatch(&[1, 0, 0], &[1, u32::MAX, u32::MAX], nothing), "segment rows has 320 bytes"),
        (
            dispatch(&[1, 0, 0], &[1, 0, 0], |_, s| s.weights.bytes = 15),
            "segment weights has 15 bytes, expected at least 16",
        ),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.x.address += 4), "x 0 is at"),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.x.bytes = 0), "x 0 has 0 bytes, expected at least 160"),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.hidden = 0), "hidden is 0"),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.hidden = u64::MAX), "segment rows has 320 bytes"),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.top_k = 65), "bytes, expected at least"),
        (dispatch(&[1, 0, 0], &[1, 0, 0], |c, _| c.places.bytes = 8), "places 0 has 8 bytes, expected at least 60"),
    ];
    for (found, expected) in refusals {
        assert!(found.contains(expected), "{found}, expected {expected}");
    }
    let sums = case.memory[0].buffer();
    let few = Counts { sent: &[1, 0, 0], received: &[1, 5, 5] };
    // SAFETY: nothing is launched.
    let found = case.with(|hosts, call, _| unsafe { hosts.combine(&call, few, sums, sums, sums) });
    assert_eq!(found, "sums has 320 bytes, expected at least 352");
    // SAFETY: nothing is launched.
    let found = case.with(|hosts, call, _| unsafe { hosts.plan(&call, Buffer { bytes: 23, ..sums }) });
    assert_eq!(found, "counts has 23 bytes, expected at least 24");
    for offsets in [&[0, 1, 2][..], &[0, 2, 1, 5], &[1, 2, 3, 5], &[0, 1, 2, 4], &[]] {
        let rows = Rows { tokens: 5, hidden: 8, dtype: semmoe_kernels::Dtype::F32 };
        let call = Shuffled { rows, permutation: None, offsets, scratch: empty() };
        // SAFETY: nothing is launched.
        let found = case.with(|hosts, _, _| unsafe { hosts.reduce_scatter(&call, sums, sums) });
        assert_eq!(found, "the offsets do not ascend from 0 to 5 over 3 ranks");
    }
    assert!(case.script.borrow().is_empty());
}

/// NCCL that refuses one call after the other: the group is ended, and nothing is launched behind it.
#[test]
fn a_refusal_of_nccl_ends_the_group_and_is_told() {
    for refused in 1.. {
        let case = Refused::new();
        let (team, runner) = (alone(&case.world, 0), Gpu(case.script.clone()));
        let mut wire = Recorder::new(0, 3, case.script.clone());
        wire.refuse(refused);
        let mut hosts = Hosts { wire: &mut wire, runner: &runner, team: &team, stream: std::ptr::null_mut() };
        let memory = places_of(&case.memory);
        let counts = Counts { sent: &[5, 0, 0], received: &[5, 1, 2] };
        let call = case.side.routed(8, &case.hosts);
        // SAFETY: nothing is run.
        let result = unsafe { hosts.combine(&call, counts, memory.rows, memory.rows, memory.rows) };
        let script = case.script.borrow();
        if result.is_ok() {
            assert_eq!(refused, 7, "a start, three sends, one receipt, an end");
            assert!(matches!(script.last(), Some(Event::Launch(_))));
            return;
        }
        assert_eq!(result, Err(HostsError::Nccl("out of luck".to_owned())));
        let count = |wanted: fn(&Event) -> bool| script.iter().filter(|event| wanted(event)).count();
        assert_eq!(count(|e| matches!(e, Event::Start)), count(|e| matches!(e, Event::End)), "call {refused}");
        assert_eq!(count(|e| matches!(e, Event::Launch(_))), 0);
    }
}

/// Counts that are not the plan's stop the kernel before it writes past a segment.
#[test]
fn counts_of_another_plan_stop_the_kernel() {
    if shim().is_none() {
        return;
    }
    let case = Refused::new();
    let mut whole = Vec::new();
    for event in 0..2 {
        let result = on_all(&case.world, 1, |_, hosts| {
            let call = Routed { rank_of_expert: case.hosts.buffer(), ..case.side.routed(8, &case.hosts) };
            // SAFETY: all memory is the case's.
            unsafe {
                match event {
                    0 => hosts.plan(&call, case.side.counts.buffer()),
                    _ => {
                        let counts = Counts { sent: &[2], received: &[2] };
                        let staging = places_of(&case.memory);
                        hosts.dispatch(&call, counts, &staging, &staging)
                    }
                }
            }
        });
        whole.push(result);
    }
    assert_eq!(whole[0], Ok(()));
    assert!(whole[1].is_err(), "{whole:?}");
    assert!(matches!(case.world.stopped(0), Some(Stopped::Rows { rank: 0, peer: 0, .. })));
    let rows = read::<f32>(&case.memory[0]);
    assert!(rows[2 * 8..].iter().all(|value| value.to_bits() == u32::MAX), "nothing behind the segment");
}
