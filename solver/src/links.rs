//! The traffic of the links between ranks in a layer of a step with attention tp. Each collective waits for the fullest
//! of them.

use crate::hosts::Hosts;

/// Rows of one layer by place: those that it goes on with, and those that it sends to others and gets from them in
/// dispatch.
#[derive(Debug)]
pub(crate) struct Links {
    rows: Vec<u64>,
    sent: Vec<u64>,
    received: Vec<u64>,
    /// Scratch: the places of a route.
    seen: Vec<bool>,
}

impl Links {
    pub(crate) fn new(places: usize) -> Self {
        Self { rows: vec![0; places], sent: vec![0; places], received: vec![0; places], seen: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        for counts in [&mut self.rows, &mut self.sent, &mut self.received] {
            counts.fill(0);
        }
    }

    /// A token at `place` with these experts.
    pub(crate) fn add(&mut self, hosts: &Hosts, layer: usize, experts: impl Iterator<Item = usize>, place: usize) {
        self.rows[place] += 1;
        self.sent[place] += hosts.sent_to(layer, experts, place, &mut self.seen) as u64;
        self.received.iter_mut().zip(&self.seen).for_each(|(received, seen)| *received += u64::from(*seen));
    }

    /// Rows that pass the fullest link, in its fuller direction: in SRS, SAG, dispatch and combine, added up. SRS
    /// brings a row of each other place to a token's place; SAG and combine are SRS and dispatch the other way round.
    pub(crate) fn fullest(&self) -> u64 {
        let (all, others) = (self.rows.iter().sum::<u64>(), self.rows.len() as u64 - 1);
        let shuffled = self.rows.iter().map(|&own| (others * own).max(all - own)).max();
        let dispatched = self.sent.iter().chain(&self.received).copied().max();
        2 * (shuffled.unwrap_or(0) + dispatched.unwrap_or(0))
    }
}
