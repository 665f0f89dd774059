//! The ranks' network: this machine's loopback, or network namespaces joined by limited links.
//!
//! ```text
//!  rank 0 .. W-1 (a namespace each)          switch (a namespace)            this side
//!    mesh  --- veth, limited both ways ---  bridge mesh                      (data between ranks)
//!    near  --- veth, limited both ways ---  bridge near                      (within a node, where nodes have links)
//!    ctl   --- veth ----------------------  bridge ctl  --- veth ---  host   (HTTP, rendezvous, control)
//! ```
//!
//! A rank has one data address. Ranks of the same node are either routed over `near` or share one namespace, as
//! processes on one host would.
//!
//! Every name created here contains the process id. Dropping the value removes everything; [`clean`] removes what a
//! killed run left behind.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;

use crate::error::BenchError;

/// Prefix of namespace names; the process id follows.
const PREFIX: &str = "semmoe-e2e-";
/// The host's end of the control network; the process id follows (at most 15 characters in all).
const HOST_LINK: &str = "sme2e";
/// Jumbo frames, as in data centres: fewer packets for the same bytes.
const MTU: u32 = 9000;
/// How late, in seconds, the kernel's timer may fire before the link falls below its rate.
const TIMER: f64 = 50e-6;
/// Queue limit of a link in bytes: more than all sockets hold, so nothing is dropped.
const QUEUE: u64 = 256 << 20;

/// Where ranks run.
#[derive(Debug)]
pub enum Network {
    /// All on 127.0.0.1, without limits.
    Loopback,
    /// A namespace for each rank.
    Namespaces(Namespaces),
}

/// The division of ranks into nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Ranks of the unit.
    pub ranks: u16,
    /// Neighbouring ranks that form a node.
    pub width: u16,
    /// The link between ranks of a node.
    pub inside: Inside,
}

/// The link between the ranks of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inside {
    /// The mesh that all ranks share.
    Mesh,
    /// Separate links.
    Links,
    /// One host: shared memory, and unlimited links.
    Host,
}

impl Shape {
    /// Ranks that are not grouped into nodes.
    #[must_use]
    pub fn flat(ranks: u16) -> Self {
        Self { ranks, width: 1, inside: Inside::Mesh }
    }

    /// Ranks per namespace.
    fn together(self) -> u16 {
        if self.inside == Inside::Host { self.width } else { 1 }
    }
}

/// Namespaces of this process. Dropping removes them.
#[derive(Debug)]
pub struct Namespaces {
    id: u32,
    /// Third byte of both networks: 198.18.n.0/24 for control, 198.19.n.0/24 for data (set aside for
    /// benchmarks by RFC 2544).
    subnet: u8,
    shape: Shape,
    /// Namespaces to remove at the end.
    made: Vec<String>,
}

impl Network {
    /// The address on which a rank serves HTTP and joins the rendezvous.
    #[must_use]
    pub fn control(&self, rank: u16) -> IpAddr {
        match self {
            Self::Loopback => Ipv4Addr::LOCALHOST.into(),
            Self::Namespaces(namespaces) => namespaces.address(18, rank).into(),
        }
    }

    /// The rank's data address, if it has a separate one.
    #[must_use]
    pub fn data(&self, rank: u16) -> Option<IpAddr> {
        match self {
            Self::Loopback => None,
            Self::Namespaces(namespaces) => Some(namespaces.address(19, rank).into()),
        }
    }

    /// A command that runs `program` where `rank` lives.
    #[must_use]
    pub fn command(&self, rank: u16, program: &Path) -> tokio::process::Command {
        match self {
            Self::Loopback => tokio::process::Command::new(program),
            Self::Namespaces(namespaces) => {
                let mut command = tokio::process::Command::new("ip");
                // ip execs the program, so the process id is the rank's.
                command.args(["netns", "exec", &namespaces.place_of(rank)]).arg(program);
                command
            }
        }
    }

    /// Limits every rank's link to this many bits per second in each direction, or lifts the limit. The ranks of one
    /// host share a link of proportionally higher rate.
    ///
    /// # Errors
    /// There are no links, or `tc` fails.
    pub fn limit(&self, bits_per_second: Option<u64>) -> Result<(), BenchError> {
        let of_all =
            |namespaces: &Namespaces| bits_per_second.map(|bits| bits * u64::from(namespaces.shape.together()));
        match (self, bits_per_second) {
            (Self::Namespaces(namespaces), _) => namespaces.limit("mesh", of_all(namespaces)),
            (Self::Loopback, None) => Ok(()),
            (Self::Loopback, Some(_)) => Err(BenchError::failed("there are no links to limit on loopback")),
        }
    }

    /// Limits the links inside nodes to this many bits per second in each direction, or lifts the limit.
    ///
    /// # Errors
    /// Nodes have no links of their own, or `tc` fails.
    pub fn limit_inside(&self, bits_per_second: Option<u64>) -> Result<(), BenchError> {
        match self {
            Self::Namespaces(namespaces) if namespaces.shape.inside == Inside::Links => {
                namespaces.limit("near", bits_per_second)
            }
            _ => Err(BenchError::failed("there are no links inside nodes to limit")),
        }
    }
}

