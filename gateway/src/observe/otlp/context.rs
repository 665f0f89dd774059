//! W3C Trace Context: `traceparent` version 00, and the part that later versions retain.

use http::{HeaderMap, HeaderName, HeaderValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length of `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;
const SAMPLED: u8 = 1;

/// A position in a trace. Neither id is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) trace: u128,
    pub(crate) span: u64,
    pub(crate) sampled: bool,
}

impl Context {
    /// Returns the client's context; `None` if there is none, more than one, or an invalid one.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(&TRACEPARENT).iter();
        let value = values.next()?;
        if values.next().is_some() {
            return None;
        }
        Self::parse(value.as_bytes())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (head, rest) = text.split_at_checked(LENGTH)?;
        let version = hex(&head[..2])?;
        // A later version may append fields after a hyphen.
        let more = rest.is_empty() || (version > 0 && rest.first() == Some(&b'-'));
        if version == 0xff || !more || head[2] != b'-' || head[35] != b'-' || head[52] != b'-' {
            return None;
        }
        let (trace, span, flags) = (hex(&head[3..35])?, hex(&head[36..52])?, hex(&head[53..55])?);
        let span = u64::try_from(span).ok().filter(|span| *span != 0)?;
        (trace != 0).then_some(Self { trace, span, sampled: flags & u128::from(SAMPLED) != 0 })
    }

    /// Writes the context for the next hop.
    pub(crate) fn pass_on(self, headers: &mut HeaderMap) {
        // Drop an invalid traceparent together with its tracestate.
        if Self::of(headers).is_none() {
            headers.remove(TRACESTATE);
        }
        headers.insert(TRACEPARENT, self.header());
    }

    /// Returns the header for the next hop.
    fn header(&self) -> HeaderValue {
        let text = format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled) * SAMPLED);
        HeaderValue::from_str(&text).expect("hexadecimal digits and hyphens form a valid header value")
    }
}

/// Parses at most 32 lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers_of_the_recommendation() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context =
            Context { trace: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, span: 0x00f0_67aa_0ba9_02b7, sampled: true };
        assert_eq!(Context::parse(good.as_bytes()), Some(context));
        assert_eq!(context.header(), good);
        for (text, sampled) in [
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", Some(false)),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03", Some(true)),
            ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes", Some(true)),
            ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.what-comes", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", None),
            ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
            ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", None),
            ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0", None),
            ("0004bf92f3577b34da6a3ce929d0e0e47360-0f067aa0ba902b7-01", None),
            ("", None),
        ] {
            assert_eq!(Context::parse(text.as_bytes()).map(|context| context.sampled), sampled, "{text}");
        }
        let mut twice = HeaderMap::new();
        twice.append(TRACEPARENT, HeaderValue::from_static("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        assert_eq!(Context::of(&twice), Some(context));
        twice.append(TRACEPARENT, HeaderValue::from_static("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        assert_eq!(Context::of(&twice), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(trace in 1u128.., span in 1u64.., sampled: bool) {
            let context = Context { trace, span, sampled };
            prop_assert_eq!(Context::parse(context.header().as_bytes()), Some(context));
        }

        #[test]
        fn nothing_panics(text in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Context::parse(&text);
        }
    }
}
