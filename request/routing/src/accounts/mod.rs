//! Load accounts and online prices for the ranks of one model, updated without locks.

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

/// Limit on how far a price may move from its initial value: shares differ by at most 1, so moving further would have
/// no effect.
const PRICE_LIMIT: f64 = 1.0;

/// Number of requests that the running mean of request sizes covers.
const MEAN_MEMORY: f64 = 1024.0;

/// Minimum number of additional tokens to expect from a response that exceeds its expected length.
const LEAST_FURTHER: u64 = 16;

/// Cap on the tokens counted for one prompt, so that no sum overflows.
pub const MAX_TOKENS: u64 = (1 << 31) - 1;

/// Cap on the sequences counted for one request.
pub const MAX_SEQUENCES: u32 = 1024;

/// The load that one request adds to its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens; zero counts as one.
    pub tokens: u64,
    /// Prompt tokens not yet computed; zero if unknown.
    pub pending: u64,
    /// Expected number of generated tokens, over all sequences.
    pub output: u32,
    /// Number of sequences; zero counts as one.
    pub sequences: u32,
}

/// Mean assigned tokens and sequences over a unit's available ranks.
#[derive(Clone, Copy)]
struct Even {
    tokens: f64,
    sequences: f64,
}

impl Even {
    /// Returns the mean over the ranks, or zero if there are none.
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

    fn of_unit(unit: &[Cell]) -> Self {
        Self::of(unit.iter().filter(|cell| cell.is_available()).map(Cell::assigned))
    }
}

impl Work {
    /// Returns the token count, clamped to between 1 and [`MAX_TOKENS`].
    pub(crate) fn counted_tokens(&self) -> u64 {
        self.tokens.clamp(1, MAX_TOKENS)
    }

    /// Returns the KV cache tokens that the request occupies once it has generated its expected output.
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

/// Prices of one rank, taken from the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TablePrice {
    /// Token price, in units of local share.
    pub token: f32,
    /// Sequence price, in units of local share of a mean-sized request.
    pub sequence: f32,
}

impl TablePrice {
    /// Builds the prices for `ranks` ranks; missing ones are zero.
    pub fn of_ranks(ranks: u16, tokens: &[f32], sequences: &[f32]) -> Vec<TablePrice> {
        let at = |prices: &[f32], rank: usize| prices.get(rank).copied().unwrap_or(0.0);
        let of_rank = |rank| TablePrice { token: at(tokens, rank), sequence: at(sequences, rank) };
        (0..usize::from(ranks)).map(of_rank).collect()
    }
}

/// Per-rank load: in-flight tokens and requests, recent tokens and prices.
///
/// Deterministic and fixed-size: time is measured in assigned requests, not read from a clock. Each counter is a
/// separate atomic and no operation takes a lock, so readers and writers on other cores never block; a reader can miss
/// only assignments being written at that moment. In detail:
///
/// * a rank's recent tokens are exactly those it received among the last `memory * ranks` assignments;
/// * `mean` is taken over the rank's [unit](RankLoad::unit);
/// * a rank's token price is its table price plus `price_step` for each mean-sized request (`m` tokens) assigned to it
///   beyond the mean; its sequence price is its table price plus `sequence_price_step` for each sequence beyond the
///   mean:
///
/// ```text
/// price[r]          = table.token[r] + price_step * (tokens assigned to r - mean) / m
/// sequence_price[r] = table.sequence[r] + sequence_price_step * (sequences assigned to r - mean)
/// ```
///
/// This is the online form of the dual steps by which the solver balances its transportation problem, with limits on
/// both loads; it corrects the table prices. Surplus that would move a price by more than 1 is discarded, so every
/// price can recover.
#[derive(Debug)]
pub struct Accounts {
    cells: Box<[Cell]>,
    memory: Window,
    /// `m`: mean number of prompt tokens per request.
    mean_request: Mean,
    /// Mean number of generated tokens per request.
    mean_output: Mean,
    price_step: f64,
    sequence_price_step: f64,
}

impl Accounts {
    /// Creates accounts for `ranks` idle, available ranks that start at the table prices; missing or non-finite prices
    /// count as zero.
    pub fn new(ranks: u16, table_prices: &[TablePrice], settings: &Settings) -> Self {
        let accounts = Self::of_cells((0..ranks).map(|_| Cell::default()).collect(), settings);
        accounts.reset_prices(table_prices);
        accounts
    }

