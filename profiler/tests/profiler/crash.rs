//! A recording that was killed is resumed where it stopped.

use std::process::{Command, Stdio};

use crate::common::{ids_line, semmoe};
use semmoe_mock_engine::Fault;
use semmoe_profiler::{NoProgress, RecordOptions, record};

const URL: &str = "SEMMOE_TEST_RECORD_URL";
const DIRECTORY: &str = "SEMMOE_TEST_RECORD_DIRECTORY";

/// Not a test: the process that is killed.
#[tokio::test]
#[ignore = "run by the test below"]
async fn recorder() {
    let (url, directory) = (std::env::var(URL).unwrap(), std::env::var(DIRECTORY).unwrap());
    let directory = std::path::Path::new(&directory);
    let options = RecordOptions::new(
        semmoe_engines::Engine::Semmoe,
        url.parse().unwrap(),
        directory.join("prompts.jsonl"),
        directory.join("out.trace.safetensors"),
        "2026-01-02T03:04:05Z".into(),
    );
    record(RecordOptions { concurrency: 1, ..options }, &NoProgress, std::future::pending()).await.unwrap();
}

#[tokio::test]
async fn a_killed_recording_is_gone_on_with_and_counts_nothing_twice() {
    let mock = semmoe();
    mock.fault(100, Fault::Hang);
    let first = [ids_line(&[1]), ids_line(&[2, 2]), ids_line(&[3]), ids_line(&[100]), ids_line(&[4])];
    mock.lines(&first);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "crash::recorder"])
        .env(URL, mock.url.to_string())
        .env(DIRECTORY, mock.directory.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    mock.engine.hanging.notified().await;
    // SIGKILL.
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(mock.partial().exists() && !mock.out().exists());
    // As left by a crash in the middle of a write.
    let mut bytes = std::fs::read(mock.partial()).unwrap();
    bytes.truncate(bytes.len() - 1);
    std::fs::write(mock.partial(), bytes).unwrap();

    let report = mock.record(mock.lines(&[&first[..3], &first[4..]].concat())).await.unwrap();
    assert_eq!((report.requests, report.resumed, report.bad.len()), (4, 2, 0));
    let trace = mock.trace();
    let recorded: Vec<&[u32]> = trace.iter().map(|request| request.token_ids()).collect::<Vec<_>>();
    assert_eq!(recorded, [&[1][..], &[2, 2], &[3], &[4]]);
    assert_eq!([1, 2, 3, 4].map(|id| mock.engine.attempts(id)), [1, 1, 2, 1]);
    assert!(!mock.partial().exists());
}
