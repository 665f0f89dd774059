//! Backends found by SRV records: a nameserver on loopback gives the answers that the test sets, even invalid ones.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use semmoe_gateway::{Config, Gateway, Resolve, Resolved, Running};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::discovery::{FOUND, answers, backends, named, until};
use crate::support::files::File;
use crate::support::{Client, Mock, PATIENCE, canned, metric, settled};

const NAME: &str = "_http._tcp.engines.example";
const TOML: &str = "[[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n[[models.discovery]]\nname = \"pods\"\n\
                    srv = \"_http._tcp.engines.example.\"\nengine = \"sglang\"\nranks = 1\ninterval_seconds = 0.01\n";

/// A nameserver's answer to a question.
#[derive(Clone)]
enum DnsAnswer {
    /// Priority, target and port.
    Records(Vec<(u16, &'static str, u16)>),
    /// The valid answer, modified.
    Damaged(fn(&mut Vec<u8>)),
    /// A length prefix followed by fewer bytes.
    Cut,
    Closes,
}

/// A nameserver, and a resolver that maps the hosts `a.example`, `b.example`, ... to loopback.
struct Nameserver {
    address: SocketAddr,
    reported: Arc<Mutex<DnsAnswer>>,
}

impl Nameserver {
    async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let reported = Arc::new(Mutex::new(DnsAnswer::Records(Vec::new())));
        let say = Arc::clone(&reported);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let reported = say.lock().unwrap().clone();
                tokio::spawn(answer(stream, reported));
            }
        });
        Arc::new(Self { address, reported })
    }

    fn set(&self, reported: DnsAnswer) {
        *self.reported.lock().unwrap() = reported;
    }

    fn records(&self, records: &[(u16, &'static str, &Mock)]) {
        let of = |(priority, target, mock): &(u16, &'static str, &Mock)| (*priority, *target, mock.address.port());
        self.set(DnsAnswer::Records(records.iter().map(of).collect()));
    }
}

impl Resolve for Nameserver {
    fn resolve(&self, name: String) -> Resolved<'_> {
        Box::pin(async move {
            let (host, port) = name.split_once(".example.:").unwrap_or_else(|| panic!("{name}"));
            if host == "missing" {
                return Err(io::Error::other("no such host"));
            }
            Ok(vec![SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()))])
        })
    }

    fn nameservers(&self) -> io::Result<Vec<SocketAddr>> {
        Ok(vec![self.address])
    }
}

async fn answer(mut stream: TcpStream, reported: DnsAnswer) -> io::Result<()> {
    let mut question = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut question).await?;
    let labels: Vec<u8> =
        NAME.split('.').flat_map(|label| [&[label.len() as u8][..], label.as_bytes()].concat()).collect();
    assert_eq!(question[12..], [&labels[..], &[0, 0, 33, 0, 1]].concat(), "a question for SRV records");
    let records = match &reported {
        DnsAnswer::Records(records) => records.clone(),
        _ => vec![(0, "a", 1)],
    };
    let mut message = question;
    message[2] |= 0x80;
    message[7] = records.len() as u8;
    for (priority, target, port) in records {
        let target = [&[target.len() as u8][..], target.as_bytes(), b"\x07example\x00"].concat();
        // The owner is a pointer to the question's name.
        message.extend([0xc0, 12, 0, 33, 0, 1, 0, 0, 0, 0, 0, target.len() as u8 + 6]);
        message.extend([priority.to_be_bytes(), [0, 1], port.to_be_bytes()].concat());
        message.extend(target);
    }
    let mut length = message.len() as u16;
    match reported {
        DnsAnswer::Records(_) => {}
        DnsAnswer::Damaged(damage) => {
            damage(&mut message);
            length = message.len() as u16;
        }
        DnsAnswer::Cut => length += 9,
        DnsAnswer::Closes => return Ok(()),
    }
    stream.write_all(&[&length.to_be_bytes()[..], &message].concat()).await
}

async fn start(file: &File, nameserver: &Arc<Nameserver>) -> Running {
    let resolver: Arc<dyn Resolve> = Arc::<Nameserver>::clone(nameserver);
    Gateway::start_with(Config::load(&file.path()).unwrap(), resolver).await.unwrap()
}

