//! Hostile clients: malformed requests get an error and are closed, slow ones are ended, and none of it reaches an
//! engine or holds unbounded memory.

use std::time::Duration;

use semmoe_gateway::Running;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Client, Fleet, Mock, PATIENCE, alone, canned, eventually, metric, plain_model, settled, start};
use crate::wire::{exchange, rest, status};

const CHAT: &str = "/v1/chat/completions";
const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n";

/// Time limits for clients: short where the test waits for them.
const HASTY: &str = "[timeouts]\nheader_seconds = 0.2\nbody_seconds = 0.2\n";
const PATIENT: &str = "[timeouts]\nheader_seconds = 2\nbody_seconds = 2\n";

async fn connect(gateway: &Running) -> TcpStream {
    TcpStream::connect(gateway.data_addr()).await.unwrap()
}

async fn still_serves(gateway: &Running, mock: &mut Mock) {
    assert_eq!(Client::data(gateway).post(CHAT, "{}").await.status, 200);
    mock.next().await;
    assert!(mock.seen.try_recv().is_err(), "something reached the engine");
    settled(gateway).await;
}

#[tokio::test]
async fn malformed_requests_are_reported_and_closed() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, PATIENT).await;
    let with = |line: &str| format!("{HEAD}{line}\r\n\r\n{{}}");
    for (request, expected) in [
        (with("content-length: 18446744073709551615"), "4"),
        (with("content-length: 18446744073709551616"), "400"),
        (with("content-length: 9223372036854775807"), "413"),
        (with("content-length: 99999999999999999999999999"), "400"),
        (with("content-length: -1"), "400"),
        (with("content-length: +2"), "400"),
        (with("content-length: 0x2"), "400"),
        (with("content-length: 2, 2"), "400"),
        (with("content-length:"), "400"),
        (with("content-length: 2\r\ncontent-length: 3"), "400"),
        (with("transfer-encoding: gzip"), "400"),
        (with("transfer-encoding: chunked, identity"), "400"),
        (with("x bad: 1"), "400"),
        (with("x-nul: a\0b"), "400"),
        (with("content-length : 2"), "400"),
        ("\x16\x03\x01\x02\0\x01\0\x01\r\n\r\n".to_owned(), "400"),
        ("GET /v1/models HTTP/9.9\r\n\r\n".to_owned(), "400"),
        (format!("POST {} HTTP/1.1\r\nhost: a\r\n\r\n", "/a".repeat(40_000)), "4"),
    ] {
        let answer = exchange(gateway.data_addr(), request.as_bytes()).await;
        assert!(status(&answer).starts_with(expected), "{request:.80}: {answer:.200}");
    }
    still_serves(&gateway, &mut mock).await;
}

/// Length and chunks at once: whichever the gateway believes, the engine sees exactly one request, reframed, and the
/// hidden one never becomes a request.
#[tokio::test]
async fn smuggled_requests_do_not_reach_the_engine() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, PATIENT).await;
    let hidden = "POST /generate HTTP/1.1\r\nhost: engine\r\ncontent-length: 2\r\n\r\n{}";
    let mut passed = 0;
    for lines in [
        format!("content-length: {}\r\ntransfer-encoding: chunked", hidden.len() + 12),
        format!("transfer-encoding: chunked\r\ncontent-length: {}", hidden.len() + 12),
        "content-length: 4\r\ntransfer-encoding: chunked".to_owned(),
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\ncontent-length: 4".to_owned(),
    ] {
        // A reader of chunks sees the body `{}`, a reader of lengths includes the rest.
        let request = format!("{HEAD}{lines}\r\nconnection: close\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{hidden}");
        let answer = exchange(gateway.data_addr(), request.as_bytes()).await;
        assert!(["200", "400"].contains(&status(&answer)), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
        passed += usize::from(status(&answer) == "200");
    }
    for _ in 0..passed {
        let seen = mock.next().await;
        assert_eq!((seen.path.as_str(), &seen.body[..]), (CHAT, &b"{}"[..]));
        assert!(!seen.headers.contains_key("transfer-encoding"), "{:?}", seen.headers);
        assert_eq!(seen.headers["content-length"], "2");
    }
    still_serves(&gateway, &mut mock).await;
}

