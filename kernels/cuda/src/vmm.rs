//! Memory by handles: allocated without an address, passed to other processes as a file descriptor, and bound to a
//! multicast address for the NVLS kernels.
//!
//! The driver is behind [`VirtualMemory`], so that order, sizes and cleanup after failures are tested without a driver.
//! `driver::Device` implements it.

use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::LaunchError;
use crate::team::Buffer;

/// Maximum size of one allocation: more than any GPU has, and far from overflow.
pub const MAX_BYTES: u64 = 1 << 42;
/// Maximum number of GPUs in a multicast object.
pub const MAX_DEVICES: u32 = 64;

/// The driver's handle for memory, mapped or not.
pub type Handle = u64;

/// The driver's calls on one GPU's memory that need no address.
pub trait Handles {
    /// The driver's message.
    type Error: Display;

    /// Returns the granularity of sizes, of memory or of a multicast object with that many GPUs.
    ///
    /// # Errors
    /// The driver's error.
    fn granularity(&self, multicast_devices: Option<u32>) -> Result<u64, Self::Error>;
    /// Allocates memory that can be exported.
    ///
    /// # Errors
    /// The driver's error, for example if memory is exhausted.
    fn create(&self, bytes: u64) -> Result<Handle, Self::Error>;
    /// Exports a handle for another process.
    ///
    /// # Errors
    /// The driver's error.
    fn export(&self, handle: Handle) -> Result<OwnedFd, Self::Error>;
    /// Imports a handle that another process exported.
    ///
    /// # Errors
    /// The driver's error.
    fn import(&self, file: BorrowedFd<'_>) -> Result<Handle, Self::Error>;
    /// Releases a handle; memory is freed with its last handle and mapping.
    ///
    /// # Errors
    /// The driver's error.
    fn release(&self, handle: Handle) -> Result<(), Self::Error>;
}

/// The driver's calls on one GPU's addresses.
pub trait Addresses: Handles {
    /// Reserves addresses without memory.
    ///
    /// # Errors
    /// The driver's error.
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, Self::Error>;
    /// Maps memory at reserved addresses.
    ///
    /// # Errors
    /// The driver's error.
    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), Self::Error>;
    /// Allows this GPU to read and write a range.
    ///
    /// # Errors
    /// The driver's error.
    fn grant(&self, address: u64, bytes: u64) -> Result<(), Self::Error>;
    /// Undoes [`map`](Self::map).
    ///
    /// # Errors
    /// The driver's error.
    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Self::Error>;
    /// Undoes [`reserve`](Self::reserve).
    ///
    /// # Errors
    /// The driver's error.
    fn free(&self, address: u64, bytes: u64) -> Result<(), Self::Error>;
}

/// The driver's calls on one GPU, including those on multicast objects.
pub trait VirtualMemory: Addresses {
    /// Whether this GPU can take part in a multicast object.
    fn has_multicast(&self) -> bool;
    /// Creates a multicast object that can be exported.
    ///
    /// # Errors
    /// The driver's error.
    fn create_multicast(&self, devices: u32, bytes: u64) -> Result<Handle, Self::Error>;
    /// Adds this GPU to a multicast object.
    ///
    /// # Errors
    /// The driver's error.
    fn add_device(&self, multicast: Handle) -> Result<(), Self::Error>;
    /// Binds memory of this GPU, from its start.
    ///
    /// # Errors
    /// The driver's error.
    fn bind(&self, multicast: Handle, memory: Handle, bytes: u64) -> Result<(), Self::Error>;
    /// Undoes [`bind`](Self::bind).
    ///
    /// # Errors
    /// The driver's error.
    fn unbind(&self, multicast: Handle, bytes: u64) -> Result<(), Self::Error>;
}

/// Memory could not be allocated, mapped or shared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VmmError {
    /// A size or count is out of range.
    #[error(transparent)]
    Size(#[from] LaunchError),
    /// Another process's memory has a size that the driver cannot map.
    #[error("memory of another process has {found} bytes, expected a multiple of {granularity}")]
    Granularity {
        /// The size given, in bytes.
        found: u64,
        /// The required multiple.
        granularity: u64,
    },
    /// The GPU has no NVLink SHARP, or the driver does not support it.
    #[error("the GPU has no multicast support")]
    NoMulticast,
    /// Steps on a multicast object are in the wrong order.
    #[error("{step} must precede {before} on a multicast object")]
    Order {
        /// The step that must come first.
        step: &'static str,
        /// The step requested.
        before: &'static str,
    },
    /// The driver's message.
    #[error("the CUDA driver refused {call}: {cause}")]
    Refused {
        /// The request.
        call: &'static str,
        /// Its message.
        cause: String,
    },
}

fn refused<E: Display>(call: &'static str) -> impl FnOnce(E) -> VmmError {
    move |cause| VmmError::Refused { call, cause: cause.to_string() }
}

