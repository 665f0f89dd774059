//! Compressed bodies, and bodies in other Unicode encodings: engines receive them decoded.

use std::io::Write;

use bytes::Bytes;
use http::Method;

use crate::support::{Answer, Client, Fixture, Fleet, TEXTS, alone, canned, canned_as, plain_model, settled, start};

const COMPLETIONS: &str = "/v1/completions";
const BODY: &[u8] = br#"{"model":"tiny","prompt":"river water boat fish"}"#;
/// Written by Python's `brotli` and `zstandard`: the body in one piece, and as a stream with a checksum.
const BROTLI: &str =
    "0b18807b226d6f64656c223a2274696e79222c2270726f6d7074223a22726976657220776174657220626f61742066697368227d03";
const ZSTD: &str = "28b52ffd20318901007b226d6f64656c223a2274696e79222c2270726f6d7074223a22726976657220776174657220626f61742066697368227d";
const ZSTD_STREAM: &str = "28b52ffd04588901007b226d6f64656c223a2274696e79222c2270726f6d7074223a22726976657220776174657220626f61\
    742066697368227d6b90c358";
/// 32 MiB of blanks in an object.
const BROTLI_BOMB: &str = "cbffff3ff88dd462cd18efd42270747b0b44a72ab9ad1050c91579aef77f4df0ffff0f7e0980382c02d0bdffe3ffff1ffc12\
    00715800a07bffc7ffff3ff82500e2b00040f7fe2f1800f04b89f4151092040016";

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap())
        .collect()
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    writer.write_all(body).unwrap();
    writer.finish().unwrap()
}

fn zlib(body: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    writer.write_all(body).unwrap();
    writer.finish().unwrap()
}

fn deflate(body: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    writer.write_all(body).unwrap();
    writer.finish().unwrap()
}

fn zstd(body: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(body, ruzstd::encoding::CompressionLevel::Fastest)
}

/// The body in every coding.
fn coded() -> Vec<(&'static str, Vec<u8>)> {
    let (start, end) = BODY.split_at(20);
    vec![
        ("gzip", gzip(BODY)),
        ("X-GZip", gzip(BODY)),
        ("gzip", [gzip(start), gzip(end)].concat()),
        ("deflate", zlib(BODY)),
        ("deflate", deflate(BODY)),
        ("zstd", bytes(ZSTD)),
        ("zstd", bytes(ZSTD_STREAM)),
        ("zstd", [zstd(start), zstd(end)].concat()),
        ("br", bytes(BROTLI)),
        ("identity, br ,", bytes(BROTLI)),
        ("identity", BODY.to_vec()),
        ("", BODY.to_vec()),
    ]
}

async fn send(client: &Client, path: &str, coding: &str, body: impl Into<Bytes>) -> Answer {
    client.call(Method::POST, path, &[("content-encoding", coding)], body).await
}

#[track_caller]
fn refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (status, Some(code)), "{answer:?}");
}

#[tokio::test]
async fn engines_get_compressed_bodies_plain() {
    let fixture = Fixture::new(2);
    let mut mock = canned_as(fixture.info());
    let tables = fixture.write("t", &TEXTS, 0);
    let sections = "[limits]\nbody_bytes = 4096\n[routing]\nscore_limit_seconds = 600\n";
    let gateway = start(&format!("{sections}{}", fixture.affinity(&mock.url(), &tables))).await;
    let client = Client::data(&gateway);
    for (coding, body) in coded() {
        let answer = send(&client, COMPLETIONS, coding, body).await;
        assert_eq!((answer.status, answer.header("x-semmoe-rank")), (200, "0"), "{coding}: {answer:?}");
        let seen = mock.next().await;
        assert_eq!((&seen.body[..], seen.headers.get("content-encoding")), (BODY, None), "{coding}");
    }
    settled(&gateway).await;
}

#[tokio::test]
async fn what_a_coding_does_not_decode_is_refused() {
    let Fleet { mocks: [mut mock], gateway, client } = alone(1, "").await;
    for (coding, body) in coded().into_iter().filter(|(coding, _)| !["identity", ""].contains(coding)) {
        for end in [1, 5, body.len() / 2, body.len() - 1] {
            let answer = send(&client, COMPLETIONS, coding, body[..end].to_vec()).await;
            assert_eq!(answer.status, 400, "{coding}, the first {end} bytes: {answer:?}");
        }
        if !coding.contains("br") {
            refused(&send(&client, COMPLETIONS, coding, [&body[..], b"x"].concat()).await, 400, "body_unreadable");
        }
    }
    let mut wrong_sum = bytes(ZSTD_STREAM);
    *wrong_sum.last_mut().unwrap() ^= 1;
    refused(&send(&client, COMPLETIONS, "zstd", wrong_sum).await, 400, "body_unreadable");
    let members = gzip(b"").repeat(2000);
    refused(&send(&client, COMPLETIONS, "gzip", members).await, 400, "body_unreadable");
    for coding in ["compress", "gzip, gzip", "br, zstd", "aes128gcm", "*"] {
        let answer = send(&client, COMPLETIONS, coding, gzip(BODY)).await;
        refused(&answer, 415, "unsupported_encoding");
        assert_eq!(answer.header("accept-encoding"), "gzip, deflate, zstd, br", "{coding}");
    }
    assert!(mock.seen.try_recv().is_err(), "nothing of it reached the engine");
    settled(&gateway).await;
}

