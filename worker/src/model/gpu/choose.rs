//! Selects tokens from logits on the GPU. The GPU returns either each row's most likely token or candidates, from which
//! the host draws the same token as it would from all logits. If the candidates are not sufficient, the host reads all
//! logits of the row.

use semmoe_kernels::Element;
use semmoe_kernels_cuda::compute::{Argmax, CandidateAsk, CandidateRow, Candidates};

use super::backend::GpuBackend;
use super::buffers::Buffers;
use super::memory::Stream;
use crate::ep::UnitError;
use crate::model::backend::WantedItem;
use crate::model::sampling::{Candidate, Draw, likelier, nucleus, order_by_id, total};
use crate::model::step::{ItemResult, StepOutput, Wants};

/// Bounds the relative difference between the sum of all weights on the host and on the GPU, caused by rounding of
/// `exp` and by the GPU's truncation to fixed point.
const TOLERANCE: f64 = 1e-6;
/// Bounds the relative difference between two sums of the same weights taken in different orders.
const TOLERANCE_OF_ORDER: f64 = 1e-12;

/// The candidates do not determine which token would be drawn from all logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Undecided;

/// Host-side lists; reused by later steps.
#[derive(Default)]
pub(super) struct Choices {
    likeliest: Vec<u32>,
    asks: Vec<CandidateAsk>,
    /// `[rows]`, if candidates were requested for any row.
    found: Vec<CandidateRow>,
}

impl Choices {
    /// Reads each row's most likely token and its candidates, if any item requests them.
    fn read(&mut self, items: &[WantedItem], vocab: usize, at: Buffers, stream: &mut Stream) -> Result<(), UnitError> {
        let (Buffers { logits, best, asks, found, .. }, rows) = (at, items.len() as u64);
        if items.iter().any(|item| item.wants == Wants::Likeliest) {
            stream.launch(Argmax { logits, best, rows, vocab: vocab as u64 }.launch())?;
            self.likeliest.resize(items.len(), 0);
            stream.read(best, &mut self.likeliest)?;
        }
        self.asks.clear();
        self.asks.extend(items.iter().map(|item| ask(item.wants, vocab)));
        if self.asks.iter().any(|ask| ask.scale != 0.0) {
            let asks = stream.write(&self.asks, asks)?;
            stream.launch(Candidates { logits, asks, out: found, rows, vocab: vocab as u64 }.launch())?;
            self.found.resize(items.len(), bytemuck::Zeroable::zeroed());
            stream.read(found, &mut self.found)?;
        }
        Ok(())
    }

    /// Returns a row's token if it can be determined without all logits; `Some(None)` if the largest logit is not
    /// finite.
    fn token(&self, row: usize, wants: Wants, vocab: usize) -> Option<Option<u32>> {
        match wants {
            Wants::Likeliest => Some(Some(self.likeliest[row]).filter(|best| *best != Argmax::NONE)),
            Wants::Drawn(draw) if self.asks[row].scale != 0.0 => choose(&draw, &self.found[row], vocab).ok(),
            Wants::Nothing | Wants::Drawn(_) | Wants::Logits => None,
        }
    }
}

impl<T: Element> GpuBackend<T> {
    /// Provides each item with the output that it requests from its row of logits.
    pub(super) fn choose(&mut self, items: &[WantedItem], out: &mut StepOutput) -> Result<(), UnitError> {
        let vocab = self.config.vocab_size;
        let Self { lists, stream, buffers, .. } = self;
        lists.choices.read(items, vocab, *buffers, stream)?;
        for (row, item) in items.iter().enumerate() {
            out.results[item.at] = match lists.choices.token(row, item.wants, vocab) {
                Some(token) => ItemResult::Token(token),
                None => {
                    let first = out.logits.len();
                    out.logits.resize(first + vocab, 0.0);
                    stream.read(buffers.logits.from_offset(4 * (row * vocab) as u64), &mut out.logits[first..])?;
                    stream.done.logit_rows += 1;
                    ItemResult::Logits(first / vocab)
                }
            };
        }
        Ok(())
    }
}

/// Whether the token is drawn from all tokens, without top-k or top-p.
fn is_of_all(draw: &Draw) -> bool {
    draw.top_k == 0 && draw.top_p >= 1.0
}

/// Returns the candidate request to send to the GPU, which is empty if candidates could not determine the token.
fn ask(wants: Wants, vocab: usize) -> CandidateAsk {
    let Wants::Drawn(draw) = wants else { return CandidateAsk::default() };
    let scale = 1.0 / draw.temperature;
    let helps = scale.is_normal() && vocab as u64 <= Candidates::MAX_VOCAB && draw.top_k <= Candidates::MOST as u32;
    match helps {
        true => CandidateAsk { scale, drawn: if is_of_all(&draw) { draw.number as f32 } else { -1.0 } },
        false => CandidateAsk::default(),
    }
}

