//! Implements [`VirtualMemory`] with the driver's `cuMem*` and `cuMulticast*` calls. Handles are passed to other
//! processes as file descriptors.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::DriverError;
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmulticastGranularity_flags, CUmulticastObjectProp, CUresult,
};

use super::Device;
use crate::vmm::{Addresses, Handle, Handles, VirtualMemory};

const FILE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// CUDA supports only 64-bit machines, where every size fits.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

impl Device {
    fn location(&self) -> CUmemLocation {
        let id = self.context.ordinal() as i32;
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
    }

    fn memory(&self) -> CUmemAllocationProp {
        let none = CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        };
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FILE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: none,
        }
    }
}

fn object(devices: u32, bytes: u64) -> CUmulticastObjectProp {
    CUmulticastObjectProp { numDevices: devices, size: bytes as usize, handleTypes: FILE.0.into(), flags: 0 }
}

impl Handles for Device {
    type Error = DriverError;

    fn granularity(&self, multicast_devices: Option<u32>) -> Result<u64, DriverError> {
        let mut unit = 0;
        // SAFETY: the structures and the number outlive the calls.
        unsafe {
            match multicast_devices {
                None => {
                    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
                    sys::cuMemGetAllocationGranularity(&raw mut unit, &self.memory(), least).result()?;
                }
                Some(devices) => {
                    let best = CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED;
                    // The call also requires a size; any size will do.
                    sys::cuMulticastGetGranularity(&raw mut unit, &object(devices, 1 << 21), best).result()?;
                }
            }
        }
        Ok(unit as u64)
    }

    fn create(&self, bytes: u64) -> Result<Handle, DriverError> {
        let mut handle = 0;
        // SAFETY: handle and structure outlive the call.
        unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, &self.memory(), 0) }.result()?;
        Ok(handle)
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        let mut file: RawFd = -1;
        // SAFETY: for this handle type, the driver writes an int.
        unsafe { sys::cuMemExportToShareableHandle((&raw mut file).cast::<c_void>(), handle, FILE, 0) }.result()?;
        if file < 0 {
            return Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE));
        }
        // SAFETY: the driver has just created the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    fn import(&self, file: BorrowedFd<'_>) -> Result<Handle, DriverError> {
        let mut handle = 0;
        // The descriptor is passed in place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(file.as_raw_fd() as usize);
        // SAFETY: the handle outlives the call; a descriptor for anything else is refused.
        unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, FILE) }.result()?;
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        // SAFETY: created or imported once, released once.
        unsafe { sys::cuMemRelease(handle) }.result()
    }
}

impl Addresses for Device {
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: the number outlives the call.
        unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, alignment as usize, 0, 0) }.result()?;
        Ok(address)
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), DriverError> {
        // SAFETY: the addresses were reserved for this; others are refused.
        unsafe { sys::cuMemMap(address, bytes as usize, 0, handle, 0) }.result()
    }

    fn grant(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let wanted = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the structure outlives the call.
        unsafe { sys::cuMemSetAccess(address, bytes as usize, &raw const wanted, 1) }.result()
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the range is mapped and no longer in use; the owner guarantees this by dropping it.
        unsafe { sys::cuMemUnmap(address, bytes as usize) }.result()
    }

    fn free(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the range was reserved and is unmapped.
        unsafe { sys::cuMemAddressFree(address, bytes as usize) }.result()
    }
}

impl VirtualMemory for Device {
    fn has_multicast(&self) -> bool {
        self.multicast
    }

    fn create_multicast(&self, devices: u32, bytes: u64) -> Result<Handle, DriverError> {
        let mut handle = 0;
        // SAFETY: handle and structure outlive the call.
        unsafe { sys::cuMulticastCreate(&raw mut handle, &object(devices, bytes)) }.result()?;
        Ok(handle)
    }

    fn add_device(&self, multicast: Handle) -> Result<(), DriverError> {
        // SAFETY: the driver refuses an invalid handle.
        unsafe { sys::cuMulticastAddDevice(multicast, self.context.cu_device()) }.result()
    }

    fn bind(&self, multicast: Handle, memory: Handle, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the driver refuses invalid handles and checks sizes too.
        unsafe { sys::cuMulticastBindMem(multicast, 0, memory, 0, bytes as usize, 0) }.result()
    }

    fn unbind(&self, multicast: Handle, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: as in `bind`.
        unsafe { sys::cuMulticastUnbind(multicast, self.context.cu_device(), 0, bytes as usize) }.result()
    }
}
