//! Memory available to this process, as reported by Linux.

use std::fs;
use std::path::Path;

/// Returns the bytes available on the machine or in the control group, whichever is smaller, or `None` if neither is
/// known.
pub(crate) fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| machine_bytes(&text));
    let group = group_bytes(Path::new("/sys/fs/cgroup"));
    machine.into_iter().chain(group).min()
}

/// Returns the reason for refusing a move that needs `needed` more bytes, or `None` if they are available or the
/// available memory is unknown.
pub(crate) fn shortage(needed: u64, available: Option<u64>) -> Option<String> {
    let available = available.filter(|available| *available < needed)?;
    Some(format!("moving the experts needs {needed} more bytes, but only {available} are available"))
}

fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the bytes left under a control group's (cgroup v2) memory limit, or `None` without a limit. The inactive
/// file cache counts as available because the kernel can reclaim it; it contains the checkpoint files once they are
/// loaded.
fn group_bytes(folder: &Path) -> Option<u64> {
    let text = |file: &str| fs::read_to_string(folder.join(file)).ok();
    let number = |file: &str| text(file)?.trim().parse::<u64>().ok();
    let (limit, current) = (number("memory.max")?, number("memory.current")?);
    let stat = text("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok());
    Some(limit.saturating_sub(current.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        assert_eq!(shortage(5, Some(5)), None);
        assert_eq!(shortage(5, None), None);
        let expected = "moving the experts needs 6 more bytes, but only 5 are available";
        assert_eq!(shortage(6, Some(5)).as_deref(), Some(expected));
    }

    #[test]
    fn the_least_limit_counts_and_nonsense_is_none() {
        assert_eq!(machine_bytes("MemTotal: 9 kB\nMemAvailable:     2048 kB\n"), Some(2048 * 1024));
        assert_eq!(machine_bytes("MemAvailable: x kB\n"), None);
        assert_eq!(machine_bytes(""), None);
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(group_bytes(folder.path()), None);
        fs::write(folder.path().join("memory.current"), "300\n").unwrap();
        fs::write(folder.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(group_bytes(folder.path()), None);
        fs::write(folder.path().join("memory.max"), "1000\n").unwrap();
        assert_eq!(group_bytes(folder.path()), Some(700));
        fs::write(folder.path().join("memory.stat"), "anon 100\ninactive_anon 7\ninactive_file 200\n").unwrap();
        assert_eq!(group_bytes(folder.path()), Some(900), "cached files are given back");
        fs::write(folder.path().join("memory.stat"), "inactive_file 5000\n").unwrap();
        assert_eq!(group_bytes(folder.path()), Some(1000), "never more than the limit");
    }
}
