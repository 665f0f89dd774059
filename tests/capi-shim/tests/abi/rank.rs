//! Ranks as threads, each with a CUDA communicator; calls as from a C program.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};

use bytemuck::Pod;
use semmoe_kernels::Element;
use semmoe_kernels_capi_shim::capi::abi::{self, AllReduce, Allgather, Argsort, InitArgs, Multicast, ReduceScatter};
use semmoe_kernels_capi_shim::capi::{self, Comm};
use semmoe_kernels_cuda::SIGNAL_BYTES;
use semmoe_kernels_shim::{Compiler, HostBuffer};

pub(crate) const BUFFER_BYTES: usize = 1 << 18;
pub(crate) const MAX_TOKENS: u64 = 256;

#[repr(C, align(64))]
struct Line(UnsafeCell<[u8; 64]>);
// SAFETY: ranks write to it only inside their calls, whose order the tests fix.
unsafe impl Sync for Line {}

fn lines(bytes: usize, byte: u8) -> Vec<Line> {
    (0..bytes.div_ceil(64)).map(|_| Line(UnsafeCell::new([byte; 64]))).collect()
}

fn pointers(memory: &[Vec<Line>]) -> Vec<*mut c_void> {
    memory.iter().map(|lines| lines.as_ptr().cast_mut().cast()).collect()
}

/// Symmetric buffers and signals of P ranks.
pub(crate) struct World {
    buffers: Vec<Vec<Line>>,
    signals: Vec<Vec<Line>>,
    timeout_ms: u64,
}

impl World {
    /// `None`, with a notice, without a C++ compiler.
    pub(crate) fn new(ranks: usize) -> Option<Self> {
        if Compiler::find().is_none() {
            eprintln!("notice: no C++ compiler (c++, g++ or clang++), so the CUDA kernels are not run");
            return None;
        }
        semmoe_kernels_capi_shim::install();
        let buffers = (0..ranks).map(|_| lines(BUFFER_BYTES, 0xff)).collect();
        // A millisecond is a thousand rounds of the shim without progress.
        Some(Self { buffers, signals: (0..ranks).map(|_| lines(SIGNAL_BYTES as usize, 0)).collect(), timeout_ms: 1 })
    }

    pub(crate) fn join(&self, rank: usize) -> Rank<'_> {
        let (buffers, signals) = (pointers(&self.buffers), pointers(&self.signals));
        let args = InitArgs {
            struct_bytes: size_of::<InitArgs>() as u64,
            device: abi::DEVICE_CUDA,
            ordinal: 0,
            rank: rank as u32,
            world: self.buffers.len() as u32,
            buffer_bytes: BUFFER_BYTES as u64,
            signal_bytes: SIGNAL_BYTES,
            buffers: buffers.as_ptr(),
            signals: signals.as_ptr(),
            max_tokens: MAX_TOKENS,
            timeout_ms: self.timeout_ms,
        };
        let mut comm = std::ptr::null_mut();
        // SAFETY: the memory has the sizes that are given and outlives the rank.
        let status = unsafe { capi::semmoe_init(&args, &mut comm) };
        assert_eq!(status, abi::OK, "{}", message());
        Rank { comm, rank, world: self }
    }

    /// Runs every rank on its own thread.
    pub(crate) fn each<R: Send>(&self, run: impl Fn(&mut Rank<'_>) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let one = |rank| {
                let run = &run;
                scope.spawn(move || run(&mut self.join(rank)))
            };
            let threads: Vec<_> = (0..self.buffers.len()).map(one).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// The calling thread's last error message.
pub(crate) fn message() -> String {
    // SAFETY: a null-terminated string, valid until this thread's next failure.
    unsafe { CStr::from_ptr(capi::semmoe_last_error()) }.to_string_lossy().into_owned()
}

/// One rank's communicator.
pub(crate) struct Rank<'a> {
    comm: *mut Comm,
    pub(crate) rank: usize,
    world: &'a World,
}

