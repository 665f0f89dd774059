//! Why a GPU could not be used.

use cudarc::driver::sys::CUresult;

/// An unsuitable GPU, driver or build.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No `libcuda.so`.
    #[error("there is no CUDA driver on this machine")]
    NoDriver,
    /// The driver is older than the images.
    #[error("the CUDA driver supports CUDA {}.{}, expected 13.0 or newer", version / 1000, version % 1000 / 10)]
    OldDriver {
        /// 1000 x major + 10 x minor
        version: i32,
    },
    /// The build has no kernels, because `SEMMOE_KERNEL_IMAGES` was not set.
    #[error("this build contains no GPU kernels: it was built without SEMMOE_KERNEL_IMAGES")]
    NoKernels,
    /// The build has no kernels, and NVRTC could not compile them.
    #[error("this build contains no GPU kernels, and they cannot be compiled: {0}")]
    NotCompiled(crate::compile::CompileError),
    /// The GPU is older than sm_80.
    #[error("the GPU has compute capability {}.{}, expected 8.0 or newer", capability / 10, capability % 10)]
    TooOld {
        /// Compute capability x 10.
        capability: u32,
    },
    /// The image for this GPU lacks a kernel, for example NVLS on sm_80.
    #[error("the kernels for this GPU do not include {kernel}")]
    NoKernel {
        /// Its name.
        kernel: &'static str,
    },
    /// The image and this library have different versions.
    #[error(
        "{kernel} has {expected} bytes of parameters, found {found}: the image and the library have different versions"
    )]
    Params {
        /// Its name.
        kernel: &'static str,
        /// Bytes that the library passes.
        found: usize,
        /// Bytes that the image expects.
        expected: usize,
    },
    /// Blocks that wait for one another could not all run at once.
    #[error("{kernel} has {found} blocks, but the GPU runs at most {most} at once")]
    TooManyBlocks {
        /// Its name.
        kernel: &'static str,
        /// Number of blocks of all ranks of the launch.
        found: u32,
        /// Maximum number of blocks that run at once.
        most: u32,
    },
    /// No `libnccl.so`.
    #[error("NCCL was not found: add the directory with libnccl.so to LD_LIBRARY_PATH")]
    NoNccl,
    /// NCCL's status.
    #[error("NCCL failed with status {0}")]
    Nccl(u32),
    /// The group has no such rank.
    #[error("rank {rank} is out of range for a group of {ranks}")]
    Group {
        /// The rank.
        rank: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// The call was rejected before any launch.
    #[error(transparent)]
    Launch(#[from] crate::error::LaunchError),
    /// The driver's message.
    #[error("the CUDA driver refused: {0}{hint}", hint = hint(.0.0))]
    Driver(#[from] cudarc::driver::DriverError),
}

/// Returns where the system log has details about a failed GPU: the Xid that the driver logs.
const fn hint(error: CUresult) -> &'static str {
    match error {
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => " (see the system log for Xid 48, 94 or 95)",
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE => " (see the system log for Xid 74)",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => " (see the system log for Xid 13 or 31)",
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT => " (see the system log for Xid 8)",
        CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => " (a kernel trapped: see the system log for Xid 13)",
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
