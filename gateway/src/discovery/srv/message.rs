//! Messages of the DNS, as far as SRV records need them (RFC 1035, RFC 2782): one question, and the answer to it.
//!
//! An answer comes from outside: what it says is followed only where the message itself bounds it. It is at most 65,535
//! bytes long, records are counted by reading them, and names may point backwards only.

/// Longest name, as text.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

const CNAME: u16 = 5;
const SRV: u16 = 33;
const INTERNET: u16 = 1;

/// Flags of a header.
const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const TRUNCATED: u16 = 0x0200;
const RECURSION_DESIRED: u16 = 0x0100;
const CODE: u16 = 0x000f;
const NO_SUCH_NAME: u16 = 3;

/// One record: where an instance of the service is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) priority: u16,
    pub(super) port: u16,
    /// In small letters, without the last dot.
    pub(super) target: String,
}

/// Why a message is no answer to go by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MessageError {
    /// The name is not there, and no other server will know it.
    #[error("no such name")]
    NoSuchName,
    /// The server could or would not answer.
    #[error("the server answers with code {code}, expected 0")]
    Code {
        /// RCODE.
        code: u16,
    },
    /// It is the answer to something else.
    #[error("the message does not answer the question: its {what} differs")]
    Foreign {
        /// Which part.
        what: &'static str,
    },
    /// It ends too early.
    #[error("the message ends at byte {length}, expected {wanted} more bytes at {at}")]
    Short {
        /// Where something should be.
        at: usize,
        /// How much of it.
        wanted: usize,
        /// The message's length.
        length: usize,
    },
    /// Something in it is not as it must be.
    #[error("the message has {found} at byte {at}, expected {expected}")]
    Malformed {
        /// What.
        found: &'static str,
        /// Where.
        at: usize,
        /// In place of what.
        expected: &'static str,
    },
}

/// Whether this is a name that can be asked for: labels of letters, digits, `-` and `_`.
pub(crate) fn is_name(name: &str) -> bool {
    let is_label =
        |label: &str| !label.is_empty() && label.len() <= MAX_LABEL_BYTES && label.bytes().all(is_letter_of_a_name);
    name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label)
}

fn is_letter_of_a_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

/// The question for the SRV records of a name for which [`is_name`] holds.
pub(super) fn question(id: u16, name: &str) -> Vec<u8> {
    let mut message = Vec::with_capacity(name.len() + 18);
    for field in [id, RECURSION_DESIRED, 1, 0, 0, 0] {
        message.extend(field.to_be_bytes());
    }
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.as_bytes());
    }
    message.push(0);
    message.extend(SRV.to_be_bytes());
    message.extend(INTERNET.to_be_bytes());
    message
}

/// The records that an answer to [`question`] has; further names that the name stands for are followed. A target that
/// is the root says that there is no such service, and makes no record.
pub(super) fn records(message: &[u8], id: u16, name: &str) -> Result<Vec<Service>, MessageError> {
    let mut reader = Reader { message, at: 0 };
    let answers = header(&mut reader, id)?;
    if reader.name()? != name.to_ascii_lowercase() || (reader.number()?, reader.number()?) != (SRV, INTERNET) {
        return Err(MessageError::Foreign { what: "question" });
    }
    let (mut owner, mut found) = (name.to_ascii_lowercase(), Vec::new());
    for _ in 0..answers {
        let name = reader.name()?;
        let (kind, class) = (reader.number()?, reader.number()?);
        // The time to live does not matter: every look asks again.
        reader.take(4)?;
        let length = usize::from(reader.number()?);
        let mut data = Reader { message, at: reader.at };
        reader.take(length)?;
        if class != INTERNET || name != owner {
            continue;
        }
        match kind {
            CNAME => owner = data.name()?,
            SRV => {
                let [priority, _weight, port] = [data.number()?, data.number()?, data.number()?];
                let target = data.name()?;
                if !target.is_empty() {
                    found.push(Service { priority, port, target });
                }
            }
            _ => continue,
        }
        if data.at != reader.at {
            let (found, expected) = ("a record of another length", "one as long as it says");
            return Err(MessageError::Malformed { found, at: data.at, expected });
        }
    }
    Ok(found)
}

/// Reads the header; gives the number of answers.
fn header(reader: &mut Reader<'_>, id: u16) -> Result<u16, MessageError> {
    if reader.number()? != id {
        return Err(MessageError::Foreign { what: "id" });
    }
    let flags = reader.number()?;
    if flags & (RESPONSE | OPCODE) != RESPONSE {
        return Err(MessageError::Foreign { what: "kind" });
    }
    match flags & CODE {
        0 => {}
        NO_SUCH_NAME => return Err(MessageError::NoSuchName),
        code => return Err(MessageError::Code { code }),
    }
    if flags & TRUNCATED != 0 {
        return Err(MessageError::Malformed { found: "the mark of a cut answer", at: 2, expected: "a whole one" });
    }
    let [questions, answers] = [reader.number()?, reader.number()?];
    // The other sections are not needed.
    reader.take(4)?;
    if questions != 1 {
        return Err(MessageError::Foreign { what: "number of questions" });
    }
    Ok(answers)
}

