//! The program's allocator, on Linux with the feature `jemalloc`.

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Memory that has been free for a second returns to the system, even if nothing is allocated any more: loading
/// tokenizers and tables temporarily needs more memory than it keeps.
const CONF: &[u8; 60] = b"background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

// SAFETY: jemalloc reads this symbol as a pointer to a zero-terminated string, and never writes to it.
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: &[u8; 60] = CONF;
