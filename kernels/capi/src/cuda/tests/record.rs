//! A recorder in place of a GPU.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use semmoe_kernels_cuda::{Buffer, GpuError, Launch, SIGNAL_BYTES};

use super::super::{Cuda, Launcher, Opened, blocks_for};
use crate::abi::{self, InitArgs};
use crate::backend::Facts;
use crate::{Comm, semmoe_free};

const WORLD: u32 = 3;
pub(super) const RANK: u32 = 1;
pub(super) const BUFFER_BYTES: u64 = 1 << 20;
const REPORT: u64 = 0x7000;
pub(super) const STREAM: usize = 0x5eed;

/// Fake addresses of arrays, which are never dereferenced.
pub(super) const fn device(place: usize) -> usize {
    0x10_0000_0000 + place * 0x10_0000
}

pub(super) fn array<T>(place: usize) -> *mut T {
    std::ptr::without_provenance_mut(device(place))
}

/// The state shared by a test and its recorder.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) launches: Mutex<Vec<(Launch, usize)>>,
    pub(super) report: AtomicU64,
    pub(super) multicast: AtomicBool,
    /// Above 0: nothing is launched; above 1: this value is reported as well.
    pub(super) refuses: AtomicU64,
}

pub(super) struct Recorder(Arc<Seen>);

impl Launcher for Recorder {
    fn launch(&mut self, launches: &[Launch], stream: *mut c_void) -> Result<(), GpuError> {
        let refuses = self.0.refuses.load(Ordering::Relaxed);
        if refuses != 0 {
            self.0.report.store(refuses & !1, Ordering::Relaxed);
            return Err("the driver refused".into());
        }
        let mut seen = self.0.launches.lock().expect("no test panicked here");
        seen.extend(launches.iter().map(|launch| (*launch, stream.addr())));
        Ok(())
    }

    fn report(&self) -> u64 {
        self.0.report.load(Ordering::Relaxed)
    }

    fn has_multicast(&self) -> bool {
        self.0.multicast.load(Ordering::Relaxed)
    }
}

/// A communicator whose launches are recorded.
pub(super) struct Fixture {
    pub(super) comm: *mut Comm,
    pub(super) seen: Arc<Seen>,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let buffers: [*mut c_void; 3] = [0, 1, 2].map(array);
        let signals: [*mut c_void; 3] = [10, 11, 12].map(array);
        let args = InitArgs {
            struct_bytes: size_of::<InitArgs>() as u64,
            device: abi::DEVICE_CUDA,
            ordinal: 0,
            rank: RANK,
            world: WORLD,
            buffer_bytes: BUFFER_BYTES,
            signal_bytes: SIGNAL_BYTES,
            buffers: buffers.as_ptr(),
            signals: signals.as_ptr(),
            max_tokens: 64,
            timeout_ms: 1000,
        };
        let facts = Facts {
            rank: RANK as usize,
            world: WORLD as usize,
            buffer: device(RANK as usize),
            buffer_bytes: BUFFER_BYTES,
            max_tokens: 64,
            timeout: std::time::Duration::from_secs(1),
        };
        let seen = Arc::new(Seen::default());
        seen.launches.lock().expect("no test panicked here").reserve(8);
        let report = Buffer { address: REPORT, bytes: 8 };
        let launcher = Box::new(Recorder(Arc::clone(&seen)));
        let opened = Opened { launcher, report, blocks: blocks_for(132, 3) };
        // SAFETY: the arrays have `WORLD` elements.
        let cuda = unsafe { Cuda::new(&args, &facts, opened) }.expect("opens");
        Self { comm: Box::into_raw(Box::new(Comm { facts, backend: Mutex::new(Box::new(cuda)) })), seen }
    }

    /// The launches since the previous call, all on the caller's stream.
    pub(super) fn launches(&self) -> Vec<Launch> {
        let mut seen = self.seen.launches.lock().expect("no test panicked here");
        assert!(seen.iter().all(|&(_, stream)| stream == STREAM), "on the caller's stream");
        seen.drain(..).map(|(launch, _)| launch).collect()
    }

    pub(super) fn one(&self) -> Launch {
        let launches = self.launches();
        assert_eq!(launches.len(), 1);
        launches[0]
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: comes from `Box::into_raw` and is freed once.
        unsafe { semmoe_free(self.comm) };
    }
}

/// Calls a function of the C interface on the recorder.
macro_rules! call {
    ($fixture:expr, $function:ident, $args:expr) => {
        // SAFETY: the communicator is alive, the arguments are a structure; its pointers are never dereferenced.
        unsafe {
            crate::$function(
                $fixture.comm,
                $args,
                std::ptr::without_provenance_mut($crate::cuda::tests::record::STREAM),
            )
        }
    };
}

pub(super) use call;