/// Returns the token that would be drawn from all logits, or `None` if the largest logit is not finite.
fn choose(draw: &Draw, row: &CandidateRow, vocab: usize) -> Result<Option<u32>, Undecided> {
    if !row.largest.is_finite() {
        return Ok(None);
    }
    let count = (row.count as usize).min(Candidates::MOST);
    let logits = row.ids[..count].iter().copied().zip(row.logits[..count].iter().copied());
    let candidates: Vec<Candidate> = draw.weigh(row.largest, logits).collect();
    let token = match is_of_all(draw) {
        true => among_all(draw, row, &candidates)?,
        // If a candidate has zero weight, so do all tokens that are not candidates.
        false => among_likeliest(draw, row, candidates.len() < count || count == vocab, candidates)?,
    };
    Ok(Some(token))
}

fn lightest(candidates: &[Candidate]) -> f32 {
    candidates.iter().fold(f32::INFINITY, |least, candidate| least.min(candidate.weight))
}

/// Samples a token with top-k or top-p. If `all` is set, every token with a positive weight is a candidate.
fn among_likeliest(
    draw: &Draw,
    row: &CandidateRow,
    all: bool,
    mut candidates: Vec<Candidate>,
) -> Result<u32, Undecided> {
    // Maximum weight of a token that is not a candidate. On a tie the lower id wins, which may belong to such a token.
    let beyond = if all { 0.0 } else { lightest(&candidates) };
    draw.keep_top_k(&mut candidates);
    let (all_weights, tolerance) = match draw.top_k {
        0 => (row.total as f64 / CandidateRow::UNITS, TOLERANCE),
        _ => (total(&candidates), TOLERANCE_OF_ORDER),
    };
    if draw.top_p < 1.0 {
        candidates.sort_unstable_by(likelier);
        let reached = |factor: f64| nucleus(&candidates, f64::from(draw.top_p) * all_weights * factor);
        let kept = reached(1.0 + tolerance).filter(|kept| reached(1.0 - tolerance) == Some(*kept)).ok_or(Undecided)?;
        candidates.truncate(kept);
    } else {
        order_by_id(&mut candidates);
    }
    if lightest(&candidates) <= beyond {
        return Err(Undecided);
    }
    draw.take(&candidates).ok_or(Undecided)
}

