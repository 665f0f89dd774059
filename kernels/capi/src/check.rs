//! All checks of a call that the host can make before any work, for all devices.

use std::time::Duration;

use semmoe_kernels::Dtype;

use crate::abi::{
    ALIGNMENT, AllReduce, Allgather, Argsort, Combine, DispatchArgs, HasRows, InitArgs, MAX_TOP_K, MAX_WORLD,
    MULTICAST_ALLGATHER, MULTICAST_REDUCE_SCATTER, Multicast, ReduceScatter, RowFields, Sized64,
};
use crate::backend::{Facts, signal_bytes};
use crate::failure::{Code, Failure};

/// Arguments that can be checked against a communicator.
pub(crate) trait Checked: Sized64 {
    fn check(&self, facts: &Facts) -> Result<(), Failure>;
}

/// Returns the structure after checking that it has the size it states.
///
/// # Safety
/// `args` must be null, or readable up to the size in its first field.
pub(crate) unsafe fn sized<'a, A: Sized64>(args: *const A) -> Result<&'a A, Failure> {
    if args.is_null() {
        return Err(Failure::invalid("the arguments are null"));
    }
    aligned("the arguments", args.addr() as u64, align_of::<A>() as u64)?;
    // SAFETY: the pointer is not null and aligned, and every structure begins with its size.
    let found = unsafe { args.cast::<u64>().read() };
    let expected = size_of::<A>() as u64;
    if found != expected {
        return Err(Failure::invalid(format!("struct_bytes is {found}, expected {expected}")));
    }
    // SAFETY: the structure has the expected size.
    Ok(unsafe { &*args })
}

pub(crate) fn world(found: u32) -> Result<(), Failure> {
    match found {
        1..=MAX_WORLD => Ok(()),
        _ => Err(Failure::invalid(format!("world is {found}, expected 1 to {MAX_WORLD}"))),
    }
}

/// Checks the arguments of `semmoe_init`.
pub(crate) fn init(args: &InitArgs) -> Result<Facts, Failure> {
    world(args.world)?;
    if args.rank >= args.world {
        let message = format!("rank is {}, expected below {}", args.rank, args.world);
        return Err(Failure::new(Code::OutOfRange, message));
    }
    let needed = signal_bytes(args.device)?;
    if args.signal_bytes < needed {
        let message = format!("signal_bytes is {}, expected at least {needed}", args.signal_bytes);
        return Err(Failure::new(Code::TooLarge, message));
    }
    if args.timeout_ms == 0 {
        return Err(Failure::invalid("timeout_ms is 0, expected at least 1"));
    }
    at_most("max_tokens", args.max_tokens, i32::MAX as u64)?;
    pointer("buffers", args.buffers, args.world.into(), align_of::<usize>() as u64)?;
    pointer("signals", args.signals, args.world.into(), align_of::<usize>() as u64)?;
    for rank in 0..args.world as usize {
        // SAFETY: the header requires `world` elements.
        let (buffer, signals) = unsafe { (*args.buffers.add(rank), *args.signals.add(rank)) };
        pointer("a symmetric buffer", buffer, args.buffer_bytes, ALIGNMENT)?;
        pointer("signals of a rank", signals, args.signal_bytes, 64)?;
    }
    // SAFETY: as above, `world` elements.
    let buffer = unsafe { *args.buffers.add(args.rank as usize) }.addr();
    Ok(Facts {
        rank: args.rank as usize,
        world: args.world as usize,
        buffer,
        buffer_bytes: args.buffer_bytes,
        max_tokens: args.max_tokens,
        timeout: Duration::from_millis(args.timeout_ms),
    })
}

impl Checked for Argsort {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        at_most("n", self.n, facts.max_tokens)?;
        ids("destinations", self.destinations, self.n)?;
        ids("permutation", self.permutation, self.n)?;
        ids("inverse", self.inverse, self.n)?;
        ids("offsets", self.offsets, facts.world as u64 + 1)
    }
}

