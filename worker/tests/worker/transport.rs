//! The requirements on every transport, and how ranks fail: each failure names the rank that failed first, and no rank
//! hangs.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::common::on_threads;
use crate::links::{PATIENT, tcp_streams};
use semmoe_worker::ep::{LocalTransport, Lockstep, ShmMemory, ShmTransport, TcpTransport, UnitError, Wake};

/// A rank's connections before it has a transport, as processes have them.
struct End {
    rank: usize,
    /// For data or, with shared memory, only to detect death.
    streams: Vec<Option<TcpStream>>,
    memory: Option<ShmMemory>,
}

impl End {
    fn transport(self, limit: Duration) -> Box<dyn Lockstep> {
        match self.memory {
            None => Box::new(TcpTransport::new(self.rank, self.streams, limit).unwrap()),
            Some(memory) => Box::new(ShmTransport::new::<f32>(self.rank, memory, self.streams, limit).unwrap().0),
        }
    }
}

type Ends = fn(usize) -> Vec<End>;

fn tcp(world: usize) -> Vec<End> {
    let end = |(rank, streams)| End { rank, streams, memory: None };
    tcp_streams(world).into_iter().enumerate().map(end).collect()
}

/// Each rank maps the memory separately, as processes do.
fn shm(world: usize) -> Vec<End> {
    let (file, _) = ShmMemory::create(world, 0, 5).unwrap();
    let attached = |end| End { memory: Some(ShmMemory::attach(&file, world, 0, 5).unwrap()), ..end };
    tcp(world).into_iter().map(attached).collect()
}

/// All transports between processes.
const BETWEEN_PROCESSES: [Ends; 2] = [tcp, shm];

fn tcp_mesh(world: usize) -> Vec<Box<dyn Lockstep>> {
    tcp(world).into_iter().map(|end| end.transport(PATIENT)).collect()
}

fn shm_mesh(world: usize) -> Vec<Box<dyn Lockstep>> {
    shm(world).into_iter().map(|end| end.transport(PATIENT)).collect()
}

fn local_mesh(world: usize) -> Vec<Box<dyn Lockstep>> {
    LocalTransport::mesh(world).into_iter().map(|t| Box::new(t) as Box<dyn Lockstep>).collect()
}

fn buffers(world: usize) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    (vec![Vec::new(); world], vec![Vec::new(); world])
}