/// Draws from all tokens. The random number must select a candidate, and its distance to the neighbouring tokens must
/// exceed the error of the sums.
fn among_all(draw: &Draw, row: &CandidateRow, candidates: &[Candidate]) -> Result<u32, Undecided> {
    let [total, before] = [row.total, row.before].map(|units| units as f64 / CandidateRow::UNITS);
    let (at, slack, mut sum) = (draw.number * total, TOLERANCE * total, before);
    for &Candidate { weight, id } in candidates {
        let begin = sum;
        sum += f64::from(weight);
        if at < sum + slack {
            return if begin + slack < at && at + slack < sum { Ok(id) } else { Err(Undecided) };
        }
    }
    Err(Undecided)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel returns it.
    fn row_of(draw: &Draw, logits: &[f32]) -> CandidateRow {
        let mut row: CandidateRow = bytemuck::Zeroable::zeroed();
        row.largest = logits.iter().copied().fold(f32::NAN, f32::max);
        let scale = 1.0 / draw.temperature;
        let weight = |logit: f32| (f64::from(((logit - row.largest) * scale).exp()) * CandidateRow::UNITS) as u64;
        row.total = logits.iter().map(|logit| weight(*logit)).sum();
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: &u32| logits[*id as usize];
        if is_of_all(draw) {
            let target = (draw.number * row.total as f64) as u64;
            let tile = |tile: &&[u32]| {
                let sum: u64 = tile.iter().map(|id| weight(logit(id))).sum();
                let inside = target - row.before < sum;
                row.before += if inside { 0 } else { sum };
                inside
            };
            ids = ids.chunks(Candidates::MOST).find(tile).unwrap().to_vec();
        } else {
            // On a tie the highest id, which the host would not take.
            ids.sort_by(|a, b| logit(b).total_cmp(&logit(a)).then(b.cmp(a)));
            ids.truncate(Candidates::MOST);
        }
        row.count = ids.len() as u32;
        for (at, id) in ids.into_iter().enumerate() {
            (row.ids[at], row.logits[at]) = (id, logit(&id));
        }
        row
    }

    fn out_of_all(draw: &Draw, logits: &[f32]) -> Option<u32> {
        let largest = logits.iter().copied().fold(f32::NAN, f32::max);
        draw.choose(&mut draw.weigh(largest, (0..).zip(logits.iter().copied())).collect())
    }

    /// How many of 300 draws the candidates decide. Checks that all logits give the same tokens.
    fn decided(temperature: f32, top_p: f32, top_k: u32, logits: impl Fn(&mut fastrand::Rng) -> f32) -> usize {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut decided = 0;
        for _ in 0..300 {
            let draw = Draw { temperature, top_p, top_k, number: rng.f64() };
            let logits: Vec<f32> = (0..1000).map(|_| logits(&mut rng)).collect();
            if let Ok(token) = choose(&draw, &row_of(&draw, &logits), logits.len()) {
                assert_eq!(token, out_of_all(&draw, &logits), "{draw:?}");
                decided += 1;
            }
        }
        decided
    }

    #[test]
    fn candidates_give_the_tokens_that_all_logits_give() {
        let peaked = |rng: &mut fastrand::Rng| (rng.f32() * 3.0).powi(3);
        for (temperature, top_p, top_k) in [(0.8, 0.9, 0), (1.3, 0.6, 0), (0.6, 1.0, 5), (1.0, 0.8, 60), (1.0, 1.0, 0)]
        {
            let decided = decided(temperature, top_p, top_k, peaked);
            assert!(decided > 290, "{temperature}, {top_p}, {top_k}: {decided}");
        }
        // Few different logits: many are as likely as the last candidate.
        let equal = |rng: &mut fastrand::Rng| rng.u8(..6) as f32 / 2.0;
        for (top_p, top_k) in [(1.0, 100), (0.9, 100), (1.0, 120), (0.3, 0)] {
            assert_eq!(decided(1.0, top_p, top_k, equal), 0, "{top_p}, {top_k}");
        }
        assert!(decided(1.0, 1.0, 0, equal) > 290);
    }

    #[test]
    fn what_the_candidates_leave_open_is_left_open() {
        let logits: Vec<f32> = (0..1000).map(|id| -(id as f32) / 100.0).collect();
        let chosen = |draw: Draw| choose(&draw, &row_of(&draw, &logits), logits.len());
        let of = |top_p, top_k| Draw { temperature: 1.0, top_p, top_k, number: 0.5 };
        assert_eq!(chosen(of(0.999, 0)), Err(Undecided), "more tokens are needed");
        assert_eq!(chosen(of(1.0, 128)), Err(Undecided), "the next may be as likely as the last");
        assert!(chosen(of(1.0, 127)).is_ok() && chosen(of(0.6, 0)).is_ok());
        // Sums are 1, 2 and 3: which one reaches a half, or has the number, depends on rounding.
        let three = [0.0; 3];
        let of_three = |draw: Draw| choose(&draw, &row_of(&draw, &three), 3);
        assert_eq!(of_three(of(2.0 / 3.0, 0)), Err(Undecided));
        assert_eq!(of_three(of(0.6, 0)), Ok(Some(1)));
        assert_eq!(of_three(Draw { number: 1.0 / 3.0, ..of(1.0, 0) }), Err(Undecided));
        assert_eq!(of_three(of(1.0, 0)), Ok(Some(1)));
        // All there are.
        assert_eq!(of_three(of(1.0, 100)), Ok(Some(1)));
        let row = |logits: &[f32]| choose(&of(1.0, 9), &row_of(&of(1.0, 9), logits), logits.len());
        assert_eq!(row(&[f32::NAN, f32::NAN]), Ok(None));
        assert_eq!(row(&[1.0, f32::INFINITY]), Ok(None));
        assert_eq!(row(&[f32::NAN, -1.0, f32::NEG_INFINITY]), Ok(Some(1)));
    }

    #[test]
    fn a_row_asks_where_candidates_can_help() {
        let draw = Draw { temperature: 0.5, top_p: 1.0, top_k: 0, number: 0.25 };
        assert_eq!(ask(Wants::Drawn(draw), 1000), CandidateAsk { scale: 2.0, drawn: 0.25 });
        assert_eq!(ask(Wants::Drawn(Draw { top_k: 9, ..draw }), 1000), CandidateAsk { scale: 2.0, drawn: -1.0 });
        for useless in [Draw { top_k: 129, ..draw }, Draw { temperature: 1e-45, ..draw }] {
            assert_eq!(ask(Wants::Drawn(useless), 1000), CandidateAsk::default());
        }
        assert_eq!(ask(Wants::Drawn(draw), 1 << 21), CandidateAsk::default());
        assert_eq!(ask(Wants::Logits, 1000), CandidateAsk::default());
    }
}
