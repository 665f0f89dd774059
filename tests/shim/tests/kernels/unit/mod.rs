//! The collectives over GPU memory behind the interface of all carriers: ranks are threads, GPUs are the shim, and NCCL
//! is simulated by [`network`].

mod network;
mod refused;
mod routed;

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use semmoe_kernels::Element;
use semmoe_kernels::collectives::Collectives;
use semmoe_kernels_cuda::hosts::Hosts;
use semmoe_kernels_cuda::unit::{
    DeviceCollectives, DeviceReceived, DeviceRows, Gpu, PeerMemory, Room, RoutedCollectives,
};
use semmoe_kernels_cuda::{Buffer, Launch, SIGNAL_BYTES, Team};
use semmoe_kernels_shim::{Group, HostBuffer, ShimStream};
use semmoe_ranks::LocalTransport;

use crate::support::shim;
use network::Nccl;
use semmoe_reference::law::{self, Case, Reach};

type End<T> = Box<dyn Collectives<T, Gpu>>;
type RoutedEnd<T> = Box<dyn RoutedCollectives<T>>;

/// Maximum experts per row where the GPU plans the dispatch.
const TOP_K: usize = 3;

// HostBuffer owns its memory; kernels write it only while its rank is inside a call.
struct Memory {
    signals: Vec<Arc<HostBuffer>>,
    reports: Vec<Arc<HostBuffer>>,
    others: Vec<Arc<HostBuffer>>,
}

impl Memory {
    fn new(world: usize, bytes: impl Iterator<Item = u64>) -> Self {
        let zeroed = |bytes| (0..world).map(|_| Arc::new(HostBuffer::zeroed(bytes))).collect();
        let others = bytes.map(|bytes| Arc::new(HostBuffer::poisoned(bytes as usize))).collect();
        Self { signals: zeroed(SIGNAL_BYTES as usize), reports: zeroed(8), others }
    }

    fn stream(&self, rank: usize, group: Option<Arc<Group<Launch>>>) -> ShimStream {
        let stream = ShimStream::new(shim().unwrap(), rank, group, Arc::clone(&self.reports[rank]));
        stream.keep([&self.signals, &self.reports, &self.others].into_iter().flatten().cloned());
        stream
    }
}

const TIMEOUT: Duration = Duration::from_millis(50);

/// Ranks that have mapped each other's memory, with `rows` rows of room each.
fn peers<T: Element>(world: usize, hidden: usize, rows: impl Fn(usize) -> usize) -> Vec<End<T>> {
    routed_peers(world, hidden, rows).into_iter().map(|end| end as End<T>).collect()
}

fn routed_peers<T: Element>(world: usize, hidden: usize, rows: impl Fn(usize) -> usize) -> Vec<RoutedEnd<T>> {
    let room = |rank| Room { ranks: world, rows: rows(rank), hidden, top_k: TOP_K, dtype: T::DTYPE };
    let sizes = (0..world).map(|rank| room(rank).symmetric_bytes());
    let memory = Memory::new(world, sizes.chain((0..world).map(|rank| room(rank).own_bytes())));
    let group = ShimStream::group(shim().unwrap(), world);
    let buffers = |of: &[Arc<HostBuffer>]| of.iter().map(|memory| memory.buffer()).collect::<Vec<_>>();
    let (signals, symmetric) = (buffers(&memory.signals), buffers(&memory.others[..world]));
    let end = |(rank, link): (usize, LocalTransport)| {
        let team = Team::new(&signals, rank as u32, &[memory.reports[rank].buffer()], TIMEOUT).unwrap();
        let (own, stream) = (memory.others[world + rank].buffer(), memory.stream(rank, Some(Arc::clone(&group))));
        // SAFETY: the streams own all of it.
        let mover = unsafe { PeerMemory::new(room(rank), team, &symmetric, own, stream) }.unwrap();
        Box::new(DeviceCollectives::new(link, mover)) as RoutedEnd<T>
    };
    LocalTransport::mesh(world).into_iter().enumerate().map(end).collect()
}

