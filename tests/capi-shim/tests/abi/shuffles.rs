//! Argsort, SRS with and without norm, SAG, their plain forms, and all-reduce, over the peers and through the switch,
//! whose scalar path sums in rank order.

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::{Element, RankOrder, ResidualNorm, RowSplit, even_offsets};
use semmoe_reference as reference;
use semmoe_reference::data::{elements, order, slices};

use crate::rank::{BUFFER_BYTES, World, all_reduce_args, read, same};

/// The inputs of all ranks, and the expected output of each.
struct Case<T> {
    tokens: usize,
    hidden: usize,
    destinations: Vec<u32>,
    order: RankOrder,
    parts: Vec<Vec<T>>,
    residual: Vec<T>,
    weight: Vec<T>,
}

impl<T: Element> Case<T> {
    fn new(rng: &mut Rng, world: usize, tokens: usize, hidden: usize) -> Self {
        // In every third case all tokens go to one rank.
        let one = tokens.is_multiple_of(3).then(|| rng.u16(0..world as u16));
        let destinations: Vec<u16> = (0..tokens).map(|_| one.unwrap_or_else(|| rng.u16(0..world as u16))).collect();
        let order = order(&destinations, world);
        Self {
            tokens,
            hidden,
            destinations: destinations.into_iter().map(u32::from).collect(),
            order,
            parts: (0..world).map(|_| elements(rng, tokens * hidden)).collect(),
            residual: elements(rng, tokens * hidden),
            weight: elements(rng, hidden),
        }
    }
}

/// Repeats every call, so that leftovers of one would break the next.
fn shuffles<T: Element>(world: &World, ranks: usize, case: &Case<T>) {
    let (split, shape) = (RowSplit::from(&case.order), (case.tokens, case.hidden, 256));
    let even = even_offsets(case.tokens, ranks).unwrap();
    let plain = RowSplit::contiguous(&even).unwrap();
    let norm = ResidualNorm { residual: &case.residual, weight: &case.weight, epsilon: 1e-6 };
    let parts = slices(&case.parts);
    let shuffled = reference::reduce_scatter(&parts, case.hidden, split).unwrap();
    let contiguous = reference::reduce_scatter(&parts, case.hidden, plain).unwrap();
    let normed = reference::reduce_scatter_norm(&parts, case.hidden, split, norm).unwrap();
    let sum = reference::all_reduce(&parts).unwrap();
    world.each(|rank| {
        let mine = rank.rank;
        for operations in [3, 1, 2, 0] {
            rank.multicast(operations);
            let (order, inverse) = rank.argsort(&case.destinations);
            same("permutation", &read::<u32>(&order.permutation), case.order.permutation());
            same("offsets", &read::<u32>(&order.offsets), case.order.offsets());
            same("inverse", &inverse, case.order.inverse());
            rank.put(shape.2, &case.parts[mine]);
            let rows = split.positions(mine).len();
            let (found, _) = rank.reduce_scatter::<T>(shape, Some(&order), rows, None);
            same("shuffled sums", &found, &shuffled[mine]);
            let (found, _) = rank.reduce_scatter::<T>(shape, None, even.len() + case.tokens, None);
            same("plain sums", &found[..contiguous[mine].len()], &contiguous[mine]);
            let with = Some((&case.residual[..], &case.weight[..]));
            let (found, residual) = rank.reduce_scatter::<T>(shape, Some(&order), rows, with);
            same("normed rows", &found, &normed[mine].normed);
            same("residual", &residual, &normed[mine].residual);
            let whole = BUFFER_BYTES / 2;
            let gathered = rank.allgather((case.tokens, case.hidden, whole), Some(&order), &shuffled[mine]);
            same("gathered", &gathered, &sum);
            let gathered = rank.allgather((case.tokens, case.hidden, whole), None, &contiguous[mine]);
            same("gathered in parts", &gathered, &sum);
            let args = all_reduce_args(T::DTYPE as u32, case.tokens as u64, case.hidden as u64, 256, whole as u64);
            same("sum", &rank.all_reduce::<T>(&args), &sum);
            same("part", &rank.get::<T>(256, case.tokens * case.hidden), &case.parts[mine]);
        }
    });
}

#[test]
fn shuffles_through_the_c_interface_equal_the_reference() {
    for (index, ranks) in [1usize, 2, 3, 4, 8].into_iter().enumerate() {
        let Some(world) = World::new(ranks) else { return };
        let mut rng = Rng::with_seed(ranks as u64);
        for (tokens, hidden) in [(13, 24), (9, 7), (0, 8)] {
            match index % 3 {
                0 => shuffles::<bf16>(&world, ranks, &Case::new(&mut rng, ranks, tokens, hidden)),
                1 => shuffles::<f32>(&world, ranks, &Case::new(&mut rng, ranks, tokens, hidden)),
                _ => shuffles::<f16>(&world, ranks, &Case::new(&mut rng, ranks, tokens, hidden)),
            }
        }
    }
}