impl Namespaces {
    /// Creates the namespaces with unlimited links.
    ///
    /// # Errors
    /// Nodes that do not divide the ranks; no root, or no `ip`.
    pub fn create(shape: Shape) -> Result<Self, BenchError> {
        if shape.width == 0 || !shape.ranks.is_multiple_of(shape.width) {
            return Err(BenchError::input(format!(
                "{} ranks per node do not divide {} ranks",
                shape.width, shape.ranks
            )));
        }
        let addresses = output("ip", &["-4", "-o", "address", "show"])
            .map_err(|error| BenchError::NoNamespaces { cause: error.to_string() })?;
        let id = std::process::id();
        let subnet = free_subnet(&addresses, (id % 256) as u8)
            .ok_or_else(|| BenchError::failed("every network of 198.18.0.0/16 is in use"))?;
        let mut namespaces = Self { id, subnet, shape, made: Vec::new() };
        let switch = namespaces.switch();
        namespaces.add(&switch).map_err(|error| BenchError::NoNamespaces { cause: error.to_string() })?;
        namespaces.build(&switch)?;
        Ok(namespaces)
    }

    fn build(&mut self, switch: &str) -> Result<(), BenchError> {
        for bridge in ["mesh", "near", "ctl"] {
            ip(&["-n", switch, "link", "add", bridge, "type", "bridge"])?;
            ip(&["-n", switch, "link", "set", bridge, "up"])?;
        }
        let host = self.host_link();
        ip(&["link", "add", &host, "type", "veth", "peer", "name", "host", "netns", switch])?;
        ip(&["-n", switch, "link", "set", "host", "master", "ctl", "up"])?;
        ip(&["address", "add", &format!("198.18.{}.254/24", self.subnet), "dev", &host])?;
        ip(&["link", "set", &host, "up"])?;
        for place in 0..self.shape.ranks / self.shape.together() {
            let name = self.place(place);
            self.add(&name)?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
            self.link(place, "mesh", Some(19))?;
            self.link(place, "ctl", Some(18))?;
            if self.shape.inside == Inside::Links {
                self.link(place, "near", None)?;
                self.route_inside(place)?;
            }
        }
        Ok(())
    }

    /// Links a namespace to the bridge of the same name and assigns its ranks' addresses there.
    fn link(&self, place: u16, link: &str, second: Option<u8>) -> Result<(), BenchError> {
        let (name, switch, port) = (self.place(place), self.switch(), format!("{link}{place}"));
        let mtu = MTU.to_string();
        let frames: &[&str] = if link == "ctl" { &[] } else { &["mtu", &mtu] };
        let ends = [&["-n", &name, "link", "add", link][..], frames, &["type", "veth", "peer", "name", &port], frames];
        ip(&[&ends.concat()[..], &["netns", &switch]].concat())?;
        ip(&["-n", &switch, "link", "set", &port, "master", link, "up"])?;
        let ranks = place * self.shape.together()..(place + 1) * self.shape.together();
        for (second, rank) in second.into_iter().flat_map(|second| ranks.clone().map(move |rank| (second, rank))) {
            let address = format!("{}/24", self.address(second, rank));
            ip(&["-n", &name, "address", "add", &address, "dev", link])?;
        }
        ip(&["-n", &name, "link", "set", link, "up"])
    }

    /// Routes to the other ranks of a rank's node.
    fn route_inside(&self, rank: u16) -> Result<(), BenchError> {
        let (name, own) = (self.place(rank), self.address(19, rank).to_string());
        let first = rank / self.shape.width * self.shape.width;
        for peer in (first..first + self.shape.width).filter(|peer| *peer != rank) {
            let to = format!("{}/32", self.address(19, peer));
            ip(&["-n", &name, "route", "add", &to, "dev", "near", "src", &own])?;
        }
        Ok(())
    }

