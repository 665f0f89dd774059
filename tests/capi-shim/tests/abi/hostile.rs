//! Errors that only the device can detect stop the kernel, return a status and a message, and make the communicator
//! unusable. Errors that the host detects are refused before any launch, and the communicator stays usable.

use std::sync::Barrier;

use fastrand::Rng;
use semmoe_kernels_capi_shim::capi::abi::{self, AllReduce, Argsort, ReduceScatter};
use semmoe_kernels_shim::HostBuffer;

use crate::exchange::{Call, sent};
use crate::rank::{MAX_TOKENS, Rank, World, all_reduce_args, at, call, holding, message};

/// The header's status codes.
const INVALID: i32 = 1;
const OUT_OF_RANGE: i32 = 2;
const TOO_LARGE: i32 = 4;
const DISAGREE: i32 = 5;
const TIMED_OUT: i32 = 6;
const BUSY: i32 = 10;

fn sum(tokens: u64) -> AllReduce {
    all_reduce_args(0, tokens, 8, 0, 8192)
}

/// This rank's kernel stopped: the launch was accepted, and every later call returns the report.
fn stopped(rank: &Rank<'_>) -> (i32, String) {
    let reported = rank.check();
    assert_ne!(reported.0, abi::OK, "rank {} went on", rank.rank);
    assert_eq!(call!(rank, semmoe_all_reduce, &sum(4)), reported.0, "later calls are refused");
    assert_eq!(message(), reported.1);
    reported
}

#[test]
fn a_missing_rank_is_named_with_the_epoch() {
    let Some(world) = World::new(3) else { return };
    let left = Barrier::new(3);
    let reported = world.each(|rank| {
        assert_eq!(call!(rank, semmoe_all_reduce, &sum(4)), abi::OK, "{}", message());
        if rank.rank == 1 {
            // SAFETY: freed once; `take` disables the rank's own drop.
            unsafe { semmoe_kernels_capi_shim::capi::semmoe_free(rank.take()) };
            left.wait();
            return None;
        }
        left.wait();
        assert_eq!(call!(rank, semmoe_all_reduce, &sum(4)), abi::OK, "{}", message());
        Some(stopped(rank))
    });
    let sentence = |rank| format!("rank {rank} timed out waiting for rank 1 to start call 2");
    assert_eq!(reported, [Some((TIMED_OUT, sentence(0))), None, Some((TIMED_OUT, sentence(2)))]);
}

#[test]
fn ranks_with_different_shapes_or_calls_stop() {
    let Some(world) = World::new(2) else { return };
    let reported = world.each(|rank| {
        let tokens = if rank.rank == 0 { 4 } else { 5 };
        assert_eq!(call!(rank, semmoe_all_reduce, &sum(tokens)), abi::OK, "{}", message());
        stopped(rank).0
    });
    assert!(
        reported.contains(&DISAGREE) && reported.iter().all(|&status| status == DISAGREE || status == TIMED_OUT),
        "{reported:?}"
    );
}

fn scatter(out: &HostBuffer) -> ReduceScatter {
    ReduceScatter {
        struct_bytes: size_of::<ReduceScatter>() as u64,
        tokens: 6,
        hidden: 8,
        dtype: 0,
        epsilon: 0.0,
        part_offset: 0,
        permutation: std::ptr::null(),
        offsets: std::ptr::null(),
        capacity: 6,
        out: at(out),
        residual: std::ptr::null(),
        norm_weight: std::ptr::null(),
        residual_out: std::ptr::null_mut(),
    }
}

#[test]
fn orders_that_do_not_fit_stop_with_a_sentence() {
    let good = [0u32, 1, 2, 3, 4, 5];
    let bad = [0u32, 1, 2, 9, 4, 5];
    let cases = [
        ((bad, [0u32, 6], 6), OUT_OF_RANGE, "position 3 of the permutation of rank 0 is out of range"),
        ((good, [3, 2], 6), OUT_OF_RANGE, "the offsets of rank 0 end at 2"),
        ((good, [0, 6], 5), TOO_LARGE, "rank 0 would receive 6 rows"),
    ];
    for ((permutation, offsets, capacity), status, sentence) in cases {
        let Some(world) = World::new(1) else { return };
        let (permutation, offsets, out) = (holding(&permutation), holding(&offsets), HostBuffer::poisoned(6 * 8 * 4));
        let args = ReduceScatter { permutation: at(&permutation), offsets: at(&offsets), capacity, ..scatter(&out) };
        let rank = world.join(0);
        assert_eq!(call!(rank, semmoe_reduce_scatter, &args), abi::OK, "{}", message());
        let reported = stopped(&rank);
        assert!(reported.0 == status && reported.1.starts_with(sentence), "{reported:?}");
    }
}

