//! HTTP/2 from clients: served, and bounded if a client is hostile. Frames are written by hand, because no honest
//! client sends them.

use http::{Method, Version};
use semmoe_engines::http::ClientSettings;
use semmoe_gateway::Running;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Client, Fleet, PATIENCE, alone, canned, leave_before_the_answer, plain_model, settled, start};
use crate::wire::{
    self, CONTINUATION, END_HEADERS, END_STREAM, GET, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, frame,
};

const CHAT: &str = "/v1/chat/completions";
/// `POST /` without an end: a body should follow.
const POST: [u8; 6] = [0x83, 0x86, 0x84, 0x41, 1, b'a'];

const REFUSED_STREAM: u32 = 7;

/// Opens with the preface, an empty SETTINGS and these frames, and keeps writing as long as the gateway reads.
async fn attack(gateway: &Running, frames: Vec<u8>, times: usize) -> TcpStream {
    let mut stream = wire::open(gateway.data_addr(), &[]).await;
    for _ in 0..times {
        if stream.write_all(&frames).await.is_err() {
            break;
        }
    }
    stream
}

/// Everything up to the end of the connection, which must occur by itself. Resets are an end too.
async fn to_end(mut stream: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    let read = async {
        let mut piece = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut piece).await {
            said.extend_from_slice(&piece[..length]);
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("closed in time");
    said
}

/// Other clients are served, and nothing is left behind.
async fn unharmed(gateway: &Running) {
    assert_eq!(Client::data(gateway).post(CHAT, "{}").await.status, 200);
    settled(gateway).await;
}

#[tokio::test]
async fn http2_without_tls_by_prior_knowledge() {
    let Fleet { mocks: [mut mock], gateway, .. } = alone(1, "").await;
    let settings = ClientSettings { http2: true, ..ClientSettings::default() };
    let client = Client::with(&settings, &format!("http://{}", gateway.data_addr()));
    let answer = client.open(Method::POST, CHAT, &[("connection-id", "1")], "{}").await;
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2));
    let seen = mock.next().await;
    assert_eq!(seen.body, "{}");
    // A client's stream reset reaches the engine, and its other streams continue.
    leave_before_the_answer(&client, &mut mock, CHAT).await;
    assert_eq!(client.post(CHAT, "{}").await.status, 200);
    let long = "x".repeat(1 << 20);
    let answer = client.post(CHAT, format!("{{\"x\":\"{long}\"}}")).await;
    assert_eq!(answer.json()["length"], (1 << 20) + 8, "a body of many windows");
    settled(&gateway).await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_in_http2_too() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "[limits]\nbody_bytes = 1000\nheaders = 10\n").await;
    let settings = ClientSettings { http2: true, ..ClientSettings::default() };
    let client = Client::with(&settings, &format!("http://{}", gateway.data_addr()));
    assert_eq!(client.post(CHAT, "x".repeat(1001)).await.status, 413);
    let names: Vec<String> = (0..11).map(|at| format!("x-{at}")).collect();
    let headers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    let answer = client.call(Method::POST, CHAT, &headers, "{}").await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (431, Some("too_many_headers")));
    unharmed(&gateway).await;
}

/// CVE-2023-44487: streams that are opened and reset at once.
#[tokio::test]
async fn rapid_reset_ends_the_connection() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "").await;
    let mut frames = Vec::new();
    for stream in (1..20_001).step_by(2) {
        frames.extend(frame(HEADERS, END_STREAM | END_HEADERS, stream, &GET));
        frames.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    to_end(attack(&gateway, frames, 1).await).await;
    unharmed(&gateway).await;
}

/// CVE-2024-27316: headers that never end.
#[tokio::test]
async fn a_continuation_flood_ends_the_connection() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "").await;
    // A literal header that is not indexed, again and again.
    let header = [&[0x00, 1, b'x', 127, 0][..], &[b'y'; 127]].concat();
    let mut frames = frame(HEADERS, 0, 1, &GET);
    frames.extend(frame(CONTINUATION, 0, 1, &header.repeat(100)).repeat(20));
    let mut stream = attack(&gateway, frames, 1).await;
    let more = frame(CONTINUATION, 0, 1, &header.repeat(100));
    // 1.3 GB, if the gateway accepted it.
    for _ in 0..100_000 {
        if stream.write_all(&more).await.is_err() {
            break;
        }
    }
    to_end(stream).await;
    unharmed(&gateway).await;
}

