//! Launches, rejections and messages of the C interface.

mod multicast;
mod record;

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use semmoe_kernels_cuda::SIGNAL_BYTES;

use crate::abi::{self, AllReduce, Allgather, Argsort, Combine, DispatchArgs, InitArgs, ReduceScatter};
use crate::failure::Code;
use record::{BUFFER_BYTES, Fixture, RANK, array, call, device};

fn scatter() -> ReduceScatter {
    ReduceScatter {
        struct_bytes: size_of::<ReduceScatter>() as u64,
        tokens: 9,
        hidden: 24,
        dtype: 2,
        epsilon: 1e-6,
        part_offset: 256,
        permutation: array(20),
        offsets: array(21),
        capacity: 5,
        out: array(22),
        residual: std::ptr::null(),
        norm_weight: std::ptr::null(),
        residual_out: std::ptr::null_mut(),
    }
}

fn gather() -> Allgather {
    Allgather {
        struct_bytes: size_of::<Allgather>() as u64,
        tokens: 9,
        hidden: 24,
        dtype: 2,
        reserved: 0,
        out_offset: 512,
        permutation: array(20),
        offsets: array(21),
        capacity: 5,
        rows: array(22),
    }
}

fn dispatch() -> DispatchArgs {
    DispatchArgs {
        struct_bytes: size_of::<DispatchArgs>() as u64,
        tokens: 7,
        hidden: 24,
        dtype: 2,
        top_k: 4,
        experts_total: 16,
        capacity: 30,
        rank_of_expert: array(20),
        x: array(21),
        experts: array(22),
        weights: array(23),
        rows_offset: 0,
        tokens_offset: 4096,
        experts_offset: 8192,
        weights_offset: 16384,
        source_offsets: array(24),
        sent_rows: array(25),
    }
}

fn combine() -> Combine {
    Combine {
        struct_bytes: size_of::<Combine>() as u64,
        tokens: 7,
        hidden: 24,
        dtype: 0,
        reserved: 0,
        capacity: 30,
        sums_offset: 4096,
        sent_rows: array(25),
        out: array(26),
    }
}

/// Kernels and shapes of a call's launches, on the caller's stream. `tests/capi-shim` executes them.
#[test]
fn each_call_is_its_launches_and_allocates_nothing() {
    let fixture = Fixture::new();
    let launched = |call: &dyn Fn() -> i32, expected: &[(&str, (u32, u32, u32))]| {
        let before = crate::tests::allocations();
        assert_eq!(call(), abi::OK);
        assert_eq!(crate::tests::allocations(), before);
        let launches = fixture.launches();
        let found: Vec<_> = launches.iter().map(|launch| (launch.kernel(), launch.shape())).collect();
        assert_eq!(found, expected);
    };
    // 132 processors for three ranks.
    let wide = (44, 1, 512);
    for (dtype, scatters, gathers) in [
        (0, "semmoe_srs_f32", "semmoe_sag_4"),
        (1, "semmoe_srs_f16", "semmoe_sag_2"),
        (2, "semmoe_srs_bf16", "semmoe_sag_2"),
    ] {
        let args = ReduceScatter { dtype, ..scatter() };
        launched(&|| call!(fixture, semmoe_reduce_scatter, &args), &[(scatters, wide)]);
        let args = Allgather { dtype, ..gather() };
        launched(&|| call!(fixture, semmoe_allgather, &args), &[(gathers, wide)]);
    }
    let normed =
        ReduceScatter { residual: array(23), norm_weight: array(24), residual_out: array(25), dtype: 1, ..scatter() };
    launched(&|| call!(fixture, semmoe_reduce_scatter, &normed), &[("semmoe_srs_norm_f16", (88, 1, 256))]);
    let reduce = AllReduce {
        struct_bytes: size_of::<AllReduce>() as u64,
        tokens: 9,
        hidden: 24,
        dtype: 1,
        reserved: 0,
        part_offset: 256,
        out_offset: 4096,
    };
    launched(&|| call!(fixture, semmoe_all_reduce, &reduce), &[("semmoe_all_reduce_f16", wide)]);
    let sort = Argsort {
        struct_bytes: size_of::<Argsort>() as u64,
        n: 9,
        destinations: array(20),
        permutation: array(21),
        inverse: array(22),
        offsets: array(23),
    };
    let one_block = (1, 1, 1024);
    launched(&|| call!(fixture, semmoe_argsort, &sort), &[("semmoe_argsort_u32", one_block)]);
    let plan_and_exchange = [("semmoe_dispatch_plan", one_block), ("semmoe_dispatch_2", wide)];
    launched(&|| call!(fixture, semmoe_dispatch, &dispatch()), &plan_and_exchange);
    launched(&|| call!(fixture, semmoe_combine, &combine()), &[("semmoe_combine_f32", wide)]);
}

