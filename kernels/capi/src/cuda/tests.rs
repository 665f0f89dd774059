//! Launches, rejections and messages of the C interface.

mod multicast;
mod record;

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use semmoe_kernels_cuda::SIGNAL_BYTES;

use crate::abi::{self, AllReduce, Allgather, Argsort, Combine, DispatchArgs, InitArgs, ReduceScatter};
use crate::failure::Code;
use record::{BUFFER_BYTES, Fields, Fixture, RANK, REPORT, WORLD, array, at, call, device, places};

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

/// `ReduceParams` of `reduce.cuh`.
fn check_reduce(fields: &mut Fields<'_>, [permutation, offsets]: [u64; 2]) {
    fields.team();
    assert_eq!(fields.peers(), places(256));
    assert_eq!([fields.local(), fields.local(), fields.local()], [at(22), permutation, offsets]);
    assert_eq!(fields.long(), 0, "no multicast");
    assert_eq!([fields.word(), fields.word(), fields.word(), fields.word()], [9, 24, 5, 0]);
}

#[test]
fn reduce_scatter_is_one_launch_plain_shuffled_or_normed() {
    let fixture = Fixture::new();
    let mut args = scatter();
    assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), abi::OK);
    let launch = fixture.one();
    // 132 processors for three ranks.
    assert_eq!((launch.kernel(), launch.shape()), ("semmoe_srs_bf16", (44, 1, 512)));
    let mut fields = Fields::of(&launch);
    check_reduce(&mut fields, [at(20), at(21)]);
    fields.end();

    (args.permutation, args.offsets) = (std::ptr::null(), std::ptr::null());
    for (dtype, kernel) in [(0, "semmoe_srs_f32"), (1, "semmoe_srs_f16")] {
        args.dtype = dtype;
        assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), abi::OK);
        let launch = fixture.one();
        assert_eq!(launch.kernel(), kernel);
        check_reduce(&mut Fields::of(&launch), [0, 0]);
    }

    (args.residual, args.norm_weight, args.residual_out) = (array(23), array(24), array(25));
    assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), abi::OK);
    let launch = fixture.one();
    assert_eq!((launch.kernel(), launch.shape()), ("semmoe_srs_norm_f16", (88, 1, 256)));
    let mut fields = Fields::of(&launch);
    check_reduce(&mut fields, [0, 0]);
    assert_eq!([fields.local(), fields.local(), fields.local()], [at(23), at(24), at(25)]);
    assert_eq!([fields.word(), fields.word()], [1e-6_f32.to_bits(), 0]);
    fields.end();
}

#[test]
fn allgather_and_all_reduce_name_every_rank() {
    let fixture = Fixture::new();
    let mut gather = Allgather {
        struct_bytes: size_of::<Allgather>() as u64,
        tokens: 9,
        hidden: 24,
        dtype: 0,
        reserved: 0,
        out_offset: 512,
        permutation: array(20),
        offsets: array(21),
        capacity: 5,
        rows: array(22),
    };
    for (dtype, kernel) in [(0, "semmoe_sag_4"), (2, "semmoe_sag_2")] {
        gather.dtype = dtype;
        assert_eq!(call!(fixture, semmoe_allgather, &gather), abi::OK);
        let launch = fixture.one();
        assert_eq!(launch.kernel(), kernel);
        let mut fields = Fields::of(&launch);
        fields.team();
        assert_eq!((fields.local(), fields.peers()), (at(22), places(512)));
        assert_eq!([fields.local(), fields.local(), fields.long()], [at(20), at(21), 0]);
        assert_eq!([fields.word(), fields.word(), fields.word(), fields.word()], [9, 24, 5, 0]);
        fields.end();
    }
    let reduce = AllReduce {
        struct_bytes: size_of::<AllReduce>() as u64,
        tokens: 9,
        hidden: 24,
        dtype: 1,
        reserved: 0,
        part_offset: 256,
        out_offset: 4096,
    };
    assert_eq!(call!(fixture, semmoe_all_reduce, &reduce), abi::OK);
    let launch = fixture.one();
    assert_eq!(launch.kernel(), "semmoe_all_reduce_f16");
    let mut fields = Fields::of(&launch);
    fields.team();
    assert_eq!((fields.peers(), fields.peers(), fields.long()), (places(256), places(4096), 9 * 24));
    fields.end();
}

