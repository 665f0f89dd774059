//! Why the shim could not build or run the kernels.

/// A failure of the shim, or a kernel's defect that it found.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// A file could not be written, or the compiler could not be started.
    #[error("the kernels could not be built for the CPU: {cause}")]
    Io {
        /// The operating system's error.
        #[from]
        cause: std::io::Error,
    },
    /// The compiler rejected the sources.
    #[error("{compiler} refused the kernels: {messages}")]
    Compile {
        /// Its name.
        compiler: String,
        /// Its output.
        messages: String,
    },
    /// The library could not be loaded.
    #[error("the kernels built for the CPU could not be loaded: {cause}")]
    Load {
        /// The loader's error.
        #[from]
        cause: libloading::Error,
    },
    /// A run that could not continue: a barrier that never completes, an invalid launch.
    #[error("the run of the kernels failed: {0}")]
    Run(String),
}
