//! The names that requests may use for a model: its own name, aliases, and `model:adapter` for its LoRA adapters.
//!
//! Names are forwarded as the client wrote them, unless the backend has a `served_name`; only the engine knows which
//! adapters are loaded.

use std::collections::HashMap;

use crate::config::OtherNames;

/// Maximum length of a model name, in bytes; enforced by the configuration.
pub(crate) const MAX_NAME_BYTES: usize = 256;

/// Finds models by any of their names.
pub(crate) struct Names {
    /// Maps names and aliases to model indices.
    models: HashMap<String, usize>,
    /// Adapters that requests may name, by model; `None` allows any.
    adapters: Vec<Option<Vec<String>>>,
}

impl Names {
    /// Builds the lookup. `models`: each model's own name and its other names, in order.
    pub(crate) fn new<'a>(models: impl Iterator<Item = (&'a String, &'a OtherNames)>) -> Self {
        let mut all = Self { models: HashMap::new(), adapters: Vec::new() };
        for (index, (own, OtherNames { aliases, adapters })) in models.enumerate() {
            all.models.extend(std::iter::once(own).chain(aliases).map(|name| (name.clone(), index)));
            all.adapters.push(adapters.clone());
        }
        all
    }

    /// Finds the model that a request names. A name with colons is looked up as a model first, then as an adapter of
    /// the model with the longest matching name.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        if let Some(index) = self.models.get(name) {
            return Some(*index);
        }
        // Bound the search: a client may send a long name consisting of colons.
        let start = &name.as_bytes()[..name.len().min(MAX_NAME_BYTES + 1)];
        let colons = (0..start.len()).rev().filter(|at| start[*at] == b':');
        let (index, adapter) =
            colons.into_iter().find_map(|at| Some((*self.models.get(&name[..at])?, &name[at + 1..])))?;
        let known = match &self.adapters[index] {
            None => !adapter.is_empty(),
            Some(known) => known.iter().any(|known| known == adapter),
        };
        known.then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_belong_to_the_model_with_the_longest_name() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let others = |aliases: &[&str], adapters| OtherNames { aliases: names(aliases), adapters };
        let models = [
            ("m".to_owned(), others(&["alias"], None)),
            ("m:8b".to_owned(), others(&[], Some(names(&["sql", "a:b"])))),
            ("closed".to_owned(), others(&[], Some(Vec::new()))),
        ];
        let names = Names::new(models.iter().map(|model| (&model.0, &model.1)));
        for (name, expected) in [
            ("m", Some(0)),
            ("m:any", Some(0)),
            ("alias:any", Some(0)),
            ("m:a:b:", Some(0)),
            ("m:", None),
            ("m:8b", Some(1)),
            ("m:8b:sql", Some(1)),
            ("m:8b:a:b", Some(1)),
            ("m:8b:other", None),
            ("m:8b:", None),
            ("closed", Some(2)),
            ("closed:x", None),
            ("other:x", None),
            (":", None),
            ("", None),
        ] {
            assert_eq!(names.find(name), expected, "{name}");
        }
        let long = ":".repeat(1 << 20);
        assert_eq!(names.find(&long), None);
        assert_eq!(names.find(&format!("m{long}é")), Some(0));
        assert_eq!(names.find(&format!("{}:x", "é".repeat(200))), None);
    }
}
