//! The transport of a unit's data: the configured choice, and whether ranks can share memory.

use std::fmt;
use std::fs;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::str::FromStr;

use semmoe_ranks::BufferAddress;
use semmoe_tables::RankId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::RendezvousError;
use super::frame;
use super::patience::{Patience, unlimited};
use crate::ep::{ShmError, ShmMemory, UnknownName};

/// How ranks exchange data. All ranks of a unit must use the same setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransportChoice {
    /// Shared memory between ranks on the same host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory; ranks that cannot share it are rejected.
    Shm,
    /// TCP, even within one host.
    Tcp,
}

const NAMES: [(TransportChoice, &str); 3] =
    [(TransportChoice::Auto, "auto"), (TransportChoice::Shm, "shm"), (TransportChoice::Tcp, "tcp")];

impl FromStr for TransportChoice {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let known = NAMES.iter().find(|(_, name)| *name == text);
        known.map(|(choice, _)| *choice).ok_or_else(|| UnknownName::new(text, "a transport", "auto, shm or tcp"))
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(it, _)| it == self).map_or("", |(_, name)| *name))
    }
}

/// Identifies where a process runs. Processes with equal values can share memory: they run under the same boot of the
/// same machine, in the same PID namespace (memory is passed as a path under `/proc`) and network namespace (a rank
/// with its own is meant to use its network), and as the same user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host(String);

impl Host {
    /// Returns this process's location; `None` if the system does not report it. Processes with different `place`s do
    /// not share memory.
    pub(super) fn here(place: Option<&str>) -> Option<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).ok();
        let (processes, networks) = (namespace("pid")?, namespace("net")?);
        let user = rustix::process::geteuid().as_raw();
        let place = place.unwrap_or_default();
        Some(Self(format!("{} {} {} user {user} {place}", boot.trim(), processes.display(), networks.display())))
    }
}

/// Returns the reason that a rank cannot share memory with rank 0; `None` if it can.
pub(super) fn apart(rank: RankId, own: Option<&Host>, other: Option<&Host>) -> Option<String> {
    let same = own.is_some() && own == other;
    (!same).then(|| format!("rank {rank} differs from rank 0 in host, namespaces or user"))
}

/// Returns, for each rank, the lowest rank that it can share memory with; the rank itself if there is no other.
pub(super) fn host_leaders(choice: TransportChoice, hosts: &[Option<Host>]) -> Vec<u16> {
    let leader = |rank: usize| match (choice, &hosts[rank]) {
        (TransportChoice::Auto | TransportChoice::Shm, Some(host)) => {
            hosts.iter().position(|other| other.as_ref() == Some(host)).unwrap_or(rank)
        }
        _ => rank,
    };
    (0..hosts.len()).map(|rank| leader(rank) as u16).collect()
}

/// Memory shared by some ranks of the unit.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pub(crate) memory: ShmMemory,
    /// The ranks, ascending.
    pub(crate) ranks: Vec<usize>,
}

/// Parameters that the ranks of a host agree on before their leader creates the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryTerms {
    pub(super) choice: TransportChoice,
    pub(super) session: u64,
    /// See [`ShmMemory::create`].
    pub(super) elements: usize,
}

/// The address at which other processes find a leader's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MemoryAddress {
    pid: u32,
    fd: i32,
}

impl MemoryAddress {
    /// Attaches to the memory.
    fn open(self, world: usize, terms: MemoryTerms) -> Result<ShmMemory, ShmError> {
        let address = BufferAddress { pid: self.pid, fd: self.fd };
        let file = address.open().map_err(ShmError::new)?;
        ShmMemory::attach(&file, world, terms.elements, terms.session)
    }
}

/// Size limit of a message with a memory address.
const MAX_ADDRESS_BYTES: usize = 256;

/// A rank that is about to share memory with other ranks on its host, to which it has data links.
pub(super) struct Sharing<'a> {
    pub(super) rank: RankId,
    pub(super) links: &'a [Option<TcpStream>],
    pub(super) terms: MemoryTerms,
    pub(super) patience: &'a Patience,
}

