//! Why a GPU could not be used.

use cudarc::driver::sys::CUresult;

/// An unsuitable GPU, driver or build.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No `libcuda.so`.
    #[error("there is no CUDA driver on this machine")]
    NoDriver,
    /// Older than the images.
    #[error("the CUDA driver is for CUDA {}.{}, expected one for 13.0 or newer", version / 1000, version % 1000 / 10)]
    OldDriver {
        /// 1000 x major + 10 x minor
        version: i32,
    },
    /// The build has no kernels, because `SEMMOE_KERNEL_IMAGES` was not set.
    #[error("this build holds no GPU kernels: it was built without SEMMOE_KERNEL_IMAGES")]
    NoKernels,
    /// Built without `SEMMOE_KERNEL_IMAGES`, and NVRTC could not compile them.
    #[error("this build holds no GPU kernels, and they cannot be compiled: {0}")]
    NotCompiled(crate::compile::CompileError),
    /// Older than sm_80.
    #[error("the GPU has compute capability {}.{}, expected 8.0 or newer", capability / 10, capability % 10)]
    TooOld {
        /// Compute capability x 10.
        capability: u32,
    },
    /// The image for this GPU lacks a kernel, as sm_80 lacks NVLS.
    #[error("the kernels for this GPU have no {kernel}")]
    NoKernel {
        /// Its name.
        kernel: &'static str,
    },
    /// The sources and this library differ.
    #[error(
        "{kernel} takes {expected} bytes of parameters, found {found}: image and library are of different versions"
    )]
    Params {
        /// Its name.
        kernel: &'static str,
        /// Bytes by the library.
        found: usize,
        /// Bytes expected by the image.
        expected: usize,
    },
    /// Blocks that wait for one another would not all run at once.
    #[error("{kernel} has {found} blocks, more than the {most} that the GPU runs at once")]
    TooManyBlocks {
        /// Its name.
        kernel: &'static str,
        /// Blocks of all ranks of the launch.
        found: u32,
        /// Blocks that fit.
        most: u32,
    },
    /// No `libnccl.so`.
    #[error("NCCL was not found: add the directory with libnccl.so to LD_LIBRARY_PATH")]
    NoNccl,
    /// NCCL's status.
    #[error("NCCL refused with status {0}")]
    Nccl(u32),
    /// A rank that the group cannot have.
    #[error("rank {rank} is out of range for a group of {ranks}")]
    Group {
        /// The rank.
        rank: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// A call that was refused before any launch.
    #[error(transparent)]
    Launch(#[from] crate::error::LaunchError),
    /// The driver's message.
    #[error("the CUDA driver refused: {0}{hint}", hint = hint(.0.0))]
    Driver(#[from] cudarc::driver::DriverError),
}

/// Where the system's log has more about a failed GPU: the Xid that the driver logs.
const fn hint(error: CUresult) -> &'static str {
    match error {
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => " (in the system's log as Xid 48, 94 or 95)",
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE => " (in the system's log as Xid 74)",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => " (in the system's log as Xid 13 or 31)",
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT => " (in the system's log as Xid 8)",
        CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => " (a kernel trapped: in the system's log as Xid 13)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_gpu_itself_name_their_xid() {
        assert!(hint(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE).contains("Xid 48"));
        assert!(hint(CUresult::CUDA_ERROR_LAUNCH_FAILED).contains("trapped"));
        assert_eq!(hint(CUresult::CUDA_ERROR_OUT_OF_MEMORY), "");
    }
}
