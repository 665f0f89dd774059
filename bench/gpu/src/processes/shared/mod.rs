//! Memory of one rank, in this process or another: signals, a part, gathered rows.

#[cfg(feature = "cuda")]
mod gpu;

use memmap2::{MmapOptions, MmapRaw};
use semmoe_kernels_cuda::Buffer;
use tempfile::NamedTempFile;

use crate::machine::{Machine, POISON, text};

/// Bytes of each of the three.
pub(super) type Sizes = [usize; 3];

pub(super) trait Shared {
    /// A line that lets the other process open this memory.
    fn handle(&self) -> Result<String, String>;
    /// The address of buffer `which`.
    fn buffer(&self, which: usize) -> Buffer;
    /// Overwrites the start of buffer `which` before any kernel runs.
    fn write(&self, which: usize, bytes: &[u8]) -> Result<(), String>;
    /// The contents of one buffer, after all kernels have finished.
    fn read(&self, which: usize) -> Result<Vec<u8>, String>;
}

const NOT_OURS: &str = "this memory belongs to another process";

/// Zeroed signals; the rest is poisoned. On a GPU, `vmm` shares by file descriptors.
pub(super) fn own(machine: &Machine, sizes: Sizes, vmm: bool) -> Result<Box<dyn Shared + '_>, String> {
    let memory: Box<dyn Shared + '_> = match machine {
        Machine::Shim(_) if vmm => return Err("file descriptors share GPU memory only; run without --vmm".to_owned()),
        Machine::Shim(_) => Box::new(Mapped::new(sizes)?),
        #[cfg(feature = "cuda")]
        Machine::Gpu(device) if vmm => Box::new(gpu::Virtual::new(device, sizes)?),
        #[cfg(feature = "cuda")]
        Machine::Gpu(_) => Box::new(gpu::Ipc::new(sizes)?),
    };
    memory.write(0, &vec![0; sizes[0]])?;
    for which in [1, 2] {
        memory.write(which, &vec![POISON; sizes[which]])?;
    }
    Ok(memory)
}

/// The memory whose handle another process exported.
pub(super) fn peer<'m>(
    machine: &'m Machine,
    handle: &str,
    sizes: Sizes,
    vmm: bool,
) -> Result<Box<dyn Shared + 'm>, String> {
    Ok(match machine {
        Machine::Shim(_) if vmm => return Err("file descriptors share GPU memory only; run without --vmm".to_owned()),
        Machine::Shim(_) => Box::new(Mapped::open(handle, sizes)?),
        #[cfg(feature = "cuda")]
        Machine::Gpu(device) if vmm => Box::new(gpu::Virtual::open(device, handle, sizes)?),
        #[cfg(feature = "cuda")]
        Machine::Gpu(_) => Box::new(gpu::IpcPeer::open(handle, sizes)?),
    })
}

/// One file with all three buffers, each page-aligned.
struct Mapped {
    map: MmapRaw,
    sizes: Sizes,
    /// The file, if this process created it.
    file: Option<NamedTempFile>,
}

const PAGE: usize = 4096;

/// Offsets of the buffers in the file, and its length.
fn places(sizes: Sizes) -> [usize; 4] {
    let [a, b, c] = sizes.map(|size| size.next_multiple_of(PAGE));
    [0, a, a + b, a + b + c]
}

impl Mapped {
    fn new(sizes: Sizes) -> Result<Self, String> {
        let file = NamedTempFile::new().map_err(text)?;
        file.as_file().set_len(places(sizes)[3] as u64).map_err(text)?;
        let map = MmapOptions::new().len(places(sizes)[3]).map_raw(file.as_file()).map_err(text)?;
        Ok(Self { map, sizes, file: Some(file) })
    }

    fn open(path: &str, sizes: Sizes) -> Result<Self, String> {
        let file = std::fs::File::options().read(true).write(true).open(path).map_err(text)?;
        let length = file.metadata().map_err(text)?.len();
        if length < places(sizes)[3] as u64 {
            return Err(format!("the other process' file has {length} bytes, expected {}", places(sizes)[3]));
        }
        let map = MmapOptions::new().len(places(sizes)[3]).map_raw(&file).map_err(text)?;
        Ok(Self { map, sizes, file: None })
    }
}

impl Shared for Mapped {
    fn handle(&self) -> Result<String, String> {
        self.file.as_ref().map(|file| file.path().display().to_string()).ok_or_else(|| NOT_OURS.to_owned())
    }

    fn buffer(&self, which: usize) -> Buffer {
        let address = self.map.as_ptr() as u64 + places(self.sizes)[which] as u64;
        Buffer { address, bytes: self.sizes[which] as u64 }
    }

    fn write(&self, which: usize, bytes: &[u8]) -> Result<(), String> {
        assert!(bytes.len() <= self.sizes[which], "{} bytes are more than {}", bytes.len(), self.sizes[which]);
        let to = self.buffer(which).address as *mut u8;
        // SAFETY: within the map; the other process does not know this memory yet.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, which: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; self.sizes[which]];
        let from = self.buffer(which).address as *const u8;
        // SAFETY: within the map; both ranks have left the collective, so no rank writes.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) };
        Ok(bytes)
    }
}
