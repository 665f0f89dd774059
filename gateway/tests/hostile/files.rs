//! File descriptors: idle clients use up their share, and everything else keeps working.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::PATIENCE;
use crate::child::Process;
use crate::engine::Engine;
use crate::wire;

const FILES: u64 = 256;
/// The clients' share of `FILES`: half of what is not reserved for the other listeners and for tables and logs.
const ACCEPTED: f64 = 32.0;

#[tokio::test]
async fn idle_clients_leave_room_for_operators() {
    let engine = Engine::honest();
    let process = Process::start_with("", engine.address, "policy = \"round_robin\"", Some(FILES));
    let mut idle = Vec::new();
    // More files than the process may have, or as many as the kernel accepts for a gateway that accepts no more.
    while idle.len() < FILES as usize + 20 {
        match tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(process.data)).await {
            Ok(connected) => idle.push(connected.unwrap()),
            Err(_) => break,
        }
    }
    assert!(idle.len() > ACCEPTED as usize);
    let accepted = async {
        // Each poll uses its own connection.
        while wire::metric(process.admin, "semmoe_open_connections ").await - 1.0 != ACCEPTED {}
    };
    tokio::time::timeout(PATIENCE, accepted).await.expect("as many are accepted as there is room for");
    for path in ["/readyz", "/metrics", "/admin/backends"] {
        let answer = wire::get(process.admin, path).await;
        assert_eq!(wire::status(&answer), "200", "{path}: {answer:.200}");
    }
    // Waiting clients are served when there is room.
    let mut last = idle.pop().unwrap();
    drop(idle);
    last.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let first = tokio::time::timeout(PATIENCE, last.read_u8()).await.expect("an answer in time");
    assert_eq!(first.unwrap(), b'H');
}
