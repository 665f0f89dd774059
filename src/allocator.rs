//! The allocator of the whole program, on Linux with the feature `jemalloc`.

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Memory that is free for a second goes back to the system, also when nothing is allocated any more: what loading
/// tokenizers and tables leaves behind is more than what stays.
const CONF: &[u8; 60] = b"background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

// SAFETY: jemalloc reads this name as a pointer to a string that ends with a zero byte, and never writes to it.
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: &[u8; 60] = CONF;