/// A handle that is released on drop.
struct Held<'d, V: VirtualMemory> {
    driver: &'d V,
    handle: Handle,
}

impl<'d, V: VirtualMemory> Held<'d, V> {
    /// Imports a handle that another process exported, for `bytes` bytes there; sizes are multiples of `unit`.
    fn import(driver: &'d V, file: BorrowedFd<'_>, bytes: u64, unit: u64) -> Result<Self, VmmError> {
        if !bytes.is_multiple_of(unit) {
            return Err(VmmError::Granularity { found: bytes, granularity: unit });
        }
        let handle = driver.import(file).map_err(refused("to import memory"))?;
        Ok(Self { driver, handle })
    }

    fn export(&self) -> Result<OwnedFd, VmmError> {
        self.driver.export(self.handle).map_err(refused("to export memory"))
    }
}

impl<V: VirtualMemory> Drop for Held<'_, V> {
    fn drop(&mut self) {
        // An error cannot be handled here.
        let _ = self.driver.release(self.handle);
    }
}

/// A mapping. When dropped, it is unmapped and its addresses are freed.
struct Mapped<'d, V: VirtualMemory> {
    driver: &'d V,
    buffer: Buffer,
}

impl<'d, V: VirtualMemory> Mapped<'d, V> {
    fn new(held: &Held<'d, V>, bytes: u64, granularity: u64) -> Result<Self, VmmError> {
        let driver = held.driver;
        let address = driver.reserve(bytes, granularity).map_err(refused("to reserve addresses"))?;
        if let Err(cause) = driver.map(address, bytes, held.handle) {
            let _ = driver.free(address, bytes);
            return Err(refused("to map memory")(cause));
        }
        // From here on, dropping the value unmaps and frees.
        let mapped = Self { driver, buffer: Buffer { address, bytes } };
        driver.grant(address, bytes).map_err(refused("access to mapped memory"))?;
        Ok(mapped)
    }
}

impl<V: VirtualMemory> Drop for Mapped<'_, V> {
    fn drop(&mut self) {
        let Buffer { address, bytes } = self.buffer;
        let _ = self.driver.unmap(address, bytes);
        let _ = self.driver.free(address, bytes);
    }
}

fn in_range(what: &'static str, found: u64, most: u64) -> Result<(), LaunchError> {
    if (1..=most).contains(&found) { Ok(()) } else { Err(LaunchError::OutOfRange { what, found, least: 1, most }) }
}

/// Returns the driver's granularity of sizes. It must be a power of two, or nothing could be aligned to it.
fn granularity<V: VirtualMemory>(driver: &V, devices: Option<u32>) -> Result<u64, VmmError> {
    let found = driver.granularity(devices).map_err(refused("to report its granularity"))?;
    if found.is_power_of_two() && found <= MAX_BYTES {
        return Ok(found);
    }
    let cause = format!("{found} bytes, expected a power of two of at most {MAX_BYTES}");
    Err(VmmError::Refused { call: "to report a valid granularity", cause })
}

/// Memory of one GPU, allocated by this process or another one, and mapped here.
pub struct Memory<'d, V: VirtualMemory> {
    // Declared before `held`, so that memory is unmapped before its handle is released.
    mapped: Mapped<'d, V>,
    held: Held<'d, V>,
}

impl<'d, V: VirtualMemory> Memory<'d, V> {
    /// Allocates at least `bytes` bytes, uninitialised. With `devices`, they may be bound to a multicast object with
    /// that many GPUs.
    ///
    /// # Errors
    /// If the size is 0 or above [`MAX_BYTES`], or the driver refuses the call. Nothing is left allocated.
    pub fn new(driver: &'d V, bytes: u64, devices: Option<u32>) -> Result<Self, VmmError> {
        in_range("size of an allocation", bytes, MAX_BYTES)?;
        let own = granularity(driver, None)?;
        let unit = match devices {
            None => own,
            Some(devices) => own.max(multicast_granularity(driver, devices)?),
        };
        // Both are powers of two no larger than `MAX_BYTES`.
        let bytes = bytes.next_multiple_of(unit);
        let handle = driver.create(bytes).map_err(refused("to allocate memory"))?;
        Self::of(Held { driver, handle }, bytes, unit)
    }

    /// Imports memory that another process exported; `bytes` is its size there.
    ///
    /// # Errors
    /// If the driver cannot map the size, the descriptor is not for memory, or the driver refuses the call.
    pub fn import(driver: &'d V, file: BorrowedFd<'_>, bytes: u64) -> Result<Self, VmmError> {
        in_range("size of an import", bytes, MAX_BYTES)?;
        let unit = granularity(driver, None)?;
        Self::of(Held::import(driver, file, bytes, unit)?, bytes, unit)
    }

