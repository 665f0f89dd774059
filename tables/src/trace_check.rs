//! Checks the rules of a trace request by request, so that pages can be released and an invalid request can be
//! distinguished from an invalid file.

use std::fmt::Display;

use half::f16;

use crate::trace::ExpertRows;
use crate::{FormatError, ModelInfo, Trace};

/// Number of bytes read before the pages behind the reader are released.
const RELEASE_BYTES: usize = 16 << 20;

impl Trace {
    pub(crate) fn check_all(&self) -> Result<(), FormatError> {
        let mut rules = RequestCheck::new(self.model());
        let row_bytes = (self.model().layers() * self.k() * 2).max(1);
        let mut released = 0;
        for request in 0..self.requests() {
            self.check_request(request, &mut rules)?;
            let end = self.token_range(request).end;
            if (end - released) * row_bytes >= RELEASE_BYTES {
                self.release(released..end);
                released = end;
            }
        }
        Ok(())
    }

    /// Checks token ids, prompt length, routes and weights of one request.
    pub(crate) fn check_request(&self, request: usize, rules: &mut RequestCheck) -> Result<(), FormatError> {
        let range = self.token_range(request);
        let (model, first, tokens) = (self.model(), range.start, &self.all_token_ids()[range.clone()]);
        check_token_ids(model, tokens, first)?;
        if let Some(lengths) = self.all_prompt_lengths() {
            check_prompt_len(lengths[request], tokens.len(), format_args!("request {request}"))?;
        }
        match self.rows(range.clone()) {
            ExpertRows::Narrow(rows) => rules.check_rows(rows, u8::MAX.into(), model, first)?,
            ExpertRows::Wide(rows) => rules.check_rows(rows, u16::MAX, model, first)?,
        }
        let Some(weights) = self.all_weights() else { return Ok(()) };
        let row = model.layers() * self.k();
        let weights = &weights[first * row..range.end * row];
        match weights.iter().position(|&w| !valid_weight(w)) {
            None => Ok(()),
            Some(at) => Err(FormatError::value("weights", place(model, first, at), weights[at], VALID_WEIGHT)),
        }
    }
}

/// Checks token ids, the first of which has index `first`.
pub(crate) fn check_token_ids(model: &ModelInfo, token_ids: &[u32], first: usize) -> Result<(), FormatError> {
    let vocabulary = model.vocab_size;
    let Some(at) = token_ids.iter().position(|&id| id >= vocabulary) else { return Ok(()) };
    let (place, expected) = (format!("token {}", first + at), format!("ids below {vocabulary}"));
    Err(FormatError::value("token_ids", place, token_ids[at], expected))
}

/// Checks the prompt length of a request of `tokens` tokens.
pub(crate) fn check_prompt_len(length: u32, tokens: usize, request: impl Display) -> Result<(), FormatError> {
    if length as usize <= tokens {
        return Ok(());
    }
    Err(FormatError::value("prompt_lengths", request, length, format!("at most its {tokens} tokens")))
}

/// Describes the position of an element of [n, L, k], whose first token has index `first`.
fn place(model: &ModelInfo, first: usize, element: usize) -> String {
    let [layers, k] = model.route_shape();
    let row = element / k;
    format!("token {}, layer {}, slot {}", first + row / layers, row % layers, element % k)
}

pub(crate) fn check_offsets(offsets: &[u64], tokens: usize) -> Result<(), FormatError> {
    let bad = |at: usize, found: u64, expected: String| {
        Err(FormatError::value("request_offsets", format!("index {at}"), found, expected))
    };
    let last = offsets.len() - 1;
    if offsets[0] != 0 {
        return bad(0, offsets[0], "0".into());
    }
    if let Some(at) = (0..last).find(|&at| offsets[at] > offsets[at + 1]) {
        return bad(at + 1, offsets[at + 1], format!("at least {}, the previous offset", offsets[at]));
    }
    if offsets[last] != tokens as u64 {
        return bad(last, offsets[last], format!("{tokens}, the number of tokens"));
    }
    Ok(())
}

pub(crate) const VALID_WEIGHT: &str = "a finite, non-negative number";

pub(crate) fn valid_weight(weight: f16) -> bool {
    weight.is_finite() && (weight >= f16::ZERO)
}

/// State of [`TraceRows::check`](crate::TraceRows::check), one per thread. Every row of experts must be all unknown, or
/// all known and distinct.
#[derive(Debug)]
pub struct RequestCheck {
    /// For each expert, the last row that contained it, counted from one.
    seen: Vec<u64>,
    row: u64,
}

impl RequestCheck {
    pub(crate) fn new(model: &ModelInfo) -> Self {
        RequestCheck { seen: vec![0; usize::from(model.num_experts)], row: 0 }
    }

    /// Checks the experts [n, L, k] of tokens, the first of which has index `first`. In an unknown route, all k experts
    /// are `unknown`.
    pub(crate) fn check_rows<T: Copy + Into<u16>>(
        &mut self,
        experts: &[T],
        unknown: u16,
        model: &ModelInfo,
        first: usize,
    ) -> Result<(), FormatError> {
        let k = usize::from(model.top_k);
        experts.chunks_exact(k).enumerate().try_for_each(|(row, route)| {
            self.check(route, unknown).map_err(|(slot, found, expected)| {
                FormatError::value("experts", place(model, first, row * k + slot), found, expected)
            })
        })
    }

    /// Checks one route. An error contains the invalid slot, its value and the allowed values.
    fn check<T: Copy + Into<u16>>(&mut self, route: &[T], unknown: u16) -> Result<(), (usize, u16, String)> {
        self.row += 1;
        let known = route[0].into() != unknown;
        for (slot, &id) in route.iter().enumerate() {
            let id = id.into();
            if !known {
                if id != unknown {
                    return Err((slot, id, format!("{unknown}, as in slot 0, because the route is unknown")));
                }
            } else if usize::from(id) >= self.seen.len() {
                let expected = format!("ids below {}, or {unknown} in every slot", self.seen.len());
                return Err((slot, id, expected));
            } else if std::mem::replace(&mut self.seen[usize::from(id)], self.row) == self.row {
                return Err((slot, id, "distinct experts per token".into()));
            }
        }
        Ok(())
    }
}
