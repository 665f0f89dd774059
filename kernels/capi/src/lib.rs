//! `libsemmoe_kernels.so`: implements the functions that `kernels/include/semmoe_kernels.h` documents.
//!
//! | module | contents |
//! |---|---|
//! | `abi` | the header's structures and constants, compared with it by a C test |
//! | `check` | all checks that the host can make before any work, for all devices |
//! | `backend` | a device's operations on checked arguments |
//! | `cpu` | the CPU: `semmoe-ranks` on the caller's memory |
//! | `cuda` | with feature `cuda`: `semmoe-kernels-cuda` on the caller's stream |
//! | `plug` | with feature `launcher`: routes launches to a GPU or to a launcher installed by a test |
//! | `failure` | status codes and the calling thread's last error message |

pub mod abi;
mod backend;
mod check;
mod cpu;
#[cfg(any(test, feature = "launcher"))]
mod cuda;
mod failure;
#[cfg(feature = "launcher")]
pub mod plug;
#[cfg(test)]
mod tests;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, TryLockError};

use abi::{AllReduce, Allgather, Argsort, Combine, DispatchArgs, InitArgs, Multicast, ReduceScatter};
use backend::{Backend, Facts};
use failure::{Code, Failure};

/// `semmoe_comm`
pub struct Comm {
    facts: Facts,
    backend: Mutex<Box<dyn Backend>>,
}

impl Comm {
    /// # Safety
    /// `comm` must be null, or come from `semmoe_init` and not have been freed.
    unsafe fn known<'c>(comm: *mut Self) -> Result<&'c Self, Failure> {
        // SAFETY: upheld by the caller.
        unsafe { comm.as_ref() }.ok_or_else(|| Failure::invalid("the communicator is null"))
    }

    /// Locks the backend for one thread at a time.
    fn enter(&self) -> Result<MutexGuard<'_, Box<dyn Backend>>, Failure> {
        self.backend.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Failure::new(Code::Busy, "another thread is in a call on this communicator"),
            TryLockError::Poisoned(_) => Failure::new(Code::Internal, "an earlier call on this communicator panicked"),
        })
    }
}

/// Runs a function, catches its panics, and stores the message if it fails.
fn guarded(run: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let answer = catch_unwind(AssertUnwindSafe(run));
    let failure = match answer {
        Ok(Ok(())) => return abi::OK,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(Code::Internal, "internal error: this library panicked"),
    };
    failure::keep(&failure)
}

/// Runs a call on a communicator: admits one thread at a time, checks the arguments, then calls the device.
///
/// # Safety
/// `comm` must be null, or come from `semmoe_init` and not have been freed; `args` must be null, or point to a
/// structure that begins with its size.
unsafe fn call<A: check::Checked>(
    comm: *mut Comm,
    args: *const A,
    run: impl FnOnce(&mut dyn Backend, &Facts, &A) -> Result<(), Failure>,
) -> i32 {
    guarded(|| {
        // SAFETY: upheld by the caller.
        let comm = unsafe { Comm::known(comm) }?;
        // SAFETY: upheld by the caller; the size is checked before anything else.
        let args = unsafe { check::sized(args) }?;
        args.check(&comm.facts)?;
        run(&mut **comm.enter()?, &comm.facts, args)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn semmoe_abi_version() -> u32 {
    abi::ABI_VERSION
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn semmoe_has_cuda() -> i32 {
    i32::from(backend::has_cuda())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn semmoe_last_error() -> *const c_char {
    failure::last()
}

/// See the header.
///
/// # Safety
/// `bytes` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_signal_bytes(device: u32, world: u32, bytes: *mut u64) -> i32 {
    guarded(|| {
        // SAFETY: upheld by the caller.
        let bytes = unsafe { bytes.as_mut() }.ok_or_else(|| Failure::invalid("bytes is null"))?;
        check::world(world)?;
        *bytes = backend::signal_bytes(device)?;
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `args` must point to a structure that begins with its size, its arrays must have `world` elements, and buffers and
/// signals must meet the header's requirements; `comm` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_init(args: *const InitArgs, comm: *mut *mut Comm) -> i32 {
    guarded(|| {
        // SAFETY: upheld by the caller.
        let to = unsafe { comm.as_mut() }.ok_or_else(|| Failure::invalid("comm is null"))?;
        *to = std::ptr::null_mut();
        // SAFETY: upheld by the caller.
        let args = unsafe { check::sized(args) }?;
        let facts = check::init(args)?;
        // SAFETY: upheld by the caller.
        let backend = unsafe { backend::open(args, &facts) }?;
        *to = Box::into_raw(Box::new(Comm { facts, backend: Mutex::new(backend) }));
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `comm` must be null, or come from `semmoe_init` and not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_free(comm: *mut Comm) {
    if !comm.is_null() {
        // SAFETY: upheld by the caller.
        let comm = unsafe { Box::from_raw(comm) };
        guarded(|| {
            drop(comm);
            Ok(())
        });
    }
}

/// See the header.
///
/// # Safety
/// `comm` must be null, or come from `semmoe_init` and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_check(comm: *mut Comm) -> i32 {
    // SAFETY: upheld by the caller.
    guarded(|| unsafe { Comm::known(comm) }?.enter()?.check())
}

/// See the header.
///
/// # Safety
/// `comm` must be null, or come from `semmoe_init` and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_has_multicast(comm: *mut Comm) -> i32 {
    let mut found = false;
    guarded(|| {
        // SAFETY: upheld by the caller.
        found = unsafe { Comm::known(comm) }?.enter()?.has_multicast();
        Ok(())
    });
    i32::from(found)
}

/// See the header.
///
/// # Safety
/// The arguments must meet the header's requirements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn semmoe_multicast(comm: *mut Comm, args: *const Multicast) -> i32 {
    // SAFETY: upheld by the caller, for later calls too.
    unsafe { call(comm, args, |backend, _, args| backend.multicast(args)) }
}

macro_rules! operations {
    ($($name:ident, $args:ty, $method:ident;)*) => {$(
        /// See the header.
        ///
        /// # Safety
        /// The arguments must meet the header's requirements.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(comm: *mut Comm, args: *const $args, stream: *mut c_void) -> i32 {
            // SAFETY: upheld by the caller, for the backend too.
            unsafe { call(comm, args, |backend, facts, args| backend.$method(facts, args, stream)) }
        }
    )*};
}

operations! {
    semmoe_argsort, Argsort, argsort;
    semmoe_reduce_scatter, ReduceScatter, reduce_scatter;
    semmoe_allgather, Allgather, allgather;
    semmoe_all_reduce, AllReduce, all_reduce;
    semmoe_dispatch, DispatchArgs, dispatch;
    semmoe_combine, Combine, combine;
}
