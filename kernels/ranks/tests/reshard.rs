//! Switches run by threads: over shared memory, messages, and both; faults at every layer, rank and direction.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use semmoe_kernels::NodeGrid;
use semmoe_kernels::collectives::{Exchange, Lockstep, UnitError, Wake, Waker};
use semmoe_kernels::reshard::{
    Checksums, ExpertMemory, ExpertShape, Fault, Hosts, Layout, MemoryCause, MemoryFault, NO_HOST, Outcome, Pool,
    Reason, Refusal, Resharder, Side, Switch, SwitchError,
};
use semmoe_ranks::{LocalTransport, SharedExperts};

const LAYERS: usize = 3;
const EXPERTS: usize = 5;

/// Faults of one rank's memory or caller while a layer moves.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Wrong {
    Stop,
    /// Bytes arrive corrupted.
    Damage,
    /// A write fails.
    Fail,
}

/// Memory that mishandles the first bytes written to a slot.
struct Faulty {
    inner: SharedExperts,
    wrong: Option<(Wrong, std::ops::Range<usize>)>,
}

impl ExpertMemory for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn reaches(&self, rank: usize) -> bool {
        self.inner.reaches(rank)
    }

    fn bytes(&self) -> usize {
        self.inner.bytes()
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.inner.read(rank, offset, into)
    }

    // `copy` is the default one, which uses this.
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        let Some((wrong, _)) = self.wrong.take_if(|(_, slot)| slot.contains(&offset)) else {
            return self.inner.write(offset, bytes);
        };
        if wrong == Wrong::Fail {
            return Err(MemoryFault { rank: 9, offset, bytes: bytes.len(), cause: MemoryCause::OutOfReach(9) });
        }
        let mut bytes = bytes.to_vec();
        bytes[0] ^= 1;
        self.inner.write(offset, &bytes)
    }
}

fn pool(world: usize) -> Pool {
    // Nodes of 2 or 3 ranks, or of 1; a width that only the last divides.
    let per_node = [2, 3, 1].into_iter().find(|&ranks| world.is_multiple_of(ranks)).unwrap();
    let grid = NodeGrid::of_nodes(world / per_node, per_node).unwrap();
    Pool::new(ExpertShape::rows(5, 7, 2).unwrap(), grid, EXPERTS, LAYERS, EXPERTS.div_ceil(world) + 1).unwrap()
}

/// Expert e + i on rank e mod P in layer i, and a replica of expert 0 on the last rank.
fn ep(world: usize, turn: usize) -> Layout {
    let slots = EXPERTS.div_ceil(world) + 1;
    let layer = |layer: usize| {
        let mut hosts = vec![NO_HOST; slots * world];
        for place in 0..EXPERTS {
            let expert = (place + layer + turn) % EXPERTS;
            hosts[(place % world) * slots + place / world] = expert as u16;
        }
        if !hosts[(world - 1) * slots..].contains(&0) {
            hosts[world * slots - 1] = 0;
        }
        hosts
    };
    Layout::Ep(Hosts::new(EXPERTS, world, (0..LAYERS).map(layer).collect()).unwrap())
}

