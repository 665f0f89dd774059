//! Dispatch and combine: uneven ranks, unused slots, one send per rank.

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::Element;
use semmoe_kernels_capi_shim::capi::abi::{self, Combine, DispatchArgs};
use semmoe_kernels_shim::HostBuffer;
use semmoe_reference::data::{Tokens, elements, slices};
use semmoe_reference::{self as reference, Dispatched};

use crate::rank::{Rank, World, at, call, holding, message, read, same};

const EXPERTS: usize = 12;
const TOP_K: usize = 4;
/// Row capacity of each rank.
const CAPACITY: usize = 96;
/// Offsets in the symmetric buffer.
const TOKENS_AT: usize = 1 << 16;
const EXPERTS_AT: usize = TOKENS_AT + 4096;
const WEIGHTS_AT: usize = EXPERTS_AT + 8192;
const SUMS_AT: usize = 1 << 17;

/// The rows that a rank sends.
pub(crate) fn sent<T: Element>(rng: &mut Rng, tokens: usize, hidden: usize) -> Tokens<T> {
    Tokens::random(rng, tokens, hidden, EXPERTS, TOP_K)
}

/// A dispatch on this rank: its arguments, and the memory they point to.
pub(crate) struct Call {
    pub(crate) args: DispatchArgs,
    source_offsets: HostBuffer,
    sent_rows: HostBuffer,
    _inputs: [HostBuffer; 4],
}

impl Call {
    pub(crate) fn new<T: Element>(rank: &Rank<'_>, sent: &Tokens<T>, hidden: usize, hosts: &[u32]) -> Self {
        let tokens = sent.experts.len() / TOP_K;
        let inputs = [holding(hosts), holding(&sent.x), holding(&sent.experts), holding(&sent.weights)];
        let source_offsets = HostBuffer::poisoned((rank.ranks() + 1) * 4);
        let sent_rows = HostBuffer::poisoned(tokens * rank.ranks() * 4);
        let args = DispatchArgs {
            struct_bytes: size_of::<DispatchArgs>() as u64,
            tokens: tokens as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE as u32,
            top_k: TOP_K as u32,
            experts_total: EXPERTS as u64,
            capacity: CAPACITY as u64,
            rank_of_expert: at(&inputs[0]),
            x: at(&inputs[1]),
            experts: at(&inputs[2]),
            weights: at(&inputs[3]),
            rows_offset: 0,
            tokens_offset: TOKENS_AT as u64,
            experts_offset: EXPERTS_AT as u64,
            weights_offset: WEIGHTS_AT as u64,
            source_offsets: at(&source_offsets),
            sent_rows: at(&sent_rows),
        };
        Self { args, source_offsets, sent_rows, _inputs: inputs }
    }
}

fn compare<T: Element>(rank: &Rank<'_>, call: &Call, expected: &Dispatched<T>, hidden: usize) {
    let rows = expected.tokens.len();
    same("source offsets", &read::<u32>(&call.source_offsets), &expected.source_offsets);
    same("sent rows", &read::<i32>(&call.sent_rows), &expected.sent_rows);
    same("rows", &rank.get::<T>(0, rows * hidden), &expected.rows);
    same("tokens", &rank.get::<u32>(TOKENS_AT, rows), &expected.tokens);
    same("experts", &rank.get::<i32>(EXPERTS_AT, rows * TOP_K), &expected.experts);
    same("weights", &rank.get::<f32>(WEIGHTS_AT, rows * TOP_K), &expected.weights);
}

fn there_and_back<T: Element>(world: &World, ranks: usize, hidden: usize) {
    let mut rng = Rng::with_seed(ranks as u64);
    let hosts: Vec<u32> = (0..EXPERTS).map(|_| rng.u32(0..ranks as u32)).collect();
    // Rank 0 has no tokens if there are other ranks.
    let count = |rank: usize, rng: &mut Rng| if rank == 0 && ranks > 1 { 0 } else { rng.usize(1..9) };
    let counts: Vec<usize> = (0..ranks).map(|rank| count(rank, &mut rng)).collect();
    let sent: Vec<Tokens<T>> = counts.into_iter().map(|tokens| sent(&mut rng, tokens, hidden)).collect();
    let routed: Vec<_> = sent.iter().map(Tokens::routed).collect();
    let dispatched = reference::dispatch(&routed, hidden, TOP_K, &hosts).unwrap();
    let sums: Vec<Vec<T>> = (0..ranks).map(|_| elements(&mut rng, CAPACITY * hidden)).collect();
    let rows: Vec<&[i32]> = dispatched.iter().map(|one| &one.sent_rows[..]).collect();
    let combined = reference::combine(&slices(&sums), &rows, hidden).unwrap();
    world.each(|rank| {
        let mine = rank.rank;
        for _ in 0..2 {
            let call = Call::new(rank, &sent[mine], hidden, &hosts);
            assert_eq!(call!(rank, semmoe_dispatch, &call.args), abi::OK, "{}", message());
            assert_eq!(rank.check(), (abi::OK, String::new()));
            compare(rank, &call, &dispatched[mine], hidden);
            rank.put(SUMS_AT, &sums[mine]);
            let out = HostBuffer::poisoned(sent[mine].x.len() * size_of::<T>());
            let home = Combine {
                struct_bytes: size_of::<Combine>() as u64,
                tokens: call.args.tokens,
                hidden: hidden as u64,
                dtype: T::DTYPE as u32,
                reserved: 0,
                capacity: CAPACITY as u64,
                sums_offset: SUMS_AT as u64,
                sent_rows: at(&call.sent_rows),
                out: at(&out),
            };
            assert_eq!(call!(rank, semmoe_combine, &home), abi::OK, "{}", message());
            assert_eq!(rank.check(), (abi::OK, String::new()));
            same("combined", &read::<T>(&out), &combined[mine]);
        }
    });
}

#[test]
fn dispatch_and_combine_through_the_c_interface_equal_the_reference() {
    for (index, ranks) in [1usize, 2, 3, 4, 8].into_iter().enumerate() {
        let Some(world) = World::new(ranks) else { return };
        match index % 3 {
            0 => there_and_back::<f16>(&world, ranks, 16),
            1 => there_and_back::<bf16>(&world, ranks, 5),
            _ => there_and_back::<f32>(&world, ranks, 8),
        }
    }
}
