//! Pins and routers' fields from clients, in every spelling that an engine would read.

use crate::child::Process;
use crate::engine::Engine;
use crate::wire;

async fn post(process: &Process, path: &str, lines: &str, body: &[u8]) -> String {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{lines}content-length: {}\r\n\r\n",
        body.len()
    );
    wire::exchange(process.data, &[head.as_bytes(), body].concat()).await
}

/// Bodies that Python's parser accepts as an object are parsed here too, or rejected, on extra routes as on fixed ones.
#[tokio::test]
async fn no_pin_passes_in_another_encoding() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    let pin = "{\"data_parallel_rank\":1}";
    let little = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let big = |text: &str| text.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<u8>>();
    let wide = |text: &str| text.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect::<Vec<u8>>();
    let refused = [
        ("nested deep", [&b"{\"a\":"[..], &[b'['; 600], &[b']'; 600], b",\"data_parallel_rank\":1}"].concat()),
        ("cut off", b"{\"data_parallel_rank\":1".to_vec()),
        ("UTF-16, cut off", little(&pin[..pin.len() - 1])),
        ("UTF-16 and a half", [little(pin), vec![b' ']].concat()),
        (
            "UTF-16 with half a character",
            [little("{\"a\":\""), vec![0, 0xd8], little("\",\"data_parallel_rank\":1}")].concat(),
        ),
    ];
    for path in ["/v1/score", "/v1/chat/completions"] {
        for (name, body) in &refused {
            let answer = post(&process, path, "", body).await;
            assert_eq!(wire::status(&answer), "400", "{path}, {name}: {answer}");
        }
    }
    assert!(engine.seen().is_empty(), "{:?}", engine.seen());
    for body in [
        r#"{"\u0064ata_parallel_rank":1}"#,
        r#"{"data_parallel_rank":null,"data_parallel_rank":1}"#,
        r#"{"routed_dp_rank":1,"disagg_prefill_dp_rank":1}"#,
        r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":1,"bootstrap_room":1,"kv_transfer_params":{}}"#,
    ] {
        for path in ["/v1/score", "/v1/chat/completions"] {
            let answer = post(&process, path, "", body.as_bytes()).await;
            assert_eq!(wire::status(&answer), "200", "{body}: {answer}");
            assert_eq!(engine.seen().last().unwrap().body, b"{}", "{path}: {body}");
        }
    }
    for (name, body) in [
        ("a byte order mark", [b"\xef\xbb\xbf", pin.as_bytes()].concat()),
        ("UTF-16", little(pin)),
        ("UTF-16, big endian", big(pin)),
        ("UTF-16 with a mark", little(&format!("\u{feff}{pin}"))),
        ("UTF-32", wide(pin)),
        ("UTF-32 with a mark", wide(&format!("\u{feff}{pin}"))),
    ] {
        for path in ["/v1/score", "/v1/chat/completions"] {
            let answer = post(&process, path, "", &body).await;
            assert_eq!(wire::status(&answer), "200", "{path}, {name}: {answer}");
            assert_eq!(engine.seen().last().unwrap().body, b"{}", "{path}, {name}");
        }
    }
    // Bodies other than a JSON object pass unchanged on extra routes.
    for body in [&b"\x1f\x8b\x08\0"[..], b"\0\0\0\x20ftypisom", b"[1,2]", b""] {
        assert_eq!(wire::status(&post(&process, "/v1/score", "", body).await), "200", "{body:?}");
        assert_eq!(engine.seen().last().unwrap().body, body);
    }
}

#[tokio::test]
async fn no_header_chooses_a_rank_or_a_host() {
    let engine = Engine::honest();
    let process = Process::start("", engine.address);
    let names = [
        "x-data-parallel-rank",
        "x_data_parallel_rank",
        "X-Data_Parallel-Rank",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "bootstrap_host",
        "bootstrap-room",
        "bootstrap_port",
        "x-override-rid",
        "x-override-bootstrap-host",
        "x_override_routed_dp_rank",
    ];
    let lines: String = names.iter().map(|name| format!("{name}: 1\r\n")).collect();
    for path in ["/v1/score", "/v1/chat/completions", "/generate"] {
        let answer = post(&process, path, &lines, b"{}").await;
        assert_eq!(wire::status(&answer), "200", "{path}: {answer}");
        let head = engine.seen().pop().unwrap().head;
        for name in names {
            assert!(!head.contains(&name.to_ascii_lowercase()), "{path}: {head}");
        }
    }
}
