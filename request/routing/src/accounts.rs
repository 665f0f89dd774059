//! Load accounts and online prices of the ranks that one model runs on: counted without a lock.

mod cell;
mod recent;
mod succession;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::policy::RankLoad;
use crate::settings::Settings;
use cell::{Cell, get, take};
use recent::{RecentWork, Window};

pub(crate) use recent::MAX_WINDOW;

/// Prices stay within this distance of their start: shares differ by at most one, so more has no effect.
const PRICE_LIMIT: f64 = 1.0;

/// Requests that the mean request remembers.
const MEAN_MEMORY: f64 = 1024.0;

/// Tokens by which an answer that is longer than expected is expected to go on, at least.
const LEAST_FURTHER: u64 = 16;

/// No prompt is longer; a longer one is counted as this many tokens, so that no sum overflows.
pub const MAX_TOKENS: u64 = (1 << 31) - 1;

/// No request runs as more sequences; one that asks for more is counted as this many.
pub const MAX_SEQUENCES: u32 = 1024;

/// The load that one request adds to its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens; zero counts as one.
    pub tokens: u64,
    /// Prompt tokens still to be computed, as long as that is known; else zero.
    pub pending: u64,
    /// Tokens that it is expected to generate, all its sequences together.
    pub output: u32,
    /// Sequences that it runs as; zero counts as one.
    pub sequences: u32,
}

/// Mean assignments of the available ranks of a unit.
#[derive(Clone, Copy)]
struct Even {
    tokens: f64,
    sequences: f64,
}

impl Even {
    /// The mean of what ranks were assigned; zero without ranks.
    fn of(assigned: impl Iterator<Item = Even>) -> Self {
        let (mut even, mut ranks) = (Even { tokens: 0.0, sequences: 0.0 }, 0.0f64);
        for of_rank in assigned {
            even.tokens += of_rank.tokens;
            even.sequences += of_rank.sequences;
            ranks += 1.0;
        }
        let ranks = ranks.max(1.0);
        Even { tokens: even.tokens / ranks, sequences: even.sequences / ranks }
    }
}

impl Work {
    /// Tokens as they are counted: 1 to [`MAX_TOKENS`].
    pub(crate) fn counted_tokens(&self) -> u64 {
        self.tokens.clamp(1, MAX_TOKENS)
    }

    /// Keys and values that it holds in the end, in tokens.
    fn held_tokens(&self) -> u64 {
        self.counted_tokens() + u64::from(self.output).min(MAX_TOKENS)
    }

    fn counted_pending(&self) -> u64 {
        self.pending.min(MAX_TOKENS)
    }

    fn counted_sequences(&self) -> u64 {
        u64::from(self.sequences.clamp(1, MAX_SEQUENCES))
    }
}

/// Prices of one rank that the solver put into the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TablePrice {
    /// Of a token, in units of share.
    pub token: f32,
    /// Of a sequence, in units of share of a mean-sized request.
    pub sequence: f32,
}

impl TablePrice {
    /// Of `ranks` ranks from the tables' prices; missing ones are zero.
    pub fn of_ranks(ranks: u16, tokens: &[f32], sequences: &[f32]) -> Vec<TablePrice> {
        let at = |prices: &[f32], rank: usize| prices.get(rank).copied().unwrap_or(0.0);
        let of_rank = |rank| TablePrice { token: at(tokens, rank), sequence: at(sequences, rank) };
        (0..usize::from(ranks)).map(of_rank).collect()
    }
}

/// Load of the ranks: tokens and requests in flight, recent tokens, prices.
///
/// Deterministic and of fixed size: time is counted in assigned requests, not read from a clock. Every count is an
/// atomic number of its own and no operation takes a lock, so that readers and writers on other cores never wait; a
/// reader may miss assignments that are being written while it looks, no others. With `n` available ranks:
///
/// * recent tokens of a rank are those among the last `memory` assignments for each rank, exactly;
/// * `mean` is that of the rank's [unit](RankLoad::unit);
/// * a rank's price of tokens is its table price, plus `price_step` for each mean-sized request `m` that it got beyond
///   its even share; its price of sequences is the table's, plus `sequence_price_step` for each sequence beyond it:
///
/// ```text
/// price[r]          = table.token[r] + price_step * (tokens assigned to r - mean) / m
/// sequence_price[r] = table.sequence[r] + sequence_price_step * (sequences assigned to r - mean)
/// ```
///
/// These are the online form of the dual steps that balance the solver's transportation problem, with a limit on either
/// load: they find what the table price missed. Surplus beyond a price of 1 is not remembered, so that every price can
/// be unlearnt.
#[derive(Debug)]
pub struct Accounts {
    cells: Box<[Cell]>,
    memory: Window,
    /// m: prompt tokens of a request.
    mean_request: Mean,
    /// Tokens that a request generated.
    mean_output: Mean,
    price_step: f64,
    sequence_price_step: f64,
}

