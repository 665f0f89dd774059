//! The ranks of a call and the memory they share.

use std::time::Duration;

use crate::error::LaunchError;
use crate::params::{Local, MAX_LOCAL, MAX_RANKS, Peers, SIGNAL_BYTES, TeamParams};

/// Memory on a device (or, for the shim, in this process).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Buffer {
    /// Address on the device.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

impl Buffer {
    /// Returns the part that starts at `offset`; empty if that is past the end.
    #[must_use]
    pub fn from_offset(self, offset: u64) -> Self {
        let bytes = self.bytes.saturating_sub(offset);
        Self { address: if bytes == 0 { 0 } else { self.address.wrapping_add(offset) }, bytes }
    }
}

/// P ranks that synchronise in every call, of which one launch runs some.
#[derive(Clone, Copy)]
pub struct Team {
    params: TeamParams,
    local: usize,
}

impl Team {
    /// - `signals` `[P]`: each rank's zeroed memory, which all ranks can write; at least [`SIGNAL_BYTES`]
    /// - `first_rank`: the rank that this launch runs, or the first of several that share a GPU
    /// - `reports` `[local]`: a zeroed word for each rank of the launch, in memory that the host can read after a trap
    /// - `timeout`: maximum time for which a rank waits for another
    ///
    /// # Errors
    /// If there are more ranks than [`MAX_RANKS`] (or [`MAX_LOCAL`] in the launch), memory is null, misaligned or too
    /// small, or the timeout is 0.
    pub fn new(
        signals: &[Buffer],
        first_rank: u32,
        reports: &[Buffer],
        timeout: Duration,
    ) -> Result<Self, LaunchError> {
        let ranks = in_range("ranks", signals.len() as u64, 1, MAX_RANKS as u64)?;
        let local = in_range("ranks of the launch", reports.len() as u64, 1, u64::from(ranks).min(MAX_LOCAL as u64))?;
        in_range("first rank", u64::from(first_rank), 0, u64::from(ranks - local))?;
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        if timeout_ns == 0 {
            return Err(LaunchError::OutOfRange { what: "timeout in ns", found: 0, least: 1, most: u64::MAX });
        }
        let mut params = TeamParams { ranks, first_rank, timeout_ns, report: [0; MAX_LOCAL], signals: [0; MAX_RANKS] };
        fill("signals", &mut params.signals, signals, SIGNAL_BYTES, 8)?;
        fill("report", &mut params.report, reports, 8, 8)?;
        Ok(Self { params, local: local as usize })
    }

    /// Creates a rank whose kernels do not wait for others, because the rows of all ranks are in its GPU's memory: see
    /// [`Team::new`].
    ///
    /// # Errors
    /// See [`Team::new`]; also if the rank is out of range.
    pub fn alone(
        ranks: usize,
        rank: usize,
        signals: Buffer,
        report: Buffer,
        timeout: Duration,
    ) -> Result<Self, LaunchError> {
        let rank = in_range("rank", rank as u64, 0, (ranks as u64).saturating_sub(1))?;
        let mut team = Self::new(&vec![signals; ranks.min(MAX_RANKS + 1)], rank, &[report], timeout)?;
        team.params.signals = [0; MAX_RANKS];
        team.params.signals[rank as usize] = signals.address;
        Ok(team)
    }

    /// P
    pub fn ranks(&self) -> usize {
        self.params.ranks as usize
    }

    /// Returns the number of ranks that one launch runs.
    pub fn local(&self) -> usize {
        self.local
    }

    /// Returns the first rank of the launch.
    pub fn first_rank(&self) -> usize {
        self.params.first_rank as usize
    }

    pub(crate) fn params(&self) -> TeamParams {
        self.params
    }

    /// Returns the address of one buffer per rank of the launch.
    pub(crate) fn locals(
        &self,
        what: &'static str,
        buffers: &[Buffer],
        bytes: u64,
        alignment: u64,
    ) -> Result<Local, LaunchError> {
        let mut list = [0; MAX_LOCAL];
        count(what, buffers.len(), self.local)?;
        fill(what, &mut list, buffers, bytes, alignment)?;
        Ok(list)
    }

    /// Returns the launch's ranks' addresses of an optional buffer; null without one.
    pub(crate) fn locals_or_null(
        &self,
        what: &'static str,
        buffers: Option<&[Buffer]>,
        bytes: u64,
    ) -> Result<Local, LaunchError> {
        buffers.map_or(Ok([0; MAX_LOCAL]), |buffers| self.locals(what, buffers, bytes, 4))
    }

    /// Returns the address of one buffer per rank.
    pub(crate) fn peers(
        &self,
        what: &'static str,
        buffers: &[Buffer],
        bytes: u64,
        alignment: u64,
    ) -> Result<Peers, LaunchError> {
        let mut list = [0; MAX_RANKS];
        count(what, buffers.len(), self.ranks())?;
        fill(what, &mut list, buffers, bytes, alignment)?;
        Ok(list)
    }

    /// Returns one number per rank of the launch, each at most `most`.
    pub(crate) fn counts(&self, what: &'static str, found: &[u64], most: u64) -> Result<[u32; MAX_LOCAL], LaunchError> {
        count(what, found.len(), self.local)?;
        let mut counts = [0; MAX_LOCAL];
        for (count, &found) in counts.iter_mut().zip(found) {
            *count = in_range(what, found, 0, most)?;
        }
        Ok(counts)
    }

    /// Returns the signals of the launch's ranks.
    pub(crate) fn local_signals(&self) -> Local {
        let mut list = [0; MAX_LOCAL];
        let first = self.first_rank();
        list[..self.local].copy_from_slice(&self.params.signals[first..first + self.local]);
        list
    }
}

/// Checks that a list has one item per rank.
pub(crate) fn count(what: &'static str, found: usize, expected: usize) -> Result<(), LaunchError> {
    if found == expected { Ok(()) } else { Err(LaunchError::Count { what, found, expected }) }
}

/// Stores the addresses of buffers in `list` after checking their size and alignment.
pub(crate) fn fill(
    what: &'static str,
    list: &mut [u64],
    buffers: &[Buffer],
    bytes: u64,
    alignment: u64,
) -> Result<(), LaunchError> {
    for (index, (slot, buffer)) in list.iter_mut().zip(buffers).enumerate() {
        let Buffer { address, bytes: found } = *buffer;
        if found < bytes {
            return Err(LaunchError::TooSmall { what, index, found, expected: bytes });
        }
        if address == 0 && bytes > 0 {
            return Err(LaunchError::Null { what, index });
        }
        if address % alignment != 0 {
            return Err(LaunchError::Misaligned { what, index, address, alignment });
        }
        *slot = address;
    }
    Ok(())
}

/// Checks that a number is in range and fits in 32 bits.
pub(crate) fn in_range(what: &'static str, found: u64, least: u64, most: u64) -> Result<u32, LaunchError> {
    match u32::try_from(found) {
        Ok(value) if (least..=most).contains(&found) => Ok(value),
        _ => Err(LaunchError::OutOfRange { what, found, least, most }),
    }
}
