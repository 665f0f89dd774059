//! Starts the built `semmoe` command as a user would, and stops it afterwards.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

/// The first start records and solves, which takes long on a busy machine.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// A hang fails the test; this is ample time to exit.
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// Name of the bundled model.
pub(crate) const MODEL: &str = "tiny-qwen3moe-15m";

/// A path inside the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The bundled model's directory.
pub(crate) fn model_dir() -> PathBuf {
    repository("assets").join(MODEL)
}

/// The command itself.
pub(crate) fn semmoe(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semmoe"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the command to completion.
pub(crate) fn run(args: &[&str]) -> Output {
    semmoe(args).output().expect("the command starts")
}

/// The output of a run, for a failing assertion.
pub(crate) fn describe(output: &Output) -> String {
    format!(
        "{}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The JSON document that a successful run printed.
pub(crate) fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", describe(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", describe(output)))
}

/// Tables in `folder` for the bundled model and four groups, solved from the recorded reference by Algorithm 1: valid,
/// with a lower LAR than those of the default solver, which takes seconds.
pub(crate) fn solved_tables(folder: &Path) -> PathBuf {
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let trace = text(&repository("tests/data/reference.trace.safetensors"));
    let (profile, tables) = (folder.join("p.profile.safetensors"), folder.join("t.tables.safetensors"));
    let built = run(&["profile", "build", &trace, "--out", &text(&profile)]);
    assert!(built.status.success(), "{}", describe(&built));
    let solve = ["solve", "--solver", "paper", "--groups", "4", "--profile", &text(&profile), "--out", &text(&tables)];
    let solved = run(&solve);
    assert!(solved.status.success(), "{}", describe(&solved));
    tables
}

/// Data folder shared by the tests of one file, so that profile and tables are made once.
pub(crate) fn shared_data() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("up-data");
    std::fs::create_dir_all(&folder).expect("a folder below target");
    folder
}

/// A running `semmoe up`.
pub(crate) struct Up {
    child: Child,
    /// Base URL from the ready line.
    pub(crate) url: String,
    /// Base URL of the admin listener.
    pub(crate) admin: String,
    stdout: mpsc::Receiver<String>,
    stderr: Option<std::thread::JoinHandle<String>>,
}

impl Up {
    /// Starts `up` on free ports and waits for its ready line.
    pub(crate) fn start(data: &Path, more: &[&str]) -> Self {
        let mut command = semmoe(&["up", "--port", "0", "--data"]);
        command.arg(data).args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("`up` starts");
        let stderr = child.stderr.take().expect("piped");
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(stderr).read_to_string(&mut text);
            text
        });
        let stdout = lines(child.stdout.take().expect("piped"));
        let mut up = Self { child, url: String::new(), admin: String::new(), stdout, stderr: Some(stderr) };
        loop {
            match up.stdout.recv_timeout(READY_TIMEOUT) {
                Ok(line) => {
                    if let Some(url) = line.strip_prefix("ready: ") {
                        url.clone_into(&mut up.url);
                    }
                    if let Some(url) = line.strip_prefix("admin: ") {
                        url.clone_into(&mut up.admin);
                        return up;
                    }
                }
                Err(error) => {
                    let _ = up.child.kill();
                    panic!("`up` was not ready ({error}); it said: {}", up.said());
                }
            }
        }
    }

    /// Process ids of the ranks, in the order in which they were started.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        let pid = self.child.id();
        let mut ranks = Vec::new();
        // A child belongs to the thread that started it.
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("Linux") {
            let children = task.expect("task").path().join("children");
            let text = std::fs::read_to_string(children).unwrap_or_default();
            ranks.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        ranks.sort_unstable();
        ranks
    }

    /// Sends SIGINT, as Ctrl-C does, waits for a successful exit and returns standard error.
    pub(crate) fn stop(self) -> String {
        signal("-INT", self.child.id());
        let (status, said) = self.wait();
        assert!(status.success(), "{status}: {said}");
        said
    }

    /// Waits for the process; returns its exit status and standard error.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let limit = Instant::now() + END_TIMEOUT;
        while self.child.try_wait().expect("a child of ours").is_none() {
            if Instant::now() > limit {
                let _ = self.child.kill();
                panic!("`up` did not exit within {END_TIMEOUT:?}; it said: {}", self.said());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = self.child.wait().expect("a child of ours");
        let said = self.said();
        (status, said)
    }

    fn said(&mut self) -> String {
        self.stderr.take().map(|thread| thread.join().unwrap_or_default()).unwrap_or_default()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // A no-op after `wait`; after a failed assertion it removes the process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rank processes without a gateway, started by hand as an operator would.
pub(crate) struct Ranks {
    unit: semmoe_worker::Ranks,
    /// Base URL of the unit.
    pub(crate) url: String,
    /// Kills its processes when dropped, also after a failed assertion.
    runtime: Runtime,
}

impl Ranks {
    /// Starts `world` ranks of the bundled model and waits until they serve.
    pub(crate) fn start(world: u16, tables: Option<&Path>) -> Self {
        Self::start_model(&model_dir(), world, tables)
    }

    /// Starts `world` ranks of the checkpoint `model` and waits until they serve.
    pub(crate) fn start_model(model: &Path, world: u16, tables: Option<&Path>) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), model, world, tables)
    }

    /// Starts `world` ranks of `model`, with rank 0's HTTP server at `listen`, and waits until they serve.
    pub(crate) fn start_at(listen: SocketAddr, model: &Path, world: u16, tables: Option<&Path>) -> Self {
        let more: Vec<&Path> = tables.into_iter().flat_map(|tables| [Path::new("--tables"), tables]).collect();
        Self::start_with(listen, model, world, &more)
    }

    /// Starts `world` ranks of `model` with more arguments.
    pub(crate) fn start_with(listen: SocketAddr, model: &Path, world: u16, more: &[impl AsRef<OsStr>]) -> Self {
        let command = |_| {
            let mut command = semmoe(&["worker", "--listen", &listen.to_string(), "--model"]);
            command.arg(model).args(more);
            Ok(command.into())
        };
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let started = semmoe_worker::Ranks::start(world, "127.0.0.1:0", READY_TIMEOUT, command);
        let unit = runtime.block_on(started).expect("ranks start");
        Self { url: unit.url.clone(), unit, runtime }
    }

    /// The process id of a rank.
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.unit.pids()[rank]
    }

    /// Waits for one rank to exit; returns its exit code, `None` if a signal killed it.
    pub(crate) fn wait(&mut self, rank: u16) -> Option<i32> {
        loop {
            let death = self.runtime.block_on(self.unit.died());
            if death.rank == rank {
                return death.exit_code();
            }
        }
    }

    /// Closes standard input and waits: every rank must exit with code 0.
    pub(crate) fn stop(self) {
        let ranks = self.unit.pids().len();
        let left = self.runtime.block_on(self.unit.stop());
        assert!(left.len() == ranks && left.iter().all(|death| death.exit_code() == Some(0)), "{left:?}");
    }
}

/// Sends a signal to one process that this test started, by pid.
pub(crate) fn signal(name: &str, pid: u32) {
    let status = Command::new("kill").args([name, &pid.to_string()]).status().expect("kill");
    assert!(status.success(), "kill {name} {pid}");
}

/// Whether the process exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

fn lines(output: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                // Keeps draining the pipe, so that the other side never blocks.
            }
        }
    });
    receive
}
