//! Who is admitted, and how hostile peers are handled.

use std::io::Write as _;
use std::net::TcpListener;
use std::time::Duration;

use super::*;
use crate::unit::Shutdown;

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).unwrap())
}

fn patience() -> Patience {
    Patience::new(Duration::from_secs(60), &Shutdown::default())
}

/// A connection whose accepting side runs `accept` and whose connecting side runs `connect`.
fn handshake<A: Send, C>(accept: impl FnOnce(TcpStream) -> A + Send, connect: impl FnOnce(TcpStream) -> C) -> (A, C) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(listener.accept().unwrap().0));
        let connected = connect(TcpStream::connect(address).unwrap());
        (accepted.join().unwrap(), connected)
    })
}

fn shake(ours: Option<Secret>, theirs: Option<Secret>) -> [Result<(), String>; 2] {
    let text = |outcome: Result<(), AuthError>| outcome.map_err(|error| error.to_string());
    let (accepted, connected) = handshake(
        |mut stream| text(accept(&mut stream, Purpose::Data, ours.as_ref(), &patience())),
        |mut stream| text(connect(&mut stream, Purpose::Data, theirs.as_ref(), &patience())),
    );
    [accepted, connected]
}

#[test]
fn only_those_with_the_same_secret_meet() {
    let (one, other) = ("one secret of many", "another secret here");
    assert_eq!(shake(None, None), [Ok(()), Ok(())]);
    assert_eq!(shake(secret(one), secret(one)), [Ok(()), Ok(())]);
    let [accepted, connected] = shake(secret(one), secret(other));
    assert!(accepted.is_err() && connected.unwrap_err().contains("secret differs"));
    let [accepted, connected] = shake(secret(one), None);
    assert!(accepted.is_err() && connected.unwrap_err().contains("requires a secret"));
    let [accepted, connected] = shake(None, secret(one));
    assert!(accepted.is_err() && connected.unwrap_err().contains("started without a secret"));
}

/// The result for a connector that answers the greeting with `answer`, given the acceptor's nonce.
fn answered(answer: impl FnOnce(Nonce) -> Answer) -> Result<(), AuthError> {
    let known = secret("one secret of many");
    let (accepted, ()) = handshake(
        |mut stream| accept(&mut stream, Purpose::Control, known.as_ref(), &patience()),
        |mut stream| {
            let greeting: Greeting = frame::read(&mut stream, MAX_BYTES).unwrap();
            frame::write(&mut stream, &answer(greeting.nonce.unwrap())).unwrap();
            // Keeps the connection open until the other side is done.
            let _ = stream.read(&mut [0; 64]);
        },
    );
    accepted
}

#[test]
fn a_proof_counts_for_its_role_purpose_and_nonce_only() {
    let known = secret("one secret of many").unwrap();
    let own = [7; 32];
    let with = |proof| Answer { magic: MAGIC.into(), proof: Some((own, proof)) };
    assert!(answered(|nonce| with(known.proof(&parts(b"connector", Purpose::Control, &nonce, &own)))).is_ok());
    // Replayed from another connection, reflected, taken from a data link, or missing.
    assert!(answered(|_| with(known.proof(&parts(b"connector", Purpose::Control, &[1; 32], &own)))).is_err());
    assert!(answered(|nonce| with(known.proof(&parts(b"acceptor", Purpose::Control, &nonce, &own)))).is_err());
    assert!(answered(|nonce| with(known.proof(&parts(b"connector", Purpose::Data, &nonce, &own)))).is_err());
    assert!(answered(|_| with([0; 32])).is_err());
    assert!(answered(|_| Answer { magic: MAGIC.into(), proof: None }).is_err());
    assert!(matches!(answered(|_| Answer { magic: "GET /".into(), proof: None }), Err(AuthError::Stranger)));
}

#[test]
fn an_acceptor_that_does_not_prove_itself_is_left() {
    for proof in [None, Some([0; 32])] {
        let known = secret("one secret of many");
        let (_, connected) = handshake(
            |mut stream| {
                let greeting = Greeting { magic: MAGIC.into(), protocol: PROTOCOL, nonce: Some([3; 32]) };
                frame::write(&mut stream, &greeting).unwrap();
                let _: Answer = frame::read(&mut stream, MAX_BYTES).unwrap();
                frame::write(&mut stream, &Verdict::Known { proof }).unwrap();
            },
            |mut stream| connect(&mut stream, Purpose::Data, known.as_ref(), &patience()),
        );
        assert!(matches!(connected, Err(AuthError::OtherSecret)));
    }
}

#[test]
fn garbage_and_silence_end_the_handshake() {
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[2, 0, 0, 0, b'{', b'}'], &[4, 0], &[]] {
        let (accepted, ()) = handshake(
            |mut stream| accept(&mut stream, Purpose::Control, None, &patience()),
            |mut stream| stream.write_all(bytes).unwrap(),
        );
        assert!(accepted.is_err(), "{bytes:?}");
    }
    let (accepted, _open) = handshake(
        |mut stream| {
            let impatient = Patience::new(Duration::from_millis(50), &Shutdown::default());
            accept(&mut stream, Purpose::Control, None, &impatient)
        },
        |stream| stream,
    );
    assert!(matches!(accepted, Err(AuthError::Frame(FrameError::Io(_)))));
}
