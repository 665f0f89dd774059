//! The sources of a profile's counts, independent of the order and grouping of merges.

use std::collections::BTreeSet;

use semmoe_tables::Provenance;

/// Separates sources.
const SEPARATOR: &str = "; ";
/// Maximum number of sources to name, in alphabetical order.
const NAMED: usize = 8;
/// Stands for all further sources.
const MORE: &str = "and more";
/// Maximum length of a source in bytes, to keep the total within the format's limit.
const MAX_SOURCE_BYTES: usize = 400;

/// The names of the two parts of a split.
pub(crate) const HELD_OUT: &str = "held out";
pub(crate) const COUNTED: &str = "counted";

/// A set of sources and the latest creation time. Addition is associative, commutative and idempotent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    sources: BTreeSet<String>,
    more: bool,
    created: String,
}

impl Origin {
    pub(crate) fn add(&mut self, provenance: &Provenance) {
        provenance.source.split(SEPARATOR).for_each(|source| self.add_source(source));
        // RFC 3339 times sort as text.
        if self.created < provenance.created {
            self.created.clone_from(&provenance.created);
        }
    }

    pub(crate) fn add_source(&mut self, source: &str) {
        self.more |= source == MORE;
        if source.is_empty() || source == MORE {
            return;
        }
        self.sources.insert(source[..source.floor_char_boundary(MAX_SOURCE_BYTES)].to_owned());
        if self.sources.len() > NAMED {
            self.sources.pop_last();
            self.more = true;
        }
    }

    /// Number of splits that these requests went through, according to the sources.
    pub(crate) fn splits(&self) -> u64 {
        let parts = self.sources.iter().filter(|source| source.starts_with(HELD_OUT) || source.starts_with(COUNTED));
        parts.count() as u64
    }

    /// Returns the source text for a part after this many splits.
    pub(crate) fn of_split(part: &str, splits: u64) -> String {
        if splits == 0 { part.to_owned() } else { format!("{part} of split {}", splits + 1) }
    }

    pub(crate) fn provenance(&self) -> Provenance {
        let more = self.more.then_some(MORE);
        let sources: Vec<&str> = self.sources.iter().map(String::as_str).chain(more).collect();
        Provenance { source: sources.join(SEPARATOR), created: self.created.clone() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum<'a>(parts: impl IntoIterator<Item = &'a Provenance>) -> Provenance {
        let mut origin = Origin::default();
        parts.into_iter().for_each(|part| origin.add(part));
        origin.provenance()
    }

    proptest! {
        #[test]
        fn no_order_or_grouping_changes_it(
            sources in proptest::collection::vec(("[a-z]{0,2}(; [a-z]{1,2})?", "[0-9]{0,2}"), 1..30), at in 0usize..30
        ) {
            let parts: Vec<Provenance> =
                sources.into_iter().map(|(source, created)| Provenance { source, created }).collect();
            let whole = sum(&parts);
            let (a, b) = parts.split_at(at.min(parts.len()));
            prop_assert_eq!(&sum([&sum(b), &sum(a)]), &whole);
            prop_assert_eq!(&sum(parts.iter().rev()), &whole);
            prop_assert_eq!(&sum([&whole, &whole, &parts[0]]), &whole);
        }
    }

    #[test]
    fn long_and_many_sources_stay_short() {
        let many: Vec<Provenance> = (0..100)
            .map(|i| Provenance { source: format!("{i:03}{}", "ä".repeat(3000)), created: String::new() })
            .collect();
        let whole = sum(&many);
        assert!(whole.source.len() < 4096 && whole.source.ends_with("; and more"), "{}", whole.source.len());
    }
}