#[tokio::test]
async fn backends_join_and_leave_with_the_records_and_their_ports() {
    let (a, b, c) = (canned(1), canned(1), canned(1));
    let nameserver = Nameserver::start().await;
    let gateway = start(&File::new("", TOML), &nameserver).await;
    answers(&gateway, "empty", 1.0).await;
    nameserver.records(&[(5, "a", &a), (5, "b", &b), (6, "spare", &c)]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    assert_eq!(Client::data(&gateway).post("/v1/completions", r#"{"model":"tiny"}"#).await.status, 200);
    // With the first ones gone, the others have the lowest priority number.
    nameserver.records(&[(6, "spare", &c)]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    assert_eq!(backends(&gateway).await, named(&[&c]));
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

/// A backend that is missing from an incomplete answer may still exist.
#[tokio::test]
async fn while_a_target_has_no_address_others_join_and_nobody_leaves() {
    let (a, b) = (canned(1), canned(1));
    let nameserver = Nameserver::start().await;
    nameserver.records(&[(0, "a", &a)]);
    let gateway = start(&File::new("", TOML), &nameserver).await;
    until(&gateway, FOUND, |found| found == 1.0).await;
    nameserver.records(&[(0, "missing", &a), (0, "b", &b)]);
    until(&gateway, FOUND, |found| found == 2.0).await;
    answers(&gateway, "incomplete", 5.0).await;
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    // No address at all is a failure.
    nameserver.records(&[(0, "missing", &a)]);
    answers(&gateway, "failed", 5.0).await;
    assert_eq!(backends(&gateway).await, named(&[&a, &b]));
    nameserver.records(&[(0, "b", &b)]);
    until(&gateway, FOUND, |found| found == 1.0).await;
    gateway.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn what_is_no_answer_changes_nothing() {
    let a = canned(1);
    let nameserver = Nameserver::start().await;
    nameserver.records(&[(0, "a", &a)]);
    let gateway = start(&File::new("", TOML), &nameserver).await;
    until(&gateway, FOUND, |found| found == 1.0).await;
    let damages: [fn(&mut Vec<u8>); 8] = [
        |message| message[0] ^= 1,
        |message| message[2] &= 0x7f,
        |message| message[3] = 2,
        |message| message[3] = 3,
        |message| message[13] ^= 1,
        |message| message[7] = 200,
        |message| message.truncate(11),
        Vec::clear,
    ];
    for reported in damages.map(DnsAnswer::Damaged).into_iter().chain([DnsAnswer::Cut, DnsAnswer::Closes]) {
        nameserver.set(reported);
        answers(&gateway, "failed", 4.0).await;
        assert_eq!(backends(&gateway).await, named(&[&a]));
        assert_eq!(metric(&gateway, r#"semmoe_discovery_stale{source="pods"}"#).await, 1.0);
    }
    nameserver.records(&[(0, "a", &a)]);
    answers(&gateway, "ok", 1.0).await;
    assert_eq!(Client::data(&gateway).post("/v1/completions", r#"{"model":"tiny"}"#).await.status, 200);
    settled(&gateway).await;
    gateway.shutdown(PATIENCE).await;
}

#[test]
fn wrong_sources_name_the_key() {
    let key = "models[0].discovery[0]";
    let both = "srv = \"a.example\"\ndns = \"a.example:1\"";
    for (to, says) in [
        ("srv = \"engines.example:30000\"", format!("{key}.srv: 'engines.example:30000' is not a DNS name")),
        ("srv = \"\"", format!("{key}.srv: ''")),
        ("srv = \"a..b\"", format!("{key}.srv: 'a..b'")),
        ("", format!("{key}: none of `dns`, `srv` and `kubernetes` is set")),
        (both, format!("{key}.srv: `dns` is set too")),
    ] {
        let toml = TOML.replace("srv = \"_http._tcp.engines.example.\"", to);
        let error = Config::from_toml(&toml, std::path::Path::new("")).unwrap_err().to_string();
        assert!(error.contains(&says), "expected '{says}' in '{error}'");
    }
}
