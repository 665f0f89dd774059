//! Ranks are threads that share one GPU and its context.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::Collectives;
use semmoe_kernels_cuda::driver::DeviceUnit;
use semmoe_kernels_cuda::unit::{
    DeviceCollectives, DeviceReceived, DeviceRows, Gpu, LocalRank, PeerMemory, Room, UnitRank,
};
use semmoe_kernels_cuda::{Accelerator, Buffer};
use semmoe_ranks::LocalTransport;

use crate::machine::text;
use semmoe_reference::law::{self, Case, Reach};

/// A rank's stream and its memory for the test's rows. Everything is allocated before the ranks synchronise: an
/// allocation waits for running kernels, and those would wait for this rank.
struct Rank {
    runner: Arc<dyn Accelerator + Sync>,
    rows: Buffer,
    used: u64,
}

/// The ranks of the current case, until their threads take them.
static RANKS: Mutex<Vec<Option<Rank>>> = Mutex::new(Vec::new());

thread_local! {
    static MINE: RefCell<Option<Rank>> = const { RefCell::new(None) };
}

fn with<R>(work: impl FnOnce(&mut Rank) -> R) -> R {
    MINE.with_borrow_mut(|mine| work(mine.as_mut().expect("a thread that has entered the context")))
}

impl Rank {
    /// Device memory with these elements.
    fn upload<T: Element>(&mut self, rows: &[T]) -> Buffer {
        let bytes = size_of_val(rows) as u64;
        let place = Buffer { address: self.rows.address + self.used, bytes };
        self.used += bytes.next_multiple_of(256);
        assert!(self.used <= self.rows.bytes, "the case needs more than {} bytes", self.rows.bytes);
        self.store(place, rows);
        place
    }

    fn store<T: Element>(&self, to: Buffer, rows: &[T]) {
        // SAFETY: the buffer is this rank's.
        unsafe { self.runner.write(bytemuck::cast_slice(rows), to) }.expect("a copy to the GPU");
    }

    fn load<T: Element>(&self, from: Buffer) -> Vec<T> {
        let mut bytes = vec![0; from.bytes as usize];
        // SAFETY: as above.
        unsafe { self.runner.read(from, &mut bytes) }.expect("a copy from the GPU");
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

fn rows<'a, T: Element>(buffer: Buffer) -> DeviceRows<'a, T> {
    // SAFETY: the rank's memory lives until its thread ends, and is used once a case.
    unsafe { DeviceRows::new(buffer.address, buffer.bytes as usize / size_of::<T>()) }
}

/// Rows in memory of the GPU.
enum OnGpu {}

impl Reach<Gpu> for OnGpu {
    fn enter(rank: usize) {
        MINE.with_borrow_mut(|mine| {
            if mine.is_none() {
                let taken = RANKS.lock().expect("no rank panicked")[rank].take();
                *mine = Some(taken.expect("each rank has one thread"));
            }
        });
        with(|mine| mine.used = 0);
    }
    fn given<T: Element>(given: &[T]) -> DeviceRows<'_, T> {
        rows(with(|mine| mine.upload(given)))
    }
    fn written<'a, T: Element>(written: &'a mut [T], call: impl FnOnce(DeviceRows<'a, T>)) {
        let place = with(|mine| mine.upload(written));
        call(rows(place));
        written.copy_from_slice(&with(|mine| mine.load::<T>(place)));
    }
    fn fill<T: Element>(to: DeviceRows<'_, T>, write: impl FnOnce(&mut [T])) {
        let mut values = with(|mine| mine.load::<T>(to.buffer()));
        write(&mut values);
        with(|mine| mine.store(to.buffer(), &values));
    }
    fn sources<T: Element>(rows: &DeviceReceived<'_, T>) -> Vec<usize> {
        (0..rows.index.len()).map(|row| rows.index.source(row)).collect()
    }
    fn row<T: Element>(received: &DeviceReceived<'_, T>, row: usize, hidden: usize) -> Vec<T> {
        let bytes = (hidden * size_of::<T>()) as u64;
        with(|mine| mine.load(Buffer { address: received.rows.buffer().address + row as u64 * bytes, bytes }))
    }
}

/// Runs a case on `world` ranks. Panics if a rank's results differ from the reference.
pub(super) fn holds<T: Element>(world: usize, case: Case) -> Result<(), String> {
    let device = DeviceUnit::open(0, None).map_err(text)?;
    let room = Room { ranks: world, rows: case.tokens * world, hidden: case.hidden, top_k: 1, dtype: T::DTYPE };
    let mut ends: Vec<Box<dyn Collectives<T, Gpu>>> = Vec::new();
    let mut ranks = Vec::new();
    let unit = device.ranks(world, &room, Duration::from_secs(10)).map_err(text)?;
    let unit = LocalRank::join_all(unit).map_err(text)?;
    for (link, UnitRank { runner, team, symmetric, own }) in LocalTransport::mesh(world).into_iter().zip(unit) {
        let bytes = 64 * (case.hidden * case.tokens * world * size_of::<T>()).next_multiple_of(256) + (1 << 16);
        let rows = runner.allocate(bytes as u64).map_err(text)?;
        // SAFETY: the runner keeps the memory.
        let mover = unsafe { PeerMemory::new(room, team, &symmetric, own, Arc::clone(&runner)) };
        ends.push(Box::new(DeviceCollectives::new(link, mover.map_err(text)?)));
        ranks.push(Some(Rank { runner, rows, used: 0 }));
    }
    *RANKS.lock().map_err(text)? = ranks;
    law::holds_in::<T, Gpu, OnGpu>(ends, case);
    Ok(())
}
