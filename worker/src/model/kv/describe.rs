//! Describes a pool in the form that the move planner uses ([`semmoe_kernels::reshard::kv`]), and builds a planned
//! pool, whose page ids are the plan's indices.

use std::collections::HashMap;

use semmoe_kernels::reshard::kv::{KvPage, KvPool as PlanPool, KvSequence};

use super::page::PAGE_TOKENS;
use super::pages::{Chain, Content, PageId, Pages, Sealed};

/// A pool's description and the ids of its pages.
#[derive(Debug, Default)]
pub(super) struct Described {
    pub(super) pool: PlanPool,
    /// `[pages]`
    pub(super) ids: Vec<PageId>,
    numbers: HashMap<PageId, u32>,
}

/// A sequence whose pages are described.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named<'a> {
    pub(super) id: u64,
    pub(super) chain: &'a Chain,
    /// See [`KvSequence::shares`].
    pub(super) shares: &'a [f32],
}

impl Pages {
    /// Describes the pages that sequences hold and, if `with_idle`, also the pages that no sequence holds. `sequences`
    /// must be all sequences that hold pages. The description is equal on ranks whose pools have had the same history.
    pub(super) fn describe<'a>(&self, sequences: impl Iterator<Item = Named<'a>>, with_idle: bool) -> Described {
        let mut described = Described::default();
        let idle: Vec<PageId> = self.idle.values().copied().filter(|_| with_idle).collect();
        for &id in &idle {
            self.number(id, &mut described);
        }
        for Named { id, chain, shares } in sequences {
            let mut pages = Vec::new();
            for (&page, tokens) in chain.pages.iter().zip(chain.tokens.chunks(PAGE_TOKENS)) {
                let number = match described.numbers.get(&page) {
                    Some(&number) => number,
                    None => {
                        let before = pages.last().copied();
                        let sealed = self.sealed[page as usize].is_some();
                        described.push(page, KvPage { before, tokens: tokens.to_vec(), sealed })
                    }
                };
                pages.push(number);
            }
            let promised = chain.promised.unwrap_or(0);
            described.pool.sequences.push(KvSequence { id, pages, promised, shares: shares.to_vec() });
        }
        described.pool.idle = idle.iter().map(|id| described.numbers[id]).collect();
        described
    }

    /// Assigns numbers to a known page's predecessors, then to the page itself.
    fn number(&self, id: PageId, described: &mut Described) -> u32 {
        let mut unnumbered = Vec::new();
        let mut at = Some(id);
        while let Some((id, page)) = at.and_then(|id| Some((id, self.sealed[id as usize].as_ref()?))) {
            if described.numbers.contains_key(&id) {
                break;
            }
            unnumbered.push((id, page));
            at = page.content.before;
        }
        for (id, page) in unnumbered.into_iter().rev() {
            let before = page.content.before.map(|before| described.numbers[&before]);
            described.push(id, KvPage { before, tokens: page.content.tokens.to_vec(), sealed: true });
        }
        described.numbers[&id]
    }

    /// Builds a planned pool's page table, with the plan's numbers as page ids, and its sequences. Everything else is
    /// copied from `before`. No page can be found by its content until [`Pages::make_known`].
    pub(super) fn planned(plan: &PlanPool, capacity: usize, before: &Self) -> (Self, Vec<Chain>) {
        let mut pages = Self::new(capacity, before.reuse);
        pages.evicted = before.evicted;
        let sealed = |page: &KvPage| Sealed {
            content: Content { before: page.before, tokens: page.tokens.as_slice().into() },
            holders: 0,
            idle_since: 0,
        };
        pages.sealed = plan.pages.iter().map(|page| page.sealed.then(|| sealed(page))).collect();
        for &page in plan.sequences.iter().flat_map(|sequence| &sequence.pages) {
            if let Some(page) = &mut pages.sealed[page as usize] {
                page.holders += 1;
            }
        }
        for &page in &plan.idle {
            pages.clock += 1;
            pages.idle.insert(pages.clock, page);
            if let Some(page) = &mut pages.sealed[page as usize] {
                page.idle_since = pages.clock;
            }
        }
        pages.used = plan.pages.len() - plan.idle.len();
        pages.promised = plan.sequences.iter().map(|sequence| sequence.promised).sum();
        let tokens = |pages: &[u32]| pages.iter().flat_map(|&page| plan.pages[page as usize].tokens.clone()).collect();
        let chain = |KvSequence { pages, promised, .. }: &KvSequence| Chain {
            pages: pages.clone(),
            tokens: tokens(pages),
            promised: Some(*promised),
        };
        let chains = plan.sequences.iter().map(chain).collect();
        (pages, chains)
    }
}

impl Described {
    fn push(&mut self, id: PageId, page: KvPage) -> u32 {
        let number = self.pool.pages.len() as u32;
        self.pool.pages.push(page);
        self.ids.push(id);
        self.numbers.insert(id, number);
        number
    }
}

/// Wire format of a [`PlanPool`]: pages, sequences, idle pages.
type WirePool = (Vec<WirePage>, Vec<WireSequence>, Vec<u32>);
/// Wire format of a page: its predecessor, its tokens, and whether it is sealed.
type WirePage = (Option<u32>, Vec<u32>, bool);
/// Wire format of a sequence: its id, pages and promised pages. Shares are omitted because only a switch to dp needs
/// them.
type WireSequence = (u64, Vec<u32>, usize);

/// Serialises a pool.
pub(super) fn encode(pool: &PlanPool) -> serde_json::Result<Vec<u8>> {
    let page = |page: &KvPage| (page.before, page.tokens.clone(), page.sealed);
    let sequence = |of: &KvSequence| (of.id, of.pages.clone(), of.promised);
    let (pages, sequences) = (pool.pages.iter().map(page), pool.sequences.iter().map(sequence));
    let wire: WirePool = (pages.collect(), sequences.collect(), pool.idle.clone());
    serde_json::to_vec(&wire)
}

pub(super) fn decode(message: &[u8]) -> serde_json::Result<PlanPool> {
    let (pages, sequences, idle): WirePool = serde_json::from_slice(message)?;
    let pages = pages.into_iter().map(|(before, tokens, sealed)| KvPage { before, tokens, sealed });
    let sequence = |(id, pages, promised)| KvSequence { id, pages, promised, shares: Vec::new() };
    Ok(PlanPool { pages: pages.collect(), sequences: sequences.into_iter().map(sequence).collect(), idle })
}
