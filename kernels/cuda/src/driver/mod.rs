//! The kernels on a GPU: loaded from the embedded image, launched on the caller's stream.
//!
//! A launch allocates nothing and waits for nothing, so it may be captured in a graph. Memory and streams are the
//! caller's, or come from [`memory`](mod@memory) for tools that have no framework beside them.

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

/// The CUDA version that compiles images, in the driver's encoding: 13.0.
const LEAST_DRIVER: i32 = 13_000;

/// A GPU with the kernels loaded.
pub struct Device {
    context: Arc<CudaContext>,
    module: CUmodule,
    functions: HashMap<&'static str, Function>,
    /// Its multiprocessors.
    pub processors: u32,
    /// Whether the NVLS variants can be used on this GPU, given memory with a multicast address.
    pub multicast: bool,
}

struct Function {
    handle: CUfunction,
    /// Bytes of its single parameter, as compiled.
    params: usize,
    /// Cached, because the driver's answer takes half as long as a launch.
    resident: OnceLock<Resident>,
}

/// Blocks that run on a multiprocessor at once, for blocks of `threads`.
#[derive(Clone, Copy)]
struct Resident {
    threads: u32,
    blocks: u32,
}

impl Function {
    /// Blocks of `threads` threads that run on a multiprocessor at once.
    fn resident(&self, threads: u32) -> Result<u32, DeviceError> {
        if let Some(blocks) = self.resident.get().and_then(|known| known.of(threads)) {
            return Ok(blocks);
        }
        let mut resident = 0;
        // SAFETY: the number outlives the call; the function belongs to a loaded module.
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

// SAFETY: a module and its functions belong to the context, which may be used from any thread that binds it; every
// method does.
unsafe impl Send for Device {}
// SAFETY: as above; nothing is changed after `open`.
unsafe impl Sync for Device {}

/// Whether this build contains kernels and this machine has a driver.
pub fn available() -> bool {
    // SAFETY: only looks for the library.
    embedded(Target::Sm90).is_some() && unsafe { sys::is_culib_present() }
}

impl Device {
    /// Opens a GPU by its ordinal and loads the kernels for it.
    ///
    /// # Errors
    /// A build without kernels, no driver, a GPU that is too old, a driver that refuses.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        Self::open_with(ordinal, None)
    }

    /// Opens a GPU like [`Device::open`]; if this build contains no kernels, NVRTC compiles them and the folder `kept`
    /// caches them.
    ///
    /// # Errors
    /// See [`Device::open`]; NVRTC is missing.
    pub fn open_with(ordinal: usize, kept: Option<&Path>) -> Result<Self, DeviceError> {
        // Without the library cudarc panics, so check for it first. SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoDriver);
        }
        let mut version = 0;
        // SAFETY: the number outlives the call, which needs nothing before it.
        unsafe { sys::cuDriverGetVersion(&raw mut version).result()? };
        if version < LEAST_DRIVER {
            return Err(DeviceError::OldDriver { version });
        }
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
        // PTX is text: the driver reads up to a 0.
        image.push(0);
        // SAFETY: the image is one that NVRTC wrote, and outlives the call.
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
            // A kernel that the driver loads only at its first launch might wait there for others, which wait for it.
            // SAFETY: the function belongs to the loaded module.
            unsafe { sys::cuFuncLoad(handle).result()? };
            // SAFETY: both numbers outlive the call; every kernel has a parameter 0.
            unsafe { sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut params).result()? };
            self.functions.insert(kernel, Function { handle, params, resident: OnceLock::new() });
        }
        Ok(())
    }

    /// Bytes of the cache shared by all its multiprocessors.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn cache_bytes(&self) -> Result<usize, DeviceError> {
        let bytes = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// Its name.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn name(&self) -> Result<String, DeviceError> {
        Ok(self.context.name()?)
    }

    /// Binds the GPU to the calling thread.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn bind(&self) -> Result<(), DeviceError> {
        Ok(self.context.bind_to_thread()?)
    }

    /// Finds errors before a launch.
    ///
    /// # Errors
    /// The image lacks the kernel, more blocks wait for each other than fit the GPU at once, or the driver refuses the
    /// call.
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

    /// Blocks that wait for one another must all run at once.
    fn resident(&self, launch: &Launch, function: &Function) -> Result<(), DeviceError> {
        let (kernel, (blocks, ranks, threads)) = (launch.kernel(), launch.shape());
        let (found, most) = (blocks.saturating_mul(ranks), function.resident(threads)? * self.processors);
        match found > most {
            true => Err(DeviceError::TooManyBlocks { kernel, found, most }),
            false => Ok(()),
        }
    }

    /// Launches on `stream`; returns before it ran.
    ///
    /// # Errors
    /// The image lacks the kernel, more blocks wait for each other than fit the GPU at once, or the driver refuses the
    /// call.
    ///
    /// # Safety
    /// `stream` belongs to this GPU's context, and the memory of the call is valid there until the kernel ended.
    pub unsafe fn launch(&self, launch: &Launch, stream: CUstream) -> Result<(), DeviceError> {
        let function = self.fits(launch)?;
        let ((blocks, ranks, threads), params) = (launch.shape(), launch.params());
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the one argument has the size that the kernel was compiled with and is copied before the call
        // returns; the caller guarantees the rest.
        unsafe {
            result::launch_kernel(function.handle, (blocks, ranks, 1), (threads, 1, 1), 0, stream, &mut arguments)?;
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // After a trap the context is gone, and the module with it.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded in `open`, unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