    /// Creates accounts with no recent assignments and no observed request sizes.
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

    /// Groups the ranks into units of these sizes, in order; any remaining ranks form one more unit.
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

    /// Copies the state of every rank for [`Policy::choose`](crate::Policy::choose). Ranks that have not responded
    /// since they became available again are reported with at least the mean load of the others. Allocates only if the
    /// capacity of `loads` is below the number of ranks.
    pub fn read(&self, loads: &mut Vec<RankLoad>) {
        if !self.count(loads) {
            assume_mean_load(loads);
        }
    }

    /// Returns the raw counts of every rank, known or not, for display and for comparison with the engines' own counts.
    /// Requests for which the engine chooses the rank are excluded.
    pub fn counted(&self) -> Vec<RankLoad> {
        let mut loads = Vec::with_capacity(self.ranks());
        self.count(&mut loads);
        for (load, cell) in loads.iter_mut().zip(&self.cells) {
            load.in_flight_tokens = load.in_flight_tokens.saturating_sub(cell.parts());
        }
        loads
    }

    /// Fills `loads` with raw counts and prices. Returns whether all in-flight counts are known.
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

    /// Like [`read`](Self::read), but returns a new vector.
    pub fn loads(&self) -> Vec<RankLoad> {
        let mut loads = Vec::with_capacity(self.ranks());
        self.read(&mut loads);
        loads
    }

    /// Resets the prices to those of newly loaded tables; loads are unchanged.
    pub fn reset_prices(&self, table_prices: &[TablePrice]) {
        self.set_table_prices(table_prices);
        for unit in self.cells.chunk_by(|a, b| a.unit == b.unit) {
            let even = Even::of_unit(unit);
            for cell in unit {
                // An unavailable rank stores its surplus instead of its count.
                let (tokens, sequences) = if cell.is_available() { (even.tokens, even.sequences) } else { (0.0, 0.0) };
                cell.assigned_tokens.set(tokens);
                cell.assigned_sequences.set(sequences);
            }
        }
    }

    /// Marks a rank available or unavailable. A returning rank starts at the mean recent load of the others, with its
    /// previous price, so it is neither flooded with requests nor spared them because of its absence. Its in-flight
    /// load is unknown until it has [`answered`](Self::answered). Returns false if there is no such rank.
    pub fn set_available(&self, rank: u16, available: bool) -> bool {
        self.set_all_available(usize::from(rank)..usize::from(rank) + 1, available)
    }

    /// Marks several ranks of one unit available or unavailable in one pass; see
    /// [`set_available`](Self::set_available). Returns false, changing nothing, if one of them does not exist.
    pub fn set_all_available(&self, ranks: Range<usize>, available: bool) -> bool {
        let Some(cells) = self.cells.get(ranks) else { return false };
        let mut changed = cells.iter().filter(|cell| cell.is_available() != available).peekable();
        let Some(first) = changed.peek() else { return true };
        let even = Even::of_unit(self.unit(first.unit));
        if !available {
            changed.for_each(|cell| cell.leave(even));
            return true;
        }
        let loads: Vec<RankLoad> = self.loads().into_iter().filter(|load| load.available).collect();
        let others = loads.len().max(1) as f64;
        let mean = |value: fn(&RankLoad) -> f64| loads.iter().map(value).sum::<f64>() / others;
        let recent =
            RecentWork { tokens: mean(|load| load.recent_tokens), requests: mean(|load| load.recent_requests) };
        let fewest = loads.iter().map(|load| load.assigned_requests).min();
        for cell in changed {
            cell.recent.come_back(&self.memory, recent);
            cell.come_back(even, fewest);
        }
        true
    }

    /// Records a response from a rank: from now on its in-flight counts are known.
    pub fn answered(&self, rank: u16) {
        if let Some(cell) = self.cell(rank) {
            cell.set_known();
        }
    }

    /// Adds a request to the counts of `rank`. Returns false, changing nothing, if there is no such rank.
    pub fn assign(&self, rank: u16, work: Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        self.mean_request.note(work.counted_tokens());
        cell.count_in(work);
        self.note_assigned(rank, cell, work.counted_tokens(), work.counted_sequences() as f64);
        true
    }