#[test]
fn destinations_and_experts_out_of_range_stop_with_a_sentence() {
    for bad in [2u32, u32::MAX] {
        let Some(world) = World::new(2) else { return };
        let (from, to) = (holding(&[0, 1, bad, 0]), [HostBuffer::poisoned(16), HostBuffer::poisoned(16)]);
        let offsets = HostBuffer::poisoned(12);
        let args = Argsort {
            struct_bytes: size_of::<Argsort>() as u64,
            n: 4,
            destinations: at(&from),
            permutation: at(&to[0]),
            inverse: at(&to[1]),
            offsets: at(&offsets),
        };
        let rank = world.join(0);
        assert_eq!(call!(rank, semmoe_argsort, &args), abi::OK, "{}", message());
        assert_eq!(rank.check(), (OUT_OF_RANGE, "destination or expert 2 is out of range".to_owned()));
    }
    let Some(world) = World::new(1) else { return };
    let mut sent = sent::<f32>(&mut Rng::with_seed(1), 3, 8);
    sent.experts[5] = 12;
    let rank = world.join(0);
    let bad = Call::new(&rank, &sent, 8, &[0; 12]);
    assert_eq!(call!(rank, semmoe_dispatch, &bad.args), abi::OK, "{}", message());
    assert_eq!(stopped(&rank).0, OUT_OF_RANGE);
}

#[test]
fn more_rows_than_the_capacity_stop_before_any_is_written() {
    let Some(world) = World::new(1) else { return };
    let mut sent = sent::<f32>(&mut Rng::with_seed(2), 5, 8);
    sent.experts.fill(3);
    let mut rank = world.join(0);
    rank.put(0, &[7.5f32; 40]);
    let mut call = Call::new(&rank, &sent, 8, &[0; 12]);
    call.args.capacity = 4;
    assert_eq!(call!(rank, semmoe_dispatch, &call.args), abi::OK, "{}", message());
    let reported = stopped(&rank);
    assert!(reported.0 == TOO_LARGE && reported.1.starts_with("rank 0 would receive 5 rows"), "{reported:?}");
    assert_eq!(rank.get::<f32>(0, 40), [7.5; 40]);
}

/// No rank launched, so the next call still synchronises with the others. `kernels/capi/src/cuda/tests.rs` covers all
/// refusals.
#[test]
fn what_the_host_sees_is_refused_and_the_ranks_go_on() {
    let Some(world) = World::new(2) else { return };
    world.each(|rank| {
        let out = HostBuffer::poisoned(6 * 8 * 4);
        let wrong = ReduceScatter { tokens: MAX_TOKENS + 1, ..scatter(&out) };
        assert_eq!(call!(rank, semmoe_reduce_scatter, &wrong), TOO_LARGE, "{}", message());
        assert_eq!(call!(rank, semmoe_all_reduce, std::ptr::null()), INVALID);
        rank.put(0, &[1.0f32; 32]);
        assert_eq!(rank.all_reduce::<f32>(&sum(4)), [2.0; 32]);
    });
}

/// While one thread is in a call, a call from another is refused at once; neither fails otherwise.
#[test]
fn a_second_thread_is_reported_that_the_communicator_is_busy() {
    let Some(world) = World::new(2) else { return };
    let (first, second) = (world.join(0), world.join(1));
    let shared = &first;
    std::thread::scope(|scope| {
        // Blocks inside the call until the other rank launches; the main thread may check before that.
        let inside = scope.spawn(move || {
            loop {
                match call!(shared, semmoe_all_reduce, &sum(4)) {
                    BUSY => std::thread::yield_now(),
                    status => break status,
                }
            }
        });
        loop {
            match shared.check() {
                (abi::OK, _) => std::thread::yield_now(),
                reported => {
                    assert_eq!(reported, (BUSY, "another thread is in a call on this communicator".to_owned()));
                    break;
                }
            }
        }
        assert_eq!(call!(second, semmoe_all_reduce, &sum(4)), abi::OK, "{}", message());
        assert_eq!(inside.join().unwrap(), abi::OK);
        assert_eq!(shared.check(), (abi::OK, String::new()));
    });
}
