//! Runs the kernels on a GPU: loads them from the embedded image and launches them on the caller's stream.
//!
//! A launch neither allocates nor waits, so it may be captured in a graph. Memory and streams are the caller's, or come
//! from [`memory`](mod@memory) for tools without a framework.

mod context;
mod error;
pub mod graph;
pub mod memory;
pub mod nccl;
mod pinned;
mod stream;
mod unit;
mod vmm;

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUmodule, CUstream};
use cudarc::driver::{CudaContext, result, sys};

pub use context::CallerContext;
pub use error::DeviceError;
pub use stream::DeviceStream;
pub use unit::DeviceUnit;

use crate::cached::{ImageKey, kept_or};
use crate::compile::compile;
use crate::image::{Target, embedded};
use crate::launch::Launch;
use crate::source::{kernels_of, sources_for};

/// The CUDA version that compiles the images, in the driver's encoding: 13.0.
const LEAST_DRIVER: i32 = 13_000;

/// A GPU on which the kernels are loaded.
pub struct Device {
    context: Arc<CudaContext>,
    module: CUmodule,
    functions: HashMap<&'static str, Function>,
    /// Number of multiprocessors.
    pub processors: u32,
    /// Whether the GPU can run the NVLS variants, given memory with a multicast address.
    pub multicast: bool,
}

struct Function {
    handle: CUfunction,
    /// Size of the kernel's single parameter, as compiled.
    params: usize,
    /// Cached, because querying the driver takes half as long as a launch.
    resident: OnceLock<Resident>,
}

/// Number of blocks that run on a multiprocessor at once, for blocks of `threads` threads.
#[derive(Clone, Copy)]
struct Resident {
    threads: u32,
    blocks: u32,
}

impl Function {
    /// Returns the number of blocks of `threads` threads that run on a multiprocessor at once.
    fn resident(&self, threads: u32) -> Result<u32, DeviceError> {
        if let Some(blocks) = self.resident.get().and_then(|known| known.of(threads)) {
            return Ok(blocks);
        }
        let mut resident = 0;
        // SAFETY: the number outlives the call, and the function belongs to a loaded module.
        unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut resident, self.handle, threads as i32, 0)
                .result()?;
        }
        let blocks = u32::try_from(resident).unwrap_or(0);
        self.resident.get_or_init(|| Resident { threads, blocks });
        Ok(blocks)
    }
}

impl Resident {
    fn of(self, threads: u32) -> Option<u32> {
        (self.threads == threads).then_some(self.blocks)
    }
}

// SAFETY: a module and its functions belong to the context, which any thread that binds it may use; every method binds
// it.
unsafe impl Send for Device {}
// SAFETY: as above; nothing changes after `open`.
unsafe impl Sync for Device {}

/// Whether this build contains kernels and this machine has a driver.
pub fn available() -> bool {
    // SAFETY: this only searches for the library.
    embedded(Target::Sm90).is_some() && unsafe { sys::is_culib_present() }
}

/// Returns the number of GPUs visible to this process, which `CUDA_VISIBLE_DEVICES` can limit.
///
/// # Errors
/// If there is no driver, it is too old, or it refuses the call.
pub fn visible_devices() -> Result<usize, DeviceError> {
    driver_version()?;
    Ok(usize::try_from(CudaContext::device_count()?).unwrap_or(0))
}

/// Returns the driver's version, after checking that it is recent enough.
fn driver_version() -> Result<i32, DeviceError> {
    // Without the library cudarc panics, so check for it first. SAFETY: this only searches for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the number outlives the call, which has no preconditions.
    unsafe { sys::cuDriverGetVersion(&raw mut version).result()? };
    if version < LEAST_DRIVER { Err(DeviceError::OldDriver { version }) } else { Ok(version) }
}

