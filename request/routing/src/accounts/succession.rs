//! Successor accounts, which continue from existing accounts when ranks join or leave or the settings change.
//!
//! In-flight counts are shared: a request added through the old accounts is also removed through them, and both see the
//! change. Everything else is copied once. Accounts with another purpose, such as a shadow policy's, share nothing,
//! because requests now in flight would never be removed from them.

use super::cell::{Cell, set};
use super::recent::Window;
use super::{Accounts, PRICE_LIMIT, TablePrice};
use crate::settings::Settings;

impl Accounts {
    /// Derives accounts for `from.len()` ranks, where new rank `r` was rank `from[r]` here. `None` marks a new rank,
    /// which is unavailable until [`set_available`](Self::set_available).
    ///
    /// Surviving ranks keep their in-flight load (shared by both accounts), their recent tokens and requests, the state
    /// behind their prices, and whether they are available and known.
    pub fn succeed(&self, from: &[Option<u16>], table_prices: &[TablePrice], settings: &Settings) -> Accounts {
        self.next(from, table_prices, settings, Cell::heir)
    }

    /// Copies the accounts like [`succeed`](Self::succeed), but the copy counts requests independently and starts with
    /// none in flight.
    pub fn fork(&self, from: &[Option<u16>], table_prices: &[TablePrice], settings: &Settings) -> Accounts {
        self.next(from, table_prices, settings, Cell::idle_copy)
    }

    fn next(
        &self,
        from: &[Option<u16>],
        table_prices: &[TablePrice],
        settings: &Settings,
        stays: fn(&Cell) -> Cell,
    ) -> Accounts {
        let ranks = u16::try_from(from.len()).unwrap_or(u16::MAX);
        let old = |from: &Option<u16>| self.cells.get(usize::from((*from)?));
        let cells = from.iter().take(usize::from(ranks)).map(|from| old(from).map_or_else(Cell::newcomer, stays));
        let next = Accounts {
            mean_request: self.mean_request.copy(),
            mean_output: self.mean_output.copy(),
            ..Accounts::of_cells(cells.collect(), settings)
        };
        next.set_table_prices(table_prices);
        let mut to = vec![None; self.cells.len()];
        for (rank, from) in (0..ranks).zip(from) {
            if let Some(place) = from.and_then(|from| to.get_mut(usize::from(from))) {
                *place = Some(rank);
            }
        }
        next.replay(&self.memory, &to);
        next
    }

    /// Replays the assignments of the `old` window, whose rank `r` is now `to[r]`.
    fn replay(&self, old: &Window, to: &[Option<u16>]) {
        for (rank, tokens) in old.held() {
            if let Some(rank) = to.get(usize::from(rank)).copied().flatten() {
                self.note_recent(rank, tokens);
            }
        }
    }

    /// Sets the table component of each price.
    pub(super) fn set_table_prices(&self, table_prices: &[TablePrice]) {
        for (rank, cell) in self.cells.iter().enumerate() {
            let start = table_prices.get(rank).copied().unwrap_or_default();
            for (price, start) in [(&cell.table_price, start.token), (&cell.table_sequence_price, start.sequence)] {
                let start = f64::from(start);
                set(price, if start.is_finite() { start.clamp(-PRICE_LIMIT, PRICE_LIMIT) } else { 0.0 });
            }
        }
    }
}
