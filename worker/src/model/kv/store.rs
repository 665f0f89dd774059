//! The memory of a pool's pages. [`super::pages`] tracks the pages' content under the same ids.
//!
//! A page that is being written belongs to its sequence; a page that may be shared is stored here, under its id.

use std::sync::Arc;

use super::CacheShape;
use super::page::{self, Page};
use super::pages::PageId;
use crate::model::compute::Arena;

/// The memory of a pool's pages.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// Memory of unused pages.
    pub(super) free: Vec<Page>,
    /// Memory that has not been used for pages yet.
    arena: Option<Arena>,
    /// Shareable pages by id. Once all sequences have released a page, the store's reference is the last one.
    shared: Vec<Option<Arc<Page>>>,
}

impl Store {
    /// Returns memory for a newly assigned page id. If the id's previous page was evicted, its memory is reused.
    pub(super) fn page(&mut self, shape: &CacheShape, id: PageId) -> Option<Page> {
        let evicted = self.shared.get_mut(id as usize).and_then(Option::take).and_then(Arc::into_inner);
        if let Some(mut page) = evicted.or_else(|| self.free.pop()) {
            // Keys and values need not be cleared, because nothing reads them before they are written.
            page.routes.clear();
            return Some(page);
        }
        let left = self.arena.as_mut().and_then(|arena| Page::take(shape, arena));
        left.or_else(|| Page::take(shape, self.arena.insert(page::arena(shape))))
    }

    /// Makes a page shareable under its id.
    pub(super) fn share(&mut self, id: PageId, page: Page) -> Arc<Page> {
        let at = id as usize;
        if self.shared.len() <= at {
            self.shared.resize(at + 1, None);
        }
        Arc::clone(self.shared[at].insert(Arc::new(page)))
    }

    /// Returns a shareable page. Panics if the id has none.
    pub(super) fn shared(&self, id: PageId) -> Arc<Page> {
        Arc::clone(self.shared[id as usize].as_ref().expect("a sealed page is shared"))
    }

    /// Returns the memory of all unused pages to the operating system; `free` are the unused page ids.
    pub(super) fn release(&mut self, free: &[PageId]) {
        for &id in free {
            self.free.extend(self.shared.get_mut(id as usize).and_then(Option::take).and_then(Arc::into_inner));
        }
        self.free.iter_mut().for_each(Page::release);
    }
}
