//! The capabilities of one thread of this machine, measured at the time of the benchmark.

use std::hint::black_box;
use std::time::Instant;

use memmap2::{Advice, MmapMut};

use crate::Outcome;

const TRIES: usize = 5;
/// Rows and columns of the measured product.
const SIZE: usize = 768;

pub(crate) struct Machine {
    /// Bytes read and bytes written by a copy.
    pub(crate) copied_per_second: f64,
    pub(crate) read_per_second: f64,
    /// The `gemm` crate's rate in f32.
    pub(crate) ops_per_second: f64,
}

/// Measures over as many bytes as a step reads: a smaller working set fits into closer caches, for the step too. Uses
/// huge pages if available, as the worker does for weights and caches.
pub(crate) fn measure(bytes: usize) -> Outcome<Machine> {
    let mut map = MmapMut::map_anon(bytes.max(4096))?;
    // A hint: if the kernel ignores it, the worker gets small pages too.
    let _ = map.advise(Advice::HugePage);
    map.fill(1);
    let read_per_second = map.len() as f64 / best(|| read(black_box(&map)));
    let (to, from) = map.split_at_mut(bytes / 2);
    let copied = 2 * to.len();
    let seconds = best(|| {
        to.copy_from_slice(&black_box(&*from)[..to.len()]);
        black_box(&mut *to);
    });
    Ok(Machine { copied_per_second: copied as f64 / seconds, read_per_second, ops_per_second: gemm_rate() })
}

fn best(mut run: impl FnMut()) -> f64 {
    run();
    let time = |_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..TRIES).map(time).fold(f64::INFINITY, f64::min)
}

/// Reads everything once with the widest available vectors: with the compiler's baseline, instructions would be the
/// bottleneck instead of memory.
fn read(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(bytes: &[u8]) {
            sum_words(bytes);
        }
        #[target_feature(enable = "avx2")]
        fn avx2(bytes: &[u8]) {
            sum_words(bytes);
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has it.
            return unsafe { avx512(bytes) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { avx2(bytes) };
        }
    }
    sum_words(bytes);
}

#[inline(always)]
fn sum_words(bytes: &[u8]) {
    let (blocks, _) = bytes.as_chunks::<512>();
    let mut sums = [0u64; 64];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        sums.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= u64::from_le_bytes(*word));
    }
    black_box(sums);
}

fn gemm_rate() -> f64 {
    let (a, b) = (vec![1.0f32; SIZE * SIZE], vec![0.5f32; SIZE * SIZE]);
    let mut c = vec![0.0f32; SIZE * SIZE];
    let (row, column) = (SIZE as isize, 1);
    let seconds = best(|| {
        // SAFETY: the three matrices have SIZE rows of SIZE elements.
        unsafe {
            gemm::gemm(
                SIZE,
                SIZE,
                SIZE,
                c.as_mut_ptr(),
                column,
                row,
                false,
                a.as_ptr(),
                column,
                row,
                b.as_ptr(),
                column,
                row,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        black_box(&mut c);
    });
    2.0 * (SIZE * SIZE * SIZE) as f64 / seconds
}