#[tokio::test]
async fn garbage_in_chunks_is_reported() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, &format!("{PATIENT}[limits]\nbody_bytes = 10000\n")).await;
    let chunked = |body: &str| format!("{HEAD}transfer-encoding: chunked\r\n\r\n{body}");
    for (body, expected) in [
        ("zz\r\n{}\r\n0\r\n\r\n".to_owned(), "400"),
        ("-2\r\n{}\r\n0\r\n\r\n".to_owned(), "400"),
        ("fffffffffffffffff\r\n{}".to_owned(), "400"),
        ("2\r\n{}garbage".to_owned(), "400"),
        // Unbounded extensions and trailers.
        (format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "x".repeat(100_000)), "400"),
        (format!("2\r\n{{}}\r\n0\r\n{}\r\n", "x-t: 1\r\n".repeat(20_000)), "400"),
        // A size that is announced and does not arrive, and one that is too large on arrival.
        ("ffffffffffffffff\r\n{}".to_owned(), "4"),
        (format!("{:x}\r\n{}\r\n0\r\n\r\n", 10_001, "x".repeat(10_001)), "413"),
        ("1\r\nx\r\n".repeat(10_001), "413"),
    ] {
        let answer = exchange(gateway.data_addr(), chunked(&body).as_bytes()).await;
        assert!(status(&answer).starts_with(expected) || answer.is_empty(), "{body:.40}: {answer:.300}");
        if !answer.is_empty() {
            assert!(answer.contains("\"error\""), "{answer}");
        }
    }
    still_serves(&gateway, &mut mock).await;
}

#[tokio::test]
async fn heads_without_end_are_cut_off() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, PATIENT).await;
    let many = format!("{HEAD}{}content-length: 2\r\n\r\n{{}}", "a: b\r\n".repeat(101));
    let long = format!("{HEAD}x-long: {}\r\ncontent-length: 2\r\n\r\n{{}}", "x".repeat(70_000));
    for request in [many, long] {
        let answer = exchange(gateway.data_addr(), request.as_bytes()).await;
        assert!(status(&answer) == "431" || answer.is_empty(), "{answer:.200}");
    }
    // The gateway stops reading long before the client has sent everything.
    let mut socket = connect(&gateway).await;
    socket.write_all(HEAD.as_bytes()).await.unwrap();
    let line = format!("x-{}: {}\r\n", "n".repeat(100), "v".repeat(4000));
    let mut sent = 0;
    while sent < 1_000 {
        if socket.write_all(line.as_bytes()).await.is_err() {
            break;
        }
        sent += 1;
    }
    assert!(sent < 1_000, "4 MB of a head were taken");
    still_serves(&gateway, &mut mock).await;
}

/// A byte now and then: the time limits of a head and of a body do not restart with each.
#[tokio::test]
async fn slow_senders_are_ended() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, HASTY).await;
    let started = format!("{HEAD}content-length: 100\r\n\r\n");
    for (begin, drip, expected) in [(HEAD, "x-a: b\r\n", "none 408"), (started.as_str(), " ", "408")] {
        let mut socket = connect(&gateway).await;
        socket.write_all(begin.as_bytes()).await.unwrap();
        let (mut reader, mut writer) = socket.split();
        let dripping = async {
            while writer.write_all(drip.as_bytes()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            std::future::pending::<()>().await;
        };
        let mut answer = Vec::new();
        tokio::select! {
            () = dripping => {}
            ended = tokio::time::timeout(PATIENCE, reader.read_to_end(&mut answer)) => drop(ended.expect("it is ended")),
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(expected.contains(status(&answer)), "{answer}");
        if status(&answer) == "408" {
            assert!(answer.contains("the body was not received within 0.2 s"), "{answer}");
        }
    }
    still_serves(&gateway, &mut mock).await;
}

/// Half-sent bodies hold memory up to a limit; the next is refused, and the memory is returned.
#[tokio::test]
async fn half_bodies_hold_memory_up_to_a_limit() {
    let mut mock = canned(1);
    let limits = "[limits]\nbody_bytes = 1000000\nbody_memory_bytes = 2500000\n";
    let gateway = start(&format!("{limits}{}", plain_model(&mock, 1))).await;
    let half = format!("{HEAD}content-length: 1000000\r\n\r\n{{{}", " ".repeat(899_000));
    let mut sockets = Vec::new();
    let mut refused = None;
    while refused.is_none() {
        assert!(sockets.len() < 8, "nothing is refused");
        let mut socket = connect(&gateway).await;
        let _ = socket.write_all(half.as_bytes()).await;
        let mut answer = [0; 12];
        // A connection that is not refused stays silent: the gateway waits for the rest of the body.
        if let Ok(read) = tokio::time::timeout(Duration::from_millis(300), socket.read(&mut answer)).await {
            refused = Some(String::from_utf8_lossy(&answer[..read.unwrap_or(0)]).into_owned());
        }
        sockets.push(socket);
    }
    let refused = refused.unwrap();
    assert!(refused == "HTTP/1.1 503" || refused.is_empty(), "{refused}");
    drop(sockets);
    let whole = format!("{{{}}}", " ".repeat(999_000));
    let client = Client::data(&gateway);
    eventually("the memory came back", async || client.post(CHAT, whole.clone()).await.status == 200).await;
    mock.next().await;
    settled(&gateway).await;
}

/// More connections than allowed: the first ones send nothing and are closed, then the others are served.
#[tokio::test]
async fn idle_connections_make_room() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, &format!("{HASTY}[limits]\nconnections = 4\n")).await;
    let mut idle = Vec::new();
    for _ in 0..32 {
        idle.push(connect(&gateway).await);
    }
    still_serves(&gateway, &mut mock).await;
    for mut socket in idle {
        let _ = rest(&mut socket).await;
    }
    still_serves(&gateway, &mut mock).await;
}

