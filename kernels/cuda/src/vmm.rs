//! Memory by handles: allocated apart from its address, passed to other processes as a file descriptor, and bound to a
//! multicast address for the NVLS kernels.
//!
//! The driver is behind [`VirtualMemory`], so that order, sizes and the cleanup after a failure are tested without one.
//! `driver::Device` implements it.

use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::LaunchError;
use crate::team::Buffer;

/// Maximum bytes of one allocation: more than any GPU has, and far from overflow.
pub const MAX_BYTES: u64 = 1 << 42;
/// Maximum GPUs of a multicast object.
pub const MAX_DEVICES: u32 = 64;

/// The driver's handle of memory, mapped or not.
pub type Handle = u64;

/// The driver's calls on one GPU's memory without an address.
pub trait Handles {
    /// The driver's message.
    type Error: Display;

    /// Granularity of sizes: of memory, or of a multicast object of that many GPUs.
    ///
    /// # Errors
    /// The driver's error.
    fn granularity(&self, multicast_devices: Option<u32>) -> Result<u64, Self::Error>;
    /// Memory that can be exported.
    ///
    /// # Errors
    /// The driver's error, for example because memory is short.
    fn create(&self, bytes: u64) -> Result<Handle, Self::Error>;
    /// A handle for another process.
    ///
    /// # Errors
    /// The driver's error.
    fn export(&self, handle: Handle) -> Result<OwnedFd, Self::Error>;
    /// A handle that another process exported.
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

/// The driver's calls on addresses of one GPU.
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
    /// Allows this GPU to read and write there.
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

/// The driver's calls on one GPU, with those on multicast objects.
pub trait VirtualMemory: Addresses {
    /// Whether this GPU can take part in a multicast object.
    fn has_multicast(&self) -> bool;
    /// A multicast object that can be exported.
    ///
    /// # Errors
    /// The driver's error.
    fn create_multicast(&self, devices: u32, bytes: u64) -> Result<Handle, Self::Error>;
    /// Adds this GPU.
    ///
    /// # Errors
    /// The driver's error.
    fn add_device(&self, multicast: Handle) -> Result<(), Self::Error>;
    /// Binds memory of this GPU, from its beginning.
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

/// Memory that could not be allocated, mapped or shared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VmmError {
    /// A size or count out of its range.
    #[error(transparent)]
    Size(#[from] LaunchError),
    /// Memory of another process whose size the driver cannot map.
    #[error("{found} bytes of another process are not a multiple of {granularity}, which the driver maps by")]
    Granularity {
        /// Its claimed size in bytes.
        found: u64,
        /// The required multiple.
        granularity: u64,
    },
    /// A GPU without NVLink SHARP, or a driver that does not offer it.
    #[error("the GPU has no multicast support")]
    NoMulticast,
    /// Steps of a multicast object in the wrong order.
    #[error("{step} comes before {before} on a multicast object")]
    Order {
        /// The step that must come first.
        step: &'static str,
        /// The value requested.
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
    /// A handle that another process exported, with `bytes` bytes there; sizes are multiples of `unit`.
    fn import(driver: &'d V, file: BorrowedFd<'_>, bytes: u64, unit: u64) -> Result<Self, VmmError> {
        if !bytes.is_multiple_of(unit) {
            return Err(VmmError::Granularity { found: bytes, granularity: unit });
        }
        let handle = driver.import(file).map_err(refused("an import"))?;
        Ok(Self { driver, handle })
    }

    fn export(&self) -> Result<OwnedFd, VmmError> {
        self.driver.export(self.handle).map_err(refused("an export"))
    }
}

impl<V: VirtualMemory> Drop for Held<'_, V> {
    fn drop(&mut self) {
        // An error cannot be handled here.
        let _ = self.driver.release(self.handle);
    }
}

/// A mapping, until dropped: unmapped, then the addresses are freed.
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
        // From here on dropping unmaps and frees.
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

/// The driver's granularity of sizes; it must be a power of two, or nothing can be aligned to it.
fn granularity<V: VirtualMemory>(driver: &V, devices: Option<u32>) -> Result<u64, VmmError> {
    let found = driver.granularity(devices).map_err(refused("the granularity of memory"))?;
    if found.is_power_of_two() && found <= MAX_BYTES {
        return Ok(found);
    }
    let cause = format!("it is {found} bytes, expected a power of two of at most {MAX_BYTES}");
    Err(VmmError::Refused { call: "the granularity of memory", cause })
}

/// Memory of one GPU, of this process or of another one, mapped here.
pub struct Memory<'d, V: VirtualMemory> {
    // Unmapped before the handle is released.
    mapped: Mapped<'d, V>,
    held: Held<'d, V>,
}

impl<'d, V: VirtualMemory> Memory<'d, V> {
    /// At least `bytes` bytes, uninitialised. With `devices` it may be bound to a multicast object of that many GPUs.
    ///
    /// # Errors
    /// A size of 0 or above [`MAX_BYTES`], or the driver refuses the call; nothing is left behind.
    pub fn new(driver: &'d V, bytes: u64, devices: Option<u32>) -> Result<Self, VmmError> {
        in_range("bytes of an allocation", bytes, MAX_BYTES)?;
        let own = granularity(driver, None)?;
        let unit = match devices {
            None => own,
            Some(devices) => own.max(multicast_granularity(driver, devices)?),
        };
        // Both are powers of two of at most MAX_BYTES.
        let bytes = bytes.next_multiple_of(unit);
        let handle = driver.create(bytes).map_err(refused("an allocation"))?;
        Self::of(Held { driver, handle }, bytes, unit)
    }