impl Checked for ReduceScatter {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        let Rows { row, all, capacity: rows } = Rows::of(facts, self)?;
        let part = place(facts, "part", self.part_offset, all)?;
        elements(facts, "out", self.out, rows, &[part])?;
        if self.norm_weight.is_null() {
            return match self.residual.is_null() && self.residual_out.is_null() {
                true => Ok(()),
                false => Err(Failure::invalid("norm_weight is null, so residual and residual_out must be null too")),
            };
        }
        if !(self.epsilon >= 0.0 && self.epsilon.is_finite()) {
            return Err(Failure::invalid(format!("epsilon is {}, expected 0 or more", self.epsilon)));
        }
        at_most("hidden of the fused norm", self.hidden, semmoe_ranks::MAX_NORM_WIDTH as u64)?;
        elements(facts, "norm_weight", self.norm_weight, row, &[])?;
        elements(facts, "residual", self.residual, all, &[])?;
        elements(facts, "residual_out", self.residual_out, rows, &[part])?;
        let taken =
            [(self.out.addr() as u64, rows), (self.residual.addr() as u64, all), (self.norm_weight.addr() as u64, row)];
        apart("residual_out", (self.residual_out.addr() as u64, rows), &taken)?;
        apart("out", taken[0], &taken[1..])
    }
}

impl Checked for Allgather {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        let rows = Rows::of(facts, self)?;
        let out = place(facts, "out", self.out_offset, rows.all)?;
        elements(facts, "rows", self.rows, rows.capacity, &[out])
    }
}

impl Checked for AllReduce {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        let rows = Rows::of(facts, self)?;
        let part = place(facts, "part", self.part_offset, rows.all)?;
        let out = place(facts, "out", self.out_offset, rows.all)?;
        if part == out { Ok(()) } else { apart("out", out, &[part]) }
    }
}

impl Checked for DispatchArgs {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        let rows = Rows::of(facts, self)?;
        if !(1..=MAX_TOP_K).contains(&self.top_k) {
            return Err(Failure::invalid(format!("top_k is {}, expected 1 to {MAX_TOP_K}", self.top_k)));
        }
        at_most("experts_total", self.experts_total, i32::MAX as u64)?;
        let pairs = self.capacity * u64::from(self.top_k) * 4;
        let places = [
            place(facts, "received rows", self.rows_offset, rows.capacity)?,
            place(facts, "received tokens", self.tokens_offset, self.capacity * 4)?,
            place(facts, "received experts", self.experts_offset, pairs)?,
            place(facts, "received weights", self.weights_offset, pairs)?,
        ];
        let slots = self.tokens * u64::from(self.top_k);
        ids("rank_of_expert", self.rank_of_expert, self.experts_total)?;
        ids("experts", self.experts, slots)?;
        ids("weights", self.weights, slots)?;
        ids("source_offsets", self.source_offsets, facts.world as u64 + 1)?;
        ids("sent_rows", self.sent_rows, self.tokens * facts.world as u64)?;
        elements(facts, "x", self.x, rows.all, &places)
    }
}

impl Checked for Combine {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        let rows = Rows::of(facts, self)?;
        let sums = place(facts, "sums", self.sums_offset, rows.capacity)?;
        ids("sent_rows", self.sent_rows, self.tokens * facts.world as u64)?;
        elements(facts, "out", self.out, rows.all, &[sums])
    }
}

impl Checked for Multicast {
    fn check(&self, facts: &Facts) -> Result<(), Failure> {
        reserved(self.reserved)?;
        if self.operations & !(MULTICAST_REDUCE_SCATTER | MULTICAST_ALLGATHER) != 0 {
            return Err(Failure::invalid(format!("operations is {:#x}, expected 0 to 3", self.operations)));
        }
        if self.operations == 0 {
            return match self.address.is_null() {
                true => Ok(()),
                false => Err(Failure::invalid("operations is 0, so the multicast address must be null")),
            };
        }
        pointer("the multicast address", self.address, 1, ALIGNMENT)?;
        if self.bytes < facts.buffer_bytes {
            let message =
                format!("the multicast address has {} bytes, expected at least {}", self.bytes, facts.buffer_bytes);
            return Err(Failure::new(Code::TooLarge, message));
        }
        match (self.address.addr() as u64).checked_add(self.bytes) {
            Some(_) => Ok(()),
            None => Err(Failure::new(Code::TooLarge, "the multicast address ends past the address space")),
        }
    }
}