impl Sharing<'_> {
    /// Sets up the memory shared by the ranks of this host, if there are several; the leader creates it and announces
    /// it over the data links. `leaders` is the result of [`host_leaders`], as sent by rank 0.
    ///
    /// # Errors
    /// If memory that must be shared cannot be set up, or a rank disconnects.
    pub(super) fn share(&self, leaders: &[u16]) -> Result<Option<SharedMemory>, RendezvousError> {
        let leader = leaders[self.rank.index()];
        let ranks: Vec<usize> = (0..leaders.len()).filter(|&other| leaders[other] == leader).collect();
        if ranks.len() == 1 {
            return Ok(None);
        }
        let memory = match self.rank.get() == leader {
            true => self.lead(&ranks)?,
            false => self.follow(RankId::new(leader), ranks.len())?,
        };
        Ok(memory.map(|memory| SharedMemory { memory, ranks }))
    }

    /// Creates the memory as the leader, and keeps the file open until all ranks have attached.
    fn lead(&self, ranks: &[usize]) -> Result<Option<ShmMemory>, RendezvousError> {
        let MemoryTerms { choice, session, elements } = self.terms;
        let made = match ShmMemory::create(ranks.len(), elements, session) {
            Ok(made) => Some(made),
            Err(error) if choice == TransportChoice::Auto => {
                tracing::info!(rank = %self.rank, "the ranks of this host fall back to TCP: {error}");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let address = made.as_ref().map(|(file, _)| MemoryAddress { pid: std::process::id(), fd: file.as_raw_fd() });
        let others = || ranks.iter().copied().filter(|&other| other != self.rank.index());
        for other in others() {
            self.send(RankId::new(other as u16), &address)?;
        }
        for other in others() {
            self.receive::<()>(RankId::new(other as u16))?;
        }
        Ok(made.map(|(_, memory)| memory))
    }

    fn follow(&self, leader: RankId, world: usize) -> Result<Option<ShmMemory>, RendezvousError> {
        let address = self.receive::<Option<MemoryAddress>>(leader)?;
        let memory = address.map(|address| address.open(world, self.terms)).transpose()?;
        self.send(leader, &())?;
        Ok(memory)
    }

    fn send<M: Serialize>(&self, to: RankId, message: &M) -> Result<(), RendezvousError> {
        frame::write(&mut self.data_link(to)?, message).map_err(|error| RendezvousError::broken_off(to, error))
    }

    fn receive<M: DeserializeOwned>(&self, from: RankId) -> Result<M, RendezvousError> {
        let stream = self.data_link(from)?;
        let received = frame::read(&mut self.patience.reader(stream), MAX_ADDRESS_BYTES);
        let received = received.map_err(|error| RendezvousError::broken_off(from, error))?;
        unlimited(stream)?;
        Ok(received)
    }

    fn data_link(&self, to: RankId) -> Result<&TcpStream, RendezvousError> {
        let stream = self.links.get(to.index()).and_then(Option::as_ref);
        stream.ok_or_else(|| RendezvousError::broken_off(to, "it has no data link"))
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
        assert_eq!(error, "'quic' is not a transport: expected auto, shm or tcp");
    }

    fn terms(choice: TransportChoice) -> MemoryTerms {
        MemoryTerms { choice, session: 9, elements: 8 }
    }

    #[test]
    fn ranks_of_a_host_have_its_lowest_rank_as_leader() {
        let [here, there] = ["here", "there"].map(|name| Some(Host(name.into())));
        let hosts = [here.clone(), there.clone(), here, None, there, None];
        for choice in [TransportChoice::Auto, TransportChoice::Shm] {
            assert_eq!(host_leaders(choice, &hosts), [0, 1, 0, 3, 1, 5]);
        }
        assert_eq!(host_leaders(TransportChoice::Tcp, &hosts), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn memory_is_found_under_its_address_and_only_in_its_session() {
        let (file, _memory) = ShmMemory::create(2, 8, 9).unwrap();
        let address = MemoryAddress { pid: std::process::id(), fd: file.as_raw_fd() };
        let auto = terms(TransportChoice::Auto);
        assert!(address.open(2, auto).is_ok());
        let other = MemoryTerms { session: 8, ..auto };
        assert!(address.open(2, other).unwrap_err().to_string().contains("belongs to another unit"));
        let gone = MemoryAddress { fd: 1 << 20, ..address };
        assert!(gone.open(2, auto).unwrap_err().to_string().contains("cannot open"));
    }

    /// Both ends of a link between ranks 0 and 1, each in its rank's list of links.
    fn links() -> [Vec<Option<TcpStream>>; 2] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [vec![None, Some(one)], vec![Some(listener.accept().unwrap().0), None]]
    }

    fn both_share(elements: usize, choice: TransportChoice) -> [Result<Option<SharedMemory>, RendezvousError>; 2] {
        let patience = Patience::new(std::time::Duration::from_secs(30), &crate::unit::Shutdown::default());
        let terms = MemoryTerms { elements, ..terms(choice) };
        let [first, second] = links();
        std::thread::scope(|scope| {
            let other = Sharing { rank: RankId::new(1), links: &second, terms, patience: &patience };
            let other = scope.spawn(move || other.share(&[0, 0]));
            let own = Sharing { rank: RankId::new(0), links: &first, terms, patience: &patience }.share(&[0, 0]);
            drop(first);
            [own, other.join().unwrap()]
        })
    }

    #[test]
    fn a_leader_that_there_is_not_is_an_error() {
        let patience = Patience::new(std::time::Duration::from_secs(30), &crate::unit::Shutdown::default());
        let [_first, second] = links();
        let (rank, terms) = (RankId::new(1), terms(TransportChoice::Auto));
        let error = Sharing { rank, links: &second, terms, patience: &patience }.share(&[9, 9]).unwrap_err();
        assert!(error.to_string().contains("rank 9 disconnected"), "{error}");
    }

    #[test]
    fn a_leader_without_memory_leaves_its_host_to_tcp_unless_it_must_share() {
        for shared in both_share(8, TransportChoice::Auto) {
            assert_eq!(shared.unwrap().unwrap().ranks, [0, 1]);
        }
        let too_much = usize::MAX / 8;
        assert!(both_share(too_much, TransportChoice::Auto).iter().all(|shared| matches!(shared, Ok(None))));
        let [own, other] = both_share(too_much, TransportChoice::Shm);
        assert!(own.unwrap_err().to_string().contains("ranks without shared memory need --transport tcp"));
        assert!(other.unwrap_err().to_string().contains("rank 0 disconnected"));
    }

    #[test]
    fn two_processes_of_one_place_know_it() {
        let here = Host::here(None);
        assert!(here.is_some());
        assert_eq!(apart(RankId::new(1), here.as_ref(), Host::here(None).as_ref()), None);
        assert!(Host::here(Some("a")) != Host::here(Some("b")));
        let other = Some(Host("elsewhere".into()));
        for (own, other) in [(&here, &other), (&here, &None), (&None, &None)] {
            assert!(apart(RankId::new(3), own.as_ref(), other.as_ref()).is_some_and(|why| why.contains("rank 3")));
        }
    }
}
