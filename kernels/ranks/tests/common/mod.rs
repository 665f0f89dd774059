//! Ranks as threads, test data, and the comparison with the reference.
#![allow(dead_code, clippy::unwrap_used, reason = "helpers of several test programs")]

use std::time::Duration;

use semmoe_kernels::Element;
use semmoe_ranks::{Communicator, threads};

/// Much longer than any rank takes; no passing test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Runs every rank in its own thread, and returns their results.
pub(crate) fn on_ranks<O: Send>(comms: Vec<Communicator>, run: impl Fn(&mut Communicator) -> O + Sync) -> Vec<O> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = comms.into_iter().map(|mut comm| scope.spawn(move || run(&mut comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn group(world: usize, bytes: usize) -> Vec<Communicator> {
    let mut comms = threads(world, bytes, PATIENCE).unwrap();
    for comm in &mut comms {
        // Anything read before it was written is detected.
        let all = semmoe_ranks::Span::<u8>::new(0, bytes).unwrap();
        comm.view_mut(all).unwrap().fill(0xa5);
    }
    comms
}

/// Yields to the others, a little or not at all, to vary the order of arrival, on which nothing depends.
pub(crate) fn dawdle(random: &mut fastrand::Rng) {
    for _ in 0..random.usize(0..4) * random.usize(0..10) {
        std::thread::yield_now();
    }
}

pub(crate) fn values<T: Element>(count: usize, seed: u64) -> Vec<T> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| T::round((random.f32() - 0.5) * 100.0)).collect()
}

pub(crate) fn bits<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}
