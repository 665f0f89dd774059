//! Checks body members: token ids against the model's vocabulary, adapters against the model's own, and members that
//! clients may not send.
//!
//! An engine that does not check ids reads beyond its embedding. SGLang 0.5.23 crashes as a result, and a retry would
//! crash the next engine. Values are scanned in place, without parsing the body.

use std::ops::Range;

use semmoe_engines::Route;
use semmoe_engines::fields::{Fault, Field, Rules, Treatment};
use semmoe_engines::json::Member;

use crate::backends::{Model, RequestError, snapshot};

/// Positions of the members to check once the model is known; usually none.
#[derive(Default)]
pub(super) struct Marked {
    found: Vec<(&'static Field, Range<usize>)>,
}

impl Marked {
    pub(super) fn see(&mut self, route: Route, field: Option<&'static Field>, member: &Member) {
        if let Some(field) = field.filter(|field| field.treatment != Treatment::Removed && field.is_on(route)) {
            self.found.push((field, member.value.clone()));
        }
    }

    /// Checks all marked members.
    ///
    /// # Errors
    /// [`RequestError::Field`] for an id outside the vocabulary, if its size is known, and for members that clients may
    /// not send; [`RequestError::UnknownModel`] for an adapter that the model does not have.
    pub(super) fn check(&self, route: Route, body: &[u8], model: &Model) -> Result<(), RequestError> {
        if self.found.is_empty() {
            return Ok(());
        }
        let rules = Rules { route, vocabulary: vocabulary(model), adapters: model.other_names.adapters.as_deref() };
        let checked = self.found.iter().try_for_each(|(field, value)| rules.check(field, &body[value.clone()]));
        checked.map_err(|fault| match fault {
            Fault::Adapter(name) => unknown_adapter(model, &name),
            fault => RequestError::Field { source: fault.into() },
        })
    }

    /// Returns the value of the member that names an adapter, if the body has one.
    pub(super) fn adapters<'a>(&self, body: &'a [u8]) -> Option<&'a [u8]> {
        let mut named = self.found.iter().rev().filter(|(field, _)| field.treatment == Treatment::Adapters);
        let value = &body[named.next()?.1.clone()];
        (value != b"null").then_some(value)
    }
}

fn unknown_adapter(model: &Model, name: &str) -> RequestError {
    let called = |name: &str| format!("{}:{name}", model.name);
    let adapters = model.other_names.adapters.iter().flatten().map(|known| called(known));
    let known: Vec<String> = std::iter::once(model.name.clone()).chain(adapters).collect();
    RequestError::unknown_model(&called(name), known.join(", "))
}

/// Returns the number of rows in the model's embedding, from its tables or its configuration; otherwise the maximum for
/// its tokenizer.
fn vocabulary(model: &Model) -> Option<u32> {
    let is_other = |member: &&snapshot::Member| {
        member.fit.unpinned.as_ref().is_some_and(|why| matches!(why.reason(), "tables" | "tokenizer"))
    };
    let tables = model.members.iter().filter(|it| !is_other(it)).filter_map(|member| member.tables.as_ref());
    let tables = tables.map(|loaded| loaded.tables.model().vocab_size).max();
    tables.or_else(|| model.text.as_deref().map(|text| text.vocabulary.size()))
}
