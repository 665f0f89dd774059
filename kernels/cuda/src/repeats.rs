//! Detects repeated lists of launches. They are worth a graph, which costs less to launch and more to create.

use std::collections::HashMap;

use crate::launch::Launch;

/// Maximum number of lists remembered; when it is exceeded, all are forgotten.
const MAX_LISTS: usize = 4096;

/// How to launch a list.
pub(crate) enum Repeat<'a, G> {
    /// The list is new: launch it directly.
    First,
    /// The list occurred before: create its graph here.
    Second(&'a mut Option<G>),
    /// The list has a graph.
    Known(&'a G),
}

/// Graphs of the lists that occurred twice, keyed by kernels, grids and parameters.
pub(crate) struct Repeats<G> {
    lists: HashMap<Vec<u8>, Option<G>>,
    key: Vec<u8>,
}

impl<G> Default for Repeats<G> {
    fn default() -> Self {
        Self { lists: HashMap::new(), key: Vec::new() }
    }
}

impl<G> Repeats<G> {
    /// Returns how to launch a list, depending on whether it occurred before.
    pub(crate) fn of(&mut self, launches: &[Launch]) -> Repeat<'_, G> {
        self.key.clear();
        for launch in launches {
            let (x, y, threads) = launch.shape();
            self.key.extend_from_slice(launch.kernel().as_bytes());
            [x, y, threads].iter().for_each(|of| self.key.extend_from_slice(&of.to_le_bytes()));
            self.key.extend_from_slice(launch.params());
        }
        if !self.lists.contains_key(&self.key) {
            if self.lists.len() == MAX_LISTS {
                self.lists.clear();
            }
            self.lists.insert(self.key.clone(), None);
            return Repeat::First;
        }
        match self.lists.get_mut(&self.key) {
            Some(Some(graph)) => Repeat::Known(graph),
            Some(none) => Repeat::Second(none),
            None => Repeat::First,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Argmax;
    use crate::team::Buffer;

    fn list(rows: u64) -> [Launch; 1] {
        let memory = Buffer { address: 4096, bytes: 1 << 20 };
        [Argmax { logits: memory, best: memory, rows, vocab: 8 }.launch().unwrap()]
    }

    #[test]
    fn a_list_gets_a_graph_when_it_comes_again() {
        let mut repeats = Repeats::<u32>::default();
        assert!(matches!(repeats.of(&list(1)), Repeat::First));
        assert!(matches!(repeats.of(&list(2)), Repeat::First), "other parameters");
        let Repeat::Second(graph) = repeats.of(&list(1)) else { panic!("it occurred before") };
        *graph = Some(7);
        assert!(matches!(repeats.of(&list(1)), Repeat::Known(7)));
        assert!(matches!(repeats.of(&list(2)), Repeat::Second(None)));
        assert!(matches!(repeats.of(&[list(1), list(2)].concat()), Repeat::First), "a longer list");
    }

    #[test]
    fn no_more_lists_are_remembered_than_said() {
        let mut repeats = Repeats::<u32>::default();
        for rows in 1..=MAX_LISTS as u64 + 1 {
            assert!(matches!(repeats.of(&list(rows)), Repeat::First));
        }
        assert_eq!(repeats.lists.len(), 1);
        assert!(matches!(repeats.of(&list(1)), Repeat::First));
    }
}
