//! A gateway in a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use semmoe_gateway::{Config, Gateway};

/// The configuration of the child; without it the test below does nothing.
const TOML: &str = "SEMMOE_HOSTILE_TOML";
/// The child's soft limit of open files.
const FILES: &str = "SEMMOE_HOSTILE_FILES";
const TEST: &str = "child::gateway_of_a_child_process";
const READY: &str = "ready ";

/// A gateway that serves in a child process. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    /// The child ends when this is closed.
    _orders: ChildStdin,
    _told: BufReader<ChildStdout>,
    pub(crate) data: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Process {
    /// With the default limits except for `toml`, which precedes the models.
    pub(crate) fn start(toml: &str, engine: SocketAddr) -> Self {
        Self::start_with(toml, engine, "policy = \"round_robin\"", None)
    }

    /// `model`: lines of the model. `files`: the limit of open files.
    pub(crate) fn start_with(toml: &str, engine: SocketAddr, model: &str, files: Option<u64>) -> Self {
        let toml = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nextra_routes = [\"/v1/score\"]\n{toml}\n\
             [[models]]\nname = \"tiny\"\n{model}\n\
             [[models.backends]]\nname = \"pod-a\"\nengine = \"openai\"\nurl = \"http://{engine}\"\n"
        );
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture", "--test-threads=1"]).env(TOML, toml);
        if let Some(files) = files {
            command.env(FILES, files.to_string());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take().unwrap();
        let mut reported = BufReader::new(child.stdout.take().unwrap());
        let ready = loop {
            let mut line = String::new();
            assert_ne!(reported.read_line(&mut line).unwrap(), 0, "the child ended before it was ready");
            if let Some(rest) = line.trim_end().split_once(READY) {
                break rest.1.to_owned();
            }
        };
        let (data, admin) = ready.split_once(' ').unwrap();
        let (data, admin) = (data.parse().unwrap(), admin.parse().unwrap());
        Self { child, _orders: orders, _told: reported, data, admin }
    }

    /// Bytes of memory that the process holds now.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Peak memory of the process.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kilobytes = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
        kilobytes.unwrap().parse::<u64>().unwrap() << 10
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The work of the child process.
#[test]
fn gateway_of_a_child_process() {
    let Ok(toml) = std::env::var(TOML) else { return };
    if let Some(files) = std::env::var(FILES).ok().map(|files| files.parse().unwrap()) {
        let resource = rustix::process::Resource::Nofile;
        let limit = rustix::process::Rlimit { current: Some(files), maximum: Some(files) };
        rustix::process::setrlimit(resource, limit).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let gateway = Gateway::start(Config::from_toml(&toml, Path::new("")).unwrap()).await.unwrap();
        gateway.wait_ready().await;
        #[allow(clippy::print_stdout, reason = "the parent reads it")]
        {
            println!("{READY}{} {}", gateway.data_addr(), gateway.admin_addr());
        }
        let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        let _ = end.await;
    });
    std::process::exit(0);
}
