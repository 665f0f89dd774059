//! Dispatch and combine: their memory, their launches, the comparison with the CPU reference.

use fastrand::Rng;
use semmoe_kernels::{Element, RoutedTokens};
use semmoe_kernels_cuda::{Combine, Dispatch, Grid, Launch, Received, Team};
use semmoe_reference as reference;

use crate::machine::{Machine, Memory, buffers, text};
use crate::setting::{Setting, shared};
use crate::world::{World, elements};
use semmoe_reference::data::same;

pub(crate) const EXPERTS: usize = 64;
pub(crate) const TOP_K: usize = 8;

/// Tokens of one rank with their routes.
struct Tokens<T> {
    x: Vec<T>,
    experts: Vec<i32>,
    weights: Vec<f32>,
}

impl<T: Element> Tokens<T> {
    fn new(rng: &mut Rng, count: usize, hidden: usize) -> Self {
        let mut all: Vec<i32> = (0..EXPERTS as i32).collect();
        let mut experts = Vec::new();
        for _ in 0..count {
            rng.shuffle(&mut all);
            experts.extend_from_slice(&all[..TOP_K]);
        }
        let weights = experts.iter().map(|_| rng.f32()).collect();
        Self { x: elements(rng, count * hidden), experts, weights }
    }
}

fn hold<T: bytemuck::Pod>(machine: &Machine, lists: impl Iterator<Item = Vec<T>>) -> Result<Vec<Memory>, String> {
    lists.map(|list| machine.holding(bytemuck::cast_slice(&list))).collect()
}

/// Tokens of every rank; received rows pass through an identity expert.
pub(crate) struct Exchange<T> {
    ranks: usize,
    each: usize,
    hidden: usize,
    sent: Vec<Tokens<T>>,
    rank_of_expert: Vec<u32>,
    hosts: Memory,
    /// By rank: x, experts, weights.
    given: [Vec<Memory>; 3],
    sent_rows: Vec<Memory>,
    offsets: Vec<Memory>,
    /// By rank: rows, tokens, experts, weights.
    received: [Vec<Memory>; 4],
    out: Vec<Memory>,
}

impl<T: Element> Exchange<T> {
    /// Deals experts out to the ranks at random, equally many each.
    pub(crate) fn new(machine: &Machine, rng: &mut Rng, [ranks, tokens, hidden]: [usize; 3]) -> Result<Self, String> {
        let each = tokens.div_ceil(ranks);
        let capacity = each * ranks;
        let mut rank_of_expert: Vec<u32> = (0..EXPERTS).map(|expert| (expert % ranks) as u32).collect();
        rng.shuffle(&mut rank_of_expert);
        let sent: Vec<Tokens<T>> = (0..ranks).map(|_| Tokens::new(rng, each, hidden)).collect();
        let row_bytes = hidden * size_of::<T>();
        let room = |bytes: usize| machine.each(ranks, capacity * bytes);
        Ok(Self {
            ranks,
            each,
            hidden,
            hosts: machine.holding(bytemuck::cast_slice(&rank_of_expert))?,
            rank_of_expert,
            given: [
                hold(machine, sent.iter().map(|tokens| tokens.x.clone()))?,
                hold(machine, sent.iter().map(|tokens| tokens.experts.clone()))?,
                hold(machine, sent.iter().map(|tokens| tokens.weights.clone()))?,
            ],
            sent,
            sent_rows: machine.each(ranks, each * ranks * 4)?,
            offsets: machine.each(ranks, (ranks + 1) * 4)?,
            received: [room(row_bytes)?, room(4)?, room(TOP_K * 4)?, room(TOP_K * 4)?],
            out: machine.each(ranks, each * row_bytes)?,
        })
    }

    /// Dispatch's two launches, and combine.
    pub(crate) fn launches(&self, team: &Team, grid: Grid, plan_threads: u32) -> Result<[Launch; 3], String> {
        let counts = vec![self.each as u64; self.ranks];
        let capacity = (self.each * self.ranks) as u64;
        let [x, experts, weights] = self.given.each_ref().map(|memory| buffers(memory));
        let [rows, tokens, row_experts, row_weights] = self.received.each_ref().map(|memory| buffers(memory));
        let dispatch = Dispatch {
            tokens: &counts,
            hidden: self.hidden as u64,
            dtype: T::DTYPE,
            top_k: TOP_K as u64,
            experts_in_all: EXPERTS as u64,
            rank_of_expert: Some(&shared(&self.hosts, self.ranks)),
            x: &x,
            experts: &experts,
            weights: &weights,
            sent_rows: &buffers(&self.sent_rows),
            source_offsets: &buffers(&self.offsets),
            received: Received { capacity, rows: &rows, tokens: &tokens, experts: &row_experts, weights: &row_weights },
        };
        let combine = Combine {
            tokens: &counts,
            hidden: self.hidden as u64,
            dtype: T::DTYPE,
            capacity,
            sums: &rows,
            sent_rows: &buffers(&self.sent_rows),
            out: &buffers(&self.out),
        };
        let [plan, exchange] = dispatch.launches(team, grid, plan_threads).map_err(text)?;
        Ok([plan, exchange, combine.launch(team, grid).map_err(text)?])
    }

    fn compare(&self) -> Result<(), String> {
        let routed: Vec<RoutedTokens<'_, T>> =
            self.sent.iter().map(|t| RoutedTokens { x: &t.x, experts: &t.experts, weights: &t.weights }).collect();
        let hidden = self.hidden;
        let expected = reference::dispatch(&routed, hidden, TOP_K, &self.rank_of_expert).map_err(text)?;
        let [rows, tokens, experts, weights] = &self.received;
        for (rank, expected) in expected.iter().enumerate() {
            let count = expected.tokens.len();
            same("source offsets", &self.offsets[rank].read::<u32>()?, &expected.source_offsets)?;
            same("sent rows", &self.sent_rows[rank].read::<i32>()?, &expected.sent_rows)?;
            same("received rows", &rows[rank].read::<T>()?[..count * hidden], &expected.rows)?;
            same("received tokens", &tokens[rank].read::<u32>()?[..count], &expected.tokens)?;
            same("received experts", &experts[rank].read::<i32>()?[..count * TOP_K], &expected.experts)?;
            same("received weights", &weights[rank].read::<f32>()?[..count * TOP_K], &expected.weights)?;
        }
        let sums: Vec<&[T]> = expected.iter().map(|expected| expected.rows.as_slice()).collect();
        let sent: Vec<&[i32]> = expected.iter().map(|expected| expected.sent_rows.as_slice()).collect();
        let combined = reference::combine(&sums, &sent, hidden).map_err(text)?;
        self.out
            .iter()
            .zip(&combined)
            .try_for_each(|(out, expected)| same("combined rows", &out.read::<T>()?, expected))
    }
}

pub(crate) fn check<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let exchange = Exchange::<T>::new(machine, rng, [ranks, tokens, hidden])?;
    let world = World::new(machine, ranks)?;
    let launches = exchange.launches(&world.team, setting.grid(), machine.sort_threads())?;
    machine.run(&launches).map_err(|error| world.explain(error))?;
    exchange.compare()
}
