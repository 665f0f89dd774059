//! Load accounts and online prices of the ranks of one engine.

use crate::policy::{RankLoad, mean_request};
use crate::settings::Settings;

/// Prices stay within this distance of zero: shares differ by at most one, so more has no effect.
const PRICE_LIMIT: f64 = 1.0;

/// What the ranks of one engine have to do: tokens and requests in flight, recent tokens, prices.
///
/// Deterministic and of fixed size: time is counted in assigned tokens, not read from a clock. With `m` the mean
/// recent request and `n` available ranks, an assignment of `a` tokens to rank `c`
///
/// * multiplies every rank's recent tokens by `2^(-a / (half_life_requests * n * m))`, then adds `a` to rank `c`;
/// * moves each available rank's price by `price_step * a/m * ([r = c] - 1/n)`: the online form of the dual step that
///   balances the solver's transportation problem. A rank's price is its table price plus `price_step` times its
///   surplus so far, counted in mean requests, so the surplus stays bounded whatever the traffic.
#[derive(Clone, Debug)]
pub struct Accounts {
    loads: Vec<RankLoad>,
    prices: Vec<f64>,
    half_life_requests: f64,
    price_step: f64,
}

impl Accounts {
    /// Accounts of `ranks` idle, available ranks that start from the tables' prices (`price`, f32 \[dp_ranks\], in units
    /// of share; missing or non-finite ones count as zero).
    pub fn new(ranks: u16, table_prices: &[f32], settings: &Settings) -> Self {
        let mut accounts = Accounts {
            loads: vec![RankLoad::IDLE; usize::from(ranks)],
            prices: vec![0.0; usize::from(ranks)],
            half_life_requests: settings.half_life_requests,
            price_step: settings.price_step,
        };
        accounts.reset_prices(table_prices);
        accounts
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.loads.len()
    }

    /// The loads, one per rank, as [`Policy::choose`](crate::Policy::choose) takes them.
    pub fn loads(&self) -> &[RankLoad] {
        &self.loads
    }

    /// The online prices, one per rank, in units of share.
    pub fn prices(&self) -> &[f64] {
        &self.prices
    }

    /// Starts again from the prices of newly loaded tables; loads stay.
    pub fn reset_prices(&mut self, table_prices: &[f32]) {
        for (rank, price) in self.prices.iter_mut().enumerate() {
            let start = table_prices.get(rank).map_or(0.0, |price| f64::from(*price));
            *price = if start.is_finite() { start.clamp(-PRICE_LIMIT, PRICE_LIMIT) } else { 0.0 };
        }
    }

    /// Marks a rank as usable or not. A rank that comes back starts at the mean recent load of the others: it is
    /// neither flooded nor spared for what happened while it was away. False if there is no such rank.
    pub fn set_available(&mut self, rank: u16, available: bool) -> bool {
        let Some(was) = self.loads.get(usize::from(rank)).map(|load| load.available) else { return false };
        if available && !was {
            let (mut tokens, mut requests, mut ranks) = (0.0, 0.0, 0.0);
            let mut fewest = u64::MAX;
            for load in self.loads.iter().filter(|load| load.available) {
                tokens += load.recent_tokens;
                requests += load.recent_requests;
                ranks += 1.0;
                fewest = fewest.min(load.assigned_requests);
            }
            if ranks > 0.0 {
                let load = &mut self.loads[usize::from(rank)];
                (load.recent_tokens, load.recent_requests) = (tokens / ranks, requests / ranks);
                load.assigned_requests = fewest;
            }
        }
        self.loads[usize::from(rank)].available = available;
        true
    }

    /// Counts a request of `tokens` prompt tokens in on `rank`. False, and nothing counted, if there is no such rank.
    pub fn assign(&mut self, rank: u16, tokens: u64) -> bool {
        let index = usize::from(rank);
        if index >= self.loads.len() {
            return false;
        }
        let counted = tokens.max(1) as f64;
        let mean_request = mean_request(&self.loads).unwrap_or(counted);
        let available = self.loads.iter().filter(|load| load.available).count().max(1) as f64;
        let decay = (-counted / (self.half_life_requests * available * mean_request)).exp2();

        for load in &mut self.loads {
            load.recent_tokens *= decay;
            load.recent_requests *= decay;
        }
        let load = &mut self.loads[index];
        load.recent_tokens += counted;
        load.recent_requests += 1.0;
        load.assigned_requests = load.assigned_requests.saturating_add(1);
        load.in_flight_tokens = load.in_flight_tokens.saturating_add(tokens.max(1));
        load.in_flight_requests = load.in_flight_requests.saturating_add(1);
        if load.available {
            self.move_prices(index, self.price_step * counted / mean_request, available);
        }
        true
    }

    /// Counts a request out that [`assign`](Self::assign) counted in with the same `tokens`. False if there is no
    /// such rank. More releases than assignments leave the counts at zero.
    pub fn release(&mut self, rank: u16, tokens: u64) -> bool {
        let Some(load) = self.loads.get_mut(usize::from(rank)) else { return false };
        load.in_flight_tokens = load.in_flight_tokens.saturating_sub(tokens.max(1));
        load.in_flight_requests = load.in_flight_requests.saturating_sub(1);
        true
    }

    fn move_prices(&mut self, chosen: usize, step: f64, available: f64) {
        for (rank, (price, load)) in self.prices.iter_mut().zip(&self.loads).enumerate() {
            if load.available {
                let surplus = f64::from(u8::from(rank == chosen)) - 1.0 / available;
                *price = (*price + step * surplus).clamp(-PRICE_LIMIT, PRICE_LIMIT);
            }
        }
    }
}