impl Accounts {
    /// Accounts of `ranks` idle, available ranks that start from the tables' prices; missing or non-finite ones count
    /// as zero.
    pub fn new(ranks: u16, table_prices: &[TablePrice], settings: &Settings) -> Self {
        let accounts = Self::of_cells((0..ranks).map(|_| Cell::default()).collect(), settings);
        accounts.reset_prices(table_prices);
        accounts
    }

    /// With nothing learned yet.
    fn of_cells(cells: Box<[Cell]>, settings: &Settings) -> Self {
        let ranks = cells.len() as u16;
        Accounts {
            cells,
            memory: Window::new(settings.memory_of(ranks)),
            mean_request: Mean::default(),
            mean_output: Mean::default(),
            price_step: settings.price_step,
            sequence_price_step: settings.sequence_price_step,
        }
    }

    /// The same, with ranks that run as units of these sizes, in order; ranks beyond them are one more.
    #[must_use]
    pub fn in_units(mut self, sizes: &[u16]) -> Self {
        let mut cells = self.cells.iter_mut();
        for (unit, size) in (0..).zip(sizes) {
            cells.by_ref().take(usize::from(*size)).for_each(|cell| cell.unit = unit);
        }
        cells.for_each(|cell| cell.unit = u16::try_from(sizes.len()).unwrap_or(u16::MAX));
        self
    }

    fn cell(&self, rank: u16) -> Option<&Cell> {
        self.cells.get(usize::from(rank))
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.cells.len()
    }

    /// Copies the state of every rank, as [`Policy::choose`](crate::Policy::choose) takes it: ranks that did not answer
    /// since they came back count as loaded as the others. Allocates only where `loads` has less room than there are
    /// ranks.
    pub fn read(&self, loads: &mut Vec<RankLoad>) {
        if !self.count(loads) {
            believe_no_idleness(loads);
        }
    }

    /// The counts of every rank, known or not, without its parts of requests that run on any: for people, and to
    /// compare with the engines' own.
    pub fn counted(&self) -> Vec<RankLoad> {
        let mut loads = Vec::with_capacity(self.ranks());
        self.count(&mut loads);
        for (load, cell) in loads.iter_mut().zip(&self.cells) {
            load.in_flight_tokens = load.in_flight_tokens.saturating_sub(cell.parts());
        }
        loads
    }

    /// Returns whether all of it is to be believed.
    fn count(&self, loads: &mut Vec<RankLoad>) -> bool {
        loads.clear();
        loads.extend(self.cells.iter().map(|cell| cell.load(cell.recent.read(&self.memory))));
        let per_token = self.price_per_token();
        let price = |surplus: f64, step: f64| (step * surplus).clamp(-PRICE_LIMIT, PRICE_LIMIT);
        let (mut cells, mut known) = (self.cells.iter(), true);
        for unit in loads.chunk_by_mut(|a, b| a.unit == b.unit) {
            let available = unit.iter().filter(|load| load.available);
            let even = Even::of(available.map(|load| Even { tokens: load.price, sequences: load.sequence_price }));
            for (load, cell) in unit.iter_mut().zip(&mut cells) {
                load.price = get(&cell.table_price) + price(load.price - even.tokens, per_token);
                load.sequence_price = get(&cell.table_sequence_price)
                    + price(load.sequence_price - even.sequences, self.sequence_price_step);
                known &= load.known;
            }
        }
        known
    }

    /// [`read`](Self::read) into a vector of its own.
    pub fn loads(&self) -> Vec<RankLoad> {
        let mut loads = Vec::with_capacity(self.ranks());
        self.read(&mut loads);
        loads
    }

    /// Starts again from the prices of newly loaded tables; loads stay.
    pub fn reset_prices(&self, table_prices: &[TablePrice]) {
        self.set_table_prices(table_prices);
        let evens: Vec<Even> = self.cells.iter().map(|cell| self.even_in(cell.unit)).collect();
        for (cell, even) in self.cells.iter().zip(evens) {
            // One that is away has the surplus in place of the count.
            let (tokens, sequences) = if cell.is_available() { (even.tokens, even.sequences) } else { (0.0, 0.0) };
            cell.assigned_tokens.set(tokens);
            cell.assigned_sequences.set(sequences);
        }
    }