/// Small on the wire, large in memory: one entry of the dynamic table, referenced thousands of times.
#[tokio::test]
async fn a_header_bomb_is_refused() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "").await;
    let mut payload = GET.to_vec();
    payload.extend([0x40, 1, b'x', 127, 0xf1, 0x1e]);
    payload.extend([b'y'; 4080]);
    payload.extend([0xbe; 12_000]);
    let stream = attack(&gateway, frame(HEADERS, END_STREAM | END_HEADERS, 1, &payload), 1).await;
    drop(stream);
    unharmed(&gateway).await;
}

/// Streams beyond the limit are refused individually.
#[tokio::test]
async fn streams_over_the_limit_are_refused() {
    let mock = canned(1);
    let toml =
        format!("[limits]\nstreams = 10\n[timeouts]\nheader_seconds = 1\nbody_seconds = 1\n{}", plain_model(&mock, 1));
    let gateway = start(&toml).await;
    // To a route that waits for a body; the path is not in the static table.
    let head = [&[0x83, 0x86, 0x04, 20][..], CHAT.as_bytes(), &[0x41, 1, b'a'][..]].concat();
    assert_eq!(CHAT.len(), 20);
    let frames: Vec<u8> = (1..201).step_by(2).flat_map(|stream| frame(HEADERS, END_HEADERS, stream, &head)).collect();
    let said = to_end(attack(&gateway, frames, 1).await).await;
    let mut rest = &said[..];
    let mut refused = 0;
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        let payload = &rest[9..9 + length];
        if rest[3] == RST_STREAM && payload == REFUSED_STREAM.to_be_bytes() {
            refused += 1;
        }
        rest = &rest[9 + length..];
    }
    assert_eq!(
        refused, 90,
        "of 100 streams ten are served; their bodies are waited for, and then the connection is idle"
    );
    unharmed(&gateway).await;
}

/// Frames that require an answer, from a client that reads none.
#[tokio::test]
async fn pings_and_settings_without_end_are_bounded() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "[timeouts]\nheader_seconds = 0.2\n").await;
    for kind in [PING, SETTINGS] {
        let payload: &[u8] = if kind == PING { &[0; 8] } else { &[] };
        let frames = frame(kind, 0, 0, payload).repeat(1000);
        let flood = attack(&gateway, frames, 1000);
        // Frames with unread answers are not accepted without end: either the writing stalls or the connection ends.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), flood).await;
    }
    unharmed(&gateway).await;
}

/// A client that begins and stops is not waited for: before the preface, after it, and in the middle of a head.
#[tokio::test]
async fn slow_beginnings_have_their_time() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "[timeouts]\nheader_seconds = 0.1\n").await;
    let settings = frame(SETTINGS, 0, 0, &[]);
    for beginning in [
        Vec::new(),
        b"P".to_vec(),
        b"PRI * H".to_vec(),
        b"POST /v1/chat".to_vec(),
        PREFACE[..20].to_vec(),
        PREFACE.to_vec(),
        [PREFACE, &settings, &frame(HEADERS, 0, 1, &POST)].concat(),
        [PREFACE, &settings, &frame(HEADERS, END_HEADERS, 1, &POST)].concat(),
    ] {
        let mut stream = TcpStream::connect(gateway.data_addr()).await.unwrap();
        stream.write_all(&beginning).await.unwrap();
        to_end(stream).await;
    }
    unharmed(&gateway).await;
}

#[tokio::test]
async fn an_address_has_its_connections() {
    let Fleet { mocks: [_mock], gateway, .. } = alone(1, "[limits]\nconnections_per_address = 3\n").await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(gateway.data_addr()).await.unwrap();
        stream.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'H');
        held.push(stream);
    }
    let mut fourth = TcpStream::connect(gateway.data_addr()).await.unwrap();
    assert!(tokio::time::timeout(PATIENCE, fourth.read_u8()).await.unwrap().is_err());
    let refused = crate::support::metric(&gateway, "semmoe_connections_refused_total").await;
    assert_eq!(refused, 1.0, "the admin plane counts its own");
    drop(held);
    let wait = async {
        let url = format!("http://{}/", gateway.data_addr()).parse().unwrap();
        let (client, limits) = (semmoe_engines::http::HttpClient::default(), Default::default());
        while client.get_text(&url, "/v1/models", &limits).await.is_err() {}
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("a place in time");
}
