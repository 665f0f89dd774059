//! The global allocator on Linux if the `jemalloc` feature is enabled.

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Returns free memory to the system after a second, even if the process makes no further allocations: loading
/// tokenizers and tables temporarily needs far more memory than the loaded data.
const CONF: &[u8; 60] = b"background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

// SAFETY: jemalloc reads this symbol as a pointer to a NUL-terminated string, and never writes to it.
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: &[u8; 60] = CONF;