    /// Marks a rank as usable or not. A rank that comes back starts at the mean recent load of the others, with the
    /// price that it had: it is neither flooded nor spared for what happened while it was away. What is in flight on it
    /// is not known until it [`answered`](Self::answered). False if there is no such rank.
    pub fn set_available(&self, rank: u16, available: bool) -> bool {
        self.set_all_available(usize::from(rank)..usize::from(rank) + 1, available)
    }

    /// [`set_available`](Self::set_available) for several ranks, as those of one engine, in one pass. False, and
    /// nothing changed, if there is no such rank among them.
    pub fn set_all_available(&self, ranks: Range<usize>, available: bool) -> bool {
        let Some(cells) = self.cells.get(ranks) else { return false };
        if cells.iter().all(|cell| cell.is_available() == available) {
            return true;
        }
        let evens: Vec<Even> = cells.iter().map(|cell| self.even_in(cell.unit)).collect();
        let changed = cells.iter().zip(evens).filter(|(cell, _)| cell.is_available() != available);
        if !available {
            changed.for_each(|(cell, even)| cell.leave(even));
            return true;
        }
        let loads: Vec<RankLoad> = self.loads().into_iter().filter(|load| load.available).collect();
        let others = loads.len().max(1) as f64;
        let mean = |value: fn(&RankLoad) -> f64| loads.iter().map(value).sum::<f64>() / others;
        let recent =
            RecentWork { tokens: mean(|load| load.recent_tokens), requests: mean(|load| load.recent_requests) };
        let fewest = loads.iter().map(|load| load.assigned_requests).min();
        for (cell, even) in changed {
            cell.recent.come_back(&self.memory, recent);
            cell.come_back(even, fewest);
        }
        true
    }

    /// An answer came from a rank: what is counted as in flight there is to be believed from now on.
    pub fn answered(&self, rank: u16) {
        if let Some(cell) = self.cell(rank) {
            cell.set_known();
        }
    }

    /// Counts a request in on `rank`. False, and nothing counted, if there is no such rank.
    pub fn assign(&self, rank: u16, work: Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        self.mean_request.note(work.counted_tokens());
        cell.count_in(work);
        self.note_assigned(rank, cell, work.counted_tokens(), work.counted_sequences() as f64);
        true
    }

    /// Counts a request in whose engine chooses one of `ranks` itself: each gets an equal part of its tokens, in all
    /// that policies see, and none the request. Returns that part, for [`release_among`](Self::release_among).
    pub fn assign_among(&self, ranks: Range<u16>, work: Work) -> u64 {
        let tokens = work.counted_tokens();
        self.mean_request.note(tokens);
        let among = u64::from(ranks.end.saturating_sub(ranks.start)).max(1);
        let (part, sequences) = (tokens.div_ceil(among), work.counted_sequences() as f64 / among as f64);
        for (rank, cell) in ranks.filter_map(|rank| Some((rank, self.cell(rank)?))) {
            cell.count_part_in(part);
            self.note_assigned(rank, cell, part, sequences);
        }
        part
    }

    /// Counts a request out that [`assign_among`](Self::assign_among) counted in with this `part`.
    pub fn release_among(&self, ranks: Range<u16>, part: u64) {
        ranks.filter_map(|rank| self.cell(rank)).for_each(|cell| cell.count_part_out(part));
    }

    fn note_assigned(&self, rank: u16, cell: &Cell, tokens: u64, sequences: f64) {
        self.note_recent(rank, tokens);
        if cell.is_available() {
            self.add_assigned(cell, tokens as f64, sequences);
        }
    }

    /// The prompt of a request that [`assign`](Self::assign) counted in has been computed: takes its `pending` tokens
    /// off. False if there is no such rank.
    pub fn computed(&self, rank: u16, work: &mut Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        cell.computed(work.counted_pending());
        work.pending = 0;
        true
    }