    /// A handle that another process exported; `bytes` is its size there.
    ///
    /// # Errors
    /// A size that the driver cannot map, a descriptor of something else, a driver that refuses.
    pub fn import(driver: &'d V, file: BorrowedFd<'_>, bytes: u64) -> Result<Self, VmmError> {
        in_range("bytes of an import", bytes, MAX_BYTES)?;
        let unit = granularity(driver, None)?;
        Self::of(Held::import(driver, file, bytes, unit)?, bytes, unit)
    }

    fn of(held: Held<'d, V>, bytes: u64, unit: u64) -> Result<Self, VmmError> {
        Ok(Self { mapped: Mapped::new(&held, bytes, unit)?, held })
    }

    /// The buffer for calls; its size is the rounded one.
    pub fn buffer(&self) -> Buffer {
        self.mapped.buffer
    }

    /// A handle for another process: over a socket, or by `pidfd_getfd`.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn export(&self) -> Result<OwnedFd, VmmError> {
        self.held.export()
    }
}

fn multicast_granularity<V: VirtualMemory>(driver: &V, devices: u32) -> Result<u64, VmmError> {
    in_range("GPUs of a multicast object", devices.into(), MAX_DEVICES.into())?;
    if !driver.has_multicast() {
        return Err(VmmError::NoMulticast);
    }
    granularity(driver, Some(devices))
}

/// One address for the memory of several GPUs: a reducing load adds what all hold, a store writes to all.
///
/// One rank creates and exports it, the others import it. Then every rank adds its GPU. After a barrier of the caller,
/// because binding waits for all GPUs, every rank binds its memory; after another barrier the address may be used.
pub struct Multicast<'d, V: VirtualMemory> {
    // Dropped in this order: unmapped, unbound, freed.
    mapped: Option<Mapped<'d, V>>,
    bound: bool,
    held: Held<'d, V>,
    bytes: u64,
    unit: u64,
    added: bool,
}

impl<'d, V: VirtualMemory> Multicast<'d, V> {
    /// An object for `devices` GPUs and at least `bytes` bytes of each.
    ///
    /// # Errors
    /// A GPU without multicast, counts or sizes out of range, or the driver refuses the call.
    pub fn new(driver: &'d V, devices: u32, bytes: u64) -> Result<Self, VmmError> {
        in_range("bytes of a multicast object", bytes, MAX_BYTES)?;
        let unit = multicast_granularity(driver, devices)?;
        let bytes = bytes.next_multiple_of(unit);
        let handle = driver.create_multicast(devices, bytes).map_err(refused("a multicast object"))?;
        Ok(Self::of(Held { driver, handle }, bytes, unit))
    }

    /// Imports another process's object; `devices` and `bytes` must equal those that it was created with.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn import(driver: &'d V, file: BorrowedFd<'_>, devices: u32, bytes: u64) -> Result<Self, VmmError> {
        in_range("bytes of a multicast object", bytes, MAX_BYTES)?;
        let unit = multicast_granularity(driver, devices)?;
        Ok(Self::of(Held::import(driver, file, bytes, unit)?, bytes, unit))
    }

    fn of(held: Held<'d, V>, bytes: u64, unit: u64) -> Self {
        Self { mapped: None, bound: false, held, bytes, unit, added: false }
    }

    /// A handle for another process.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn export(&self) -> Result<OwnedFd, VmmError> {
        self.held.export()
    }

    /// Bytes of each GPU, rounded.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds this GPU, once.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn add_device(&mut self) -> Result<(), VmmError> {
        if !self.added {
            self.held.driver.add_device(self.held.handle).map_err(refused("a GPU in a multicast object"))?;
            self.added = true;
        }
        Ok(())
    }

    /// Binds this GPU's memory and maps the object; returns the address for the NVLS kernels. All GPUs must have been
    /// added before, and the memory must outlive the object.
    ///
    /// # Errors
    /// A GPU that was not added, memory that is too small, or the driver refuses the call; it can then be retried.
    pub fn bind(&mut self, memory: &'d Memory<'_, V>) -> Result<Buffer, VmmError> {
        let (driver, handle, bytes) = (self.held.driver, self.held.handle, self.bytes);
        if !self.added {
            return Err(VmmError::Order { step: "adding the GPU", before: "binding its memory" });
        }
        let found = memory.buffer().bytes;
        if found < bytes {
            let (what, least, most) = ("bytes to bind", bytes, MAX_BYTES);
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
