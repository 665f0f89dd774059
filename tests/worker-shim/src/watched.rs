//! A stream whose launches a test observes, and may fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use semmoe_kernels_cuda::{Accelerator, Buffer, GpuError, Grid, Launch, Runner};
use semmoe_kernels_shim::ShimStream;

type OnLaunch = dyn Fn(&ShimStream, &Launch) -> Result<(), GpuError> + Send + Sync;

/// A stream that reports its launches to a test.
pub struct Watched {
    stream: ShimStream,
    on_launch: Box<OnLaunch>,
    /// Replaces the kernels' report if it is not 0.
    pub report: AtomicU64,
    /// Bytes that the host has written.
    pub written: Arc<AtomicU64>,
}

impl Watched {
    /// `on_launch` gets each launch before it runs; its error becomes the driver's.
    pub fn new(
        stream: ShimStream,
        on_launch: impl Fn(&ShimStream, &Launch) -> Result<(), GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self { stream, on_launch: Box::new(on_launch), report: AtomicU64::new(0), written: Arc::default() }
    }
}

impl Runner for Watched {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        (self.on_launch)(&self.stream, launch)?;
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.launch(launch) }
    }

    unsafe fn write(&self, bytes: &[u8], to: Buffer) -> Result<(), GpuError> {
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.write(bytes, to) }
    }

    unsafe fn copy(&self, from: Buffer, to: Buffer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.copy(from, to) }
    }

    fn grid(&self) -> Grid {
        self.stream.grid()
    }

    fn report(&self) -> u64 {
        match self.report.load(Ordering::Relaxed) {
            0 => self.stream.report(),
            planted => planted,
        }
    }
}

impl Accelerator for Watched {
    fn allocate(&self, bytes: u64) -> Result<Buffer, GpuError> {
        self.stream.allocate(bytes)
    }

    unsafe fn read(&self, from: Buffer, to: &mut [u8]) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.stream.read(from, to) }
    }

    fn free_bytes(&self) -> Result<u64, GpuError> {
        self.stream.free_bytes()
    }

    fn export(&self, memory: Buffer) -> Result<Vec<u8>, GpuError> {
        self.stream.export(memory)
    }

    fn import(&self, handle: &[u8], bytes: u64) -> Result<Buffer, GpuError> {
        self.stream.import(handle, bytes)
    }
}
