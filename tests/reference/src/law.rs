//! The conformance test of all carriers: every collective equals this crate bit for bit, in any order and number.
#![allow(clippy::unwrap_used, reason = "a part of tests")]

use semmoe_kernels::collectives::{AllRowsIn, Collectives, Host, NormIn, OwnRowsIn, ReceivedIn, ReceivedRows, Space};
use semmoe_kernels::{
    DispatchPlan, Element, NO_EXPERT, RankOrder, ResidualNorm, RoutedTokens, RowSplit, argsort_by_rank,
};

/// A few rounds of every collective.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Elements of a row.
    pub hidden: usize,
    /// Maximum tokens of a rank.
    pub tokens: usize,
    /// Rounds of every collective.
    pub rounds: usize,
    /// Seed of the data.
    pub seed: u64,
    /// The fused norm uses the rounded sums: for residuals of another type than the rows sent.
    pub norms_rounded_sums: bool,
}

/// How the test accesses rows of a space.
pub trait Reach<S: Space> {
    /// Makes the calling thread this rank's.
    fn enter(_rank: usize) {}
    /// Rows that a call reads.
    fn given<T: Element>(rows: &[T]) -> S::Read<'_, T>;
    /// Has a call write rows.
    fn written<'a, T: Element>(rows: &'a mut [T], call: impl FnOnce(S::Write<'a, T>));
    /// Writes rows in place.
    fn fill<T: Element>(rows: S::Write<'_, T>, write: impl FnOnce(&mut [T]));
    /// The source rank of each row.
    fn sources<T: Element>(rows: &S::Received<'_, T>) -> Vec<usize>;
    /// One row's content.
    fn row<T: Element>(rows: &S::Received<'_, T>, row: usize, hidden: usize) -> Vec<T>;
}

/// Rows in memory of the host.
enum OnHost {}

impl Reach<Host> for OnHost {
    /// Rows that a call reads.
    fn given<T: Element>(rows: &[T]) -> &[T] {
        rows
    }
    fn written<'a, T: Element>(rows: &'a mut [T], call: impl FnOnce(&'a mut [T])) {
        call(rows);
    }
    fn fill<T: Element>(rows: &mut [T], write: impl FnOnce(&mut [T])) {
        write(rows);
    }
    fn sources<T: Element>(rows: &ReceivedRows<'_, T>) -> Vec<usize> {
        (0..rows.len()).map(|row| rows.source(row)).collect()
    }
    fn row<T: Element>(rows: &ReceivedRows<'_, T>, row: usize, _hidden: usize) -> Vec<T> {
        rows.row(row).to_vec()
    }
}

/// One rank's tokens with their routes.
struct Tokens<T> {
    x: Vec<T>,
    experts: Vec<u16>,
    weights: Vec<f32>,
}

/// The inputs of all ranks for one round.
struct Round<T> {
    order: RankOrder,
    parts: Vec<Vec<T>>,
    /// The residual of all ranks, and the norm's weight.
    residual: Vec<T>,
    weight: Vec<T>,
    top_k: usize,
    rank_of_expert: Vec<u16>,
    tokens: Vec<Tokens<T>>,
}

const EXPERTS: usize = 6;
const WIDTH: usize = 2;
const EPSILON: f32 = 1e-6;

/// Upper bound on the elements that a rank sends or returns in one collective of a case.
pub fn elements(case: Case, world: usize) -> usize {
    case.hidden * case.tokens * world
}

impl<T: Element> Round<T> {
    fn new(case: Case, world: usize, random: &mut fastrand::Rng) -> Self {
        let mut value = {
            let mut random = random.fork();
            move || T::round(if random.u8(..) < 20 { -0.0 } else { random.f32() - 0.5 })
        };
        // Ranks below `lowest` get no rows.
        let lowest = random.usize(0..world);
        let destinations: Vec<u16> =
            (0..random.usize(0..=case.tokens)).map(|_| random.usize(lowest..world) as u16).collect();
        let mut order = RankOrder::default();
        argsort_by_rank(&destinations, world, &mut order).unwrap();
        let parts = (0..world).map(|_| (0..destinations.len() * case.hidden).map(|_| value()).collect()).collect();
        let residual = (0..destinations.len() * case.hidden).map(|_| value()).collect();
        let weight = (0..case.hidden).map(|_| value()).collect();
        let top_k = random.usize(1..=EXPERTS);
        let tokens = (0..world).map(|_| {
            let count = if random.bool() { random.usize(0..=case.tokens) } else { 0 };
            let experts = (0..count).flat_map(|_| {
                let mut all: Vec<u16> = (0..EXPERTS as u16).collect();
                random.shuffle(&mut all);
                all.truncate(top_k);
                all
            });
            let experts: Vec<u16> = experts.collect();
            let weights = experts.iter().map(|_| random.f32()).collect();
            Tokens { x: (0..count * case.hidden).map(|_| value()).collect(), experts, weights }
        });
        let tokens = tokens.collect();
        let rank_of_expert = (0..EXPERTS).map(|_| random.usize(0..world) as u16).collect();
        Self { order, parts, residual, weight, top_k, rank_of_expert, tokens }
    }

    fn split(&self) -> RowSplit<'_> {
        RowSplit::from(&self.order)
    }

    fn labels(&self, positions: std::ops::Range<usize>) -> Vec<u16> {
        positions.flat_map(|at| [self.split().token(at) as u16, 7]).collect()
    }
}

/// A rank's results of one round.
#[derive(PartialEq, Debug)]
struct Found {
    scattered: Vec<u8>,
    /// The normed rows, and the new residual.
    normed: [Vec<u8>; 2],
    gathered: Vec<u8>,
    labels: Vec<u16>,
    received: Vec<u8>,
    pairs: Vec<(u32, u16, u32)>,
    sources: Vec<usize>,
    combined: Vec<u8>,
    /// Each token sent to every rank and back: the sum of one copy per rank.
    everywhere: Vec<u8>,
}

fn bytes<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// A rank's function of a row.
fn sum<T: Element>(row: &[T], weights: f32, to: &mut [T]) {
    to.iter_mut().zip(row).for_each(|(to, value)| *to = T::round(value.widen() * weights));
}

fn run<T: Element, S: Space, R: Reach<S>>(case: Case, round: &Round<T>, end: &mut dyn Collectives<T, S>) -> Found {
    let (me, hidden, split) = (end.rank(), case.hidden, round.split());
    R::enter(me);
    let part = &round.parts[me];
    R::fill(end.part(part.len()).unwrap(), |to| to.copy_from_slice(part));
    let mut own = vec![T::round(9.0); split.positions(me).len() * hidden];
    R::written(&mut own, |own| end.reduce_scatter(hidden, split, None, own).unwrap());

    R::fill(end.part(part.len()).unwrap(), |to| to.copy_from_slice(part));
    let (mut normed, mut residual) = (own.clone(), own.clone());
    let (before, weight) = (R::given(&round.residual), R::given(&round.weight));
    R::written(&mut normed, |normed| {
        R::written(&mut residual, |residual_out| {
            let norm = NormIn { residual: before, weight, epsilon: EPSILON, residual_out };
            end.reduce_scatter(hidden, split, Some(norm), normed).unwrap();
        });
    });

    let labels = round.labels(split.positions(me));
    let (mut rows, mut all) = (vec![T::round(9.0); part.len()], vec![0; WIDTH * split.tokens()]);
    let given = OwnRowsIn { rows: R::given(&own), hidden, labels: &labels, width: WIDTH, bound: 1 << 15 };
    R::written(&mut rows, |rows| end.allgather(given, split, AllRowsIn { rows, labels: &mut all }).unwrap());

    let Tokens { x, experts, weights } = &round.tokens[me];
    let mut plan = DispatchPlan::default();
    plan.build(experts, weights, round.top_k, &round.rank_of_expert, end.world()).unwrap();
    end.dispatch(R::given(x), hidden, &plan).unwrap();
    let ReceivedIn { rows: arrived, pair_rows, experts: wanted, weights: shares, sums } = end.received();
    let sources = R::sources(&arrived);
    let content = (0..sources.len()).flat_map(|at| bytes(&R::row(&arrived, at, hidden))).collect();
    let pairs = pair_rows.iter().zip(wanted).zip(shares);
    let pairs: Vec<_> = pairs.map(|((row, expert), weight)| (*row, *expert, weight.to_bits())).collect();
    R::fill(sums, |sums| {
        for (at, to) in (0u32..).zip(sums.chunks_exact_mut(hidden)) {
            let weights = pair_rows.iter().zip(shares).filter(|(row, _)| **row == at);
            sum(&R::row(&arrived, at as usize, hidden), weights.map(|(_, weight)| weight).sum(), to);
        }
    });
    drop(arrived);
    let mut combined = vec![T::round(9.0); x.len()];
    R::written(&mut combined, |out| end.combine(&plan, out).unwrap());

    plan.build_everywhere(experts, weights, round.top_k, end.world()).unwrap();
    end.dispatch(R::given(x), hidden, &plan).unwrap();
    let ReceivedIn { rows: arrived, sums, .. } = end.received();
    R::fill(sums, |sums| {
        let rows = sums.chunks_exact_mut(hidden).enumerate();
        rows.for_each(|(at, to)| to.copy_from_slice(&R::row(&arrived, at, hidden)));
    });
    drop(arrived);
    let mut everywhere = vec![T::round(9.0); x.len()];
    R::written(&mut everywhere, |out| end.combine(&plan, out).unwrap());
    Found {
        scattered: bytes(&own),
        normed: [bytes(&normed), bytes(&residual)],
        gathered: bytes(&rows),
        labels: all,
        received: content,
        pairs,
        sources,
        combined: bytes(&combined),
        everywhere: bytes(&everywhere),
    }
}

fn expected<T: Element>(case: Case, round: &Round<T>) -> Vec<Found> {
    let (hidden, split, world) = (case.hidden, round.split(), round.parts.len());
    let parts: Vec<&[T]> = round.parts.iter().map(Vec::as_slice).collect();
    let scattered = crate::reduce_scatter(&parts, hidden, split).unwrap();
    let norm = ResidualNorm { residual: &round.residual, weight: &round.weight, epsilon: EPSILON };
    let rounded = [crate::all_reduce(&parts).unwrap(), vec![T::round(-0.0); parts[0].len()]];
    let summed: Vec<&[T]> = match case.norms_rounded_sums {
        false => parts,
        // Adding minus zero changes no sum.
        true => (0..world).map(|rank| rounded[rank.min(1)].as_slice()).collect(),
    };
    let normed = crate::reduce_scatter_norm(&summed, hidden, split, norm).unwrap();
    let own: Vec<&[T]> = scattered.iter().map(Vec::as_slice).collect();
    let gathered = crate::allgather(&own, hidden, split).unwrap();
    let experts: Vec<Vec<i32>> =
        round.tokens.iter().map(|tokens| tokens.experts.iter().map(|&expert| expert.into()).collect()).collect();
    let routed: Vec<_> = round
        .tokens
        .iter()
        .zip(&experts)
        .map(|(tokens, experts)| RoutedTokens { x: &tokens.x, experts, weights: &tokens.weights })
        .collect();
    let hosts: Vec<u32> = round.rank_of_expert.iter().map(|&rank| rank.into()).collect();
    let dispatched = crate::dispatch(&routed, hidden, round.top_k, &hosts).unwrap();
    let sums: Vec<Vec<T>> = dispatched
        .iter()
        .map(|there| {
            let mut sums = vec![T::round(0.0); there.rows.len()];
            for (at, to) in sums.chunks_exact_mut(hidden).enumerate() {
                let weights = &there.weights[at * round.top_k..][..round.top_k];
                let used =
                    there.experts[at * round.top_k..].iter().zip(weights).filter(|(expert, _)| **expert != NO_EXPERT);
                sum(&there.rows[at * hidden..][..hidden], used.map(|(_, weight)| weight).sum(), to);
            }
            sums
        })
        .collect();
    let sums: Vec<&[T]> = sums.iter().map(Vec::as_slice).collect();
    let sent: Vec<&[i32]> = dispatched.iter().map(|there| there.sent_rows.as_slice()).collect();
    let combined = crate::combine(&sums, &sent, hidden).unwrap();
    (0..world)
        .map(|rank| {
            let there = &dispatched[rank];
            let slots = there.experts.iter().zip(&there.weights).enumerate().filter(|(_, (expert, _))| **expert >= 0);
            let pair = |(slot, (expert, weight)): (usize, (&i32, &f32))| {
                ((slot / round.top_k) as u32, *expert as u16, weight.to_bits())
            };
            let offsets = there.source_offsets.windows(2).enumerate();
            let copies: Vec<&[T]> = vec![&round.tokens[rank].x; world];
            Found {
                scattered: bytes(&scattered[rank]),
                normed: [bytes(&normed[rank].normed), bytes(&normed[rank].residual)],
                gathered: bytes(&gathered),
                labels: (0..split.tokens() as u16).flat_map(|token| [token, 7]).collect(),
                received: bytes(&there.rows),
                pairs: slots.map(pair).collect(),
                sources: offsets
                    .flat_map(|(source, at)| std::iter::repeat_n(source, (at[1] - at[0]) as usize))
                    .collect(),
                combined: bytes(&combined[rank]),
                everywhere: bytes(&crate::all_reduce(&copies).unwrap()),
            }
        })
        .collect()
}

/// Runs every end, in rank order, on its own thread, and collects the results.
///
/// # Panics
/// If any of them does.
pub fn on_ranks<E: Send, R: Send>(ends: Vec<E>, work: impl Fn(usize, E) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |(rank, end): (usize, E)| scope.spawn(move || work(rank, end));
        let threads: Vec<_> = ends.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs a case on all ends, and compares every rank's results of every round.
///
/// # Panics
/// If results differ, or a collective fails.
pub fn holds<T: Element>(ends: Vec<Box<dyn Collectives<T>>>, case: Case) {
    holds_in::<T, Host, OnHost>(ends, case);
}

/// Runs a case on all ends of any space, and compares every rank's results of every round.
///
/// # Panics
/// If results differ, or a collective fails.
pub fn holds_in<T: Element, S: Space, R: Reach<S>>(ends: Vec<Box<dyn Collectives<T, S>>>, case: Case) {
    let mut random = fastrand::Rng::with_seed(case.seed);
    let rounds: Vec<Round<T>> = (0..case.rounds).map(|_| Round::new(case, ends.len(), &mut random)).collect();
    let found: Vec<Vec<Found>> =
        on_ranks(ends, |_, mut end| rounds.iter().map(|round| run::<T, S, R>(case, round, &mut *end)).collect());
    for (at, round) in rounds.iter().enumerate() {
        for (rank, expected) in expected(case, round).into_iter().enumerate() {
            assert_eq!(found[rank][at], expected, "rank {rank}, round {at} of {case:?}, {}", T::DTYPE.name());
        }
    }
}
