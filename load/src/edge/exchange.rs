//! One measured request and its response.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use semmoe_engines::http::collect;

use super::connection::{Connections, Sender};
use crate::Failure;
use crate::answer::{self, Said};
use crate::events::{Event, Events, TooLong};
use crate::failure::{Break, Phase};
use crate::stats::{Answered, Tokens};

/// Maximum size in bytes of a non-streamed response.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Maximum number of bytes to read from an error body, so that its connection can be reused.
const MAX_ERROR_BYTES: usize = 64 << 10;

const NO_JSON: Failure = Failure::Malformed("not the route's JSON");

/// Progress of a running request, from which a timeout derives how far the request got.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) headers: Option<HeaderMap>,
    first: Option<Instant>,
    last: Option<Instant>,
    events: u64,
    longest_gap: Option<Duration>,
    reported: Option<u64>,
    done: bool,
    content: bool,
}

impl From<TooLong> for Failure {
    fn from(_: TooLong) -> Self {
        Self::Malformed("an event of more than 4 MiB")
    }
}

impl Seen {
    /// Returns the part of the response that the request is waiting for.
    pub(crate) fn phase(&self) -> Phase {
        if self.headers.is_some() { Phase::Body } else { Phase::Head }
    }

    /// Sends `body` and reads the complete response; `on_gap` receives the gaps between content events. Latencies are
    /// measured from `due`, the time at which the request was due or its client became free.
    pub(crate) async fn exchange(
        &mut self,
        connections: &Connections,
        due: Instant,
        body: Bytes,
        stream: bool,
        on_gap: impl FnMut(Duration),
    ) -> Result<Answered, Failure> {
        let (mut sender, response) = send(connections, body).await?;
        let status = response.status();
        let (head, body) = response.into_parts();
        let headers = self.headers.insert(head.headers);
        if !status.is_success() {
            if collect(body, MAX_ERROR_BYTES).await.is_ok() {
                connections.keep(sender);
            }
            return Err(Failure::Status(status.as_u16()));
        }
        if stream {
            if !is_event_stream(headers) {
                return Err(Failure::Malformed("not an event stream"));
            }
            self.read_stream(body, on_gap).await?;
        } else {
            self.read_document(body).await?;
        }
        let end = Instant::now();
        // The connection's task detects the end of the response only when it runs again.
        if sender.ready().await.is_ok() {
            connections.keep(sender);
        }
        Ok(self.answered(due, end))
    }

    async fn read_stream(&mut self, mut body: Incoming, mut on_gap: impl FnMut(Duration)) -> Result<(), Failure> {
        let mut events = Events::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Failure::Broken(Break::Short))?;
            let Ok(data) = frame.into_data() else { continue };
            let now = Instant::now();
            events.push(data, |event| self.event(event, now, &mut on_gap))?;
        }
        match (events.ends_at_boundary(), self.done) {
            (true, true) => Ok(()),
            (false, _) => Err(Failure::Broken(Break::InEvent)),
            (true, false) => Err(Failure::Broken(Break::NoDone)),
        }
    }

    fn event(&mut self, event: Event<'_>, now: Instant, on_gap: &mut impl FnMut(Duration)) -> Result<(), Failure> {
        if event.is_error {
            return Err(Failure::ErrorEvent);
        }
        if self.done {
            return Err(Failure::Malformed("events after [DONE]"));
        }
        if event.data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let said = self.document(event.data)?;
        if said.content {
            self.events += 1;
            self.first.get_or_insert(now);
            if let Some(last) = self.last.replace(now) {
                let gap = now - last;
                self.longest_gap = self.longest_gap.max(Some(gap));
                on_gap(gap);
            }
        }
        Ok(())
    }

    async fn read_document(&mut self, body: Incoming) -> Result<(), Failure> {
        let whole = collect(body, MAX_BODY_BYTES).await.map_err(|error| match error {
            Some(_) => Failure::Broken(Break::Short),
            None => Failure::Malformed("a response of more than 64 MiB"),
        })?;
        let said = self.document(&whole)?;
        if said.is_answer { Ok(()) } else { Err(NO_JSON) }
    }

    fn document(&mut self, json: &[u8]) -> Result<Said, Failure> {
        let said = answer::read(json).ok_or(NO_JSON)?;
        if said.is_error {
            return Err(Failure::ErrorEvent);
        }
        self.reported = said.output_tokens.or(self.reported);
        self.content |= said.content;
        Ok(said)
    }

    fn answered(&self, due: Instant, end: Instant) -> Answered {
        let gaps = u32::try_from(self.events.saturating_sub(1)).unwrap_or(u32::MAX);
        let spread = self.first.zip(self.last).map(|(first, last)| last - first);
        Answered {
            ttft: self.first.map(|first| first.saturating_duration_since(due)),
            e2e: end.saturating_duration_since(due),
            mean_gap: spread.and_then(|spread| spread.checked_div(gaps)),
            longest_gap: self.longest_gap,
            tokens: self.reported.map_or(Tokens::Events(self.events), Tokens::Reported),
            content: self.content,
        }
    }
}

/// Sends a request on an idle connection or a new one. If the server had just closed the idle connection and nothing
/// was sent, the request is sent on a new connection.
async fn send(connections: &Connections, body: Bytes) -> Result<(Sender, Response<Incoming>), Failure> {
    let mut request = connections.target.request(body);
    if let Some(mut sender) = connections.idle().await {
        match sender.try_send_request(request).await {
            Ok(response) => return Ok((sender, response)),
            Err(mut refused) => match refused.take_message() {
                Some(unsent) => request = unsent,
                None => return Err(no_head(&refused.into_error())),
            },
        }
    }
    let mut sender = connections.open().await?;
    let response = sender.send_request(request).await.map_err(|error| no_head(&error))?;
    Ok((sender, response))
}

fn no_head(error: &hyper::Error) -> Failure {
    if error.is_parse() { Failure::Malformed("not HTTP") } else { Failure::Closed }
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.trim_start().get(..17).is_some_and(|start| start.eq_ignore_ascii_case("text/event-stream"))
}
