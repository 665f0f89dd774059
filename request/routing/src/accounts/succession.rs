//! Accounts of other ranks that go on from accounts in use: a rank joins or leaves, or the settings change.
//!
//! Requests in flight are shared between both: a request that was counted in by the old accounts is counted out there,
//! and both see it. Everything else is copied as it is in this moment. Accounts that keep books on the same ranks for
//! another purpose, as a shadow's do, share nothing: no request that is in flight now will ever be counted out there.

use super::cell::{Cell, set};
use super::recent::Window;
use super::{Accounts, PRICE_LIMIT, TablePrice};
use crate::settings::Settings;

impl Accounts {
    /// Accounts of `from.len()` ranks, of which rank `r` is rank `from[r]` of these ones; with `None` it is new, and
    /// away until [`set_available`](Self::set_available) brings it in like one that comes back.
    ///
    /// Ranks that stay keep what is in flight on them (counted here or there, it is in both), their recent tokens and
    /// requests, what made their prices, and whether they are available and known.
    pub fn succeed(&self, from: &[Option<u16>], table_prices: &[TablePrice], settings: &Settings) -> Accounts {
        self.next(from, table_prices, settings, Cell::heir)
    }

    /// As [`succeed`](Self::succeed), but the new accounts count requests for themselves, and begin with none in
    /// flight.
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

    /// Notes what was assigned lately, rank `r` of the old window being `to[r]` here.
    fn replay(&self, old: &Window, to: &[Option<u16>]) {
        for (rank, tokens) in old.held() {
            if let Some(rank) = to.get(usize::from(rank)).copied().flatten() {
                self.note_recent(rank, tokens);
            }
        }
    }

    /// The tables' part of the prices.
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
