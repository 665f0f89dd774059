//! Misbehaviour: half a message before a rank dies, and corrupt ring words.

use std::net::TcpListener;

use super::*;
use semmoe_kernels::collectives::{Lockstep as _, UnitError};

const PATIENT: Duration = Duration::from_secs(120);

/// Rank 0 of two, the memory, and rank 1's end of the link.
fn one_of_two() -> (ShmTransport, Arc<ShmMemory>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let link = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (file, memory) = ShmMemory::create(2, 0, 3).unwrap();
    let other = ShmMemory::attach(&file, 2, 0, 3).unwrap();
    let (transport, _) = ShmTransport::new::<f32>(0, memory, vec![None, Some(link)], PATIENT).unwrap();
    (transport, Arc::new(other), listener.accept().unwrap().0)
}

fn collective(transport: &mut ShmTransport) -> Result<Vec<u8>, UnitError> {
    let mut incoming = [Vec::new(), Vec::new()];
    transport.all_to_all(&[Vec::new(), Vec::new()], &mut incoming)?;
    let [_, message] = incoming;
    Ok(message)
}

#[test]
fn a_rank_that_dies_within_a_message_is_lost_and_one_after_it_is_not_missed() {
    let (mut transport, memory, link) = one_of_two();
    let mut writer = RingWriter::new(&memory, 1, 0);
    let header = |collective, length| crate::ep::stream::data_header(collective, length);
    let first = std::thread::scope(|scope| {
        let rank = scope.spawn(|| collective(&mut transport));
        // Wait until its own message is out: nothing is sent to a rank that has died.
        while memory.ring(0, 1).0.sender.written.load(Ordering::SeqCst) == 0 && !rank.is_finished() {
            std::thread::yield_now();
        }
        writer.write([&header(1, 5)[..], b"whole"].into_iter()).unwrap();
        writer.write([&header(2, 9)[..], b"half"].into_iter()).unwrap();
        drop(link);
        rank.join().unwrap()
    });
    assert_eq!(first.unwrap(), b"whole");
    let error = collective(&mut transport).unwrap_err();
    assert!(matches!(&error, UnitError::PeerLost { .. }), "{error}");
    assert_eq!(error.to_string(), "rank 1 was lost: it closed its connection");
}

#[test]
fn words_and_headers_that_cannot_be_break_the_protocol() {
    let (mut transport, memory, _link) = one_of_two();
    memory.ring(1, 0).0.sender.written.store(1 << 40, Ordering::SeqCst);
    let error = collective(&mut transport).unwrap_err();
    assert!(error.to_string().contains("rank 1 broke the protocol: its ring is at 1099511627776 bytes"), "{error}");

    let (mut transport, memory, _link) = one_of_two();
    RingWriter::new(&memory, 1, 0).write(std::iter::once(&[0x41; 24][..])).unwrap();
    let error = transport.wait().unwrap_err();
    assert!(error.to_string().contains("rank 1 broke the protocol: a frame begins with 0x41414141"), "{error}");

    let (mut transport, memory, _link) = one_of_two();
    let huge = crate::ep::stream::data_header(1, usize::MAX);
    RingWriter::new(&memory, 1, 0).write(std::iter::once(&huge[..])).unwrap();
    assert!(collective(&mut transport).unwrap_err().to_string().contains("bytes, expected at most"));
}

#[test]
fn the_end_of_a_transport_leaves_no_thread_and_no_map() {
    let (transport, memory, link) = one_of_two();
    let shared = Arc::downgrade(&transport.medium().memory);
    drop(transport);
    assert!(shared.upgrade().is_none(), "the thread that watches holds the memory as long as it runs");
    drop((memory, link));
}