/// A client that half-closes while it waits is taken to be gone, as nginx does: its engine's connection ends at once.
#[tokio::test]
async fn half_closed_connections_are_gone() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "").await;
    let mut socket = connect(&gateway).await;
    socket.write_all(format!("{HEAD}x-mock: hang\r\ncontent-length: 2\r\n\r\n{{}}").as_bytes()).await.unwrap();
    mock.next().await;
    socket.shutdown().await.unwrap();
    mock.next_gone().await;
    settled(&gateway).await;
    // In the middle of a head or a body: nothing reaches the engine.
    for half in [HEAD.to_owned(), format!("{HEAD}content-length: 10\r\n\r\n{{")] {
        let mut socket = connect(&gateway).await;
        socket.write_all(half.as_bytes()).await.unwrap();
        socket.shutdown().await.unwrap();
        let answer = rest(&mut socket).await;
        assert!(answer.is_empty() || status(&answer) == "400", "{answer}");
    }
    still_serves(&gateway, &mut mock).await;
}

/// A client that does not read its response: the engine's stream waits for it instead of filling memory.
#[tokio::test]
async fn a_client_that_does_not_read_is_not_buffered_for() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "").await;
    let mut socket = connect(&gateway).await;
    socket.write_all(format!("{HEAD}x-mock: flood\r\ncontent-length: 2\r\n\r\n{{}}").as_bytes()).await.unwrap();
    mock.next().await;
    // The bytes that the engine can send before the reader stops.
    let sent = mock.flooded().await;
    assert!(sent < 64 << 20, "{sent} bytes went somewhere");
    drop(socket);
    mock.next_gone().await;
    settled(&gateway).await;
}

/// It occupies a rank, so it is ended after a limit.
#[tokio::test]
async fn a_client_that_takes_nothing_is_ended() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "[timeouts]\nclient_seconds = 0.2\n").await;
    let mut socket = connect(&gateway).await;
    socket.write_all(format!("{HEAD}x-mock: flood\r\ncontent-length: 2\r\n\r\n{{}}").as_bytes()).await.unwrap();
    mock.next().await;
    mock.next_gone().await;
    settled(&gateway).await;
}

/// Pipelined requests are answered in order, one at a time.
#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "").await;
    let request = |length: usize, close: &str| format!("{HEAD}{close}content-length: {length}\r\n\r\n{:length$}", "{}");
    let all = format!("{}{}{}", request(2, ""), request(3, ""), request(4, "connection: close\r\n"));
    let answer = exchange(gateway.data_addr(), all.as_bytes()).await;
    let lengths: Vec<&str> = answer.split("\"length\":").skip(1).map(|rest| &rest[..1]).collect();
    assert_eq!(lengths, ["2", "3", "4"], "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 3);
    for _ in 0..3 {
        mock.next().await;
    }
    let line = "semmoe_requests_total{backend=\"pod-a\",model=\"tiny\",rank=\"0\",policy=\"round_robin\",code=\"200\"}";
    assert_eq!(metric(&gateway, line).await, 3.0);
    settled(&gateway).await;
}
