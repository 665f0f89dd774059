//! GPU memory: by cuIpc, and by file descriptors.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::driver::Device;
use semmoe_kernels_cuda::driver::memory::{self, DeviceBuffer, PeerBuffer, synchronize};
use semmoe_kernels_cuda::vmm::Memory;

use super::{NOT_OURS, Shared, Sizes};
use crate::machine::text;

/// Memory of this process.
pub(super) struct Ipc([DeviceBuffer; 3]);

impl Ipc {
    pub(super) fn new(sizes: Sizes) -> Result<Self, String> {
        let new = |which: usize| DeviceBuffer::new(sizes[which]).map_err(text);
        Ok(Self([new(0)?, new(1)?, new(2)?]))
    }
}

impl Shared for Ipc {
    fn handle(&self) -> Result<String, String> {
        synchronize().map_err(text)?;
        let mut digits = String::new();
        for buffer in &self.0 {
            for byte in buffer.export().map_err(text)? {
                digits.push_str(&format!("{byte:02x}"));
            }
        }
        Ok(digits)
    }

    fn buffer(&self, which: usize) -> Buffer {
        self.0[which].buffer()
    }

    fn write(&self, which: usize, bytes: &[u8]) -> Result<(), String> {
        self.0[which].write(bytes).map_err(text)
    }

    fn read(&self, which: usize) -> Result<Vec<u8>, String> {
        self.0[which].read().map_err(text)
    }
}

/// Memory of the other process.
pub(super) struct IpcPeer([PeerBuffer; 3]);

impl IpcPeer {
    pub(super) fn open(handle: &str, sizes: Sizes) -> Result<Self, String> {
        let open = |index: usize| {
            let mut bytes = [0; 64];
            for (at, slot) in bytes.iter_mut().enumerate() {
                let at = 2 * (64 * index + at);
                let digits = handle.get(at..at + 2).ok_or("a handle is truncated")?;
                *slot = u8::from_str_radix(digits, 16).map_err(text)?;
            }
            PeerBuffer::open(&bytes, sizes[index] as u64).map_err(text)
        };
        Ok(Self([open(0)?, open(1)?, open(2)?]))
    }
}

impl Shared for IpcPeer {
    fn handle(&self) -> Result<String, String> {
        Err(NOT_OURS.to_owned())
    }

    fn buffer(&self, which: usize) -> Buffer {
        self.0[which].buffer()
    }

    fn write(&self, _: usize, _: &[u8]) -> Result<(), String> {
        Err(NOT_OURS.to_owned())
    }

    fn read(&self, _: usize) -> Result<Vec<u8>, String> {
        Err(NOT_OURS.to_owned())
    }
}

/// Memory of either process, shared by file descriptors that the other takes with `pidfd_getfd`.
pub(super) struct Virtual<'m> {
    memory: [Memory<'m, Device>; 3],
    sizes: Sizes,
    /// Kept open while the other process may take them.
    files: Vec<OwnedFd>,
}

impl<'m> Virtual<'m> {
    pub(super) fn new(device: &'m Device, sizes: Sizes) -> Result<Self, String> {
        let new = |which: usize| Memory::new(device, sizes[which] as u64, None).map_err(text);
        let memory = [new(0)?, new(1)?, new(2)?];
        let files = memory.iter().map(|memory| memory.export().map_err(text)).collect::<Result<_, _>>()?;
        Ok(Self { memory, sizes, files })
    }

    pub(super) fn open(device: &'m Device, handle: &str, sizes: Sizes) -> Result<Self, String> {
        let numbers: Vec<i64> =
            handle.split(' ').map(str::parse).collect::<Result<_, _>>().map_err(|_| "a handle has no numbers")?;
        let [pid, rest @ ..] = &numbers[..] else { return Err("a handle is truncated".to_owned()) };
        let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw).ok_or("a handle has no process")?;
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| format!("pidfd_open: {error}"))?;
        let open = |which: usize| {
            let [file, bytes] = rest.get(2 * which..2 * which + 2).ok_or("a handle is truncated")? else {
                return Err("a handle is truncated".to_owned());
            };
            let file = i32::try_from(*file).map_err(text)?;
            let file = pidfd_getfd(&process, file, PidfdGetfdFlags::empty())
                .map_err(|error| format!("pidfd_getfd: {error}"))?;
            Memory::import(device, file.as_fd(), u64::try_from(*bytes).map_err(text)?).map_err(text)
        };
        Ok(Self { memory: [open(0)?, open(1)?, open(2)?], sizes, files: Vec::new() })
    }
}

impl Shared for Virtual<'_> {
    fn handle(&self) -> Result<String, String> {
        synchronize().map_err(text)?;
        let mut line = std::process::id().to_string();
        for (memory, file) in self.memory.iter().zip(&self.files) {
            line.push_str(&format!(" {} {}", file.as_raw_fd(), memory.buffer().bytes));
        }
        Ok(line)
    }

    fn buffer(&self, which: usize) -> Buffer {
        Buffer { bytes: self.sizes[which] as u64, ..self.memory[which].buffer() }
    }

    fn write(&self, which: usize, bytes: &[u8]) -> Result<(), String> {
        assert!(bytes.len() <= self.sizes[which], "{} bytes are more than {}", bytes.len(), self.sizes[which]);
        // SAFETY: mapped, with at least these bytes.
        unsafe { memory::write(self.buffer(which), bytes) }.map_err(text)
    }

    fn read(&self, which: usize) -> Result<Vec<u8>, String> {
        // SAFETY: mapped, with at least these bytes.
        unsafe { memory::read(self.buffer(which), self.sizes[which]) }.map_err(text)
    }
}
