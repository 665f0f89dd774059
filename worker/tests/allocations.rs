//! A step allocates nothing once its buffers have grown.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use semmoe_tables::{Attention, EvenGroups, GroupId, LikelyGroup, Placement, RankId};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{
    AttentionPlan, ExpertMemory, ExpertRoom, KvCache, Model, ModelConfig, PAGE_TOKENS, StepItem, Wants,
};

/// The system's allocator with a counter per thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // An exiting thread has no counter any more.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: forwards everything to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees it.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees it.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Decodes one token of every sequence; returns the number of allocations.
fn decode(model: &mut Model, ep: &mut ExpertParallel, caches: &mut [KvCache], tokens: &[u32]) -> usize {
    let item = |(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase: StepPhase::Decode };
    let mut items: Vec<StepItem<'_>> = caches.iter_mut().zip(tokens.chunks(1)).map(item).collect();
    let before = ALLOCATIONS.get();
    model.step(&mut items, ep).expect("one rank does not fail");
    ALLOCATIONS.get() - before
}

fn model_dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m"))
}

fn assert_decoding_allocates_nothing(mut model: Model, placement: &Placement) {
    let mut ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), placement).unwrap();

    let mut caches: Vec<KvCache> = (0..16).map(|_| model.new_sequence()).collect();
    let prompt: Vec<u32> = (0..8).collect();
    for kv in &mut caches {
        let items = &mut [StepItem { kv, tokens: &prompt, wants: Wants::Nothing, phase: StepPhase::Prefill }];
        model.step(items, &mut ep).unwrap();
    }
    let tokens: Vec<u32> = (0..16).map(|sequence| 17 * sequence + 1).collect();
    // Equal tokens give the largest batch that one expert can have.
    assert!(decode(&mut model, &mut ep, &mut caches, &[5; 16]) > 0, "buffers grow, so this counts something");
    decode(&mut model, &mut ep, &mut caches, &tokens);
    while caches[0].len() < PAGE_TOKENS {
        assert_eq!(decode(&mut model, &mut ep, &mut caches, &tokens), 0, "after {} tokens", caches[0].len());
    }
}

#[test]
fn a_decode_step_allocates_nothing() {
    let config = ModelConfig::load(model_dir()).unwrap();
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1).unwrap();
    assert_decoding_allocates_nothing(Model::load(model_dir(), RankId::new(0), &placement).unwrap(), &placement);
}

#[test]
fn nor_does_one_whose_experts_are_streamed() {
    let config = ModelConfig::load(model_dir()).unwrap();
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1).unwrap();
    let room = ExpertRoom { memory: Some(ExpertMemory::Bytes(10 << 20)), ..ExpertLayout::Ep.into() };
    let model = Model::load_divided(model_dir(), RankId::new(0), &placement, room, Attention::Dp).unwrap();
    assert!(model.expert_fetches().unwrap().memory_bytes < 10 << 20);
    assert_decoding_allocates_nothing(model, &placement);
}

#[test]
fn nor_does_one_whose_rows_are_split() {
    let config = ModelConfig::load(model_dir()).unwrap();
    let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1).unwrap();
    let tables = Arc::new(common::tp_tables(&config, &placement, 1));
    let plan = AttentionPlan { tables: Some(tables), ..Attention::Tp.into() };
    let model = Model::load_divided(model_dir(), RankId::new(0), &placement, ExpertLayout::Ep, plan).unwrap();
    assert_decoding_allocates_nothing(model, &placement);
}

#[test]
fn rows_that_all_want_one_group_are_evened_out_without_allocations() {
    let mut even = EvenGroups::new(4);
    let mut split = |wanted: u16| {
        let before = ALLOCATIONS.get();
        even.clear();
        for row in 0..512 {
            even.push(|shares| {
                shares.fill(0.1);
                shares[usize::from(wanted)] = 0.2 + f64::from(row % 7) / 10.0;
                Some(LikelyGroup { group: GroupId::new(wanted), share: shares[usize::from(wanted)] })
            });
        }
        even.settle();
        ALLOCATIONS.get() - before
    };
    assert!(split(0) > 0, "buffers grow, so this counts something");
    (1..4).for_each(|wanted| assert_eq!(split(wanted), 0));
}
