//! Locates failure reports in a response, given its head.

use http::{HeaderMap, HeaderValue, header};
use semmoe_engines::Route;
use semmoe_engines::failures::{self, Document, Failure};

/// The format of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Events,
    Json,
    /// Other content, or a compressed body.
    Other,
}

impl Kind {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let is_plain = headers.get(header::CONTENT_ENCODING).is_none_or(|encoding| encoding == "identity");
        let kind = headers.get(header::CONTENT_TYPE).filter(|_| is_plain).map_or(&[][..], HeaderValue::as_bytes);
        let is = |name: &[u8]| kind.get(..name.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(name));
        if is(b"text/event-stream") {
            Self::Events
        } else if is(b"application/json") {
            Self::Json
        } else {
            Self::Other
        }
    }
}

/// Where to search a response for failures.
pub(crate) enum Reports {
    Nowhere,
    Events,
    Document(Document),
}

impl Reports {
    /// Returns where to search a successful response of this kind.
    pub(super) fn of(route: Route, kind: Kind) -> Self {
        match kind {
            Kind::Events if route.generates() => Self::Events,
            Kind::Json if route.generates() => Self::Document(Document::default()),
            _ => Self::Nowhere,
        }
    }

    /// Searches complete events, or a document up to the end of this chunk, which may be its last.
    pub(super) fn find(&mut self, piece: &[u8], is_last: bool) -> Option<Failure> {
        match self {
            Self::Nowhere => None,
            Self::Events => failures::in_events(piece),
            Self::Document(document) => document.push(piece, is_last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_bodies() {
        for (kind, encoding, expected) in [
            ("text/event-stream", None, Kind::Events),
            ("Text/Event-Stream; charset=utf-8", None, Kind::Events),
            ("text/event-stream", Some("identity"), Kind::Events),
            ("text/event-stream", Some("gzip"), Kind::Other),
            ("application/json", None, Kind::Json),
            ("application/json", Some("br"), Kind::Other),
            ("text/event", None, Kind::Other),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            if let Some(encoding) = encoding {
                headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(encoding));
            }
            assert_eq!(Kind::of(&headers), expected, "{kind} {encoding:?}");
        }
    }
}
