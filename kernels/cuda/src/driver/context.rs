//! The calling thread's CUDA context, for a library inside another program.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUcontext};

use super::{Device, DeviceError};

/// The context that was current on the thread, restored when this is dropped.
pub struct CallerContext(CUcontext);

impl CallerContext {
    /// Saves the thread's context, before a device is opened.
    ///
    /// # Errors
    /// If there is no driver, or it refuses the call.
    pub fn keep() -> Result<Self, DeviceError> {
        // SAFETY: this only searches for the library, without which cudarc panics.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoDriver);
        }
        result::init()?;
        Self::now()
    }

    fn now() -> Result<Self, DeviceError> {
        Ok(Self(result::ctx::get_current()?.unwrap_or(std::ptr::null_mut())))
    }
}

impl Drop for CallerContext {
    fn drop(&mut self) {
        // SAFETY: the context was this thread's, or null for none; a context that no longer exists is refused.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

impl Device {
    /// Binds the GPU to the calling thread until the result is dropped.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn enter(&self) -> Result<CallerContext, DeviceError> {
        let caller = CallerContext::now()?;
        self.bind()?;
        Ok(caller)
    }
}