/// An expert's bytes, by layer, expert and position within the expert.
fn value(words: [usize; 6]) -> u8 {
    words.iter().fold(3u64, |hash, &word| (hash ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        as u8
}

fn each_byte(pool: &Pool, layout: &Layout, side: Side, rank: usize, mut visit: impl FnMut(usize, u8)) {
    let mut parts = Vec::new();
    for layer in 0..LAYERS {
        pool.parts(layout, side, layer, rank, &mut parts);
        for part in &parts {
            for row in 0..part.rows {
                for byte in 0..part.bytes {
                    let place = [layer, part.piece.expert.into(), part.piece.slice.into(), part.array, row, byte];
                    visit(part.place.offset + row * part.place.stride + byte, value(place));
                }
            }
        }
    }
}

fn assert_holds(pool: &Pool, layout: &Layout, side: Side, rank: usize, own: &[u8]) {
    each_byte(pool, layout, side, rank, |at, expected| assert_eq!(own[at], expected, "rank {rank}, byte {at}"));
}

struct Unit<'a> {
    pool: &'a Pool,
    layout: &'a Layout,
    side: Side,
    host: usize,
    chunk_bytes: usize,
}

impl Unit<'_> {
    /// Loads the layout on one thread per rank and runs `work` on each, with the checksums of all.
    fn run<R: Send>(
        &self,
        work: impl Fn(usize, Resharder<'_, LocalTransport, Faulty>, Checksums) -> R + Sync,
    ) -> Vec<R> {
        let world = self.pool.grid().ranks();
        let memory = SharedExperts::on_hosts(world, self.host, self.pool.bytes()).unwrap();
        let work = &work;
        std::thread::scope(|scope| {
            let start = |(mut memory, link): (SharedExperts, LocalTransport)| {
                scope.spawn(move || {
                    let rank = link.rank();
                    each_byte(self.pool, self.layout, self.side, rank, |at, byte| memory.write(at, &[byte]).unwrap());
                    let mut memory = Faulty { inner: memory, wrong: None };
                    let mut resharder = Resharder::new(link, &mut memory, self.chunk_bytes);
                    let mut checksums = resharder.record(self.pool, self.layout, self.side).unwrap();
                    resharder.gather(&mut checksums).unwrap();
                    work(rank, resharder, checksums)
                })
            };
            let threads: Vec<_> = memory.into_iter().zip(LocalTransport::mesh(world)).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// The sequence EP, TP, another EP, and the first again.
fn layouts(world: usize) -> [Layout; 3] {
    [ep(world, 0), Layout::Tp, ep(world, 2)]
}

#[test]
fn ranks_switch_back_and_forth_over_any_carrier() {
    for (world, host, chunk_bytes) in
        [(1, 1, 1 << 20), (2, 2, 1 << 20), (2, 1, 1 << 20), (2, 1, 13), (4, 4, 64), (4, 2, 100), (4, 1, 29), (3, 2, 7)]
    {
        let (pool, layouts) = (pool(world), layouts(world));
        let unit = Unit { pool: &pool, layout: &layouts[0], side: Side::Low, host, chunk_bytes };
        unit.run(|rank, mut resharder, checksums| {
            let mut side = Side::Low;
            for step in 0..6 {
                let (from, to) = (&layouts[step % 3], &layouts[(step + 1) % 3]);
                let switch = Switch::new(&pool, from, to, side).unwrap();
                let mut journal = Vec::new();
                let ended = resharder.run(&switch, &checksums, &mut |progress| {
                    journal.push((progress.done, progress.layer));
                    true
                });
                assert_eq!(ended, Ok(Outcome::Switched));
                side = side.other();
                let descending: Vec<_> = (0..LAYERS).map(|done| (done, LAYERS - 1 - done)).collect();
                let ascending: Vec<_> = (0..LAYERS).map(|done| (done, done)).collect();
                assert_eq!(journal, if side == Side::High { descending } else { ascending });
                resharder.verify(&pool, to, side, &checksums).unwrap();
            }
            assert_eq!(side, Side::Low);
            // Messages that arrive, those that are placed and those that leave; vectors may have grown by doubling.
            let most = 2 * 3 * ((world - host) * chunk_bytes + world * HEAD_BYTES);
            assert!(resharder.buffer_bytes() <= most, "{} bytes, {most} at most", resharder.buffer_bytes());
            let (_, memory) = resharder.into_parts();
            assert_holds(&pool, &layouts[0], side, rank, memory.inner.own());
        });
    }
}

/// Bytes of a message without experts.
const HEAD_BYTES: usize = 14;

/// The course of a switch on one rank.
#[derive(Default)]
struct Course {
    /// Whether each exchange that has begun carries experts.
    exchanges: Vec<bool>,
    /// For each layer that is being placed, or was: the number of exchanges that had begun before.
    placed: Vec<usize>,
}

#[derive(Default)]
struct Shared {
    course: Mutex<Course>,
    changed: Condvar,
}

impl Shared {
    /// Waits for an event on the rank's other thread.
    fn wait_until(&self, event: &str, came: impl Fn(&Course) -> bool) {
        let course = self.course.lock().unwrap();
        let waiting = |course: &mut Course| !came(course);
        let (_course, waited) = self.changed.wait_timeout_while(course, Duration::from_secs(20), waiting).unwrap();
        assert!(!waited.timed_out(), "{event} never came");
    }

    fn note(&self, event: impl FnOnce(&mut Course)) {
        event(&mut self.course.lock().unwrap());
        self.changed.notify_all();
    }
}

/// A link whose exchanges of experts, after the first one, end once the layer before is being placed.
struct WatchedLink {
    inner: LocalTransport,
    shared: Arc<Shared>,
}

impl Lockstep for WatchedLink {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let experts = exchange.outgoing.iter().any(|message| message.len() > HEAD_BYTES);
        self.shared.note(|course| course.exchanges.push(experts));
        self.inner.group_all_to_all(exchange)?;
        if experts {
            let layers = |course: &Course| course.exchanges.iter().filter(|experts| **experts).count();
            self.shared.wait_until("the layer before", |course| course.placed.len() + 1 >= layers(course));
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.inner.wait()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// Memory in which the first write to a layer's slot waits until a number of exchanges have begun.
struct WaitingMemory<'m> {
    inner: &'m mut Faulty,
    shared: Arc<Shared>,
    /// In the order of layers: the slot, and the number of exchanges.
    slots: Vec<(Range<usize>, usize)>,
}

impl ExpertMemory for WaitingMemory<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn reaches(&self, rank: usize) -> bool {
        self.inner.reaches(rank)
    }

    fn bytes(&self) -> usize {
        self.inner.bytes()
    }

    fn read(&self, rank: usize, offset: usize, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.inner.read(rank, offset, into)
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryFault> {
        let layer = self.shared.course.lock().unwrap().placed.len();
        if let Some((slot, wanted)) = self.slots.get(layer)
            && slot.contains(&offset)
        {
            self.shared.note(|course| course.placed.push(course.exchanges.len()));
            self.shared.wait_until("the next layer", |course| course.exchanges.len() >= *wanted);
        }
        self.inner.write(offset, bytes)
    }
}

/// A layer's bytes travel while the layer before it is placed, and are placed after the vote on that layer.
#[test]
fn the_next_layer_travels_while_this_one_is_placed() {
    let [first, tp, _] = layouts(2);
    // So many bytes that a thread pays.
    let shape = ExpertShape::slice_major(2, 64 << 10).unwrap();
    let pool = Pool::new(shape, NodeGrid::of_nodes(2, 1).unwrap(), EXPERTS, LAYERS, EXPERTS.div_ceil(2) + 1).unwrap();
    let switch = Switch::new(&pool, &first, &tp, Side::High).unwrap();
    // Each rank is a host, and a layer fits a message.
    let unit = Unit { pool: &pool, layout: &first, side: Side::High, host: 1, chunk_bytes: 1 << 20 };
    unit.run(|_, resharder, checksums| {
        let (link, memory) = resharder.into_parts();
        let shared = Arc::new(Shared::default());
        // An agreement and the bytes of two layers; then a vote and the bytes of one more, for each layer.
        let wanted = [3, 5, 6];
        let slots = wanted.iter().enumerate().map(|(layer, wanted)| (pool.slot(&tp, Side::Low, layer), *wanted));
        let mut memory = WaitingMemory { inner: memory, shared: Arc::clone(&shared), slots: slots.collect() };
        let link = WatchedLink { inner: link, shared: Arc::clone(&shared) };
        let ended = Resharder::new(link, &mut memory, 1 << 20).run(&switch, &checksums, &mut |_| true);
        assert_eq!(ended, Ok(Outcome::Switched));
        let Course { exchanges, placed } = std::mem::take(&mut *shared.course.lock().unwrap());
        assert_eq!(exchanges, [false, true, true, false, true, false, false]);
        // After the vote on the layer before.
        assert!(placed.iter().zip([0, 4, 6]).all(|(begun, voted)| *begun >= voted), "{placed:?}");
    });
}

/// One fault, in a unit of 4 ranks on 2 hosts.
#[derive(Clone, Copy, Debug)]
struct Injected {
    wrong: Wrong,
    layer: usize,
    rank: usize,
}

/// The switch ends in the old layout, on all ranks, for the same reason; then it succeeds without the fault.
fn roll_back(pool: &Pool, switch: &Switch<'_>, injected: Injected, host: usize) {
    let side = switch.side();
    let unit = Unit { pool, layout: switch.from(), side, host, chunk_bytes: 50 };
    let Injected { wrong, layer, rank: at } = injected;
    let (reason, slot) = match wrong {
        Wrong::Stop => (Reason::Stopped, None),
        Wrong::Damage => (Reason::Checksum, Some(pool.slot(switch.to(), side.other(), layer))),
        Wrong::Fail => (Reason::Memory, Some(pool.slot(switch.to(), side.other(), layer))),
    };
    unit.run(|rank, resharder, checksums| {
        let (link, memory) = resharder.into_parts();
        memory.wrong = slot.clone().filter(|_| rank == at).map(|slot| (wrong, slot));
        let mut resharder = Resharder::new(link, memory, 50);
        let ended = resharder
            .run(switch, &checksums, &mut |progress| wrong != Wrong::Stop || rank != at || progress.layer != layer);
        assert_eq!(ended, Ok(Outcome::RolledBack(Refusal { layer, rank: at, reason })), "{injected:?}");
        match (rank == at, resharder.fault()) {
            (false, fault) => assert_eq!(fault, None),
            (true, Some(Fault::Checksum { piece, .. })) => assert_eq!((wrong, piece.layer), (Wrong::Damage, layer)),
            (true, fault) => assert_eq!(fault.map(Fault::reason), Some(reason)),
        }
        resharder.verify(pool, switch.from(), side, &checksums).unwrap();
        let again = resharder.run(switch, &checksums, &mut |_| true);
        assert_eq!(again, Ok(Outcome::Switched));
        let (_, memory) = resharder.into_parts();
        assert_holds(pool, switch.to(), side.other(), rank, memory.inner.own());
    });
}

#[test]
fn a_fault_at_any_layer_rank_and_direction_ends_in_the_old_layout() {
    let (pool, [first, tp, second]) = (pool(4), layouts(4));
    for (from, to) in [(&first, &tp), (&tp, &first), (&first, &second)] {
        for side in [Side::Low, Side::High] {
            let switch = Switch::new(&pool, from, to, side).unwrap();
            for wrong in [Wrong::Stop, Wrong::Damage, Wrong::Fail] {
                for layer in 0..LAYERS {
                    for rank in 0..4 {
                        roll_back(&pool, &switch, Injected { wrong, layer, rank }, [4, 2, 1][(layer + rank) % 3]);
                    }
                }
            }
        }
    }
}

/// A second fault during rollback: the unit is in neither layout, and every rank reports it.
#[test]
fn a_rollback_that_fails_is_an_error_on_all_ranks() {
    let (pool, [first, tp, _]) = (pool(4), layouts(4));
    let switch = Switch::new(&pool, &first, &tp, Side::High).unwrap();
    let unit = Unit { pool: &pool, layout: &first, side: Side::High, host: 2, chunk_bytes: 50 };
    unit.run(|rank, resharder, checksums| {
        let (link, memory) = resharder.into_parts();
        // Layer 1 is refused, then layer 0 cannot be written back: the end of its old slot, which the forward direction
        // did not write.
        let end = pool.slot(&tp, Side::Low, 1).end..pool.slot(&first, Side::High, 0).end;
        memory.wrong = Some((Wrong::Fail, end)).filter(|_| rank == 3);
        let mut resharder = Resharder::new(link, memory, 50);
        let ended = resharder.run(&switch, &checksums, &mut |progress| rank != 1 || progress.layer < 1);
        let first = Refusal { layer: 1, rank: 1, reason: Reason::Stopped };
        let second = Refusal { layer: 0, rank: 3, reason: Reason::Memory };
        assert_eq!(ended, Err(SwitchError::Stuck { first, second }));
    });
}

#[test]
fn a_rank_that_leaves_ends_the_switch_and_is_named() {
    let (pool, [first, tp, _]) = (pool(4), layouts(4));
    let switch = Switch::new(&pool, &first, &tp, Side::High).unwrap();
    let unit = Unit { pool: &pool, layout: &first, side: Side::High, host: 2, chunk_bytes: 50 };
    let errors = unit.run(|rank, mut resharder, checksums| {
        if rank == 2 {
            return None;
        }
        Some(resharder.run(&switch, &checksums, &mut |_| true).unwrap_err())
    });
    for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        match error {
            Some(SwitchError::Lost { layer: 0, cause: UnitError::PeerLost { rank: 2, .. } }) => {}
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn ranks_with_other_switches_find_out_before_anything_is_written() {
    let (pool, [first, tp, second]) = (pool(2), layouts(2));
    let unit = Unit { pool: &pool, layout: &first, side: Side::High, host: 2, chunk_bytes: 50 };
    unit.run(|rank, mut resharder, checksums| {
        let switch = Switch::new(&pool, &first, if rank == 0 { &tp } else { &second }, Side::High).unwrap();
        let mut asked = false;
        let error = resharder.run(&switch, &checksums, &mut |_| std::mem::replace(&mut asked, true)).unwrap_err();
        let other = 1 - rank;
        let expected = format!(
            "the switch stopped at layer 0: rank {other} broke the protocol: it sent layer 0, expected layer 0 of \
             this rank's switch"
        );
        assert_eq!((error.to_string(), asked), (expected, false));
        let (_, memory) = resharder.into_parts();
        assert_holds(&pool, &first, Side::High, rank, memory.inner.own());
    });
}

#[test]
fn damage_in_a_copy_is_found_and_operands_are_checked() {
    let (pool, [first, tp, _]) = (pool(2), layouts(2));
    let unit = Unit { pool: &pool, layout: &first, side: Side::High, host: 2, chunk_bytes: 50 };
    unit.run(|rank, resharder, checksums| {
        // Corrupts the first byte of this rank's last layer in place.
        let (link, memory) = resharder.into_parts();
        let at = pool.slot(&first, Side::High, LAYERS - 1).start;
        let byte = memory.inner.own()[at];
        memory.write(at, &[byte ^ 1]).unwrap();
        let mut resharder = Resharder::new(link, memory, 50);
        let fault = resharder.verify(&pool, &first, Side::High, &checksums).unwrap_err();
        assert_eq!(fault.reason(), Reason::Checksum, "rank {rank}");
        let switch = Switch::new(&pool, &first, &tp, Side::High).unwrap();
        let ended = resharder.run(&switch, &checksums, &mut |_| true).unwrap();
        assert!(matches!(ended, Outcome::RolledBack(Refusal { reason: Reason::Checksum, .. })), "{ended:?}");
        // Checksums that were never gathered.
        let none = Checksums::new(&pool);
        assert_eq!(resharder.verify(&pool, &first, Side::High, &none).unwrap_err().reason(), Reason::Checksum);
        // A different buffer.
        let other = Pool::new(ExpertShape::slice_major(2, 8).unwrap(), pool.grid(), EXPERTS, LAYERS, 4).unwrap();
        let switch = Switch::new(&other, &Layout::Tp, &first, Side::High).unwrap();
        let error = resharder.run(&switch, &none, &mut |_| true).unwrap_err();
        assert!(error.to_string().starts_with("bytes of the expert buffer: "), "{error}");
    });
}
