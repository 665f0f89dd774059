//! Metrics of the process: its build, and its resource usage.
//!
//! They have the names that Prometheus' own libraries use, and are read on every scrape. Metrics that the system does
//! not provide are omitted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::labels::{Counter, Gauge};

type Bytes = Gauge<u64, AtomicU64>;

metrics! {
    /// Metrics of this process.
    struct Figures {
        cpu_seconds: Counter<f64, AtomicU64>, "process_cpu_seconds", "CPU time of the process";
        resident: Bytes, "process_resident_memory_bytes", "Resident memory of the process";
        virtual_memory: Bytes, "process_virtual_memory_bytes", "Virtual memory of the process";
        threads: Bytes, "process_threads", "Threads of the process";
        open_files: Bytes, "process_open_fds", "Open file descriptors";
        most_files: Bytes, "process_max_fds", "Maximum number of open file descriptors";
        started: Gauge<f64, AtomicU64>,
            "process_start_time_seconds", "Start time of the gateway, as Unix time in seconds";
    }
}

/// The process's metrics, without a prefix.
pub(super) struct ProcessMetrics {
    registry: Registry,
    figures: Figures,
}

/// Registers `semmoe_build_info`.
pub(super) fn register_build(registry: &mut Registry) {
    let features = if cfg!(feature = "kube") { "kube" } else { "" };
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    let mut labels = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("target", target)];
    labels.push(("features", features.to_owned()));
    registry.register("build", "Build information of this gateway", Info::new(labels));
}

impl Default for ProcessMetrics {
    fn default() -> Self {
        let (mut registry, figures) = (Registry::default(), Figures::default());
        figures.started.set(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));
        figures.most_files.set(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX));
        figures.register(&mut registry);
        Self { registry, figures }
    }
}

impl ProcessMetrics {
    /// Updates the process's metrics, and returns the registry to encode.
    pub(super) fn refreshed(&self) -> Option<&Registry> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().trim_end_matches(" kB").parse::<u64>().ok()
        };
        let figures = &self.figures;
        figures.resident.set(field("VmRSS")? << 10);
        figures.virtual_memory.set(field("VmSize")? << 10);
        figures.threads.set(field("Threads")?);
        // Exclude the descriptor that is reading the folder.
        let files = std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
        figures.open_files.set(files as u64);
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
        figures.cpu_seconds.inner().store(seconds.to_bits(), Ordering::Relaxed);
        Some(&self.registry)
    }
}