// SAFETY: any thread may use a communicator; concurrent calls are refused.
unsafe impl Sync for Rank<'_> {}

impl Drop for Rank<'_> {
    fn drop(&mut self) {
        // SAFETY: null, or from `semmoe_init` and freed once.
        unsafe { capi::semmoe_free(self.comm) };
    }
}

/// An order of rows on the device; `None` splits the tokens evenly in their own order.
pub(crate) struct Order {
    pub(crate) permutation: HostBuffer,
    pub(crate) offsets: HostBuffer,
}

pub(crate) fn at<T>(memory: &HostBuffer) -> *mut T {
    memory.buffer().address as *mut T
}

pub(crate) fn holding<T: Pod>(values: &[T]) -> HostBuffer {
    HostBuffer::holding(bytemuck::cast_slice(values))
}

pub(crate) fn read<T: Pod>(memory: &HostBuffer) -> Vec<T> {
    memory.bytes().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// A call through the C interface; evaluates to its status.
macro_rules! call {
    ($rank:expr, $function:ident, $args:expr) => {
        // SAFETY: the communicator is alive, and the arguments point to memory of the lengths that the header requires,
        // or must be refused.
        unsafe { semmoe_kernels_capi_shim::capi::$function($rank.comm(), $args, std::ptr::null_mut()) }
    };
}
pub(crate) use call;

impl Rank<'_> {
    pub(crate) fn comm(&self) -> *mut Comm {
        self.comm
    }

    /// Passes ownership to the caller, who must free it.
    pub(crate) fn take(&mut self) -> *mut Comm {
        std::mem::replace(&mut self.comm, std::ptr::null_mut())
    }

    pub(crate) fn ranks(&self) -> usize {
        self.world.buffers.len()
    }

    /// Errors reported asynchronously.
    pub(crate) fn check(&self) -> (i32, String) {
        // SAFETY: the communicator is alive.
        let status = unsafe { capi::semmoe_check(self.comm) };
        (status, if status == abi::OK { String::new() } else { message() })
    }

    fn done(&self, status: i32) {
        assert_eq!(status, abi::OK, "{}", message());
        assert_eq!(self.check(), (abi::OK, String::new()));
    }

    /// Sends operations through the switch; the shim has none, so any aligned address will do.
    pub(crate) fn multicast(&self, operations: u32) {
        let buffer = self.world.buffers[self.rank].as_ptr().cast_mut().cast();
        let args = Multicast {
            struct_bytes: size_of::<Multicast>() as u64,
            address: if operations == 0 { std::ptr::null_mut() } else { buffer },
            bytes: BUFFER_BYTES as u64,
            operations,
            reserved: 0,
        };
        // SAFETY: the communicator is alive.
        let (has, status) =
            unsafe { (capi::semmoe_has_multicast(self.comm), capi::semmoe_multicast(self.comm, &args)) };
        assert_eq!((has, status), (1, abi::OK), "{}", message());
    }

    /// Overwrites a part of this rank's symmetric buffer.
    pub(crate) fn put<T: Pod>(&mut self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= BUFFER_BYTES);
        let own: *mut u8 = self.world.buffers[self.rank].as_ptr().cast_mut().cast();
        // SAFETY: within the buffer; no call that uses it is running, because the peers' calls end with this rank's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), own.add(offset), bytes.len()) };
    }

    /// Reads a part of this rank's symmetric buffer.
    pub(crate) fn get<T: Pod>(&self, offset: usize, count: usize) -> Vec<T> {
        assert!(offset + count * size_of::<T>() <= BUFFER_BYTES);
        let own: *const u8 = self.world.buffers[self.rank].as_ptr().cast();
        // SAFETY: as in `put`.
        (0..count).map(|i| unsafe { own.add(offset).cast::<T>().add(i).read_unaligned() }).collect()
    }

    pub(crate) fn argsort(&self, destinations: &[u32]) -> (Order, Vec<u32>) {
        let n = destinations.len();
        let (from, inverse) = (holding(destinations), HostBuffer::poisoned(n * 4));
        let order =
            Order { permutation: HostBuffer::poisoned(n * 4), offsets: HostBuffer::poisoned((self.ranks() + 1) * 4) };
        let args = Argsort {
            struct_bytes: size_of::<Argsort>() as u64,
            n: n as u64,
            destinations: at(&from),
            permutation: at(&order.permutation),
            inverse: at(&inverse),
            offsets: at(&order.offsets),
        };
        self.done(call!(self, semmoe_argsort, &args));
        (order, read(&inverse))
    }

    /// Sums of the parts at `part_offset`, in `rows` rows; with a norm also returns the new residual.
    pub(crate) fn reduce_scatter<T: Element>(
        &self,
        (tokens, hidden, part_offset): (usize, usize, usize),
        order: Option<&Order>,
        rows: usize,
        norm: Option<(&[T], &[T])>,
    ) -> (Vec<T>, Vec<T>) {
        let out = HostBuffer::poisoned(rows * hidden * size_of::<T>());
        let second = HostBuffer::poisoned(rows * hidden * size_of::<T>());
        let norm = norm.map(|(residual, weight)| (holding(residual), holding(weight)));
        let args = ReduceScatter {
            struct_bytes: size_of::<ReduceScatter>() as u64,
            tokens: tokens as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE as u32,
            epsilon: 1e-6,
            part_offset: part_offset as u64,
            permutation: order.map_or(std::ptr::null(), |order| at(&order.permutation)),
            offsets: order.map_or(std::ptr::null(), |order| at(&order.offsets)),
            capacity: rows as u64,
            out: at(&out),
            residual: norm.as_ref().map_or(std::ptr::null(), |(residual, _)| at(residual)),
            norm_weight: norm.as_ref().map_or(std::ptr::null(), |(_, weight)| at(weight)),
            residual_out: norm.as_ref().map_or(std::ptr::null_mut(), |_| at(&second)),
        };
        self.done(call!(self, semmoe_reduce_scatter, &args));
        (read(&out), read(&second))
    }

    /// All ranks' rows in the order of the tokens.
    pub(crate) fn allgather<T: Element>(
        &self,
        (tokens, hidden, out_offset): (usize, usize, usize),
        order: Option<&Order>,
        rows: &[T],
    ) -> Vec<T> {
        let from = holding(rows);
        let args = Allgather {
            struct_bytes: size_of::<Allgather>() as u64,
            tokens: tokens as u64,
            hidden: hidden as u64,
            dtype: T::DTYPE as u32,
            reserved: 0,
            out_offset: out_offset as u64,
            permutation: order.map_or(std::ptr::null(), |order| at(&order.permutation)),
            offsets: order.map_or(std::ptr::null(), |order| at(&order.offsets)),
            capacity: (rows.len() / hidden) as u64,
            rows: at(&from),
        };
        self.done(call!(self, semmoe_allgather, &args));
        self.get(out_offset, tokens * hidden)
    }

    pub(crate) fn all_reduce<T: Element>(&self, args: &AllReduce) -> Vec<T> {
        self.done(call!(self, semmoe_all_reduce, args));
        self.get(args.out_offset as usize, (args.tokens * args.hidden) as usize)
    }
}

pub(crate) fn all_reduce_args(dtype: u32, tokens: u64, hidden: u64, part_offset: u64, out_offset: u64) -> AllReduce {
    AllReduce {
        struct_bytes: size_of::<AllReduce>() as u64,
        tokens,
        hidden,
        dtype,
        reserved: 0,
        part_offset,
        out_offset,
    }
}

/// Compares bits.
pub(crate) fn same<T: Pod>(what: &str, found: &[T], expected: &[T]) {
    semmoe_reference::data::same(what, found, expected).unwrap();
}