impl Device {
    /// Opens a GPU by its ordinal and loads the kernels for it.
    ///
    /// # Errors
    /// If the build has no kernels, there is no driver, the GPU is too old, or the driver refuses the call.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        Self::open_with(ordinal, None)
    }

    /// Opens a GPU like [`Device::open`]. If this build contains no kernels, NVRTC compiles them and the folder `kept`
    /// caches them.
    ///
    /// # Errors
    /// See [`Device::open`]; also if NVRTC is missing.
    pub fn open_with(ordinal: usize, kept: Option<&Path>) -> Result<Self, DeviceError> {
        let version = driver_version()?;
        let context = CudaContext::new(ordinal)?;
        let (major, minor) = context.compute_capability()?;
        let capability = u32::try_from(major * 10 + minor).unwrap_or(0);
        let target = Target::for_capability(capability).ok_or(DeviceError::TooOld { capability })?;
        let mut image = match (embedded(target), kept) {
            (Some(image), _) => image.to_vec(),
            (None, None) => return Err(DeviceError::NoKernels),
            (None, Some(kept)) => kept_or(&ImageKey::new(target, version), kept, || {
                compile(target).map(|compiled| compiled.image).map_err(DeviceError::NotCompiled)
            })?,
        };
        let attribute = |which| context.attribute(which);
        let processors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let multicast = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)? != 0;
        // PTX is text, which the driver reads up to a 0.
        image.push(0);
        // SAFETY: NVRTC created the image, which outlives the call.
        let module = unsafe { result::module::load_data(image.as_ptr().cast())? };
        let mut device = Self {
            context,
            module,
            functions: HashMap::new(),
            processors: u32::try_from(processors).unwrap_or(0),
            multicast: multicast && target.capability() >= 90,
        };
        device.find_functions(target)?;
        Ok(device)
    }

    fn find_functions(&mut self, target: Target) -> Result<(), DeviceError> {
        for kernel in sources_for(target.capability()).flat_map(kernels_of) {
            let name = CString::new(kernel).map_err(|_| DeviceError::NoKernel { kernel })?;
            // SAFETY: the module was just loaded in this context.
            let handle = unsafe { result::module::get_function(self.module, name)? };
            let (mut offset, mut params) = (0, 0);
            // Loads each kernel now: one that the driver loads only at its first launch might wait there for others,
            // which wait for it. SAFETY: the function belongs to the loaded module.
            unsafe { sys::cuFuncLoad(handle).result()? };
            // SAFETY: both numbers outlive the call, and every kernel has a parameter 0.
            unsafe { sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut params).result()? };
            self.functions.insert(kernel, Function { handle, params, resident: OnceLock::new() });
        }
        Ok(())
    }

    /// Returns the size of the cache that all multiprocessors share.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn cache_bytes(&self) -> Result<usize, DeviceError> {
        let bytes = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// Returns the GPU's name.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn name(&self) -> Result<String, DeviceError> {
        Ok(self.context.name()?)
    }

    /// Returns the GPU's UUID, as `nvidia-smi -L` prints it.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn uuid(&self) -> Result<String, DeviceError> {
        let digits: String = self.context.uuid()?.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
        let (a, b, c, d, e) = (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
        Ok(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
    }

    /// Binds the GPU to the calling thread.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn bind(&self) -> Result<(), DeviceError> {
        Ok(self.context.bind_to_thread()?)
    }

    /// Detects errors before a launch.
    ///
    /// # Errors
    /// If the image lacks the kernel, more blocks wait for one another than the GPU can run at once, or the driver
    /// refuses the call.
    pub fn check(&self, launch: &Launch) -> Result<(), DeviceError> {
        self.fits(launch).map(|_| ())
    }

    fn fits(&self, launch: &Launch) -> Result<&Function, DeviceError> {
        let kernel = launch.kernel();
        let function = self.functions.get(kernel).ok_or(DeviceError::NoKernel { kernel })?;
        let (found, expected) = (launch.params().len(), function.params);
        if found != expected {
            return Err(DeviceError::Params { kernel, found, expected });
        }
        if launch.is_collective() {
            self.resident(launch, function)?;
        }
        Ok(function)
    }

    /// Checks that all blocks can run at once, as they must if they wait for one another.
    fn resident(&self, launch: &Launch, function: &Function) -> Result<(), DeviceError> {
        let (kernel, (blocks, ranks, threads)) = (launch.kernel(), launch.shape());
        let (found, most) = (blocks.saturating_mul(ranks), function.resident(threads)? * self.processors);
        match found > most {
            true => Err(DeviceError::TooManyBlocks { kernel, found, most }),
            false => Ok(()),
        }
    }

    /// Enqueues a launch on `stream` and returns without waiting for it.
    ///
    /// # Errors
    /// If the image lacks the kernel, more blocks wait for one another than the GPU can run at once, or the driver
    /// refuses the call.
    ///
    /// # Safety
    /// `stream` must belong to this GPU's context, and the call's memory must be valid there until the kernel ends.
    pub unsafe fn launch(&self, launch: &Launch, stream: CUstream) -> Result<(), DeviceError> {
        let function = self.fits(launch)?;
        let ((blocks, ranks, threads), params) = (launch.shape(), launch.params());
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the only argument has the size with which the kernel was compiled and is copied before the call
        // returns; the caller guarantees the rest.
        unsafe {
            result::launch_kernel(function.handle, (blocks, ranks, 1), (threads, 1, 1), 0, stream, &mut arguments)?;
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // After a trap, the context and the module are gone.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded in `open`, unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