    /// Adds a request for which the engine itself chooses one of `ranks`. Each of them is charged an equal part of the
    /// tokens in every figure that policies see, but no request is added to its in-flight count. Returns that part, for
    /// [`release_among`](Self::release_among).
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

    /// Removes a request that [`assign_among`](Self::assign_among) added with this `part`.
    pub fn release_among(&self, ranks: Range<u16>, part: u64) {
        ranks.filter_map(|rank| self.cell(rank)).for_each(|cell| cell.count_part_out(part));
    }

    fn note_assigned(&self, rank: u16, cell: &Cell, tokens: u64, sequences: f64) {
        self.note_recent(rank, tokens);
        if cell.is_available() {
            self.add_assigned(cell, tokens as f64, sequences);
        }
    }

    /// Removes the `pending` tokens of a request added by [`assign`](Self::assign) once its prompt has been computed.
    /// Returns false if there is no such rank.
    pub fn computed(&self, rank: u16, work: &mut Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        cell.computed(work.counted_pending());
        work.pending = 0;
        true
    }

    /// Records that a running request has generated `tokens` tokens. If that exceeds its `output`, the expectation is
    /// raised to `tokens` plus the mean output of a request. Returns false if there is no such rank.
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

    /// Records the number of tokens that a finished request generated, over all its sequences.
    pub fn generated(&self, tokens: u64) {
        self.mean_output.note(tokens.min(MAX_TOKENS));
    }

    /// Returns the number of tokens that a request is expected to generate: the mean over finished requests, at most
    /// `most`.
    pub fn expected_output(&self, most: Option<u64>) -> u64 {
        (self.mean_output.get() as u64).min(most.unwrap_or(MAX_TOKENS))
    }

    /// Removes a request that [`assign`](Self::assign) added with the same `work`. Returns false if there is no such
    /// rank. Excess releases leave the counts at zero.
    pub fn release(&self, rank: u16, work: Work) -> bool {
        let Some(cell) = self.cell(rank) else { return false };
        cell.count_out(work);
        true
    }

    /// Reverses an [`assign`](Self::assign) after the engine refused the request: removes it from recent tokens and
    /// prices. The request stays in flight until [`release`](Self::release), and still counts towards the mean request
    /// size. Returns false if there is no such rank.
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

    /// Returns the ranks of a unit. Cells are sorted by unit, so they are contiguous.
    fn unit(&self, unit: u16) -> &[Cell] {
        let first = self.cells.partition_point(|cell| cell.unit < unit);
        let end = self.cells.partition_point(|cell| cell.unit <= unit);
        &self.cells[first..end]
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

    /// Adds to the chosen rank's assignments, then clamps every rank's surplus or deficit in its unit to the amount
    /// that moves a price by [`PRICE_LIMIT`].
    fn add_assigned(&self, chosen: &Cell, tokens: f64, sequences: f64) {
        chosen.assigned_tokens.add(tokens);
        chosen.assigned_sequences.add(sequences);
        let unit = self.unit(chosen.unit);
        let even = Even::of_unit(unit);
        let most =
            Even { tokens: PRICE_LIMIT / self.price_per_token(), sequences: PRICE_LIMIT / self.sequence_price_step };
        for cell in unit.iter().filter(|cell| cell.is_available()) {
            cell.assigned_tokens.keep_near(even.tokens, most.tokens);
            cell.assigned_sequences.keep_near(even.sequences, most.sequences);
        }
    }
}

/// A running mean over recent requests.
#[derive(Debug, Default)]
struct Mean {
    /// The mean, as f64 bits.
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
        // Cannot fail: the closure always returns `Some`.
        let _ = self.value.fetch_update(Relaxed, Relaxed, moved);
    }

    fn copy(&self) -> Self {
        let copied = |number: &AtomicU64| AtomicU64::new(number.load(Relaxed));
        Self { value: copied(&self.value), requests: copied(&self.requests) }
    }
}

/// Raises the loads of unknown ranks to the mean of the known ones.
fn assume_mean_load(loads: &mut [RankLoad]) {
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