#[test]
fn what_the_host_can_see_is_refused_before_any_launch() {
    let fixture = Fixture::new();
    let refused = |change: fn(&mut ReduceScatter), code: Code| {
        let mut args = scatter();
        change(&mut args);
        assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), code as i32, "{args:?}");
    };
    refused(|args| args.struct_bytes -= 8, Code::Invalid);
    refused(|args| args.dtype = 3, Code::Invalid);
    refused(|args| args.part_offset = 8, Code::Misaligned);
    refused(|args| args.part_offset = BUFFER_BYTES - 16, Code::TooLarge);
    refused(|args| args.tokens = 65, Code::TooLarge);
    refused(|args| args.out = std::ptr::null_mut(), Code::Invalid);
    refused(|args| args.out = args.out.wrapping_byte_add(4), Code::Misaligned);
    refused(|args| args.out = std::ptr::without_provenance_mut(device(RANK as usize) + 256), Code::Invalid);
    refused(|args| args.permutation = std::ptr::without_provenance(device(20) + 2), Code::Misaligned);
    // Only the kernels reject these.
    refused(|args| args.hidden = 0, Code::OutOfRange);
    refused(|args| (args.tokens, args.capacity, args.hidden) = (0, 0, (1 << 20) + 8), Code::TooLarge);
    let mut wide = dispatch();
    (wide.tokens, wide.capacity, wide.hidden) = (0, 0, (1 << 20) + 8);
    assert_eq!(call!(fixture, semmoe_dispatch, &wide), Code::TooLarge as i32, "not even the plan");
    wide = dispatch();
    wide.experts_total = 0;
    assert_eq!(call!(fixture, semmoe_dispatch, &wide), Code::OutOfRange as i32);
    let mut sums = combine();
    sums.sums_offset = BUFFER_BYTES;
    assert_eq!(call!(fixture, semmoe_combine, &sums), Code::TooLarge as i32);
    assert!(fixture.launches().is_empty());
}

#[test]
fn what_a_kernel_reports_is_reported_by_every_later_call() {
    // Kind, rank 1, peer 2, a number.
    let report = |kind: u64| kind << 56 | 1 << 48 | 2 << 40 | 3;
    let reports = [
        (1, Code::TimedOut, "rank 1 timed out waiting for rank 2 to start call 3"),
        (2, Code::TimedOut, "rank 1 timed out waiting for rank 2 to finish call 3"),
        (3, Code::Disagree, "rank 1 and rank 2 made different calls"),
        (4, Code::OutOfRange, "destination or expert 3 "),
        (5, Code::TooLarge, "rank 2 would receive 3 rows"),
        (6, Code::OutOfRange, "position 3 of the permutation of rank 1"),
        (7, Code::OutOfRange, "the offsets of rank 1 end at 3"),
        (99, Code::Device, "a kernel stopped with unknown code"),
    ];
    let fixture = Fixture::new();
    // SAFETY: the communicator is alive.
    let check = || unsafe { crate::semmoe_check(fixture.comm) };
    assert_eq!(check(), abi::OK);
    for (kind, code, sentence) in reports {
        fixture.seen.report.store(report(kind), Ordering::Relaxed);
        assert_eq!(check(), code as i32);
        // SAFETY: a terminated string, valid until this thread's next failure.
        let message = unsafe { std::ffi::CStr::from_ptr(crate::semmoe_last_error()) }.to_str().expect("UTF-8");
        assert!(message.starts_with(sentence), "{message}");
        assert_eq!(call!(fixture, semmoe_combine, &combine()), code as i32);
        assert_eq!(check(), code as i32, "still");
    }
    assert!(fixture.launches().is_empty());
}

/// If the driver rejects a launch, the report of the kernel that caused it is more informative.
#[test]
fn a_refused_launch_is_a_device_error_unless_a_kernel_told_more() {
    let fixture = Fixture::new();
    fixture.seen.refuses.store(1, Ordering::Relaxed);
    assert_eq!(call!(fixture, semmoe_combine, &combine()), Code::Device as i32);
    fixture.seen.refuses.store(3 << 56, Ordering::Relaxed);
    assert_eq!(call!(fixture, semmoe_combine, &combine()), Code::Disagree as i32);
}

/// Without the feature, the kernels or a driver, a GPU is rejected with a sentence, before any other check.
#[test]
fn a_gpu_that_cannot_be_had_is_refused_with_a_sentence() {
    let buffers: [*mut c_void; 1] = [array(0)];
    let args = InitArgs {
        struct_bytes: size_of::<InitArgs>() as u64,
        device: abi::DEVICE_CUDA,
        ordinal: 0,
        rank: 0,
        world: 1,
        buffer_bytes: BUFFER_BYTES,
        signal_bytes: SIGNAL_BYTES,
        buffers: buffers.as_ptr(),
        signals: buffers.as_ptr(),
        max_tokens: 1,
        timeout_ms: 1000,
    };
    if crate::semmoe_has_cuda() != 0 {
        return;
    }
    let mut comm = std::ptr::null_mut();
    // SAFETY: all pointers are to live structures; without a driver nothing reads device memory.
    let status = unsafe { crate::semmoe_init(&args, &mut comm) };
    // SAFETY: a terminated string, valid until this thread's next failure.
    let message = unsafe { std::ffi::CStr::from_ptr(crate::semmoe_last_error()) }.to_str().expect("UTF-8");
    assert!(comm.is_null());
    let images = cfg!(feature = "cuda") && semmoe_kernels_cuda::embedded(semmoe_kernels_cuda::Target::Sm90).is_some();
    if images {
        assert_eq!((status, message), (Code::Device as i32, "there is no CUDA driver on this machine"));
    } else {
        assert_eq!(status, Code::NotBuilt as i32);
        assert!(message.contains("SEMMOE_KERNEL_IMAGES"), "{message}");
    }
    let mut bytes = 0;
    // SAFETY: `bytes` is writable.
    let reported = unsafe { crate::semmoe_signal_bytes(abi::DEVICE_CUDA, 1, &mut bytes) };
    assert_eq!((reported, bytes), if images { (abi::OK, SIGNAL_BYTES) } else { (Code::NotBuilt as i32, 0) });
}
