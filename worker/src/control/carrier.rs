//! What carries the data of a unit: what its ranks were told, and whether they can share memory.

use std::fmt;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::str::FromStr;

use semmoe_tables::RankId;
use serde::{Deserialize, Serialize};

use crate::ep::{MAX_SHARED_WORLD, ShmError, ShmMemory};

/// How ranks exchange. All ranks of a unit must be given the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransportChoice {
    /// Shared memory if all ranks are on one host, else TCP.
    #[default]
    Auto,
    /// Shared memory; ranks that cannot share it are refused.
    Shm,
    /// TCP, also on one host.
    Tcp,
}

const NAMES: [(TransportChoice, &str); 3] =
    [(TransportChoice::Auto, "auto"), (TransportChoice::Shm, "shm"), (TransportChoice::Tcp, "tcp")];

/// Not a way to exchange.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{found}' is no transport: expected auto, shm or tcp")]
pub struct UnknownTransport {
    found: String,
}

impl FromStr for TransportChoice {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let found = || text.chars().take(100).collect();
        NAMES
            .iter()
            .find(|(_, name)| *name == text)
            .map(|(it, _)| *it)
            .ok_or_else(|| UnknownTransport { found: found() })
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(it, _)| it == self).map_or("", |(_, name)| *name))
    }
}

/// Where a process is. Two that are in the same place can share memory: one machine since its start, one namespace of
/// processes (memory is handed over by a path under `/proc`) and of networks (one that was given a network of its own is meant
/// to use it), one user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host(String);

impl Host {
    /// None where the system does not say.
    pub(super) fn here() -> Option<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).ok();
        let (processes, networks) = (namespace("pid")?, namespace("net")?);
        let user = rustix::process::geteuid().as_raw();
        Some(Self(format!("{} {} {} user {user}", boot.trim(), processes.display(), networks.display())))
    }
}

/// Why a rank shares no memory with rank 0, if so.
pub(super) fn apart(rank: RankId, own: Option<&Host>, other: Option<&Host>) -> Option<String> {
    let same = own.is_some() && own == other;
    (!same).then(|| format!("rank {rank} shares no host, namespaces and user with rank 0"))
}

/// Rank 0's memory, where other processes find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemoryAddress {
    pid: u32,
    fd: i32,
}

/// Rank 0's part of it; the file is to be kept until all have attached.
pub(super) struct Offer {
    pub(super) memory: ShmMemory,
    pub(super) address: MemoryAddress,
    _file: File,
}

impl MemoryAddress {
    /// Attaches to it.
    pub(super) fn open(self, world: u16, elements: usize, session: u64) -> Result<ShmMemory, ShmError> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(|error| ShmError::new(format_args!("{path} cannot be opened: {error}")))?;
        ShmMemory::attach(&file, world.into(), elements, session)
    }
}

/// Memory for the unit, if it is to exchange through memory: `apart` tells why some rank cannot.
pub(super) fn offer(
    choice: TransportChoice,
    world: u16,
    elements: usize,
    session: u64,
    apart: Option<String>,
) -> Result<Option<Offer>, ShmError> {
    let too_many = || {
        (usize::from(world) > MAX_SHARED_WORLD)
            .then(|| format!("{world} ranks are more than the {MAX_SHARED_WORLD} that share memory"))
    };
    let why_not = apart.or_else(too_many);
    let outcome = match (choice, why_not) {
        (TransportChoice::Tcp, _) => return Ok(None),
        (TransportChoice::Shm, Some(cause)) => return Err(ShmError::new(cause)),
        (_, None) => ShmMemory::create(world.into(), elements, session),
        (TransportChoice::Auto, Some(cause)) => Err(ShmError::new(cause)),
    };
    match outcome {
        Ok((file, memory)) => {
            let address = MemoryAddress { pid: std::process::id(), fd: file.as_raw_fd() };
            Ok(Some(Offer { memory, address, _file: file }))
        }
        Err(error) if choice == TransportChoice::Auto => {
            tracing::info!("the ranks exchange over TCP: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_names_and_others_are_refused() {
        for (choice, name) in NAMES {
            assert_eq!((name.parse(), choice.to_string().as_str()), (Ok(choice), name));
        }
        let error = "quic".parse::<TransportChoice>().unwrap_err().to_string();
        assert_eq!(error, "'quic' is no transport: expected auto, shm or tcp");
    }

    #[test]
    fn memory_is_offered_where_it_is_wanted_and_can_be() {
        let apart_rank = || Some("rank 2 is elsewhere".to_owned());
        let is_some = |choice, world, apart| offer(choice, world, 8, 1, apart).map(|offer| offer.is_some());
        assert_eq!(is_some(TransportChoice::Auto, 2, None), Ok(true));
        assert_eq!(is_some(TransportChoice::Auto, 2, apart_rank()), Ok(false));
        assert_eq!(is_some(TransportChoice::Auto, 65, None), Ok(false));
        assert_eq!(is_some(TransportChoice::Tcp, 2, None), Ok(false));
        assert!(is_some(TransportChoice::Shm, 65, None).unwrap_err().to_string().contains("65 ranks are more than"));
        assert!(
            is_some(TransportChoice::Shm, 2, apart_rank()).unwrap_err().to_string().contains("rank 2 is elsewhere")
        );
    }

    #[test]
    fn an_offer_is_found_under_its_address_and_only_in_its_session() {
        let made = offer(TransportChoice::Shm, 2, 8, 9, None).unwrap().unwrap();
        assert!(made.address.open(2, 8, 9).is_ok());
        assert!(made.address.open(2, 8, 8).unwrap_err().to_string().contains("not this unit's"));
        let gone = MemoryAddress { fd: 1 << 20, ..made.address };
        assert!(gone.open(2, 8, 9).unwrap_err().to_string().contains("cannot be opened"));
    }

    #[test]
    fn two_processes_of_one_place_know_it() {
        let here = Host::here();
        assert!(here.is_some());
        assert_eq!(apart(RankId::new(1), here.as_ref(), Host::here().as_ref()), None);
        let other = Some(Host("elsewhere".into()));
        for (own, other) in [(&here, &other), (&here, &None), (&None, &None)] {
            assert!(apart(RankId::new(3), own.as_ref(), other.as_ref()).is_some_and(|why| why.contains("rank 3")));
        }
    }
}
