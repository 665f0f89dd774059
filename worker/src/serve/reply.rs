//! Complete responses and event streams, for any dialect.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use semmoe_engines::pin;
use serde_json::Value;

use super::answer::{Answer, Answers, Delta};
use super::app::App;
use super::error::ApiError;
use super::validated::{ValidatedRequest, off_the_runtime};

/// How a route formats its responses.
pub(super) trait Dialect: Send + 'static {
    /// Formats the complete response.
    fn whole(&self, answers: &[Answer]) -> Value;
    /// Returns the events to send before the first token.
    fn opening(&self, _answers: &[Answer]) -> Vec<Value> {
        Vec::new()
    }
    /// Formats events for one answer's progress.
    fn news(&self, answer: &Answer, delta: &Delta) -> Vec<Value>;
    /// Returns the events to send after the last token.
    fn closing(&self, _answers: &[Answer]) -> Vec<Value> {
        Vec::new()
    }
}

/// Parses a request's headers and body into its sequences and the dialect of the response.
type Prepare<D> = fn(&App, &HeaderMap, &[u8]) -> Result<(ValidatedRequest, D), ApiError>;

/// Prepares a request (on a blocking thread if it is large), runs it and sends the response. Errors before the first
/// token set the HTTP status, even for streams; later errors end a stream with one event. If the client disconnects,
/// the future or the stream is dropped, which cancels the sequences.
pub(super) async fn serve<D: Dialect>(
    app: &Arc<App>,
    headers: HeaderMap,
    body: Bytes,
    prepare: Prepare<D>,
) -> Result<Response, ApiError> {
    let (request, dialect) = off_the_runtime(app, headers, body, prepare).await?;
    let stream = request.stream;
    let mut answers = Answers::begin(app, request)?;
    let rank = answers.list.first().map(|answer| HeaderValue::from(answer.running.rank.get()));
    let mut response = if stream {
        let first = answers.next().await.transpose()?;
        events(answers, dialect, first)
    } else {
        answers.complete().await?;
        Json(dialect.whole(&answers.list)).into_response()
    };
    if let Some(rank) = rank {
        response.headers_mut().insert(pin::HEADER, rank);
    }
    Ok(response)
}

struct Stream<D> {
    answers: Answers,
    dialect: D,
    /// Events that are ready to be sent.
    queue: VecDeque<Bytes>,
    ended: bool,
}

fn events<D: Dialect>(answers: Answers, dialect: D, first: Option<Delta>) -> Response {
    let mut state = Stream { queue: VecDeque::new(), ended: false, answers, dialect };
    let opening = state.dialect.opening(&state.answers.list);
    state.push(opening);
    state.take(first.map(Ok));
    let body = stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.queue.pop_front() {
                return Some((Ok::<_, Infallible>(event), state));
            }
            if state.ended {
                return None;
            }
            let news = state.answers.next().await;
            state.take(news);
        }
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(body)).into_response()
}

impl<D: Dialect> Stream<D> {
    fn push(&mut self, events: Vec<Value>) {
        self.queue.extend(events.iter().map(|event| Bytes::from(format!("data: {event}\n\n"))));
    }

    fn take(&mut self, news: Option<Result<Delta, ApiError>>) {
        match news {
            Some(Ok(delta)) => {
                let events = self.dialect.news(&self.answers.list[delta.index], &delta);
                self.push(events);
            }
            // No [DONE] is sent: a client that misses the error must not assume that the text is complete.
            Some(Err(error)) => {
                self.push(vec![error.json()]);
                self.ended = true;
            }
            None => {
                let events = self.dialect.closing(&self.answers.list);
                self.push(events);
                self.queue.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                self.ended = true;
            }
        }
    }
}
