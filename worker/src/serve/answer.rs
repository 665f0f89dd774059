//! Collects the tokens of a request's sequences as they arrive.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::app::App;
use super::error::ApiError;
use super::validated::ValidatedRequest;
use crate::engine::{Finish, SequenceEvent, SequenceText, TokenLogprobs};
use crate::unit::Running;

/// One sequence's output so far.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) running: Running,
    decoder: SequenceText,
    pub(super) prompt: Vec<u32>,
    pub(super) output: Vec<u32>,
    /// One entry per token in `output`, if requested.
    pub(super) logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens found in the prefix cache.
    pub(super) cached: u32,
    pub(super) text: String,
    pub(super) finish: Option<Finish>,
    /// Routed experts in SGLang's encoding; set by the last event.
    pub(super) routes: Option<String>,
    /// The time at which the request was accepted.
    pub(super) begun: Instant,
}

/// The progress of one sequence since the last call.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Delta {
    /// Index of the sequence in the request.
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) tokens: usize,
}

impl Answer {
    /// Returns the progress since the last call.
    fn poll(&mut self, app: &App, context: &mut Context<'_>) -> Poll<Result<Delta, ApiError>> {
        let mut delta = Delta::default();
        let mut news = false;
        while !self.running.ended {
            match self.running.poll_next(context) {
                Poll::Pending if news => break,
                Poll::Pending => return Poll::Pending,
                Poll::Ready(event) => {
                    news |= !matches!(event, Ok(SequenceEvent::Begun { .. }));
                    if let Err(error) =
                        event.map_err(ApiError::from).and_then(|event| self.take(app, event, &mut delta))
                    {
                        return Poll::Ready(Err(error));
                    }
                }
            }
        }
        self.text.push_str(&delta.text);
        Poll::Ready(Ok(delta))
    }

    fn take(&mut self, app: &App, event: SequenceEvent, delta: &mut Delta) -> Result<(), ApiError> {
        match event {
            SequenceEvent::Begun { cached_tokens } => self.cached = cached_tokens,
            SequenceEvent::Token { id: token, logprobs } => {
                self.output.push(token);
                self.logprobs.extend(logprobs);
                delta.tokens += 1;
                delta.text += &self.decoder.push(&app.served.tokenizer, token)?.0;
            }
            SequenceEvent::Finished { finish, routes } => {
                // If a stop text matched, the text before it has already been sent and nothing follows it.
                if !matches!(finish, Finish::Text(_)) {
                    delta.text += &self.decoder.finish(&app.served.tokenizer)?;
                }
                self.finish = Some(finish);
                self.routes = routes;
            }
            SequenceEvent::Failed { message } => return Err(ApiError::internal(message)),
        }
        Ok(())
    }
}

/// The sequences of one request. Dropping it cancels all sequences that are still running.
#[derive(Debug)]
pub(super) struct Answers {
    app: Arc<App>,
    pub(super) list: Vec<Answer>,
}

impl Answers {
    /// Submits all sequences of a request; if one is rejected, none runs.
    pub(super) fn begin(app: &Arc<App>, request: ValidatedRequest) -> Result<Self, ApiError> {
        let begun = Instant::now();
        let mut list = Vec::with_capacity(request.sequences.len());
        for sequence in request.sequences {
            let (decoder, prompt) = (SequenceText::new(&sequence), sequence.tokens.clone());
            let running = app.unit.submit(request.rank, sequence)?;
            list.push(Answer {
                running,
                decoder,
                prompt,
                output: Vec::new(),
                logprobs: Vec::new(),
                cached: 0,
                text: String::new(),
                finish: None,
                routes: None,
                begun,
            });
        }
        Ok(Self { app: Arc::clone(app), list })
    }

    /// Waits for progress on any sequence; returns `None` once all have ended.
    pub(super) async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        poll_fn(|context| {
            let mut open = false;
            for (index, answer) in self.list.iter_mut().enumerate().filter(|(_, answer)| answer.finish.is_none()) {
                open = true;
                if let Poll::Ready(delta) = answer.poll(&self.app, context) {
                    return Poll::Ready(Some(delta.map(|delta| Delta { index, ..delta })));
                }
            }
            if open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// Waits until all sequences have ended.
    pub(super) async fn complete(&mut self) -> Result<(), ApiError> {
        while let Some(news) = self.next().await {
            news?;
        }
        Ok(())
    }
}
