//! `semmoe serve` and a supervisor's signals: running requests finish and the exit code is 0; a second signal stops it
//! at once.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use semmoe_mock_engine::{Mock, canned};

use crate::support::{semmoe, signal};

/// An engine with one rank whose answers wait until they are released.
fn engine() -> Mock {
    let mock = canned(1);
    mock.behave("late");
    mock
}

struct Served {
    child: Child,
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve_command(engine: &Mock) -> Served {
    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("semmoe.toml");
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[drain]\ndelay_seconds = 0\ngrace_seconds = 60\n\
         [[models]]\nname = \"m\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"a\"\nengine = \"sglang\"\nurl = \"{}\"\n",
        engine.url()
    );
    std::fs::write(&config, text).expect("written");
    let mut child = semmoe(&["serve", "--config"])
        .arg(&config)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("ready: http://").unwrap_or_else(|| panic!("{line}")).to_owned();
    Served { child, address }
}

fn ask(served: &Served) -> std::thread::JoinHandle<String> {
    let mut stream = TcpStream::connect(&served.address).expect("it listens");
    stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").expect("sent");
    std::thread::spawn(move || {
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    })
}

#[test]
fn a_signal_lets_requests_finish_and_ends_with_0() {
    let mut engine = engine();
    let mut served = serve_command(&engine);
    let answer = ask(&served);
    engine.seen.blocking_recv().expect("the engine is asked");
    signal("-TERM", served.child.id());
    while TcpStream::connect(&served.address).is_ok() {
        std::thread::yield_now();
    }
    assert!(served.child.try_wait().expect("our child").is_none(), "it waits for the request");
    engine.release(1);
    assert!(answer.join().expect("no panic").starts_with("HTTP/1.1 200"));
    assert_eq!(served.child.wait().expect("our child").code(), Some(0));
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let mut engine = engine();
    let mut served = serve_command(&engine);
    let answer = ask(&served);
    engine.seen.blocking_recv().expect("the engine is asked");
    signal("-TERM", served.child.id());
    while TcpStream::connect(&served.address).is_ok() {
        std::thread::yield_now();
    }
    signal("-TERM", served.child.id());
    assert_eq!(served.child.wait().expect("our child").code(), Some(130));
    assert_eq!(answer.join().expect("no panic"), "");
}
