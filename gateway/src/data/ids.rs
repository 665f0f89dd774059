//! Token ids that clients send in place of text, checked against the model's vocabulary.
//!
//! An engine that does not check them looks up a row of its embedding that is not there. SGLang 0.5.23 dies of that,
//! and a retry would kill the next engine. Lists are scanned where they stand in the body, without parsing it.

use std::ops::Range;

use semmoe_engines::{Route, json};

use crate::error::RequestError;
use crate::snapshot::Model;

/// Characters of a wrong id that an error repeats.
const SHOWN: usize = 32;

/// Members of a body that can hold token ids, by route.
fn fields(route: Route) -> &'static [&'static str] {
    match route {
        Route::Completions => &["prompt"],
        // SGLang takes ids beside messages.
        Route::Chat | Route::Generate => &["input_ids"],
        Route::Embeddings => &["input"],
        _ => &[],
    }
}

/// Where lists stand in a body that may be lists of ids.
#[derive(Default)]
pub(super) struct Lists {
    found: Vec<(&'static str, Range<usize>)>,
}

impl Lists {
    pub(super) fn see(&mut self, route: Route, body: &[u8], member: &json::Member) {
        if body.get(member.value.start) != Some(&b'[') {
            return;
        }
        if let Some(field) = fields(route).iter().find(|field| member.is(body, field)) {
            self.found.push((field, member.value.clone()));
        }
    }

    /// Checks every list, where the size of the model's vocabulary is known.
    ///
    /// # Errors
    /// [`RequestError::Field`] with the first id that is not in the vocabulary.
    pub(super) fn check(&self, body: &[u8], model: &Model) -> Result<(), RequestError> {
        if self.found.is_empty() {
            return Ok(());
        }
        let Some(size) = vocabulary(model) else { return Ok(()) };
        for (field, list) in &self.found {
            if let Some(id) = outside(&body[list.clone()], size, *field == "input_ids") {
                let id: String = String::from_utf8_lossy(id).chars().take(SHOWN).collect();
                let cause = format!("{field}: token id {id} is not in the model's vocabulary of {size} tokens");
                return Err(RequestError::Field { cause });
            }
        }
        Ok(())
    }
}

/// Rows of the model's embedding as far as its tables say; else what its tokenizer knows.
fn vocabulary(model: &Model) -> Option<u32> {
    let tables = model.members.iter().filter_map(|member| member.tables.as_ref());
    let tables = tables.map(|loaded| loaded.tables.model().vocab_size);
    tables.chain(model.text.as_deref().map(|text| text.tokenizer.vocab_size())).max()
}

/// The first number in a list, or a list of lists, that is no id below `size`. A list that holds text or objects has no
/// ids; with `quoted` numbers in quotes are ids, too, as the parsers of engines take them for that.
fn outside(list: &[u8], size: u32, quoted: bool) -> Option<&[u8]> {
    let mut rest = list;
    while let Some(first) = rest.first() {
        let is_plain = matches!(first, b'[' | b']' | b',' | b' ' | b'\t' | b'\r' | b'\n');
        if is_plain || (quoted && *first == b'"') {
            rest = &rest[1..];
            continue;
        }
        let is_end = |byte: &u8| matches!(byte, b'[' | b']' | b',' | b'"' | b' ' | b'\t' | b'\r' | b'\n');
        let (item, behind) = rest.split_at(rest.iter().position(is_end).unwrap_or(rest.len()));
        let number = std::str::from_utf8(item).ok().and_then(|item| item.parse::<f64>().ok());
        match number {
            Some(number) if (0.0..f64::from(size)).contains(&number) => {}
            Some(_) => return Some(item),
            // Text, objects, true, null: the engine judges these.
            None if !quoted => return None,
            None => {}
        }
        // A bare quote in a list of text.
        rest = if behind.len() == rest.len() { &behind[1..] } else { behind };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_outside_the_vocabulary_are_found() {
        for (list, quoted, expected) in [
            ("[0, 99]", false, None),
            ("[100]", false, Some("100")),
            ("[99999999]", false, Some("99999999")),
            ("[[1,2],[3 , -1]]", false, Some("-1")),
            ("[1, 1e8]", false, Some("1e8")),
            ("[99.0, 5]", false, None),
            ("[99999999999999999999999999]", false, Some("99999999999999999999999999")),
            ("[\"100\"]", true, Some("100")),
            ("[\"100\", \"-5\"]", false, None),
            ("[\"a\", 1, 100]", true, Some("100")),
            ("[true, null, 5]", true, None),
            ("[{\"role\": 100}]", false, None),
            ("[]", false, None),
            ("[", false, None),
        ] {
            let found = outside(list.as_bytes(), 100, quoted).map(|id| std::str::from_utf8(id).unwrap());
            assert_eq!(found, expected, "{list}");
        }
    }

    proptest! {
        /// The oracle parses.
        #[test]
        fn as_a_parser_sees_it(lists in proptest::collection::vec(proptest::collection::vec(-3i64..103, 0..5), 0..5)) {
            let wrong = lists.iter().flatten().find(|id| !(0..100).contains(*id)).map(i64::to_string);
            let text = serde_json::to_string(&lists).unwrap();
            let found = outside(text.as_bytes(), 100, false).map(|id| std::str::from_utf8(id).unwrap().to_owned());
            prop_assert_eq!(found, wrong);
        }

        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..40), quoted in any::<bool>()) {
            let _ = outside(&bytes, 100, quoted);
        }
    }
}