    /// A request has generated so many tokens and goes on. Where these are more than its `output`, as many again as the
    /// mean request generates are expected. False if there is no such rank.
    pub fn generates(&self, rank: u16, work: &mut Work, tokens: u64) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        if tokens > work.output.into() {
            let before = work.held_tokens();
            let expected = tokens.saturating_add(self.expected_output(None).max(LEAST_FURTHER));
            work.output = u32::try_from(expected).unwrap_or(u32::MAX);
            cell.hold_more(work.held_tokens() - before);
        }
        true
    }

    /// A request ended that generated so many tokens, all its sequences together.
    pub fn generated(&self, tokens: u64) {
        self.mean_output.note(tokens.min(MAX_TOKENS));
    }

    /// The tokens that a request is expected to generate: the mean of those that ended, or `most` where that is less.
    pub fn expected_output(&self, most: Option<u64>) -> u64 {
        (self.mean_output.get() as u64).min(most.unwrap_or(MAX_TOKENS))
    }

    /// Counts a request out that [`assign`](Self::assign) counted in with the same `work`. False if there is no such
    /// rank. More releases than assignments leave the counts at zero.
    pub fn release(&self, rank: u16, work: Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        cell.count_out(work);
        true
    }

    /// The request that [`assign`](Self::assign) counted in with this `work` was refused and did not run: takes it out
    /// of the recent tokens and of what prices remember. It is still in flight until [`release`](Self::release). False
    /// if there is no such rank. The size of the mean request keeps what it learned.
    pub fn take_back(&self, rank: u16, work: Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        let tokens = work.counted_tokens();
        if self.memory.take_back(rank, tokens) {
            cell.recent.remove(tokens);
        }
        take(&cell.assigned_requests, 1);
        if cell.is_available() {
            self.add_assigned(cell, -(tokens as f64), -(work.counted_sequences() as f64));
        }
        true
    }

    /// The available ranks of a unit.
    fn available_in(&self, unit: u16) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| cell.unit == unit && cell.is_available())
    }

    fn even_in(&self, unit: u16) -> Even {
        Even::of(self.available_in(unit).map(Cell::assigned))
    }

    fn note_recent(&self, rank: u16, tokens: u64) {
        if let Some(cell) = self.cell(rank) {
            cell.recent.add(tokens);
        }
        if let Some((left, tokens)) = self.memory.push(rank, tokens)
            && let Some(cell) = self.cell(left)
        {
            cell.recent.remove(tokens);
        }
    }

    fn price_per_token(&self) -> f64 {
        self.price_step / self.mean_request.get().max(1.0)
    }

    /// Adds to what the chosen rank got, and lets no rank's surplus, up or down, grow beyond what moves a price by
    /// [`PRICE_LIMIT`].
    fn add_assigned(&self, chosen: &Cell, tokens: f64, sequences: f64) {
        chosen.assigned_tokens.add(tokens);
        chosen.assigned_sequences.add(sequences);
        let even = self.even_in(chosen.unit);
        let most =
            Even { tokens: PRICE_LIMIT / self.price_per_token(), sequences: PRICE_LIMIT / self.sequence_price_step };
        for cell in self.available_in(chosen.unit) {
            cell.assigned_tokens.keep_near(even.tokens, most.tokens);
            cell.assigned_sequences.keep_near(even.sequences, most.sequences);
        }
    }
}

/// A mean over the last requests.
#[derive(Debug, Default)]
struct Mean {
    /// An f64.
    value: AtomicU64,
    requests: AtomicU64,
}

impl Mean {
    fn get(&self) -> f64 {
        get(&self.value)
    }

    fn note(&self, tokens: u64) {
        let seen = self.requests.fetch_add(1, Relaxed) as f64;
        let weight = 1.0 / (seen + 1.0).min(MEAN_MEMORY);
        let moved = |mean: u64| {
            let mean = f64::from_bits(mean);
            Some((mean + weight * (tokens as f64 - mean)).to_bits())
        };
        // The closure never gives up.
        let _ = self.value.fetch_update(Relaxed, Relaxed, moved);
    }

    fn copy(&self) -> Self {
        let copied = |number: &AtomicU64| AtomicU64::new(number.load(Relaxed));
        Self { value: copied(&self.value), requests: copied(&self.requests) }
    }
}

/// Raises the loads of ranks that are not known to the mean of those that are.
fn believe_no_idleness(loads: &mut [RankLoad]) {
    let (mut tokens, mut requests, mut sequences, mut pending, mut ranks) = (0u64, 0u64, 0u64, 0u64, 0u64);
    for load in loads.iter().filter(|load| load.known && load.available) {
        tokens += load.in_flight_tokens;
        requests += u64::from(load.in_flight_requests);
        sequences += load.in_flight_sequences;
        pending += load.pending_tokens;
        ranks += 1;
    }
    let mean = |sum: u64| sum.checked_div(ranks).unwrap_or(0);
    for load in loads.iter_mut().filter(|load| !load.known) {
        load.in_flight_tokens = load.in_flight_tokens.max(mean(tokens));
        load.in_flight_requests = load.in_flight_requests.max(u32::try_from(mean(requests)).unwrap_or(u32::MAX));
        load.in_flight_sequences = load.in_flight_sequences.max(mean(sequences));
        load.pending_tokens = load.pending_tokens.max(mean(pending));
    }
}