/// Ranks on separate hosts.
fn hosts<T: Element>(world: usize, hidden: usize, rows: usize, refused: Option<usize>) -> Vec<End<T>> {
    let room = Room { ranks: world, rows, hidden, top_k: 1, dtype: T::DTYPE };
    let memory = Memory::new(world, std::iter::repeat_n(room.hosts_bytes(), world));
    let group = network::group(world);
    let end = |(rank, link): (usize, LocalTransport)| {
        let (own, report) = (memory.signals[rank].buffer(), memory.reports[rank].buffer());
        let team = Team::alone(world, rank, own, report, TIMEOUT).unwrap();
        let wire = Nccl::new(rank, world, Arc::clone(&group), refused);
        // SAFETY: the streams own all of it.
        let mover = unsafe { Hosts::new(room, team, memory.others[rank].buffer(), wire, memory.stream(rank, None)) };
        Box::new(DeviceCollectives::new(link, mover.unwrap())) as End<T>
    };
    LocalTransport::mesh(world).into_iter().enumerate().map(end).collect()
}

fn on_device<'a, T: Element>(rows: &[T]) -> DeviceRows<'a, T> {
    // SAFETY: device memory is host memory, and the shim's streams have finished when a call returns.
    unsafe { DeviceRows::new(rows.as_ptr().addr() as u64, rows.len()) }
}

fn on_host<'a, T: Element>(rows: DeviceRows<'_, T>) -> &'a mut [T] {
    let Buffer { address, .. } = rows.buffer();
    match rows.is_empty() {
        true => &mut [],
        // SAFETY: see above; the test uses one slice of it at a time.
        false => unsafe { std::slice::from_raw_parts_mut(address as *mut T, rows.len()) },
    }
}

/// Rows in memory of the GPU.
enum OnGpu {}

impl Reach<Gpu> for OnGpu {
    fn given<T: Element>(rows: &[T]) -> DeviceRows<'_, T> {
        on_device(rows)
    }
    fn written<'a, T: Element>(rows: &'a mut [T], call: impl FnOnce(DeviceRows<'a, T>)) {
        call(on_device(rows));
    }
    fn fill<T: Element>(rows: DeviceRows<'_, T>, write: impl FnOnce(&mut [T])) {
        write(on_host(rows));
    }
    fn sources<T: Element>(rows: &DeviceReceived<'_, T>) -> Vec<usize> {
        (0..rows.index.len()).map(|row| rows.index.source(row)).collect()
    }
    fn row<T: Element>(rows: &DeviceReceived<'_, T>, row: usize, hidden: usize) -> Vec<T> {
        on_host(rows.rows)[row * hidden..][..hidden].to_vec()
    }
}

fn cases(world: usize) -> [Case; 2] {
    let case = Case { hidden: 24, tokens: 7, rounds: 2, seed: world as u64, norms_rounded_sums: false };
    [case, Case { hidden: 7, tokens: 4, rounds: 3, ..case }]
}

fn holds<T: Element>(ends: impl Fn(usize, usize, usize) -> Vec<End<T>>) {
    if shim().is_none() {
        return;
    }
    for world in [1, 2, 3, 4, 8] {
        for case in cases(world) {
            law::holds_in::<T, Gpu, OnGpu>(ends(world, case.hidden, case.tokens * world), case);
        }
    }
}

#[test]
fn gpus_that_map_each_other_are_the_reference_bit_for_bit() {
    holds::<f32>(|world, hidden, rows| peers(world, hidden, |_| rows));
    holds::<bf16>(|world, hidden, rows| peers(world, hidden, |_| rows));
}

#[test]
fn gpus_of_several_hosts_are_the_reference_bit_for_bit() {
    holds::<f32>(|world, hidden, rows| hosts(world, hidden, rows, None));
    holds::<bf16>(|world, hidden, rows| hosts(world, hidden, rows, None));
}
