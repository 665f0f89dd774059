//! Why a GPU could not be used.

/// A GPU, driver or build that does not fit.
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
    /// Built without `SEMMOE_KERNEL_IMAGES`.
    #[error("this build holds no GPU kernels: it was built without SEMMOE_KERNEL_IMAGES")]
    NoKernels,
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
    /// Sources and this library differ.
    #[error(
        "{kernel} takes {expected} bytes of parameters, found {found}: image and library are of different versions"
    )]
    Params {
        /// Its name.
        kernel: &'static str,
        /// Bytes by the library.
        found: usize,
        /// Bytes by the image.
        expected: usize,
    },
    /// Blocks that wait for one another would not all run.
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
    #[error("NCCL was not found: put the folder of libnccl.so on LD_LIBRARY_PATH")]
    NoNccl,
    /// NCCL's status.
    #[error("NCCL refused with status {0}")]
    Nccl(u32),
    /// A rank that the group cannot have.
    #[error("rank {rank} is not one of {ranks} ranks")]
    Group {
        /// The rank.
        rank: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// A call that was refused before any launch.
    #[error(transparent)]
    Launch(#[from] crate::error::LaunchError),
    /// The driver's own words.
    #[error("the CUDA driver refused: {0}")]
    Driver(#[from] cudarc::driver::DriverError),
}
