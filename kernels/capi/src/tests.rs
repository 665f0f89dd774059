//! The library's half of the header test, and a check that calls do not allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;

use crate::abi::{self, AllReduce, Allgather, Argsort, Combine, DispatchArgs, InitArgs, Multicast, ReduceScatter};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: upheld by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: upheld by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Number of allocations by this thread so far.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The structures as `_Static_assert`s, which `tests/header.rs` compiles against the header.
#[test]
fn the_header_has_these_layouts() {
    let layouts = [
        InitArgs::layout(),
        Argsort::layout(),
        ReduceScatter::layout(),
        Allgather::layout(),
        AllReduce::layout(),
        DispatchArgs::layout(),
        Combine::layout(),
        Multicast::layout(),
    ];
    let mut source = String::from("#include <stddef.h>\n#include \"semmoe_kernels.h\"\n");
    let mut check = |condition: String| source.push_str(&format!("_Static_assert({condition}, \"{condition}\");\n"));
    for (name, size, fields) in layouts {
        check(format!("sizeof({name}) == {size}"));
        for (field, offset) in fields {
            check(format!("offsetof({name}, {field}) == {offset}"));
        }
    }
    for (name, value) in [
        ("SEMMOE_ABI_VERSION", u64::from(abi::ABI_VERSION)),
        ("SEMMOE_MULTICAST_REDUCE_SCATTER", u64::from(abi::MULTICAST_REDUCE_SCATTER)),
        ("SEMMOE_MULTICAST_ALLGATHER", u64::from(abi::MULTICAST_ALLGATHER)),
        ("SEMMOE_MAX_WORLD", u64::from(abi::MAX_WORLD)),
        ("SEMMOE_MAX_WORLD", semmoe_ranks::MAX_WORLD as u64),
        ("SEMMOE_ALIGNMENT", abi::ALIGNMENT),
        ("SEMMOE_ALIGNMENT", semmoe_ranks::ALIGNMENT as u64),
        ("SEMMOE_DEVICE_CPU", u64::from(abi::DEVICE_CPU)),
        ("SEMMOE_DEVICE_CUDA", u64::from(abi::DEVICE_CUDA)),
        ("SEMMOE_F32", semmoe_kernels::Dtype::F32 as u64),
        ("SEMMOE_F16", semmoe_kernels::Dtype::F16 as u64),
        ("SEMMOE_BF16", semmoe_kernels::Dtype::Bf16 as u64),
        ("SEMMOE_OK", abi::OK as u64),
        ("SEMMOE_INVALID", crate::Code::Invalid as u64),
        ("SEMMOE_OUT_OF_RANGE", crate::Code::OutOfRange as u64),
        ("SEMMOE_MISALIGNED", crate::Code::Misaligned as u64),
        ("SEMMOE_TOO_LARGE", crate::Code::TooLarge as u64),
        ("SEMMOE_DISAGREE", crate::Code::Disagree as u64),
        ("SEMMOE_TIMED_OUT", crate::Code::TimedOut as u64),
        ("SEMMOE_PEER_FAILED", crate::Code::PeerFailed as u64),
        ("SEMMOE_NOT_BUILT", crate::Code::NotBuilt as u64),
        ("SEMMOE_DEVICE", crate::Code::Device as u64),
        ("SEMMOE_BUSY", crate::Code::Busy as u64),
        ("SEMMOE_INTERNAL", crate::Code::Internal as u64),
    ] {
        check(format!("{name} == {value}"));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("layout.c");
    std::fs::write(&file, source).expect("written");
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../include");
    let compiler = std::process::Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", include])
        .arg(&file)
        .output()
        .expect("a C compiler");
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
}

#[repr(C, align(64))]
struct Memory([u8; 4096]);

#[test]
fn calls_allocate_nothing() {
    let (mut buffer, mut signals) = (Box::new(Memory([0; 4096])), Box::new(Memory([0; 4096])));
    let (buffers, words): ([*mut c_void; 1], [*mut c_void; 1]) =
        ([buffer.0.as_mut_ptr().cast()], [signals.0.as_mut_ptr().cast()]);
    let init = InitArgs {
        struct_bytes: size_of::<InitArgs>() as u64,
        device: abi::DEVICE_CPU,
        ordinal: 0,
        rank: 0,
        world: 1,
        buffer_bytes: 4096,
        signal_bytes: 4096,
        buffers: buffers.as_ptr(),
        signals: words.as_ptr(),
        max_tokens: 16,
        timeout_ms: 1000,
    };
    let mut comm = std::ptr::null_mut();
    // SAFETY: all pointers are to live memory of the given sizes, and the memory outlives the communicator.
    unsafe {
        assert_eq!(crate::semmoe_init(&init, &mut comm), abi::OK);
        all_calls(comm);
        crate::semmoe_free(comm);
    }
}

/// # Safety
/// The communicator has one rank and 4,096 bytes.
unsafe fn all_calls(comm: *mut crate::Comm) {
    let null = std::ptr::null_mut();
    let destinations = [0i32; 9];
    let (mut permutation, mut inverse, mut offsets) = ([1i32; 9], [1i32; 9], [1i32; 2]);
    let mut rows = Box::pin(Memory([0; 4096]));
    let out: *mut c_void = rows.0.as_mut_ptr().cast();
    let other = out.wrapping_byte_add(1024);
    let argsort = Argsort {
        struct_bytes: size_of::<Argsort>() as u64,
        n: 9,
        destinations: destinations.as_ptr(),
        permutation: permutation.as_mut_ptr(),
        inverse: inverse.as_mut_ptr(),
        offsets: offsets.as_mut_ptr(),
    };
    let before = allocations();
    // SAFETY: upheld by the caller; arrays have the lengths that the header requires.
    unsafe {
        assert_eq!(crate::semmoe_argsort(comm, &argsort, null), abi::OK);
        let mut scatter = ReduceScatter {
            struct_bytes: size_of::<ReduceScatter>() as u64,
            tokens: 9,
            hidden: 8,
            dtype: 2,
            epsilon: 1e-6,
            part_offset: 0,
            permutation: permutation.as_ptr(),
            offsets: offsets.as_ptr(),
            capacity: 9,
            out,
            residual: std::ptr::null(),
            norm_weight: std::ptr::null(),
            residual_out: null,
        };
        assert_eq!(crate::semmoe_reduce_scatter(comm, &scatter, null), abi::OK);
        (scatter.residual, scatter.norm_weight) = (out.wrapping_byte_add(2048), out.wrapping_byte_add(3072));
        scatter.residual_out = other;
        assert_eq!(crate::semmoe_reduce_scatter(comm, &scatter, null), abi::OK);
        let gather = Allgather {
            struct_bytes: size_of::<Allgather>() as u64,
            tokens: 9,
            hidden: 8,
            dtype: 2,
            reserved: 0,
            out_offset: 256,
            permutation: permutation.as_ptr(),
            offsets: std::ptr::null(),
            capacity: 9,
            rows: out,
        };
        assert_eq!(crate::semmoe_allgather(comm, &gather, null), abi::OK);
        let reduce = AllReduce {
            struct_bytes: size_of::<AllReduce>() as u64,
            tokens: 9,
            hidden: 8,
            dtype: 2,
            reserved: 0,
            part_offset: 0,
            out_offset: 256,
        };
        assert_eq!(crate::semmoe_all_reduce(comm, &reduce, null), abi::OK);
        there_and_back(comm, out, other);
        assert_eq!(crate::semmoe_check(comm), abi::OK);
    }
    assert_eq!(allocations(), before);
}

/// Dispatch and combine.
///
/// # Safety
/// See [`all_calls`]; `x` and `out` have 1,024 bytes.
unsafe fn there_and_back(comm: *mut crate::Comm, x: *const c_void, out: *mut c_void) {
    let (rank_of_expert, experts, weights) = ([0i32; 4], [0, 1, 2, 3, 1, -1i32], [0.5f32; 6]);
    let (mut source_offsets, mut sent_rows) = ([-1i32; 2], [-1i32; 3]);
    let dispatch = DispatchArgs {
        struct_bytes: size_of::<DispatchArgs>() as u64,
        tokens: 3,
        hidden: 8,
        dtype: 2,
        top_k: 2,
        experts_total: 4,
        capacity: 4,
        rank_of_expert: rank_of_expert.as_ptr(),
        x,
        experts: experts.as_ptr(),
        weights: weights.as_ptr(),
        rows_offset: 0,
        tokens_offset: 512,
        experts_offset: 1024,
        weights_offset: 1536,
        source_offsets: source_offsets.as_mut_ptr(),
        sent_rows: sent_rows.as_mut_ptr(),
    };
    let combine = Combine {
        struct_bytes: size_of::<Combine>() as u64,
        tokens: 3,
        hidden: 8,
        dtype: 2,
        reserved: 0,
        capacity: 4,
        sums_offset: 0,
        sent_rows: sent_rows.as_ptr(),
        out,
    };
    let null = std::ptr::null_mut();
    // SAFETY: upheld by the caller; arrays have the lengths that the header requires.
    unsafe {
        assert_eq!(crate::semmoe_dispatch(comm, &dispatch, null), abi::OK);
        assert_eq!(crate::semmoe_combine(comm, &combine, null), abi::OK);
    }
    assert_eq!((source_offsets, sent_rows), ([0, 3], [0, 1, 2]));
}
