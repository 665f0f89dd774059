//! The files that describe the measured machine to `semmoe plan`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use semmoe_planner::calibration::{Accuracy, Calibration};
use semmoe_planner::cluster::{Measured, Operator, Sharing};
use semmoe_worker::TransportChoice;

use crate::error::CliError;

pub(super) const CLUSTER: &str = "cluster.toml";
pub(super) const CALIBRATION: &str = "calibration.json";
/// Nominal figures that the fitted constants scale. Only the products matter.
const NOMINAL: &str = "hbm_tb_per_second = 0.01\nbf16_tflops = 0.1\n";

/// The level name for a transport.
pub(super) fn level(carrier: TransportChoice) -> &'static str {
    if carrier == TransportChoice::Tcp { "loopback" } else { "shared memory" }
}

/// Checks that the directory is writable before measuring.
pub(super) fn check(folder: &Path) -> Result<(), CliError> {
    let writable = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    writable.map(drop).map_err(|error| CliError::cannot_write(folder, error))
}

/// Formats the cluster file for a machine with these collectives and this processor sharing.
pub(super) fn describe(tables: &[Measured], sharing: &[Sharing], ranks: u64, carrier: TransportChoice) -> String {
    let level = level(carrier);
    let line = tables.iter().rfind(|table| table.operator == Operator::PointToPoint).and_then(Measured::line);
    // A single rank uses no links, so these figures are arbitrary.
    let (gigabytes, microseconds) = line.map_or((1.0, 0.0), |line| (1e-9 / line.seconds_per_byte, line.latency * 1e6));
    let mut text = String::from("# Measured by `semmoe plan calibrate`.\n");
    let sharing: Vec<String> = sharing
        .iter()
        .map(|sharing| format!("{{ ranks = {}, slowdown = {:.4} }}", sharing.ranks, sharing.slowdown))
        .collect();
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "[gpu]\nname = {:?}\nmemory_gb = {:.3}\n{NOMINAL}source = \"measured\"\nsharing = [{}]\n\n\
         [[levels]]\nname = {level:?}\ncount = {ranks}\nbandwidth_gb_per_second = {gigabytes:.4}\nlatency_us = {microseconds:.3}\n",
        machine(),
        memory_gb(),
        sharing.join(", "),
    );
    for table in tables {
        let points: Vec<String> = table
            .points
            .points()
            .iter()
            .map(|[bytes, seconds]| format!("{{ bytes = {bytes:.0}, us = {:.3} }}", seconds * 1e6))
            .collect();
        let _ = write!(
            text,
            "\n[[measured]]\nlevel = {level:?}\noperator = \"{}\"\nranks = {}\npoints = [{}]\n",
            table.operator.name(),
            table.ranks,
            points.join(", ")
        );
    }
    text
}

/// Identifies this machine by its processor model and count, as a calibration is valid for one machine only.
pub(super) fn machine() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let name = name.map_or("an unknown processor", |(_, name)| name.trim());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{} ({processors} processors)", name.chars().take(40).collect::<String>())
}

/// The machine's memory in GB.
fn memory_gb() -> f64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"));
    kilobytes.and_then(|kilobytes| kilobytes.trim().parse::<f64>().ok()).map_or(1.0, |kilobytes| kilobytes * 1024e-9)
}

/// Writes both files, each atomically.
pub(super) fn write(folder: &Path, cluster: &str, calibration: &Calibration) -> Result<(), CliError> {
    let json = serde_json::to_string_pretty(calibration).map_err(CliError::failed)? + "\n";
    for (name, text) in [(CLUSTER, cluster), (CALIBRATION, &json)] {
        semmoe_tables::export::write(text, &folder.join(name)).map_err(CliError::failed)?;
    }
    Ok(())
}

/// The error figures.
pub(super) fn accuracy(calibration: &Calibration) -> String {
    let mut text = format!("{}\n", Accuracy::of(Some(calibration)));
    if let Some(links) = calibration.links {
        let (median, mean, rows) = (links.median * 100.0, links.mean * 100.0, links.rows);
        let _ =
            writeln!(text, "links, at sizes between table entries: off by {median:.0}% (mean {mean:.0}%, {rows} rows)");
    }
    text
}
