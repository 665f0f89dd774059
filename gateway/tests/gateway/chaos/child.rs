//! Engines as child processes, and faults inflicted on them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::engine::{Mode, PORT, READY, TEST};

/// One engine. Dropping it kills its process.
pub(super) struct Engine {
    pub(super) port: u16,
    running: Option<Running>,
}

struct Running {
    child: Child,
    orders: ChildStdin,
    reported: BufReader<ChildStdout>,
}

impl Engine {
    pub(super) fn start() -> Self {
        let mut engine = Self { port: 0, running: None };
        engine.restart();
        engine
    }

    /// Starts a new process on the old port; kills the old one if it still runs.
    pub(super) fn restart(&mut self) {
        self.kill();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env(PORT, self.port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let reported = BufReader::new(child.stdout.take().unwrap());
        let mut running = Running { child, orders, reported };
        self.port = running.until(READY).parse().unwrap();
        self.running = Some(running);
    }

    pub(super) fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }

    /// Returns once requests are handled this way.
    pub(super) fn behave(&mut self, mode: Mode) {
        let running = self.running.as_mut().unwrap();
        writeln!(running.orders, "{mode:?}").unwrap();
        let done = running.until("mode ");
        assert_eq!(done, format!("{mode:?}"));
    }

    /// Stops the process; its sockets stay open.
    pub(super) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub(super) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.running.as_ref().unwrap().child), signal).unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Running {
    /// The rest of the first line with this prefix; the test harness prints others.
    fn until(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.reported.read_line(&mut line).unwrap(), 0, "the engine ended before it said '{start}'");
            if let Some(rest) = line.trim_end().strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }
}
