//! Where a rank computes: on CPUs, or on a GPU that it may share with other ranks of its process.

use semmoe_kernels::Dtype;

/// What computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceChoice {
    /// The machine's CPUs, in f32.
    #[default]
    Cpu,
    /// A GPU.
    Cuda {
        /// Of weights, rows, keys and values: f32 or bf16. Sums are f32.
        dtype: Dtype,
        /// Ranks of this process, each a thread, from its own rank on. They share the GPU.
        ranks_here: u16,
    },
}

/// The GPUs that this build has kernels for, as NVRTC names them; none without the feature `cuda`.
pub fn gpu_kernels() -> Vec<&'static str> {
    #[cfg(feature = "cuda")]
    {
        use semmoe_kernels_cuda::{Target, embedded};
        Target::ALL.into_iter().filter(|target| embedded(*target).is_some()).map(Target::name).collect()
    }
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}