#[test]
fn argsort_is_one_block() {
    let fixture = Fixture::new();
    let args = Argsort {
        struct_bytes: size_of::<Argsort>() as u64,
        n: 9,
        destinations: array(20),
        permutation: array(21),
        inverse: array(22),
        offsets: array(23),
    };
    assert_eq!(call!(fixture, semmoe_argsort, &args), abi::OK);
    let launch = fixture.one();
    assert_eq!((launch.kernel(), launch.shape()), ("semmoe_argsort_u32", (1, 1, 1024)));
    let mut fields = Fields::of(&launch);
    let arrays = [fields.local(), fields.local(), fields.local(), fields.local()];
    assert_eq!(arrays, [at(20), at(21), at(22), at(23)]);
    assert_eq!((fields.local(), fields.word(), fields.word()), (REPORT, 9, WORLD));
    fields.end();
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

#[test]
fn dispatch_is_a_plan_and_an_exchange() {
    let fixture = Fixture::new();
    let before = crate::tests::allocations();
    assert_eq!(call!(fixture, semmoe_dispatch, &dispatch()), abi::OK);
    assert_eq!(crate::tests::allocations(), before);
    let launches = fixture.launches();
    let shapes: Vec<_> = launches.iter().map(|launch| (launch.kernel(), launch.shape())).collect();
    assert_eq!(shapes, [("semmoe_dispatch_plan", (1, 1, 1024)), ("semmoe_dispatch_2", (44, 1, 512))]);
    let mut plan = Fields::of(&launches[0]);
    assert_eq!([plan.local(), plan.local(), plan.local()], [at(22), at(20), at(25)]);
    assert_eq!([plan.local(), plan.local()], [at(11), REPORT], "this rank's signals");
    assert_eq!(plan.local_tokens(), 7);
    assert_eq!([plan.word(), plan.word(), plan.word(), plan.word()], [4, 16, WORLD, 0]);
    plan.end();
    let mut fields = Fields::of(&launches[1]);
    fields.team();
    assert_eq!([fields.local(), fields.local(), fields.local()], [at(21), at(22), at(23)]);
    assert_eq!([fields.local(), fields.local(), fields.local()], [at(20), at(25), at(24)]);
    for offset in [0, 4096, 8192, 16384] {
        assert_eq!(fields.peers(), places(offset));
    }
    assert_eq!(fields.local_tokens(), 7);
    assert_eq!([fields.word(), fields.word(), fields.word(), fields.word()], [24, 4, 30, 0]);
    fields.end();
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

#[test]
fn combine_pulls_from_every_rank() {
    let fixture = Fixture::new();
    assert_eq!(call!(fixture, semmoe_combine, &combine()), abi::OK);
    let launch = fixture.one();
    assert_eq!(launch.kernel(), "semmoe_combine_f32");
    let mut fields = Fields::of(&launch);
    fields.team();
    assert_eq!((fields.peers(), fields.local(), fields.local()), (places(4096), at(25), at(26)));
    assert_eq!([fields.local_tokens(), fields.word(), fields.word()], [7, 24, 30]);
    fields.end();
}

#[test]
fn what_the_host_can_see_is_refused_before_any_launch() {
    let fixture = Fixture::new();
    let refused = |change: fn(&mut ReduceScatter), code: Code| {
        let mut args = scatter();
        change(&mut args);
        assert_eq!(call!(fixture, semmoe_reduce_scatter, &args), code as i32, "{args:?}");
    };
    refused(|args| args.dtype = 3, Code::Invalid);
    refused(|args| args.part_offset = 8, Code::Misaligned);
    refused(|args| args.part_offset = BUFFER_BYTES - 16, Code::TooLarge);
    refused(|args| args.tokens = 65, Code::TooLarge);
    refused(|args| args.out = std::ptr::null_mut(), Code::Invalid);
    refused(|args| args.out = std::ptr::without_provenance_mut(device(RANK as usize) + 256), Code::Invalid);
    refused(|args| args.permutation = std::ptr::without_provenance(device(20) + 2), Code::Misaligned);
    // Only the kernels refuse these.
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
        (1, Code::TimedOut, "rank 1 waited for rank 2 to begin call 3"),
        (2, Code::TimedOut, "rank 1 waited for rank 2 to end call 3"),
        (3, Code::Disagree, "rank 1 and rank 2 made different calls"),
        (4, Code::OutOfRange, "destination or expert 3 "),
        (5, Code::TooLarge, "rank 2 would get 3 rows"),
        (6, Code::OutOfRange, "position 3 of the permutation of rank 1"),
        (7, Code::OutOfRange, "the offsets of rank 1 end at 3"),
        (99, Code::Device, "a kernel stopped with the unknown code"),
    ];
    let fixture = Fixture::new();
    // SAFETY: the communicator is alive.
    let check = || unsafe { crate::semmoe_check(fixture.comm) };
    assert_eq!(check(), abi::OK);
    for (kind, code, sentence) in reports {
        fixture.seen.report.store(report(kind), Ordering::Relaxed);
        assert_eq!(check(), code as i32);
        // SAFETY: a string that ends, valid until this thread's next failure.
        let message = unsafe { std::ffi::CStr::from_ptr(crate::semmoe_last_error()) }.to_str().expect("UTF-8");
        assert!(message.starts_with(sentence), "{message}");
        assert_eq!(call!(fixture, semmoe_combine, &combine()), code as i32);
        assert_eq!(check(), code as i32, "still");
    }
    assert!(fixture.launches().is_empty());
}

/// A driver that refuses says less than the report of the kernel that was the cause.
#[test]
fn a_refused_launch_is_a_device_error_unless_a_kernel_told_more() {
    let fixture = Fixture::new();
    fixture.seen.refuses.store(1, Ordering::Relaxed);
    assert_eq!(call!(fixture, semmoe_combine, &combine()), Code::Device as i32);
    fixture.seen.refuses.store(3 << 56, Ordering::Relaxed);
    assert_eq!(call!(fixture, semmoe_combine, &combine()), Code::Disagree as i32);
}

/// Without the feature, the kernels or a driver a GPU is refused with a sentence, before anything else is looked at.
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
    // SAFETY: as above.
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
    // SAFETY: `bytes` can be written.
    let reported = unsafe { crate::semmoe_signal_bytes(abi::DEVICE_CUDA, 1, &mut bytes) };
    assert_eq!((reported, bytes), if images { (abi::OK, SIGNAL_BYTES) } else { (Code::NotBuilt as i32, 0) });
}
