//! The CPU device: ranks are threads or processes with shared memory, and calls are synchronous.

use std::ffi::c_void;

use half::{bf16, f16};
use semmoe_kernels::{Dtype, Element, RoutedTokens, RowSplit, argsort_into, even_part};
use semmoe_ranks::{Communicator, Dispatch, MAX_WORLD, Norm, RankError, RawGroup, Received, Routes, Span};

use crate::abi::{AllReduce, Allgather, Argsort, Combine, DispatchArgs, HasRows, InitArgs, ReduceScatter, RowFields};
use crate::backend::{Backend, Collectives, Facts};
use crate::failure::{Code, Failure};

/// One rank on the CPU.
pub(crate) struct Cpu(Communicator);

/// Calls a generic function with the element type that a checked code denotes.
macro_rules! by_dtype {
    ($code:expr, $function:ident($($argument:expr),*)) => {
        match Dtype::from_code($code) {
            Some(Dtype::F16) => $function::<f16>($($argument),*),
            Some(Dtype::Bf16) => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}

impl Cpu {
    /// # Safety
    /// Buffers and signals must meet the header's requirements.
    pub(crate) unsafe fn join(args: &InitArgs, facts: &Facts) -> Result<Self, Failure> {
        let (mut buffers, mut signals) = ([std::ptr::null_mut(); MAX_WORLD], [std::ptr::null_mut(); MAX_WORLD]);
        for rank in 0..facts.world {
            // SAFETY: the arrays have `world` elements.
            (buffers[rank], signals[rank]) =
                unsafe { ((*args.buffers.add(rank)).cast::<u8>(), (*args.signals.add(rank)).cast::<u8>()) };
        }
        let group = RawGroup {
            rank: facts.rank,
            buffers: &buffers[..facts.world],
            buffer_bytes: facts.buffer_bytes as usize,
            signals: &signals[..facts.world],
            timeout: facts.timeout,
        };
        // SAFETY: upheld by the caller.
        let mut comm = unsafe { Communicator::join(group) }?;
        comm.reserve(facts.max_tokens as usize);
        Ok(Self(comm))
    }
}

impl Collectives for Cpu {
    fn argsort(&mut self, facts: &Facts, args: &Argsort, _: *mut c_void) -> Result<(), Failure> {
        // SAFETY: the caller guarantees lengths; nulls and alignment have been checked. A negative int32 becomes a
        // large u32.
        let (destinations, permutation, inverse, offsets) = unsafe {
            (
                slice::<u32>(args.destinations.cast(), args.n),
                slice_mut::<u32>(args.permutation.cast(), args.n),
                slice_mut::<u32>(args.inverse.cast(), args.n),
                slice_mut::<u32>(args.offsets.cast(), facts.world as u64 + 1),
            )
        };
        Ok(argsort_into(destinations, permutation, inverse, offsets)?)
    }

    fn reduce_scatter(&mut self, _: &Facts, args: &ReduceScatter, _: *mut c_void) -> Result<(), Failure> {
        by_dtype!(args.dtype, reduce_scatter(&mut self.0, args))
    }

    fn allgather(&mut self, _: &Facts, args: &Allgather, _: *mut c_void) -> Result<(), Failure> {
        by_dtype!(args.dtype, allgather(&mut self.0, args))
    }

    fn all_reduce(&mut self, _: &Facts, args: &AllReduce, _: *mut c_void) -> Result<(), Failure> {
        by_dtype!(args.dtype, all_reduce(&mut self.0, args))
    }

    fn dispatch(&mut self, _: &Facts, args: &DispatchArgs, _: *mut c_void) -> Result<(), Failure> {
        by_dtype!(args.dtype, dispatch(&mut self.0, args))
    }

    fn combine(&mut self, _: &Facts, args: &Combine, _: *mut c_void) -> Result<(), Failure> {
        by_dtype!(args.dtype, combine(&mut self.0, args))
    }
}

impl Backend for Cpu {
    fn check(&mut self) -> Result<(), Failure> {
        // Calls are synchronous, so there are no later errors.
        Ok(())
    }
}

fn reduce_scatter<T: Element>(comm: &mut Communicator, args: &ReduceScatter) -> Result<(), Failure> {
    let hidden = args.hidden as usize;
    let run = |comm: &mut Communicator, split: RowSplit<'_>, rows: u64| {
        let part = Span::<T>::new(args.part_offset as usize, split.tokens() * hidden)?;
        // SAFETY: `out` has `capacity` rows, at least as many as are written, and overlaps no other operand (checked).
        let out = unsafe { slice_mut::<T>(args.out.cast(), rows * args.hidden) };
        if args.norm_weight.is_null() {
            return comm.reduce_scatter(part, hidden, split, out);
        }
        // SAFETY: as above; the arrays have at least `capacity` rows.
        let norm = unsafe {
            Norm {
                residual: slice::<T>(args.residual.cast(), args.tokens * args.hidden),
                weight: slice::<T>(args.norm_weight.cast(), args.hidden),
                epsilon: args.epsilon,
                residual_out: slice_mut::<T>(args.residual_out.cast(), rows * args.hidden),
            }
        };
        comm.reduce_scatter_norm(part, hidden, split, norm, out)
    };
    // SAFETY: the caller guarantees that the pointers are valid for these lengths.
    unsafe { with_split(comm, args.rows(), run) }
}

fn allgather<T: Element>(comm: &mut Communicator, args: &Allgather) -> Result<(), Failure> {
    let run = |comm: &mut Communicator, split: RowSplit<'_>, rows: u64| {
        let hidden = args.hidden as usize;
        let out = Span::new(args.out_offset as usize, split.tokens() * hidden)?;
        // SAFETY: `rows` has `capacity` rows, at least as many as are read, and does not overlap the output (checked).
        comm.allgather(unsafe { slice::<T>(args.rows.cast(), rows * args.hidden) }, hidden, split, out)
    };
    // SAFETY: the caller guarantees that the pointers are valid for these lengths.
    unsafe { with_split(comm, args.rows(), run) }
}