/// An address or offset, and the number of bytes that start there.
type Range = (u64, u64);

/// Sizes of one row, of all tokens' rows, and of the maximum number of rows.
struct Rows {
    row: u64,
    all: u64,
    capacity: u64,
}

impl Rows {
    fn of(facts: &Facts, args: &impl HasRows) -> Result<Self, Failure> {
        let RowFields { tokens, hidden, dtype, reserved: padding, capacity, permutation, offsets } = args.rows();
        let dtype = Dtype::from_code(dtype)
            .ok_or_else(|| Failure::invalid(format!("dtype is {dtype}, expected 0 (f32), 1 (f16) or 2 (bf16)")))?;
        reserved(padding)?;
        at_most("tokens", tokens, facts.max_tokens)?;
        at_most("hidden", hidden, i32::MAX as u64)?;
        at_most("capacity", capacity, i32::MAX as u64)?;
        // Both may be null; the device checks their contents.
        aligned("permutation", permutation.addr() as u64, 4)?;
        aligned("offsets", offsets.addr() as u64, 4)?;
        let row = hidden * dtype.bytes() as u64;
        Ok(Self { row, all: tokens * row, capacity: capacity * row })
    }
}

fn reserved(found: u32) -> Result<(), Failure> {
    if found == 0 { Ok(()) } else { Err(Failure::invalid(format!("reserved is {found}, expected 0"))) }
}

fn at_most(what: &str, found: u64, limit: u64) -> Result<(), Failure> {
    let message = || format!("{what} is {found}, expected at most {limit}");
    if found <= limit { Ok(()) } else { Err(Failure::new(Code::TooLarge, message())) }
}

/// Returns a checked range in the symmetric buffer.
fn place(facts: &Facts, what: &str, offset: u64, bytes: u64) -> Result<Range, Failure> {
    aligned(what, offset, ALIGNMENT)?;
    let (end, limit) = (offset.saturating_add(bytes), facts.buffer_bytes);
    if end > limit {
        let message = format!("{what} ends at byte {end}, but the symmetric buffer has only {limit}");
        return Err(Failure::new(Code::TooLarge, message));
    }
    Ok((offset, bytes))
}

fn aligned(what: &str, found: u64, alignment: u64) -> Result<(), Failure> {
    let message = || format!("{what} is at {found:#x}, expected a multiple of {alignment}");
    if found.is_multiple_of(alignment) { Ok(()) } else { Err(Failure::new(Code::Misaligned, message())) }
}

/// Checks a pointer to `count` values, which may be null if `count` is 0.
fn pointer<T>(what: &str, pointer: *const T, count: u64, alignment: u64) -> Result<(), Failure> {
    if pointer.is_null() && count > 0 {
        return Err(Failure::invalid(format!("{what} is null")));
    }
    aligned(what, pointer.addr() as u64, alignment)
}

/// Checks an array of int32 or float values.
fn ids<T>(what: &str, array: *const T, count: u64) -> Result<(), Failure> {
    pointer(what, array, count, 4)
}

/// Checks the caller's own rows: they must be aligned, and disjoint from the ranges of this rank's symmetric buffer
/// that the call uses.
fn elements<T>(facts: &Facts, what: &str, rows: *const T, bytes: u64, places: &[Range]) -> Result<(), Failure> {
    pointer(what, rows, bytes, ALIGNMENT)?;
    let from = rows.addr() as u64;
    if from.checked_add(bytes).is_none() {
        return Err(Failure::new(Code::TooLarge, format!("{what} ends past the address space")));
    }
    for &(offset, length) in places {
        apart(what, (from, bytes), &[(facts.buffer as u64 + offset, length)])?;
    }
    Ok(())
}

fn apart(what: &str, (from, bytes): Range, others: &[Range]) -> Result<(), Failure> {
    match others.iter().any(|&(other, length)| from < other + length && other < from + bytes && bytes > 0 && length > 0)
    {
        false => Ok(()),
        true => Err(Failure::invalid(format!("{what} overlaps another array of this call"))),
    }
}