    fn of(held: Held<'d, V>, bytes: u64, unit: u64) -> Result<Self, VmmError> {
        Ok(Self { mapped: Mapped::new(&held, bytes, unit)?, held })
    }

    /// Returns the buffer for calls, with the rounded size.
    pub fn buffer(&self) -> Buffer {
        self.mapped.buffer
    }

    /// Exports a handle for another process, to be passed over a socket or by `pidfd_getfd`.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn export(&self) -> Result<OwnedFd, VmmError> {
        self.held.export()
    }
}

fn multicast_granularity<V: VirtualMemory>(driver: &V, devices: u32) -> Result<u64, VmmError> {
    in_range("number of GPUs in a multicast object", devices.into(), MAX_DEVICES.into())?;
    if !driver.has_multicast() {
        return Err(VmmError::NoMulticast);
    }
    granularity(driver, Some(devices))
}

/// One address for the memory of several GPUs: a reducing load adds the values of all GPUs, a store writes to all of
/// them.
///
/// One rank creates and exports the object, the others import it. Then every rank adds its GPU. After a barrier by the
/// caller, because binding waits for all GPUs, every rank binds its memory; after another barrier, the address may be
/// used.
pub struct Multicast<'d, V: VirtualMemory> {
    // Drop order: unmap, unbind, free.
    mapped: Option<Mapped<'d, V>>,
    bound: bool,
    held: Held<'d, V>,
    bytes: u64,
    unit: u64,
    added: bool,
}

impl<'d, V: VirtualMemory> Multicast<'d, V> {
    /// Creates an object for `devices` GPUs with at least `bytes` bytes each.
    ///
    /// # Errors
    /// If the GPU has no multicast support, counts or sizes are out of range, or the driver refuses the call.
    pub fn new(driver: &'d V, devices: u32, bytes: u64) -> Result<Self, VmmError> {
        in_range("size of a multicast object", bytes, MAX_BYTES)?;
        let unit = multicast_granularity(driver, devices)?;
        let bytes = bytes.next_multiple_of(unit);
        let handle = driver.create_multicast(devices, bytes).map_err(refused("to create a multicast object"))?;
        Ok(Self::of(Held { driver, handle }, bytes, unit))
    }

    /// Imports another process's object; `devices` and `bytes` must be those with which it was created.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn import(driver: &'d V, file: BorrowedFd<'_>, devices: u32, bytes: u64) -> Result<Self, VmmError> {
        in_range("size of a multicast object", bytes, MAX_BYTES)?;
        let unit = multicast_granularity(driver, devices)?;
        Ok(Self::of(Held::import(driver, file, bytes, unit)?, bytes, unit))
    }

    fn of(held: Held<'d, V>, bytes: u64, unit: u64) -> Self {
        Self { mapped: None, bound: false, held, bytes, unit, added: false }
    }

    /// Exports a handle for another process.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn export(&self) -> Result<OwnedFd, VmmError> {
        self.held.export()
    }

    /// Returns the rounded size per GPU.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds this GPU unless it was added before.
    ///
    /// # Errors
    /// If the driver refuses the call.
    pub fn add_device(&mut self) -> Result<(), VmmError> {
        if !self.added {
            self.held.driver.add_device(self.held.handle).map_err(refused("to add a GPU to a multicast object"))?;
            self.added = true;
        }
        Ok(())
    }

    /// Binds this GPU's memory and maps the object; returns the address for the NVLS kernels. All GPUs must have been
    /// added before, and the memory must outlive the object.
    ///
    /// # Errors
    /// If the GPU was not added, memory is too small, or the driver refuses the call, which can then be retried.
    pub fn bind(&mut self, memory: &'d Memory<'_, V>) -> Result<Buffer, VmmError> {
        let (driver, handle, bytes) = (self.held.driver, self.held.handle, self.bytes);
        if !self.added {
            return Err(VmmError::Order { step: "adding the GPU", before: "binding its memory" });
        }
        let found = memory.buffer().bytes;
        if found < bytes {
            let (what, least, most) = ("size of the memory to bind", bytes, MAX_BYTES);
            return Err(LaunchError::OutOfRange { what, found, least, most }.into());
        }
        if !self.bound {
            driver.bind(handle, memory.held.handle, bytes).map_err(refused("to bind memory"))?;
            self.bound = true;
        }
        let mapped = match self.mapped.take() {
            Some(mapped) => mapped,
            None => Mapped::new(&self.held, bytes, self.unit)?,
        };
        Ok(self.mapped.insert(mapped).buffer)
    }
}

impl<V: VirtualMemory> Drop for Multicast<'_, V> {
    fn drop(&mut self) {
        self.mapped = None;
        if self.bound {
            let _ = self.held.driver.unbind(self.held.handle, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests;
