//! GPU memory in pieces, and transfers of numbers to and from it.

use std::time::Instant;

use bytemuck::Pod;
use semmoe_kernels::Element;
use semmoe_kernels_cuda::unit::DeviceRows;
use semmoe_kernels_cuda::{Buffer, GpuError, Launch, LaunchError, Stopped};

use super::SharedAccelerator;
use crate::ep::UnitError;
use crate::model::DeviceWork;

/// Alignment of pieces.
const GRAIN: u64 = 256;

/// A rank's stream of work.
pub(super) struct Stream {
    pub(super) gpu: SharedAccelerator,
    pub(super) rank: usize,
    /// Kernels not launched yet.
    queue: Vec<Launch>,
    pub(super) done: DeviceWork,
}

impl Stream {
    pub(super) fn new(gpu: SharedAccelerator, rank: usize) -> Self {
        Self { gpu, rank, queue: Vec::new(), done: DeviceWork::default() }
    }

    /// A GPU that failed loses its rank, unless a kernel stopped while it waited for another one.
    pub(super) fn lost(&self, cause: &GpuError) -> UnitError {
        let stopped = Stopped::from_report(self.gpu.report());
        match stopped.and_then(|stopped| Some((stopped.late()?, stopped))) {
            Some((peer, stopped)) => UnitError::lost(peer, stopped.to_string()),
            None => UnitError::lost(self.rank, format!("its GPU failed: {cause}")),
        }
    }

    pub(super) fn refused(&self, error: &LaunchError) -> UnitError {
        UnitError::Operands { rank: self.rank, detail: error.to_string() }
    }

    /// Queues a kernel, to be launched with others before the next other call to the GPU.
    pub(super) fn launch(&mut self, launch: Result<Launch, LaunchError>) -> Result<(), UnitError> {
        self.queue.push(launch.map_err(|error| self.refused(&error))?);
        self.done.launches += 1;
        Ok(())
    }

    /// Launches the queue. Must precede every other call to the GPU, including collectives.
    pub(super) fn flush(&mut self) -> Result<(), UnitError> {
        if self.queue.is_empty() {
            return Ok(());
        }
        // SAFETY: every buffer of a call is the backend's own, which lives until its stream has ended.
        let launched = unsafe { self.gpu.launch_all(&self.queue) };
        self.queue.clear();
        launched.map_err(|cause| self.lost(&cause))
    }

    /// Writes numbers to the beginning of a buffer.
    pub(super) fn write<N: Pod>(&mut self, numbers: &[N], to: Buffer) -> Result<Buffer, UnitError> {
        let bytes = bytemuck::cast_slice::<N, u8>(numbers);
        let expected = bytes.len() as u64;
        if to.bytes < expected {
            let detail = format!("{expected} bytes, more than the {} that the GPU's memory has for them", to.bytes);
            return Err(UnitError::Operands { rank: self.rank, detail });
        }
        if !bytes.is_empty() {
            self.flush()?;
            self.done.written += expected;
            // SAFETY: there is room, and the memory is the backend's own.
            unsafe { self.gpu.write(bytes, to) }.map_err(|cause| self.lost(&cause))?;
        }
        Ok(Buffer { bytes: expected, ..to })
    }

    /// Reads numbers back, once all earlier work is done.
    pub(super) fn read<N: Pod>(&mut self, from: Buffer, numbers: &mut [N]) -> Result<(), UnitError> {
        let bytes = bytemuck::cast_slice_mut::<N, u8>(numbers);
        if bytes.is_empty() {
            return Ok(());
        }
        debug_assert!(from.bytes >= bytes.len() as u64);
        self.flush()?;
        let began = Instant::now();
        // SAFETY: the memory is the backend's own, and long enough.
        unsafe { self.gpu.read(from, bytes) }.map_err(|cause| self.lost(&cause))?;
        self.done.read += bytes.len() as u64;
        self.done.synchronisations += 1;
        self.done.waited += began.elapsed();
        Ok(())
    }
}

/// Sizes of buffers that become pieces of one allocation.
#[derive(Default)]
pub(super) struct Layout {
    sizes: Vec<u64>,
}

impl Layout {
    /// Reserves room for `elements`.
    pub(super) fn add<N>(&mut self, elements: usize) {
        self.sizes.push((elements * size_of::<N>()) as u64);
    }

    /// The pieces, in the order of their additions.
    pub(super) fn allocate(self, gpu: &SharedAccelerator) -> Result<std::vec::IntoIter<Buffer>, GpuError> {
        let all: u64 = self.sizes.iter().map(|bytes| bytes.next_multiple_of(GRAIN)).sum();
        let mut address = gpu.allocate(all)?.address;
        let piece = |bytes: u64| {
            let piece = Buffer { address, bytes };
            address += bytes.next_multiple_of(GRAIN);
            piece
        };
        Ok(self.sizes.into_iter().map(piece).collect::<Vec<_>>().into_iter())
    }
}

/// Lists of words, written contiguously.
pub(super) struct WordLists(pub(super) Buffer);

impl WordLists {
    /// The next list.
    pub(super) fn next(&mut self, words: usize) -> Buffer {
        let list = Buffer { bytes: 4 * words as u64, ..self.0 };
        self.0 = self.0.from_offset(list.bytes);
        list
    }
}

/// The first `elements` elements of a buffer.
pub(super) fn rows_of<'a, T: Element>(buffer: Buffer, elements: usize) -> DeviceRows<'a, T> {
    debug_assert!(buffer.bytes >= (elements * size_of::<T>()) as u64);
    // SAFETY: a piece of the backend's own memory; nothing else uses it while the stream does.
    unsafe { DeviceRows::new(buffer.address, elements) }
}
