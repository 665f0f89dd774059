//! A request's id: the client's `x-request-id` if it is valid, or a generated one.
//!
//! It is sent to the engine, returned to the client, and included in error bodies and the access log, so that one
//! search finds a request everywhere. The gateway bases no decision on it, but vLLM uses it as the key of a running
//! request, so two requests with one id would interfere. Generated ids are therefore unguessable, and a client's id is
//! forwarded to the engine with a random suffix.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The header that carries the id, in requests and responses.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length. Longer ids are replaced, because every log line contains one.
const MAX_BYTES: usize = 128;
/// How many numbers a thread reserves at a time, so that threads seldom contend.
const BLOCK: u64 = 4096;

/// A per-process secret that turns a counter into unpredictable numbers.
static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);
static BLOCKS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// A request id: a printable header value of at most 128 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// Returns the request's id, and replaces the id in the headers with the form for the engine.
    pub(crate) fn of(headers: &mut HeaderMap) -> Self {
        let mut values = headers.get_all(&REQUEST_ID).iter();
        if let (Some(value), None) = (values.next(), values.next())
            && is_sane(value.as_bytes())
        {
            let id = Self(value.clone());
            headers.insert(REQUEST_ID, id.for_engine());
            return id;
        }
        let id = Self::new();
        headers.insert(REQUEST_ID, id.0.clone());
        id
    }

    /// Returns the client's id with 16 hexadecimal digits appended, which the client cannot predict.
    fn for_engine(&self) -> HeaderValue {
        let mut text = [self.0.as_bytes(), &[b'-'; 17]].concat();
        let digits = text.len() - 16;
        write_hex(SECRET.hash_one(number()), &mut text[digits..]);
        HeaderValue::from_maybe_shared(Bytes::from(text)).expect("an id and hexadecimal digits form a header value")
    }

    /// Generates a unique and unpredictable id: 16 hexadecimal digits, and a number.
    fn new() -> Self {
        let (mut text, number) = ([0; 33], number());
        write_hex(SECRET.hash_one(number), &mut text[..16]);
        text[16] = b'-';
        write_hex(number, &mut text[17..]);
        // Strip leading zeros from the number, but keep at least four digits so that ids look alike.
        let zeros = text[17..].iter().take(12).take_while(|digit| **digit == b'0').count();
        text.copy_within(17 + zeros.., 17);
        let bytes = Bytes::copy_from_slice(&text[..33 - zeros]);
        Self(HeaderValue::from_maybe_shared(bytes).expect("hexadecimal digits and a hyphen form a header value"))
    }

    pub(crate) fn header(&self) -> &HeaderValue {
        &self.0
    }

    pub(crate) fn as_str(&self) -> &str {
        // Valid ids are ASCII.
        self.0.to_str().unwrap_or("")
    }
}

/// Accepts only graphic ASCII without quotes, backslashes and the like, so that an id never needs escaping.
fn is_sane(id: &[u8]) -> bool {
    !id.is_empty()
        && id.len() <= MAX_BYTES
        && id.iter().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\' | b'<' | b'>' | b'`'))
}

fn number() -> u64 {
    NEXT.with(|next| {
        let mut number = next.get();
        if number.is_multiple_of(BLOCK) {
            number = BLOCKS.fetch_add(1, Ordering::Relaxed).wrapping_mul(BLOCK).wrapping_add(1);
        }
        next.set(number.wrapping_add(1));
        number
    })
}

fn write_hex(mut value: u64, digits: &mut [u8]) {
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(value & 15) as usize];
        value >>= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn sane_ids_stay_and_others_are_replaced() {
        for (id, stays) in [
            ("a", true),
            ("550e8400-e29b-41d4-a716-446655440000", true),
            ("trace:1/span=2", true),
            ("", false),
            ("a b", false),
            ("a\"b", false),
            ("<script>", false),
            (&"x".repeat(MAX_BYTES), true),
            (&"x".repeat(MAX_BYTES + 1), false),
            ("\u{e9}", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(id.as_bytes()).unwrap());
            let found = RequestId::of(&mut headers);
            assert_eq!(found.as_str() == id, stays, "{id:?}");
            let sent = headers[REQUEST_ID].to_str().unwrap();
            let end = sent.strip_prefix(found.as_str()).unwrap();
            assert_eq!(end.len(), if stays { 17 } else { 0 }, "{id:?} goes to the engine as {sent}");
            assert!(is_sane(found.as_str().as_bytes()));
        }
        let mut two = HeaderMap::new();
        two.append(REQUEST_ID, HeaderValue::from_static("a"));
        two.append(REQUEST_ID, HeaderValue::from_static("b"));
        let id = RequestId::of(&mut two);
        assert_eq!(two.get_all(REQUEST_ID).iter().count(), 1);
        assert!(!["a", "b"].contains(&id.as_str()));
    }

    /// A client that sees its own ids learns nothing about those of others.
    #[test]
    fn ids_are_not_foreseen() {
        let random = |id: &str| u64::from_str_radix(&id[..16], 16).unwrap();
        let ids: Vec<u64> = (0..1000).map(|_| random(RequestId::new().as_str())).collect();
        let differing: u32 = ids.windows(2).map(|pair| (pair[0] ^ pair[1]).count_ones()).sum();
        // Half of 64 bits, over 999 pairs.
        assert!((30_000..34_000).contains(&differing), "{differing}");
        let chosen = || {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_static("mine"));
            RequestId::of(&mut headers);
            headers[REQUEST_ID].clone()
        };
        assert_ne!(chosen(), chosen(), "one id of a client is two at the engine");
    }

    #[test]
    fn made_ids_are_unique_over_threads_and_blocks() {
        let make = || (0..2 * BLOCK + 3).map(|_| RequestId::new().as_str().to_owned()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(make)).collect();
        let mut all = HashSet::new();
        for id in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
            assert!(is_sane(id.as_bytes()) && id.len() >= 21, "{id}");
            assert!(all.insert(id));
        }
    }
}