/// A short body may expand, but no further than the limit, and all of it is accounted for.
#[tokio::test]
async fn bombs_are_refused() {
    let Fleet { mocks: [mut mock], gateway: _gateway, client } = alone(1, "").await;
    let blanks = [&br#"{"prompt":""#[..], &vec![b' '; 32 << 20], br#""}"#].concat();
    for (coding, bomb) in [
        ("gzip", gzip(&blanks)),
        ("deflate", zlib(&blanks)),
        ("deflate", deflate(&blanks)),
        ("zstd", zstd(&blanks)),
        ("br", bytes(BROTLI_BOMB)),
    ] {
        assert!(bomb.len() < 1 << 20);
        refused(&send(&client, COMPLETIONS, coding, bomb).await, 413, "body_too_long");
    }
    assert!(mock.seen.try_recv().is_err());
    // Without room for it, it is not decoded.
    let limits = "[limits]\nbody_bytes = 20000000\nbody_memory_bytes = 20000000\n";
    let small = start(&format!("{limits}{}", plain_model(&mock, 1))).await;
    let most = [&br#"{"prompt":""#[..], &vec![b' '; 17 << 20], br#""}"#].concat();
    let client = Client::data(&small);
    refused(&send(&client, COMPLETIONS, "gzip", gzip(&most)).await, 503, "body_memory");
    // Memory is returned in every case.
    let some = [&br#"{"prompt":""#[..], &vec![b' '; 5 << 20], br#""}"#].concat();
    for _ in 0..5 {
        refused(&send(&client, COMPLETIONS, "gzip", gzip(&most)).await, 503, "body_memory");
        assert_eq!(send(&client, COMPLETIONS, "gzip", gzip(&some)).await.status, 200);
        assert_eq!(mock.next().await.body, some);
    }
    settled(&small).await;
}

fn wide<const BYTES: usize>(text: &str, unit: impl Fn(u32) -> [u8; BYTES], mark: bool) -> Vec<u8> {
    let marked = if mark { format!("\u{feff}{text}") } else { text.to_owned() };
    match BYTES {
        2 => marked.encode_utf16().flat_map(|code| unit(u32::from(code))).collect(),
        _ => marked.chars().flat_map(|code| unit(u32::from(code))).collect(),
    }
}

/// Bodies decode as in Python's parser, which engines use.
#[tokio::test]
async fn other_encodings_of_unicode_are_read() {
    let mut mock = canned(1);
    let sections = "extra_routes = [\"/v1/score\"]";
    let file = crate::support::files::File::new(sections, &plain_model(&mock, 1));
    let gateway = file.start().await;
    gateway.wait_ready().await;
    let client = Client::data(&gateway);
    let text = "{\"model\":\"tiny\",\"prompt\":\"é 😀\"}";
    let (le2, be2) = (|code: u32| (code as u16).to_le_bytes(), |code: u32| (code as u16).to_be_bytes());
    let mut bodies = vec![format!("\u{feff}{text}").into_bytes()];
    for mark in [false, true] {
        bodies.extend([wide(text, le2, mark), wide(text, be2, mark)]);
        bodies.extend([wide(text, u32::to_le_bytes, mark), wide(text, u32::to_be_bytes, mark)]);
    }
    for path in [COMPLETIONS, "/v1/score"] {
        for body in &bodies {
            assert_eq!(client.post(path, body.clone()).await.status, 200, "{path}, {body:x?}");
            assert_eq!(mock.next().await.body, text.as_bytes(), "{path}");
        }
        let zipped = send(&client, path, "gzip", gzip(&bodies[3])).await;
        assert_eq!((zipped.status, &mock.next().await.body[..]), (200, text.as_bytes()));
        for pinned in ["{\"routed_dp_rank\":0,\"a\":1}", "{ \"a\" : \"\u{feff}\" }"] {
            assert_eq!(client.post(path, wide(pinned, le2, true)).await.status, 200);
            let seen = mock.next().await.json();
            assert_eq!(seen.as_object().unwrap().len(), 1, "{seen}");
        }
        for broken in [
            &b"\xff\xfe{\x00\"\x00}"[..],
            b"\xff\xfe{\x00\"\x00\x00\xd8\"\x00:\x001\x00}\x00",
            b"{\x00\x00\x00\x00\x00\x11\x00}\x00\x00\x00",
            b"\xef\xbb\xbf\xef\xbb\xbf{}",
        ] {
            let answer = client.post(path, broken.to_vec()).await;
            assert!(answer.status == 400 || path != COMPLETIONS, "{broken:x?}: {answer:?}");
            if answer.status == 200 {
                mock.next().await;
            }
        }
    }
    // Non-JSON bodies pass unchanged on routes whose bodies only the engine understands.
    let sound = b"\x00\x00\x00 ftypisom\x00\x00\x02\x00".to_vec();
    assert_eq!(client.call(Method::POST, "/v1/score", &[("x-semmoe-model", "tiny")], sound.clone()).await.status, 200);
    assert_eq!(mock.next().await.body, sound);
    settled(&gateway).await;
}