/// The message from rank `from` to rank `to` in a round: length and bytes depend on all three.
fn message(from: usize, to: usize, round: usize, most: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed((from * 1000 + to * 100 + round) as u64);
    let length = if random.u8(0..4) == 0 { 0 } else { random.usize(0..=most) };
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

/// Rounds of messages with all peers; every message must arrive complete and in its round.
fn talk(mut transport: Box<dyn Lockstep>, rounds: usize, most: usize) {
    let (me, world) = (transport.rank(), transport.world());
    let (mut outgoing, mut incoming) = buffers(world);
    for round in 0..rounds {
        for (peer, out) in outgoing.iter_mut().enumerate() {
            out.clear();
            out.extend(message(me, peer, round, most));
        }
        transport.all_to_all(&outgoing, &mut incoming).unwrap();
        for (peer, message_in) in incoming.iter().enumerate().filter(|(peer, _)| *peer != me) {
            assert!(*message_in == message(peer, me, round, most), "round {round}, from {peer} to {me}");
        }
    }
}

#[test]
fn messages_of_any_size_arrive_in_their_round() {
    for mesh in [local_mesh, tcp_mesh, shm_mesh] {
        for world in [1, 2, 3, 5] {
            on_threads(mesh(world), |transport| talk(transport, 60, 5000));
        }
    }
}

#[test]
fn messages_larger_than_what_a_stream_holds_do_not_block_each_other() {
    for mesh in [tcp_mesh, shm_mesh] {
        on_threads(mesh(3), |transport| talk(transport, 4, 24 << 20));
    }
}

#[test]
fn small_messages_beside_large_ones_arrive_in_their_round() {
    // Rings and socket buffers fill up in one direction only, and wrap at every offset.
    on_threads(shm_mesh(4), |transport| talk(transport, 40, 3 << 20));
}

#[test]
fn ringing_and_a_peers_step_end_a_wait() {
    for mesh in [local_mesh, tcp_mesh, shm_mesh] {
        on_threads(mesh(2), |mut transport| {
            let (outgoing, mut incoming) = buffers(2);
            let waker = transport.waker();
            if transport.rank() == 0 {
                // A ring before the wait is not lost, and several count as one.
                waker.ring();
                waker.ring();
                assert_eq!(transport.wait().unwrap(), Wake::Local);
                std::thread::scope(|scope| {
                    scope.spawn(|| waker.ring());
                    assert_eq!(transport.wait().unwrap(), Wake::Local);
                });
            } else {
                // However often it polls, the peer's message stays until the collective takes it.
                assert_eq!(transport.wait().unwrap(), Wake::Peer);
                assert_eq!(transport.wait().unwrap(), Wake::Peer);
            }
            transport.all_to_all(&outgoing, &mut incoming).unwrap();
            transport.all_to_all(&outgoing, &mut incoming).unwrap();
        });
    }
}

/// Collectives until one fails; the failure must persist.
fn until_failure(transport: &mut dyn Lockstep, bytes: usize) -> UnitError {
    let world = transport.world();
    let (outgoing, mut incoming) = (vec![vec![1; bytes]; world], vec![Vec::new(); world]);
    loop {
        if let Err(error) = transport.all_to_all(&outgoing, &mut incoming) {
            assert_eq!(transport.all_to_all(&outgoing, &mut incoming), Err(error.clone()), "a failure stays");
            assert_eq!(transport.wait(), Err(error.clone()), "a failure stays");
            return error;
        }
    }
}

/// The rank that each survivor names when rank 2 of 4 does `last` with its streams instead of its third collective.
fn survivors(
    ends: Ends,
    bytes: usize,
    limit: Duration,
    last: impl Fn(Vec<Option<TcpStream>>) + Sync,
) -> Vec<UnitError> {
    let ends = ends(4);
    let own: Vec<_> = ends[2].streams.iter().map(|s| s.as_ref().map(|s| s.try_clone().unwrap())).collect();
    let own = std::sync::Mutex::new(Some(own));
    let found = on_threads(ends, |end| {
        let rank = end.rank;
        let mut transport = end.transport(limit);
        if rank != 2 {
            return Some(until_failure(&mut *transport, bytes));
        }
        let (outgoing, mut incoming) = (vec![vec![1; bytes]; 4], vec![Vec::new(); 4]);
        transport.all_to_all(&outgoing, &mut incoming).unwrap();
        transport.all_to_all(&outgoing, &mut incoming).unwrap();
        drop(transport);
        let own = own.lock().unwrap().take().unwrap();
        // Undoes the transport's own setting.
        own.iter().flatten().for_each(|stream| stream.set_nonblocking(false).unwrap());
        last(own);
        None
    });
    found.into_iter().flatten().collect()
}

fn assert_all_name_rank_2(errors: &[UnitError]) {
    assert_eq!(errors.len(), 3);
    for error in errors {
        assert_eq!(error.rank(), 2, "{error}");
    }
}

#[test]
fn every_survivor_names_the_rank_that_died() {
    for (ends, bytes) in BETWEEN_PROCESSES.into_iter().flat_map(|ends| [(ends, 10), (ends, 4 << 20)]) {
        // Between two messages.
        let errors = survivors(ends, bytes, PATIENT, drop);
        assert_all_name_rank_2(&errors);
        assert!(errors.iter().all(|e| matches!(e, UnitError::PeerLost { .. })), "{errors:?}");

        // In the middle of a header, to one peer only (over shared memory, that is invalid).
        assert_all_name_rank_2(&survivors(ends, bytes, PATIENT, |streams| {
            streams[0].as_ref().unwrap().write_all(b"smEP\x01").unwrap();
        }));
    }
}

#[test]
fn a_rank_that_is_silent_is_named_when_its_time_is_up() {
    for ends in BETWEEN_PROCESSES {
        let (hold, held) = std::sync::mpsc::channel();
        let errors = survivors(ends, 10, Duration::from_secs(3), |streams| hold.send(streams).unwrap());
        assert_all_name_rank_2(&errors);
        assert!(errors.iter().any(|e| matches!(e, UnitError::TimedOut { .. })), "{errors:?}");
        drop(held);
    }
}

#[test]
fn a_rank_that_sends_nonsense_is_named() {
    for ends in BETWEEN_PROCESSES {
        let errors = survivors(ends, 10, PATIENT, |streams| {
            let nonsense = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
            streams.iter().flatten().for_each(|mut stream| stream.write_all(nonsense).unwrap());
        });
        assert_all_name_rank_2(&errors);
        assert!(errors.iter().any(|e| e.to_string().contains("broke the protocol")), "{errors:?}");
    }
}

#[test]
fn a_rank_that_cannot_see_the_death_hears_of_it() {
    // Rank 2's stream to rank 3 stays open after its death, as over a network that lost the closing packet.
    for ends in BETWEEN_PROCESSES {
        let kept = std::sync::Mutex::new(None);
        let errors = survivors(ends, 10, PATIENT, |mut streams| *kept.lock().unwrap() = streams[3].take());
        drop(kept);
        assert_all_name_rank_2(&errors);
    }
}

#[test]
fn a_death_ends_a_wait() {
    for ends in BETWEEN_PROCESSES {
        let mut ends = ends(3);
        let dead = ends.remove(0);
        std::thread::scope(|scope| {
            let wait = |end: End| scope.spawn(move || end.transport(PATIENT).wait().unwrap_err());
            let threads: Vec<_> = ends.into_iter().map(wait).collect();
            drop(dead);
            for thread in threads {
                assert_eq!(thread.join().unwrap().rank(), 0);
            }
        });
    }

    let mut mesh = LocalTransport::mesh(2);
    drop(mesh.remove(0));
    assert_eq!(mesh[0].wait().unwrap_err().rank(), 0);
}

#[test]
fn streams_must_fit_the_rank() {
    let mut streams = tcp_streams(2);
    let right = streams.pop().unwrap();
    let wrong = TcpTransport::new(0, right, PATIENT);
    assert!(wrong.is_err_and(|error| error.to_string().contains("slot 0 is wrong")));
    assert!(TcpTransport::new(1, vec![None], PATIENT).is_err());
    assert!(TcpTransport::new(0, vec![None], PATIENT).is_ok());

    let memory = |world| ShmMemory::create(world, 0, 1).unwrap().1;
    let mut streams = tcp_streams(2);
    let wrong = ShmTransport::new::<f32>(0, memory(2), streams.pop().unwrap(), PATIENT);
    assert!(wrong.is_err_and(|error| error.to_string().contains("slot 0 is wrong")));
    let wrong = ShmTransport::new::<f32>(0, memory(3), streams.pop().unwrap(), PATIENT);
    assert!(wrong.is_err_and(|error| error.to_string().contains("memory for 3 ranks, expected 2")));
    assert!(ShmTransport::new::<f32>(0, memory(1), vec![None], PATIENT).is_ok());
}
