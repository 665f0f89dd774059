//! The rules of a trace, checked request by request: pages can leave memory again, and one bad request is distinguished
//! from a bad file.

use half::f16;

use crate::trace::ExpertRows;
use crate::{FormatError, ModelInfo, Trace};

/// After so many tokens' rows the pages behind are given back.
const RELEASE_BYTES: usize = 16 << 20;

impl Trace {
    pub(crate) fn check_all(&self) -> Result<(), FormatError> {
        let mut rules = self.rules();
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

    /// For [`Trace::check_request`].
    pub(crate) fn rules(&self) -> RouteCheck {
        RouteCheck::new(self.model(), 0)
    }

    /// Token ids, prompt length, routes and weights of one request.
    pub(crate) fn check_request(&self, request: usize, rules: &mut RouteCheck) -> Result<(), FormatError> {
        let range = self.token_range(request);
        let (tokens, vocabulary) = (&self.all_token_ids()[range.clone()], self.model().vocab_size);
        if let Some(at) = tokens.iter().position(|&t| t >= vocabulary) {
            let (place, expected) = (format!("token {}", range.start + at), format!("ids below {vocabulary}"));
            return Err(FormatError::value("token_ids", place, tokens[at], expected));
        }
        if let Some(&length) = self.all_prompt_lengths().map(|lengths| &lengths[request])
            && length as usize > tokens.len()
        {
            let (at, expected) = (format!("request {request}"), format!("at most its {} tokens", tokens.len()));
            return Err(FormatError::value("prompt_lengths", at, length, expected));
        }
        match self.rows(range.clone()) {
            ExpertRows::Narrow(rows) => self.check_routes(rows, range.start, rules.with_unknown(u8::MAX.into()))?,
            ExpertRows::Wide(rows) => self.check_routes(rows, range.start, rules.with_unknown(u16::MAX))?,
        }
        let Some(weights) = self.all_weights() else { return Ok(()) };
        let row = self.model().layers() * self.k();
        let first = range.start * row;
        match weights[first..range.end * row].iter().position(|&w| !valid_weight(w)) {
            None => Ok(()),
            Some(at) => Err(FormatError::value("weights", self.at(first + at), weights[first + at], VALID_WEIGHT)),
        }
    }

    fn check_routes<T: Copy + Into<u16>>(
        &self,
        experts: &[T],
        first_token: usize,
        rules: &mut RouteCheck,
    ) -> Result<(), FormatError> {
        let k = self.k();
        for (row, route) in experts.chunks_exact(k).enumerate() {
            rules.check(route).map_err(|(slot, found, expected)| {
                let element = first_token * self.model().layers() * k + row * k + slot;
                FormatError::value("experts", self.at(element), found, expected)
            })?;
        }
        Ok(())
    }

    /// A position of `experts` in words.
    fn at(&self, element: usize) -> String {
        let (row, slot) = (element / self.k(), element % self.k());
        let layers = self.model().layers();
        format!("token {}, layer {}, slot {slot}", row / layers, row % layers)
    }
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
        return bad(at + 1, offsets[at + 1], format!("at least {}, the offset before", offsets[at]));
    }
    if offsets[last] != tokens as u64 {
        return bad(last, offsets[last], format!("{tokens}, the number of tokens"));
    }
    Ok(())
}

pub(crate) const VALID_WEIGHT: &str = "a finite number, not below zero";

pub(crate) fn valid_weight(weight: f16) -> bool {
    weight.is_finite() && (weight >= f16::ZERO)
}

/// Checks rows of experts: each all unknown, or all known and distinct.
#[derive(Debug)]
pub(crate) struct RouteCheck {
    num_experts: u16,
    unknown: u16,
    /// For each expert the last row it was seen in, counted from one.
    seen: Vec<u64>,
    row: u64,
}

impl RouteCheck {
    pub(crate) fn new(model: &ModelInfo, unknown: u16) -> Self {
        let seen = vec![0; usize::from(model.num_experts)];
        RouteCheck { num_experts: model.num_experts, unknown, seen, row: 0 }
    }

    fn with_unknown(&mut self, unknown: u16) -> &mut Self {
        self.unknown = unknown;
        self
    }

    /// Whether the row is known; otherwise the slot that is wrong, what it holds and what is allowed.
    pub(crate) fn check<T: Copy + Into<u16>>(&mut self, route: &[T]) -> Result<bool, (usize, u16, String)> {
        self.row += 1;
        let known = route[0].into() != self.unknown;
        for (slot, &id) in route.iter().enumerate() {
            let id = id.into();
            if !known {
                if id != self.unknown {
                    return Err((slot, id, format!("{} as in slot 0 of an unknown route", self.unknown)));
                }
            } else if id >= self.num_experts {
                let expected = format!("ids below {}, or {} in every slot", self.num_experts, self.unknown);
                return Err((slot, id, expected));
            } else if std::mem::replace(&mut self.seen[usize::from(id)], self.row) == self.row {
                return Err((slot, id, "experts distinct within a token".into()));
            }
        }
        Ok(known)
    }
}
