//! The NVLS kernels through the C interface: their scalar path, which adds in rank order, equals the reference.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::{RankOrder, RowSplit, argsort_by_rank, reference};
use semmoe_kernels_capi_shim::capi::{self, abi};

use crate::rank::{BUFFER_BYTES, Rank, World, elements, message, same};

/// The shim has no switch: any address that fits will do.
fn through(rank: &Rank<'_>, operations: u32) {
    let address = if operations == 0 { std::ptr::null_mut() } else { rank.buffer() };
    let args = abi::Multicast {
        struct_bytes: size_of::<abi::Multicast>() as u64,
        address,
        bytes: BUFFER_BYTES as u64,
        operations,
        reserved: 0,
    };
    // SAFETY: the communicator is alive.
    let (has, status) =
        unsafe { (capi::semmoe_has_multicast(rank.comm()), capi::semmoe_multicast(rank.comm(), &args)) };
    assert_eq!((has, status), (1, abi::OK), "{}", message());
}

#[test]
fn shuffles_through_the_switch_equal_the_reference() {
    for ranks in [1usize, 2, 3, 4] {
        let Some(world) = World::new(ranks) else { return };
        let mut rng = Rng::with_seed(ranks as u64);
        let (tokens, hidden) = (11, 24);
        let destinations: Vec<u16> = (0..tokens).map(|_| rng.u16(0..ranks as u16)).collect();
        let mut order = RankOrder::default();
        argsort_by_rank(&destinations, ranks, &mut order).unwrap();
        let parts: Vec<Vec<bf16>> = (0..ranks).map(|_| elements(&mut rng, tokens * hidden)).collect();
        let slices: Vec<&[bf16]> = parts.iter().map(Vec::as_slice).collect();
        let split = RowSplit::from(&order);
        let sums = reference::reduce_scatter(&slices, hidden, split).unwrap();
        let all = reference::all_reduce(&slices).unwrap();
        let wide: Vec<u32> = destinations.iter().map(|&rank| u32::from(rank)).collect();
        world.each(|rank| {
            let mine = rank.rank;
            let (order, _) = rank.argsort(&wide);
            for operations in [3, 1, 2, 0] {
                through(rank, operations);
                rank.put(256, &parts[mine]);
                let rows = split.positions(mine).len();
                let (found, _) = rank.reduce_scatter::<bf16>((tokens, hidden, 256), Some(&order), rows, None);
                same("sums", &found, &sums[mine]);
                let whole = BUFFER_BYTES / 2;
                let gathered = rank.allgather((tokens, hidden, whole), Some(&order), &sums[mine]);
                same("gathered", &gathered, &all);
            }
        });
    }
}
