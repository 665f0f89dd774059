//! What every transport must do, and how TCP ranks fail: each failure names the rank that failed first, and nobody hangs.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use semmoe_tables::RankId;
use semmoe_worker::ep::{LocalTransport, TcpTransport, Transport, TransportError, Wake};

const PATIENT: Duration = Duration::from_secs(120);

/// Both ends of every pair of ranks: `streams[a][b]` is a's stream to b.
fn tcp_streams(world: usize) -> Vec<Vec<Option<TcpStream>>> {
    let mut streams: Vec<Vec<Option<TcpStream>>> = (0..world).map(|_| (0..world).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (a, b) in (0..world).flat_map(|a| (0..a).map(move |b| (a, b))) {
        streams[a][b] = Some(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        streams[b][a] = Some(listener.accept().unwrap().0);
    }
    streams
}

fn tcp(rank: usize, streams: Vec<Option<TcpStream>>, limit: Duration) -> TcpTransport {
    TcpTransport::new(RankId::new(rank as u16), streams, limit).unwrap()
}

fn tcp_mesh(world: usize) -> Vec<Box<dyn Transport>> {
    let transport = |(rank, streams)| Box::new(tcp(rank, streams, PATIENT)) as Box<dyn Transport>;
    tcp_streams(world).into_iter().enumerate().map(transport).collect()
}

fn local_mesh(world: usize) -> Vec<Box<dyn Transport>> {
    LocalTransport::mesh(world).into_iter().map(|t| Box::new(t) as Box<dyn Transport>).collect()
}

fn on_threads<T: Send, R: Send>(ranks: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn buffers(world: usize) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    (vec![Vec::new(); world], vec![Vec::new(); world])
}

/// What rank `from` sends rank `to` in a round: its length and its bytes depend on all three.
fn message(from: usize, to: usize, round: usize, most: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed((from * 1000 + to * 100 + round) as u64);
    let length = if random.u8(0..4) == 0 { 0 } else { random.usize(0..=most) };
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

/// Rounds of messages with all peers; every one must arrive whole and in its round.
fn talk(mut transport: Box<dyn Transport>, rounds: usize, most: usize) {
    let (me, world) = (transport.rank().index(), transport.world());
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
    for mesh in [local_mesh, tcp_mesh] {
        for world in [1, 2, 3, 5] {
            on_threads(mesh(world), |transport| talk(transport, 60, 5000));
        }
    }
}

#[test]
fn messages_larger_than_the_socket_buffers_do_not_block_each_other() {
    on_threads(tcp_mesh(3), |transport| talk(transport, 4, 24 << 20));
}

#[test]
fn ringing_and_a_peers_step_end_a_wait() {
    for mesh in [local_mesh, tcp_mesh] {
        on_threads(mesh(2), |mut transport| {
            let (outgoing, mut incoming) = buffers(2);
            let waker = transport.waker();
            if transport.rank().index() == 0 {
                // A ring before the wait is not lost, and several are one.
                waker.ring();
                waker.ring();
                assert_eq!(transport.wait().unwrap(), Wake::Local);
                std::thread::scope(|scope| {
                    scope.spawn(|| waker.ring());
                    assert_eq!(transport.wait().unwrap(), Wake::Local);
                });
            } else {
                // However often it looks, the peer's message stays until the collective takes it.
                assert_eq!(transport.wait().unwrap(), Wake::Peer);
                assert_eq!(transport.wait().unwrap(), Wake::Peer);
            }
            transport.all_to_all(&outgoing, &mut incoming).unwrap();
            transport.all_to_all(&outgoing, &mut incoming).unwrap();
        });
    }
}

/// Collectives until one fails; the failure stays.
fn until_failure(transport: &mut dyn Transport, bytes: usize) -> TransportError {
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

/// Which rank each survivor names when rank 2 of 4 does `last` with its streams instead of its third collective.
fn survivors(bytes: usize, limit: Duration, last: impl Fn(Vec<Option<TcpStream>>) + Sync) -> Vec<TransportError> {
    let streams = tcp_streams(4);
    let own: Vec<_> = streams[2].iter().map(|s| s.as_ref().map(|s| s.try_clone().unwrap())).collect();
    let own = std::sync::Mutex::new(Some(own));
    let found = on_threads(streams.into_iter().enumerate().collect(), |(rank, streams)| {
        let mut transport = tcp(rank, streams, limit);
        if rank != 2 {
            return Some(until_failure(&mut transport, bytes));
        }
        let (outgoing, mut incoming) = (vec![vec![1; bytes]; 4], vec![Vec::new(); 4]);
        transport.all_to_all(&outgoing, &mut incoming).unwrap();
        transport.all_to_all(&outgoing, &mut incoming).unwrap();
        drop(transport);
        let own = own.lock().unwrap().take().unwrap();
        // What the transport set for its own use.
        own.iter().flatten().for_each(|stream| stream.set_nonblocking(false).unwrap());
        last(own);
        None
    });
    found.into_iter().flatten().collect()
}

fn assert_all_name_rank_2(errors: &[TransportError]) {
    assert_eq!(errors.len(), 3);
    for error in errors {
        assert_eq!(error.rank(), RankId::new(2), "{error}");
    }
}

#[test]
fn every_survivor_names_the_rank_that_died() {
    for bytes in [10, 4 << 20] {
        // Between two messages.
        let errors = survivors(bytes, PATIENT, drop);
        assert_all_name_rank_2(&errors);
        assert!(errors.iter().all(|e| matches!(e, TransportError::PeerLost { .. })), "{errors:?}");

        // In the middle of a header, to one peer only.
        assert_all_name_rank_2(&survivors(bytes, PATIENT, |streams| {
            streams[0].as_ref().unwrap().write_all(b"smEP\x01").unwrap();
        }));
    }
}

#[test]
fn a_rank_that_is_silent_is_named_when_its_time_is_up() {
    let (hold, held) = std::sync::mpsc::channel();
    let errors = survivors(10, Duration::from_secs(1), |streams| hold.send(streams).unwrap());
    assert_all_name_rank_2(&errors);
    assert!(errors.iter().any(|e| matches!(e, TransportError::TimedOut { .. })), "{errors:?}");
    drop(held);
}

#[test]
fn a_rank_that_sends_nonsense_is_named() {
    let errors = survivors(10, PATIENT, |streams| {
        streams.iter().flatten().for_each(|mut s| s.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap());
    });
    assert_all_name_rank_2(&errors);
    assert!(errors.iter().any(|e| e.to_string().contains("broke the protocol")), "{errors:?}");
}

#[test]
fn a_rank_that_cannot_see_the_death_hears_of_it() {
    // Rank 2's stream to rank 3 stays open after its death, as over a network that lost the end of it.
    let errors = {
        let kept = std::sync::Mutex::new(None);
        let errors = survivors(10, PATIENT, |mut streams| *kept.lock().unwrap() = streams[3].take());
        drop(kept);
        errors
    };
    assert_all_name_rank_2(&errors);
}

#[test]
fn a_death_ends_a_wait() {
    let mut streams = tcp_streams(3).into_iter().enumerate();
    let (_, dead) = streams.next().unwrap();
    let waiting: Vec<_> = streams.collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = waiting
            .into_iter()
            .map(|(rank, streams)| scope.spawn(move || tcp(rank, streams, PATIENT).wait().unwrap_err()))
            .collect();
        drop(dead);
        for thread in threads {
            assert_eq!(thread.join().unwrap().rank(), RankId::new(0));
        }
    });

    let mut mesh = LocalTransport::mesh(2);
    drop(mesh.remove(0));
    assert_eq!(mesh[0].wait().unwrap_err().rank(), RankId::new(0));
}

#[test]
fn streams_must_fit_the_rank() {
    let mut streams = tcp_streams(2);
    let right = streams.pop().unwrap();
    let wrong = TcpTransport::new(RankId::new(0), right, PATIENT);
    assert!(wrong.is_err_and(|error| error.to_string().contains("slot 0 is not right")));
    assert!(TcpTransport::new(RankId::new(1), vec![None], PATIENT).is_err());
    assert!(TcpTransport::new(RankId::new(0), vec![None], PATIENT).is_ok());
}
