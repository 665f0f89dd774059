//! Memory that a hostile file makes the reader allocate: at most the file's size and a few megabytes.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "pickle/build.rs"]
#[allow(dead_code, reason = "the other test uses the rest")]
mod build;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use semmoe_profiler::pickle::{Source, TorchFile};

/// Counts what is held, and the most that ever was.
struct Counting;

static HELD: AtomicU64 = AtomicU64::new(0);
static MOST: AtomicU64 = AtomicU64::new(0);

fn taken(bytes: usize) {
    let held = HELD.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    MOST.fetch_max(held, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counters touch no memory of its blocks.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the block came from `alloc` above with this layout, as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most that opening `bytes` took, beside the bytes themselves.
fn most(bytes: Vec<u8>) -> u64 {
    let source = Source::from_bytes(bytes);
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let _ = TorchFile::from_source(source);
    MOST.load(Ordering::Relaxed) - before
}

/// One test, as others beside it would count too.
#[test]
fn memory_is_bounded_by_the_file() {
    // The most memory that one byte of a pickle can cause: values, containers, entries of the memo.
    let pieces: [&[u8]; 8] = [b"]", b"}", b")", b"N", b"]\x94", b"N\x85", b"}NNs", b"]Na"];
    for piece in pieces {
        for repeats in [10, 1000, 100_000, 3_000_000] {
            // In batches, so that the stack's own bound is not what stops it.
            let batch = [b"(", &piece.repeat(500)[..], b"t"].concat();
            let body = [b"]", &[&batch[..], b"a"].concat().repeat(repeats / 500 + 1)[..]].concat();
            let file = build::pt(&build::pickle(&[&body]), &[0; 8]);
            let (size, taken) = (file.len() as u64, most(file));
            // The pickle itself, the values, and the stack.
            assert!(taken <= 2 * size + (4 << 20), "{taken} bytes for a file of {size}, of {piece:?}");
        }
    }
    // Announced sizes are not believed.
    for hostile in [
        build::pickle(&[b"X\xff\xff\xff\x7f"]),
        build::pickle(&[b"N", b"r\xff\xff\xff\x7f"]),
        build::pickle(&[&build::tensor(
            &build::storage("LongStorage", 1),
            0,
            &build::tuple(&[1 << 40]),
            &build::tuple(&[0]),
        )]),
        build::pickle(&[&build::storage("DoubleStorage", 1 << 50)]),
    ] {
        let taken = most(build::pt(&hostile, &[0; 8]));
        assert!(taken < 1 << 20, "{taken} bytes");
    }
}
