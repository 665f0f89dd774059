//! DNS messages, to the extent that SRV records need them (RFC 1035, RFC 2782): one question and its answer.
//!
//! `simple_dns` parses an answer: names only point backwards, and nothing is read beyond the message, which has at most
//! 65,535 bytes. This module checks the rest: that the message answers our question, and that its targets are host
//! names.

use simple_dns::rdata::RData;
use simple_dns::{CLASS, Name, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, SimpleDnsError, TYPE};

use crate::config::is_dns_name;

const HEADER_BYTES: usize = 12;
/// Minimum size of a question; records are longer.
const MIN_ENTRY_BYTES: usize = 5;

/// One SRV record: the address of a service instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) priority: u16,
    pub(super) port: u16,
    /// The target host, in lower case, without the trailing dot.
    pub(super) target: String,
}

/// Why a message is not a usable answer.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::shell::discovery) enum MessageError {
    /// The name does not exist, so querying other servers is pointless.
    #[error("no such name")]
    NoSuchName,
    /// The server could not or would not answer.
    #[error("the server answered {0:?}, expected NoError")]
    Code(RCODE),
    /// The message answers a different question.
    #[error("the message does not answer the question: its {0} differs")]
    Foreign(&'static str),
    /// The message is too short for the entries that its header declares.
    #[error("the message has {length} bytes, too few for the {entries} entries that it declares")]
    Short {
        /// The message's length.
        length: usize,
        /// Number of questions and records in all sections.
        entries: usize,
    },
    /// The server's answer did not fit into the message.
    #[error("the message is truncated, expected a complete one")]
    Truncated,
    /// The data is not a DNS message, or the question could not be encoded.
    #[error("not a DNS message: {0}")]
    Malformed(#[from] SimpleDnsError),
    /// A target is not a host name.
    #[error("the target {0:?} is not a host name: its labels must consist of letters, digits, '-' and '_'")]
    Target(String),
}

/// Encodes the question for a name's SRV records; [`is_dns_name`] must hold for the name.
pub(super) fn question(id: u16, name: &str) -> Result<Vec<u8>, MessageError> {
    let mut packet = Packet::new_query(id);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let (kind, class) = (QTYPE::TYPE(TYPE::SRV), QCLASS::CLASS(CLASS::IN));
    packet.questions.push(Question::new(Name::new(name)?, kind, class, false));
    Ok(packet.build_bytes_vec()?)
}

/// Returns the records in an answer to [`question`], following aliases of the name. A root target means that the
/// service does not exist and yields no record.
pub(super) fn records(message: &[u8], id: u16, name: &str) -> Result<Vec<Service>, MessageError> {
    has_room(message)?;
    let packet = Packet::parse(message)?;
    let mut owner = Name::new(name)?;
    answers(&packet, id, &owner)?;
    let mut found = Vec::new();
    // The time to live does not matter, because every poll queries again.
    for record in packet.answers.iter().filter(|record| record.class == CLASS::IN) {
        match &record.rdata {
            _ if record.name != owner => {}
            RData::CNAME(alias) => owner = alias.0.clone(),
            RData::SRV(service) if !service.target.get_labels().is_empty() => {
                let target = service.target.to_string().to_ascii_lowercase();
                if !is_dns_name(&target) {
                    return Err(MessageError::Target(target));
                }
                found.push(Service { priority: service.priority, port: service.port, target });
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Checks that the message is long enough to contain the entries that it declares, because the parser allocates memory
/// for that many.
fn has_room(message: &[u8]) -> Result<(), MessageError> {
    let length = message.len();
    let counts = message.get(4..HEADER_BYTES).unwrap_or_default();
    let entries = counts.chunks_exact(2).map(|count| usize::from(u16::from_be_bytes([count[0], count[1]]))).sum();
    let fits = entries * MIN_ENTRY_BYTES <= length.saturating_sub(HEADER_BYTES);
    if fits { Ok(()) } else { Err(MessageError::Short { length, entries }) }
}

/// Checks that the message answers the question with this id for this name.
fn answers(packet: &Packet<'_>, id: u16, name: &Name<'_>) -> Result<(), MessageError> {
    let foreign = |what| Err(MessageError::Foreign(what));
    if packet.id() != id {
        return foreign("id");
    }
    if !packet.has_flags(PacketFlag::RESPONSE) || packet.opcode() != OPCODE::StandardQuery {
        return foreign("kind");
    }
    match packet.rcode() {
        RCODE::NoError => {}
        RCODE::NameError => return Err(MessageError::NoSuchName),
        code => return Err(MessageError::Code(code)),
    }
    if packet.has_flags(PacketFlag::TRUNCATION) {
        return Err(MessageError::Truncated);
    }
    let [asked] = &packet.questions[..] else { return foreign("number of questions") };
    let is_asked =
        asked.qname == *name && asked.qtype == QTYPE::TYPE(TYPE::SRV) && asked.qclass == QCLASS::CLASS(CLASS::IN);
    if is_asked { Ok(()) } else { foreign("question") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAME: &str = "_http._tcp.engines.example";

    /// An answer to the question with this id, followed by these records.
    fn answer(flags: u16, answers: u16, records: &[u8]) -> Vec<u8> {
        let mut message = question(7, NAME).unwrap();
        message[2..4].copy_from_slice(&(0x8000 | flags).to_be_bytes());
        message[6..8].copy_from_slice(&answers.to_be_bytes());
        message.extend(records);
        message
    }

    /// A record of this type, owned by a pointer to `owner`.
    fn record(owner: u8, kind: u16, data: &[u8]) -> Vec<u8> {
        let mut record = vec![0xc0, owner];
        record.extend([kind.to_be_bytes(), [0, 1], [0, 0], [0, 5]].concat());
        record.extend((data.len() as u16).to_be_bytes());
        record.extend(data);
        record
    }

    const CNAME: u16 = 5;
    const SRV: u16 = 33;
    /// A pointer to the question's name, and one to its last two labels.
    const OWNER: u8 = 12;
    const DOMAIN: u8 = 12 + 11;

    fn service(priority: u8, port: u16, target: &[u8]) -> Vec<u8> {
        let data = [&[0, priority, 0, 9][..], &port.to_be_bytes(), target].concat();
        record(OWNER, SRV, &data)
    }

    fn read(message: &[u8]) -> Result<Vec<Service>, MessageError> {
        records(message, 7, NAME)
    }

    #[test]
    fn records_are_read_with_their_targets_completed() {
        let first = service(1, 30_000, &[2, b'P', b'0', 0xc0, DOMAIN]);
        let second = service(2, 30_001, b"\x01b\x02de\x00");
        let message = answer(0x0480, 2, &[first, second].concat());
        let targets = [(1, 30_000, "p0.engines.example"), (2, 30_001, "b.de")];
        let expected = targets.map(|(priority, port, target)| Service { priority, port, target: target.to_owned() });
        assert_eq!(read(&message), Ok(expected.to_vec()));
        assert_eq!(records(&message, 7, "_HTTP._tcp.Engines.example").map(|found| found.len()), Ok(2));
        assert_eq!(read(&answer(0, 0, &[])), Ok(vec![]));
        assert_eq!(read(&answer(0, 1, &service(0, 0, &[0]))), Ok(vec![]), "decidedly not there");
    }

    /// Records of the name count; those of other names or types do not.
    #[test]
    fn other_names_are_followed_and_other_records_passed_over() {
        let alias = record(OWNER, CNAME, b"\x01a\x01x\x00");
        let at = (question(7, NAME).unwrap().len() + 12) as u8;
        let mine = record(at, SRV, b"\0\x01\0\0\0\x50\x01b\x00");
        let others = service(1, 81, b"\x01c\x00");
        let text = record(at, 16, b"\x03abc");
        let message = answer(0, 4, &[alias, others, text, mine].concat());
        let expected = Service { priority: 1, port: 80, target: "b".to_owned() };
        assert_eq!(read(&message), Ok(vec![expected]));
    }

    #[test]
    fn what_is_no_answer_says_why() {
        let good = service(1, 80, b"\x01a\x00");
        assert_eq!(records(&answer(0, 1, &good), 8, NAME), Err(MessageError::Foreign("id")));
        assert_eq!(records(&answer(0, 1, &good), 7, "x.example"), Err(MessageError::Foreign("question")));
        assert_eq!(read(&question(7, NAME).unwrap()), Err(MessageError::Foreign("kind")));
        assert_eq!(read(&answer(3, 0, &[])), Err(MessageError::NoSuchName));
        assert_eq!(read(&answer(2, 0, &[])), Err(MessageError::Code(RCODE::ServerFailure)));
        assert_eq!(read(&answer(0x0200, 1, &good)), Err(MessageError::Truncated));
        let longer = service(1, 80, b"\x01a\x00\x07");
        assert_eq!(read(&answer(0, 1, &longer)), read(&answer(0, 1, &good)), "bytes behind a target are passed over");
        // More records than there are, and names that point nowhere or in a circle.
        assert!(matches!(read(&answer(0, u16::MAX, &good)), Err(MessageError::Short { .. })));
        let own = question(7, NAME).unwrap().len() as u8 + 18;
        for target in [&b"\x40a\x00"[..], b"\x01/\x00", b"\x3fa\x00", &[0xc0, own], &[0xff, 0xff]] {
            assert!(read(&answer(0, 1, &service(1, 80, target))).is_err(), "{target:?}");
        }
        let label = [&[63][..], &[b'a'; 63]].concat();
        let long = [label.repeat(4), vec![0]].concat();
        assert!(matches!(read(&answer(0, 1, &service(1, 80, &long))), Err(MessageError::Malformed(_))));
    }

    #[test]
    fn names_that_can_be_asked_for() {
        for (name, is) in [
            (NAME, true),
            ("engines.service.consul", true),
            ("", false),
            ("a..b", false),
            (".a", false),
            ("a.", false),
            ("a:1", false),
            ("a b", false),
            ("\u{e4}.de", false),
        ] {
            assert_eq!(is_dns_name(name), is, "{name:?}");
        }
        assert!(!is_dns_name(&"a".repeat(64)) && !is_dns_name(&vec!["abc"; 64].join(".")));
    }

    proptest! {
        /// Arbitrary bytes are refused or parsed, and any name parsed is a valid question.
        #[test]
        fn any_bytes_end_well(tail in prop::collection::vec(any::<u8>(), 0..200), answers in 0u16..9) {
            for found in read(&answer(0, answers, &tail)).unwrap_or_default() {
                prop_assert!(is_dns_name(&found.target), "{found:?}");
            }
        }

        /// The property holds for good messages with some bytes changed, too.
        #[test]
        fn damaged_answers_end_well(at in 0usize..120, byte: u8, cut in 0usize..120) {
            let records = [service(1, 80, &[2, b'p', b'0', 0xc0, DOMAIN]), record(OWNER, CNAME, &[0xc0, OWNER])];
            let mut message = answer(0, 2, &records.concat());
            let at = at % message.len();
            message[at] = byte;
            message.truncate(message.len().saturating_sub(cut));
            for found in read(&message).unwrap_or_default() {
                prop_assert!(is_dns_name(&found.target), "{found:?}");
            }
        }
    }
}
