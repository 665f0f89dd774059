//! The name of one request: the client's `x-request-id` where it is sane, or one that is made here.
//!
//! It goes to the engine, back to the client, into error bodies and into the access log, so that one search finds a request
//! everywhere. It is no secret, and nothing is decided by it.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The header, both ways.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longer ones are replaced: they are in every log line.
const LONGEST_BYTES: usize = 128;
/// Numbers that a thread takes at a time, so that threads seldom meet.
const BLOCK: u64 = 4096;

/// Tells the ids of this process from those of others and of later ones.
static PREFIX: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
static BLOCKS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// A printable header value of at most 128 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// The request's id, which stands in its headers from now on.
    pub(crate) fn of(headers: &mut HeaderMap) -> Self {
        let mut values = headers.get_all(&REQUEST_ID).iter();
        if let (Some(value), None) = (values.next(), values.next())
            && is_sane(value.as_bytes())
        {
            return Self(value.clone());
        }
        let id = Self::new();
        headers.insert(REQUEST_ID, id.0.clone());
        id
    }

    /// One that no other request has: 16 hexadecimal digits of this process, and a number.
    fn new() -> Self {
        let mut text = [0; 33];
        write_hex(*PREFIX, &mut text[..16]);
        text[16] = b'-';
        write_hex(number(), &mut text[17..]);
        // Leading zeros of the number say nothing; four digits are kept, so that ids look alike.
        let zeros = text[17..].iter().take(12).take_while(|digit| **digit == b'0').count();
        text.copy_within(17 + zeros.., 17);
        let bytes = Bytes::copy_from_slice(&text[..33 - zeros]);
        Self(HeaderValue::from_maybe_shared(bytes).expect("hexadecimal digits and a hyphen are a header value"))
    }

    pub(crate) fn header(&self) -> &HeaderValue {
        &self.0
    }

    pub(crate) fn as_str(&self) -> &str {
        // Sane ones are ASCII.
        self.0.to_str().unwrap_or("")
    }
}

/// Graphic ASCII but quotes and backslashes, so that it needs no escape anywhere.
fn is_sane(id: &[u8]) -> bool {
    !id.is_empty()
        && id.len() <= LONGEST_BYTES
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
            (&"x".repeat(LONGEST_BYTES), true),
            (&"x".repeat(LONGEST_BYTES + 1), false),
            ("\u{e9}", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(id.as_bytes()).unwrap());
            let found = RequestId::of(&mut headers);
            assert_eq!(found.as_str() == id, stays, "{id:?}");
            assert_eq!(headers[REQUEST_ID], *found.header());
            assert!(is_sane(found.as_str().as_bytes()));
        }
        let mut two = HeaderMap::new();
        two.append(REQUEST_ID, HeaderValue::from_static("a"));
        two.append(REQUEST_ID, HeaderValue::from_static("b"));
        let id = RequestId::of(&mut two);
        assert_eq!(two.get_all(REQUEST_ID).iter().count(), 1);
        assert!(!["a", "b"].contains(&id.as_str()));
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
