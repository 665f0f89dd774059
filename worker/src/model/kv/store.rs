//! The memory of a pool's pages. It knows nothing of which page holds what: [`super::pages`] does, by the same ids.
//!
//! A page that a sequence writes to is the sequence's; one that may be shared is here, under its id.

use std::sync::Arc;

use super::CacheShape;
use super::page::{self, Page};
use super::pages::PageId;
use crate::model::compute::Arena;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// Memory of pages that hold nothing: that no sequence needs any more.
    pub(super) free: Vec<Page>,
    /// Memory that no page has yet.
    arena: Option<Arena>,
    /// By id: pages that others may hold. The store's own reference is the last one once all sequences have released
    /// it.
    shared: Vec<Option<Arc<Page>>>,
}

impl Store {
    /// Memory for the page that an id names from now on: that of the page it named before, if it was evicted, or any.
    pub(super) fn page(&mut self, shape: &CacheShape, id: PageId) -> Option<Page> {
        let evicted = self.shared.get_mut(id as usize).and_then(Option::take).and_then(Arc::into_inner);
        if let Some(mut page) = evicted.or_else(|| self.free.pop()) {
            // Keys and values are left: nothing reads what was not written.
            page.routes.clear();
            return Some(page);
        }
        let left = self.arena.as_mut().and_then(|arena| Page::take(shape, arena));
        left.or_else(|| Page::take(shape, self.arena.insert(page::arena(shape))))
    }

    /// Others may hold the page from now on.
    pub(super) fn share(&mut self, id: PageId, page: Page) -> Arc<Page> {
        let at = id as usize;
        if self.shared.len() <= at {
            self.shared.resize(at + 1, None);
        }
        Arc::clone(self.shared[at].insert(Arc::new(page)))
    }

    /// A page that others may hold. Panics if there is none by this id.
    pub(super) fn shared(&self, id: PageId) -> Arc<Page> {
        Arc::clone(self.shared[id as usize].as_ref().expect("a sealed page is shared"))
    }

    /// Gives the memory of all pages that hold nothing back to the system; `free` are their ids.
    pub(super) fn release(&mut self, free: &[PageId]) {
        for &id in free {
            self.free.extend(self.shared.get_mut(id as usize).and_then(Option::take).and_then(Arc::into_inner));
        }
        self.free.iter_mut().for_each(Page::release);
    }
}
