//! `semmoe keys`: its output is valid configuration, and the key that it generated is accepted by that gateway.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::support::{describe, run, semmoe};

fn hash(input: &[u8]) -> std::process::Output {
    let mut child = semmoe(&["keys", "hash", "team-b"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    // The child may refuse before it has read everything.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("ends")
}

#[test]
fn printed_lines_are_configuration() {
    let made = run(&["keys", "new", "team-a"]);
    assert!(made.status.success(), "{}", describe(&made));
    let text = String::from_utf8(made.stdout).expect("UTF-8");
    let (key, line) = text.trim().split_once('\n').expect("two lines");
    let key = key.strip_prefix("key: ").expect("the key");
    assert!(key.len() >= 64, "{} characters", key.len());
    let again = hash(format!("{key}\n").as_bytes());
    let again = String::from_utf8(again.stdout).expect("UTF-8");
    assert_eq!(again.trim().replace("team-b", "team-a"), line, "a line break is not part of the key");
    let toml = format!(
        "[auth]\nkeys = [{line}]\n[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n[[models.backends]]\nname = \"a\"\n\
         engine = \"sglang\"\nurl = \"http://127.0.0.1:1\"\n"
    );
    semmoe_gateway::Config::from_toml(&toml, Path::new("")).expect("a configuration");
    let other = run(&["keys", "new"]);
    assert!(!String::from_utf8_lossy(&other.stdout).contains(key), "keys are random");
}

#[test]
fn what_is_no_key_is_refused_and_not_repeated() {
    for input in [&b""[..], b" \n", b"two words", b"two\nlines", b"secret\xff", &[b'x'; 600]] {
        let output = hash(input);
        assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.starts_with("semmoe: ") && !said.contains("secret") && !said.contains("xxx"), "{said}");
    }
    assert_eq!(run(&["keys", "new", "a\"b"]).status.code(), Some(2));
}