/// Reads a message from a place in it.
struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, wanted: usize) -> Result<&[u8], MessageError> {
        let short = MessageError::Short { at: self.at, wanted, length: self.message.len() };
        let end = self.at.checked_add(wanted).filter(|end| *end <= self.message.len()).ok_or(short)?;
        let taken = &self.message[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u16, MessageError> {
        let bytes = self.take(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// A name in small letters, without its last dot; the root is empty.
    fn name(&mut self) -> Result<String, MessageError> {
        let malformed = |found, at, expected| Err(MessageError::Malformed { found, at, expected });
        let mut name = String::new();
        let mut labels = Reader { message: self.message, at: self.at };
        // Every pointer leads before the part that it stands in, so that they come to an end.
        let (mut part, mut after) = (self.at, None);
        loop {
            let at = labels.at;
            let length = usize::from(labels.take(1)?[0]);
            match length >> 6 {
                0 if length == 0 => break,
                0 => {
                    let label = labels.take(length)?;
                    if !label.iter().all(|byte| is_letter_of_a_name(*byte)) {
                        return malformed("a label of other bytes", at, "letters, digits, '-' or '_'");
                    }
                    if !name.is_empty() {
                        name.push('.');
                    }
                    name.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
                    if name.len() > MAX_NAME_BYTES {
                        return malformed("a name of more than 253 bytes", self.at, "a shorter one");
                    }
                }
                3 => {
                    let low = usize::from(labels.take(1)?[0]);
                    let to = (length & 0x3f) << 8 | low;
                    if to >= part {
                        return malformed("a pointer that leads not backwards", at, "one to an earlier name");
                    }
                    after.get_or_insert(labels.at);
                    (part, labels.at) = (to, to);
                }
                _ => return malformed("a label of an unknown kind", at, "a length or a pointer"),
            }
        }
        self.at = after.unwrap_or(labels.at);
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAME: &str = "_http._tcp.engines.example";

    /// An answer to the question with this id, with these records behind it.
    fn answer(flags: u16, answers: u16, records: &[u8]) -> Vec<u8> {
        let mut message = question(7, NAME);
        message[2..4].copy_from_slice(&(RESPONSE | flags).to_be_bytes());
        message[6..8].copy_from_slice(&answers.to_be_bytes());
        message.extend(records);
        message
    }

    /// A record of this type whose owner is a pointer to `owner`.
    fn record(owner: u8, kind: u16, data: &[u8]) -> Vec<u8> {
        let mut record = vec![0xc0, owner];
        record.extend([kind.to_be_bytes(), INTERNET.to_be_bytes(), [0, 0], [0, 5]].concat());
        record.extend((data.len() as u16).to_be_bytes());
        record.extend(data);
        record
    }

    /// Points to the question's name, and to its last two labels.
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
        let at = (question(7, NAME).len() + 12) as u8;
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
        assert_eq!(records(&answer(0, 1, &good), 8, NAME), Err(MessageError::Foreign { what: "id" }));
        assert_eq!(records(&answer(0, 1, &good), 7, "x.example"), Err(MessageError::Foreign { what: "question" }));
        assert_eq!(read(&question(7, NAME)), Err(MessageError::Foreign { what: "kind" }));
        assert_eq!(read(&answer(3, 0, &[])), Err(MessageError::NoSuchName));
        assert_eq!(read(&answer(2, 0, &[])), Err(MessageError::Code { code: 2 }));
        assert!(matches!(read(&answer(TRUNCATED, 1, &good)), Err(MessageError::Malformed { at: 2, .. })));
        // More records than there are, data that is longer than it says, and names that lead nowhere or round.
        assert!(matches!(read(&answer(0, u16::MAX, &good)), Err(MessageError::Short { .. })));
        let own = question(7, NAME).len() as u8 + 18;
        for target in [&b"\x01a\x00\x00"[..], b"\x40a\x00", b"\x01/\x00", b"\x3fa\x00", &[0xc0, own], &[0xff, 0xff]] {
            assert!(read(&answer(0, 1, &service(1, 80, target))).is_err(), "{target:?}");
        }
        let long = [&[63; 64][..], &[63; 64], &[63; 64], &[63; 64], &[0]].concat().map_letters();
        assert!(matches!(read(&answer(0, 1, &service(1, 80, &long))), Err(MessageError::Malformed { .. })));
    }

    trait Letters {
        fn map_letters(self) -> Vec<u8>;
    }

    impl Letters for Vec<u8> {
        /// Labels of 63 letters in place of 63 lengths.
        fn map_letters(mut self) -> Vec<u8> {
            let length = self.len();
            for (at, byte) in self.iter_mut().enumerate().take(length - 1) {
                *byte = if at % 64 == 0 { 63 } else { b'a' };
            }
            self
        }
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
            assert_eq!(is_name(name), is, "{name:?}");
        }
        assert!(!is_name(&"a".repeat(64)) && !is_name(&vec!["abc"; 64].join(".")));
    }

    proptest! {
        /// Bytes from outside are refused or read, and what is read could be asked for.
        #[test]
        fn any_bytes_end_well(tail in prop::collection::vec(any::<u8>(), 0..200), answers in 0u16..9) {
            for found in read(&answer(0, answers, &tail)).unwrap_or_default() {
                prop_assert!(is_name(&found.target), "{found:?}");
            }
        }

        /// So are good messages with some bytes changed.
        #[test]
        fn damaged_answers_end_well(at in 0usize..120, byte: u8, cut in 0usize..120) {
            let records = [service(1, 80, &[2, b'p', b'0', 0xc0, DOMAIN]), record(OWNER, CNAME, &[0xc0, OWNER])];
            let mut message = answer(0, 2, &records.concat());
            let at = at % message.len();
            message[at] = byte;
            message.truncate(message.len().saturating_sub(cut));
            for found in read(&message).unwrap_or_default() {
                prop_assert!(is_name(&found.target), "{found:?}");
            }
        }
    }
}
