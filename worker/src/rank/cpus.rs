//! CPUs to which a rank's computing threads are pinned.

use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A set of CPUs: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// Reasons why CPUs are unusable.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The text is not a list of CPUs.
    #[error("'{found}' is not a list of CPUs below {}: expected numbers and ranges such as 0-3,8", CpuSet::MAX_CPU)]
    Syntax {
        /// The text.
        found: String,
    },
    /// This process may not use the CPU.
    #[error("CPU {cpu} does not exist, or is not available to this process")]
    NotAllowed {
        /// The processor.
        cpu: usize,
    },
    /// The operating system refused.
    #[error("cannot pin threads to CPUs: {source}")]
    System {
        /// The cause.
        source: std::io::Error,
    },
}

impl FromStr for CpuList {
    type Err = CpuError;

    fn from_str(text: &str) -> Result<Self, CpuError> {
        let syntax = || CpuError::Syntax { found: text.chars().take(100).collect() };
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|cpu| *cpu < CpuSet::MAX_CPU);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = number(first).zip(number(last)).ok_or_else(syntax)?;
            if first > last {
                return Err(syntax());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self(cpus))
    }
}

impl CpuList {
    /// Checks that this process may use all of the CPUs.
    pub(super) fn check(&self) -> Result<(), CpuError> {
        let allowed = sched_getaffinity(None).map_err(|error| CpuError::System { source: error.into() })?;
        match self.0.iter().find(|cpu| !allowed.is_set(**cpu)) {
            None => Ok(()),
            Some(cpu) => Err(CpuError::NotAllowed { cpu: *cpu }),
        }
    }

    /// Pins the calling thread, and those that it starts later, to these CPUs.
    pub(super) fn pin(&self) -> Result<(), CpuError> {
        let mut set = CpuSet::new();
        self.0.iter().for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).map_err(|error| CpuError::System { source: error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_nonsense_is_refused() {
        let list = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(list("3").unwrap(), [3]);
        assert_eq!(list("0-2, 8,1").unwrap(), [0, 1, 2, 8]);
        for wrong in ["", "a", "3-1", "-1", "1-", "1,,2", "1024", "0-99999999999"] {
            assert!(list(wrong).unwrap_err().to_string().contains(&format!("'{wrong}' is not a list")), "{wrong}");
        }
    }

    #[test]
    fn a_thread_is_kept_where_it_was_told_and_its_children_too() {
        let allowed = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        let outcome = std::thread::spawn(move || {
            let list = CpuList(vec![cpu]);
            list.check().unwrap();
            list.pin().unwrap();
            std::thread::spawn(|| sched_getaffinity(None).unwrap()).join().unwrap()
        });
        let after = outcome.join().unwrap();
        assert!(after.is_set(cpu) && after.count() == 1);
        let absent = (0..CpuSet::MAX_CPU).find(|cpu| !allowed.is_set(*cpu)).unwrap();
        assert!(matches!(CpuList(vec![absent]).check(), Err(CpuError::NotAllowed { cpu }) if cpu == absent));
    }
}
