//! Streams, and graphs of launches for replay, for tools without a framework.

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};

use super::{Device, DeviceError};
use crate::launch::Launch;

/// A non-default stream of the GPU that was bound when it was created.
pub struct Stream(CUstream);

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn new() -> Result<Self, DeviceError> {
        Ok(Self(result::stream::create(StreamKind::NonBlocking)?))
    }

    /// Waits for all work on the stream.
    ///
    /// # Errors
    /// If a kernel trapped.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.0) }.map_err(Into::into)
    }

    /// Returns the handle for launches and events.
    pub fn raw(&self) -> CUstream {
        self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A captured list of launches.
pub struct Graph(CUgraphExec);

/// A captured graph, needed only until it is instantiated.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: returned by `end_capture`, destroyed once.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

impl Graph {
    /// Captures the launches in order.
    ///
    /// # Errors
    /// If a launch is refused or the driver cannot capture.
    ///
    /// # Safety
    /// See [`Device::launch`]; its requirements must hold for as long as the graph lives.
    pub unsafe fn of(device: &Device, launches: &[Launch], stream: &Stream) -> Result<Self, DeviceError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(stream.0, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)? };
        // SAFETY: upheld by the caller.
        let launched = launches.iter().try_for_each(|launch| unsafe { device.launch(launch, stream.0) });
        // A capture must be ended even if a launch failed. SAFETY: the stream is alive and is capturing.
        let captured = unsafe { result::stream::end_capture(stream.0) };
        launched?;
        let captured = Captured(captured?);
        // SAFETY: the graph is alive.
        Ok(Self(unsafe { result::graph::instantiate(captured.0, CUgraphInstantiate_flags(0))? }))
    }

    /// Enqueues the graph on `stream` and returns without waiting for it.
    ///
    /// # Errors
    /// If the driver refuses the call.
    ///
    /// # Safety
    /// The requirements of [`Graph::of`] must still hold.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        unsafe { result::graph::launch(self.0, stream.0).map_err(Into::into) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created in `of`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