    fn limit(&self, link: &str, bits_per_second: Option<u64>) -> Result<(), BenchError> {
        let switch = self.switch();
        for place in 0..self.shape.ranks / self.shape.together() {
            let (name, port) = (self.place(place), format!("{link}{place}"));
            for (namespace, device) in [(&name, link), (&switch, &port[..])] {
                match bits_per_second {
                    Some(bits) => {
                        let (rate, burst, queue) = (format!("{bits}bit"), burst(bits).to_string(), QUEUE.to_string());
                        let limit = ["tbf", "rate", &rate, "burst", &burst, "limit", &queue];
                        let at = ["-n", namespace, "qdisc", "replace", "dev", device, "root"];
                        output("tc", &[&at[..], &limit].concat())?;
                    }
                    None => {
                        // Restores the default discipline, which has no limit. There may be none to remove.
                        let shown = output("tc", &["-n", namespace, "qdisc", "show", "dev", device, "root"])?;
                        if shown.contains("tbf") {
                            output("tc", &["-n", namespace, "qdisc", "del", "dev", device, "root"])?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str) -> Result<(), BenchError> {
        ip(&["netns", "add", name])?;
        self.made.push(name.to_owned());
        Ok(())
    }

    /// The namespace of a rank.
    fn place_of(&self, rank: u16) -> String {
        self.place(rank / self.shape.together())
    }

    fn place(&self, place: u16) -> String {
        format!("{PREFIX}{}-r{place}", self.id)
    }

    fn switch(&self) -> String {
        format!("{PREFIX}{}-sw", self.id)
    }

    fn host_link(&self) -> String {
        format!("{HOST_LINK}{}", self.id)
    }

    fn address(&self, second: u8, rank: u16) -> Ipv4Addr {
        Ipv4Addr::new(198, second, self.subnet, 1 + rank as u8)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // Deleting one end of a link deletes the other. Failures are ignored here; `--clean` removes leftovers.
        for name in self.made.iter().rev() {
            let _ = ip(&["netns", "del", name]);
        }
        let _ = ip(&["link", "del", &self.host_link()]);
    }
}

/// Removes the namespaces of processes that have exited and returns their names.
///
/// # Errors
/// No `ip`, or a namespace that cannot be removed.
pub fn clean() -> Result<Vec<String>, BenchError> {
    let listed = output("ip", &["netns", "list"])?;
    let dead = |id: &u32| !Path::new(&format!("/proc/{id}")).exists();
    let mut removed = Vec::new();
    for name in listed.lines().filter_map(|line| line.split_whitespace().next()) {
        if let Some(id) = owner(name).filter(dead) {
            ip(&["netns", "del", name])?;
            let _ = ip(&["link", "del", &format!("{HOST_LINK}{id}")]);
            removed.push(name.to_owned());
        }
    }
    Ok(removed)
}

/// The process that created a namespace of this name.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

/// The first n, cyclically from `first`, for which no address 198.18.n.x is in use.
fn free_subnet(addresses: &str, first: u8) -> Option<u8> {
    let is_free = |n: &u8| !addresses.contains(&format!(" 198.18.{n}."));
    (0..=255).map(|step| first.wrapping_add(step)).find(is_free)
}

/// The burst in bytes that a link may send after a pause: two frames, plus what a late timer must make up for.
fn burst(bits_per_second: u64) -> u64 {
    2 * u64::from(MTU + 18) + (bits_per_second as f64 / 8.0 * TIMER) as u64
}

fn ip(arguments: &[&str]) -> Result<(), BenchError> {
    output("ip", arguments).map(drop)
}

/// Runs a short program to its end.
fn output(program: &str, arguments: &[&str]) -> Result<String, BenchError> {
    let command = || format!("{program} {}", arguments.join(" "));
    let failed = |cause: String| BenchError::Command { command: command(), cause };
    let done = Command::new(program).args(arguments).output().map_err(|error| failed(error.to_string()))?;
    if !done.status.success() {
        let words = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        return Err(failed(if words.is_empty() { done.status.to_string() } else { words }));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_in_use_is_passed_over() {
        let addresses = "1: lo inet 127.0.0.1/8\n2: x inet 198.18.255.1/24\n3: y inet 198.18.0.254/24\n";
        assert_eq!(free_subnet(addresses, 254), Some(254));
        assert_eq!(free_subnet(addresses, 255), Some(1));
        let all: String = (0..=255).map(|n| format!("x inet 198.18.{n}.9/24\n")).collect();
        assert_eq!(free_subnet(&all, 7), None);
        // 198.18.1 is not 198.18.12.
        assert_eq!(free_subnet("x inet 198.18.12.1/24", 1), Some(1));
    }

    #[test]
    fn only_namespaces_of_this_program_have_an_owner() {
        for (name, expected) in [
            ("semmoe-e2e-123-r0", Some(123)),
            ("semmoe-e2e-123-sw", Some(123)),
            ("semmoe-e2e-x-sw", None),
            ("semmoe-e2e-123", None),
            ("other-e2e-123-r0", None),
            ("", None),
        ] {
            assert_eq!(owner(name), expected, "{name}");
        }
    }

    #[test]
    fn a_burst_holds_frames_and_a_late_timer() {
        assert_eq!(burst(0), 18_036);
        assert_eq!(burst(8_000_000_000), 18_036 + 50_000);
    }

    #[test]
    fn failures_name_the_command() {
        let error = output("ip", &["netns", "del", "semmoe-e2e-none-here"]).unwrap_err().to_string();
        assert!(error.starts_with("ip netns del semmoe-e2e-none-here failed: "), "{error}");
        let error = output("no-such-program", &["x"]).unwrap_err().to_string();
        assert!(error.starts_with("no-such-program x failed: "), "{error}");
    }
}
