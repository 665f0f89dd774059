//! [`VirtualMemory`] by the driver: `cuMem*` and `cuMulticast*`. Handles go to other
//! processes as file descriptors. Not yet run on a GPU.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmulticastGranularity_flags, CUmulticastObjectProp, CUresult,
};

use super::Device;
use crate::vmm::{Handle, VirtualMemory};

const FILE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn said(result: CUresult) -> Result<(), String> {
    result.result().map_err(|error| error.to_string())
}

/// Sizes are at most [`crate::vmm::MAX_BYTES`], which fits.
fn size(bytes: u64) -> Result<usize, String> {
    usize::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than this machine can address"))
}

impl Device {
    fn location(&self) -> Result<CUmemLocation, String> {
        let id = i32::try_from(self.context.ordinal()).map_err(|error| error.to_string())?;
        Ok(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id })
    }

    fn memory(&self) -> Result<CUmemAllocationProp, String> {
        let none = CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        };
        Ok(CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FILE,
            location: self.location()?,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: none,
        })
    }
}

fn object(devices: u32, bytes: usize) -> CUmulticastObjectProp {
    CUmulticastObjectProp { numDevices: devices, size: bytes, handleTypes: FILE.0.into(), flags: 0 }
}

impl VirtualMemory for Device {
    fn granularity(&self, multicast_devices: Option<u32>) -> Result<u64, String> {
        let mut unit = 0;
        // SAFETY: both structures and the number outlive the calls.
        unsafe {
            match multicast_devices {
                None => {
                    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
                    said(sys::cuMemGetAllocationGranularity(&raw mut unit, &self.memory()?, least))?;
                }
                Some(devices) => {
                    let best = CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED;
                    // The call requires a size, too; any will do.
                    said(sys::cuMulticastGetGranularity(&raw mut unit, &object(devices, 1 << 21), best))?;
                }
            }
        }
        Ok(unit as u64)
    }

    fn create(&self, bytes: u64) -> Result<Handle, String> {
        let mut handle = 0;
        // SAFETY: handle and structure outlive the call.
        said(unsafe { sys::cuMemCreate(&raw mut handle, size(bytes)?, &self.memory()?, 0) })?;
        Ok(handle)
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, String> {
        let mut file: RawFd = -1;
        // SAFETY: for this kind of handle the driver writes an int.
        said(unsafe { sys::cuMemExportToShareableHandle((&raw mut file).cast::<c_void>(), handle, FILE, 0) })?;
        if file < 0 {
            return Err(format!("it gave the file descriptor {file}"));
        }
        // SAFETY: a descriptor that the driver has just made for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    fn import(&self, file: BorrowedFd<'_>) -> Result<Handle, String> {
        let mut handle = 0;
        // The descriptor goes in place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(file.as_raw_fd() as usize);
        // SAFETY: the handle outlives the call; a descriptor of anything else is refused.
        said(unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, FILE) })?;
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), String> {
        // SAFETY: made or imported once, given back once.
        said(unsafe { sys::cuMemRelease(handle) })
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: the number outlives the call.
        said(unsafe { sys::cuMemAddressReserve(&raw mut address, size(bytes)?, size(alignment)?, 0, 0) })?;
        Ok(address)
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), String> {
        // SAFETY: the addresses were reserved for this; others are refused.
        said(unsafe { sys::cuMemMap(address, size(bytes)?, 0, handle, 0) })
    }

    fn grant(&self, address: u64, bytes: u64) -> Result<(), String> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let wanted = CUmemAccessDesc { location: self.location()?, flags };
        // SAFETY: the structure outlives the call.
        said(unsafe { sys::cuMemSetAccess(address, size(bytes)?, &raw const wanted, 1) })
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<(), String> {
        // SAFETY: mapped before, and what used it has ended, as the owner promises by dropping it.
        said(unsafe { sys::cuMemUnmap(address, size(bytes)?) })
    }

    fn free(&self, address: u64, bytes: u64) -> Result<(), String> {
        // SAFETY: reserved before and unmapped.
        said(unsafe { sys::cuMemAddressFree(address, size(bytes)?) })
    }

    fn has_multicast(&self) -> bool {
        self.multicast()
    }

    fn create_multicast(&self, devices: u32, bytes: u64) -> Result<Handle, String> {
        let mut handle = 0;
        // SAFETY: handle and structure outlive the call.
        said(unsafe { sys::cuMulticastCreate(&raw mut handle, &object(devices, size(bytes)?)) })?;
        Ok(handle)
    }

    fn add_device(&self, multicast: Handle) -> Result<(), String> {
        // SAFETY: an invalid handle is refused.
        said(unsafe { sys::cuMulticastAddDevice(multicast, self.context.cu_device()) })
    }

    fn bind(&self, multicast: Handle, memory: Handle, bytes: u64) -> Result<(), String> {
        // SAFETY: invalid handles are refused; sizes are checked by the driver too.
        said(unsafe { sys::cuMulticastBindMem(multicast, 0, memory, 0, size(bytes)?, 0) })
    }

    fn unbind(&self, multicast: Handle, bytes: u64) -> Result<(), String> {
        // SAFETY: as for `bind`.
        said(unsafe { sys::cuMulticastUnbind(multicast, self.context.cu_device(), 0, size(bytes)?) })
    }
}