fn all_reduce<T: Element>(comm: &mut Communicator, args: &AllReduce) -> Result<(), Failure> {
    let elements = args.tokens as usize * args.hidden as usize;
    let part = Span::<T>::new(args.part_offset as usize, elements)?;
    Ok(comm.all_reduce(part, Span::new(args.out_offset as usize, elements)?)?)
}

fn dispatch<T: Element>(comm: &mut Communicator, args: &DispatchArgs) -> Result<(), Failure> {
    let slots = args.tokens * u64::from(args.top_k);
    let (capacity, top_k, hidden) = (args.capacity as usize, args.top_k as usize, args.hidden as usize);
    let received = Received {
        rows: Span::<T>::new(args.rows_offset as usize, capacity * hidden)?,
        tokens: Span::new(args.tokens_offset as usize, capacity)?,
        experts: Span::new(args.experts_offset as usize, capacity * top_k)?,
        weights: Span::new(args.weights_offset as usize, capacity * top_k)?,
    };
    // SAFETY: the caller guarantees lengths; nulls and alignment have been checked.
    let (routes, out) = unsafe {
        let routes = Routes {
            tokens: RoutedTokens {
                x: slice::<T>(args.x.cast(), args.tokens * args.hidden),
                experts: slice(args.experts, slots),
                weights: slice(args.weights, slots),
            },
            rank_of_expert: slice::<u32>(args.rank_of_expert.cast(), args.experts_total),
            top_k,
            hidden,
        };
        let source_offsets = slice_mut::<u32>(args.source_offsets.cast(), comm.world() as u64 + 1);
        (routes, Dispatch { source_offsets, sent_rows: slice_mut(args.sent_rows, args.tokens * comm.world() as u64) })
    };
    Ok(comm.dispatch(routes, received, out)?)
}

fn combine<T: Element>(comm: &mut Communicator, args: &Combine) -> Result<(), Failure> {
    let hidden = args.hidden as usize;
    let sums = Span::<T>::new(args.sums_offset as usize, args.capacity as usize * hidden)?;
    // SAFETY: the caller guarantees lengths; nulls, alignment and overlap of `out` with the sums have been checked.
    let (sent_rows, out) = unsafe {
        let sent_rows = slice(args.sent_rows, args.tokens * comm.world() as u64);
        (sent_rows, slice_mut::<T>(args.out.cast(), args.tokens * args.hidden))
    };
    Ok(comm.combine(sums, hidden, sent_rows, out)?)
}

/// Runs a call with the caller's order, or the default one if null, and with this rank's number of rows, which must not
/// exceed the capacity.
///
/// # Safety
/// `permutation` must be null or have `tokens` elements; `offsets` must be null or have one element more than there are
/// ranks.
unsafe fn with_split(
    comm: &mut Communicator,
    call: RowFields,
    run: impl FnOnce(&mut Communicator, RowSplit<'_>, u64) -> Result<(), RankError>,
) -> Result<(), Failure> {
    let (world, tokens) = (comm.world(), call.tokens as usize);
    let mut even = [0; MAX_WORLD + 1];
    let offsets = if call.offsets.is_null() {
        even.iter_mut().enumerate().for_each(|(rank, offset)| *offset = even_part(tokens, world, rank));
        &even[..=world]
    } else {
        // SAFETY: upheld by the caller.
        unsafe { slice(call.offsets.cast(), world as u64 + 1) }
    };
    let end = offsets[world] as usize;
    if end != tokens {
        return Err(Failure::new(Code::OutOfRange, format!("offsets end at {end}, expected {tokens} tokens")));
    }
    let split = if call.permutation.is_null() {
        RowSplit::contiguous(offsets)?
    } else {
        // SAFETY: upheld by the caller.
        comm.check_split(unsafe { slice(call.permutation.cast(), call.tokens) }, offsets)?
    };
    let (rows, capacity) = (split.positions(comm.rank().index()).len() as u64, call.capacity);
    if rows > capacity {
        let message = format!("this rank has {rows} rows, but the capacity is {capacity}");
        return Err(Failure::new(Code::TooLarge, message));
    }
    Ok(run(comm, split, rows)?)
}

/// # Safety
/// `from` must have `len` aligned values, or `len` must be 0.
unsafe fn slice<'a, T: bytemuck::Pod>(from: *const T, len: u64) -> &'a [T] {
    match len {
        0 => &[],
        // SAFETY: upheld by the caller; null was rejected unless `len` is 0.
        _ => unsafe { std::slice::from_raw_parts(from, len as usize) },
    }
}

/// # Safety
/// See [`slice`]; in addition, nothing else may access the values during `'a`.
unsafe fn slice_mut<'a, T: bytemuck::Pod>(from: *mut T, len: u64) -> &'a mut [T] {
    match len {
        0 => &mut [],
        // SAFETY: as for `slice`, with exclusive access.
        _ => unsafe { std::slice::from_raw_parts_mut(from, len as usize) },
    }
}
