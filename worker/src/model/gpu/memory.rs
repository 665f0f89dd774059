//! GPU allocations divided into pieces, and transfers between host and GPU.

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

/// A rank's stream of GPU work.
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

    /// Converts a GPU error to the loss of this rank, or of another rank if a kernel stopped while waiting for that
    /// rank.
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

    /// Queues a kernel. Queued kernels are launched together before the next GPU call of any other kind.
    pub(super) fn launch(&mut self, launch: Result<Launch, LaunchError>) -> Result<(), UnitError> {
        self.queue.push(launch.map_err(|error| self.refused(&error))?);
        self.done.launches += 1;
        Ok(())
    }

    /// Launches the queued kernels. Must be called before any other GPU call, including collectives.
    pub(super) fn flush(&mut self) -> Result<(), UnitError> {
        if self.queue.is_empty() {
            return Ok(());
        }
        // SAFETY: every buffer passed to a kernel belongs to the backend, which outlives its stream.
        let launched = unsafe { self.gpu.launch_all(&self.queue) };
        self.queue.clear();
        launched.map_err(|cause| self.lost(&cause))
    }

    /// Writes values to the beginning of a buffer.
    pub(super) fn write<N: Pod>(&mut self, numbers: &[N], to: Buffer) -> Result<Buffer, UnitError> {
        let bytes = bytemuck::cast_slice::<N, u8>(numbers);
        let expected = bytes.len() as u64;
        if to.bytes < expected {
            let detail = format!("{expected} bytes do not fit into a GPU buffer of {} bytes", to.bytes);
            return Err(UnitError::Operands { rank: self.rank, detail });
        }
        if !bytes.is_empty() {
            self.flush()?;
            self.done.written += expected;
            // SAFETY: the buffer is large enough and belongs to the backend.
            unsafe { self.gpu.write(bytes, to) }.map_err(|cause| self.lost(&cause))?;
        }
        Ok(Buffer { bytes: expected, ..to })
    }

    /// Reads values back after all earlier work has finished.
    pub(super) fn read<N: Pod>(&mut self, from: Buffer, numbers: &mut [N]) -> Result<(), UnitError> {
        let bytes = bytemuck::cast_slice_mut::<N, u8>(numbers);
        if bytes.is_empty() {
            return Ok(());
        }
        debug_assert!(from.bytes >= bytes.len() as u64);
        self.flush()?;
        let began = Instant::now();
        // SAFETY: the buffer is large enough and belongs to the backend.
        unsafe { self.gpu.read(from, bytes) }.map_err(|cause| self.lost(&cause))?;
        self.done.read += bytes.len() as u64;
        self.done.synchronisations += 1;
        self.done.waited += began.elapsed();
        Ok(())
    }
}

/// Sizes of buffers that share a single allocation.
#[derive(Default)]
pub(super) struct Layout {
    sizes: Vec<u64>,
}

impl Layout {
    /// Adds a buffer for `elements` elements.
    pub(super) fn add<N>(&mut self, elements: usize) {
        self.sizes.push((elements * size_of::<N>()) as u64);
    }

    /// Allocates the buffers, and returns them in the order in which they were added.
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

/// Contiguous lists of words in one buffer.
pub(super) struct WordLists(pub(super) Buffer);

impl WordLists {
    /// Returns the next list.
    pub(super) fn next(&mut self, words: usize) -> Buffer {
        let list = Buffer { bytes: 4 * words as u64, ..self.0 };
        self.0 = self.0.from_offset(list.bytes);
        list
    }
}

/// Returns the first `elements` elements of a buffer.
pub(super) fn rows_of<'a, T: Element>(buffer: Buffer, elements: usize) -> DeviceRows<'a, T> {
    debug_assert!(buffer.bytes >= (elements * size_of::<T>()) as u64);
    // SAFETY: the buffer belongs to the backend, and nothing else uses it while the stream does.
    unsafe { DeviceRows::new(buffer.address, elements) }
}
