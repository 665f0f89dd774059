//! Rows in GPU memory.

use std::marker::PhantomData;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{ReceivedRows, Space};

use crate::team::Buffer;

/// Memory of this rank's GPU.
#[derive(Clone, Copy, Debug)]
pub enum Gpu {}

/// Elements in the memory of this rank's GPU.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a, T> {
    buffer: Buffer,
    memory: PhantomData<&'a mut [T]>,
}

impl<T: Element> DeviceRows<'_, T> {
    /// Wraps `len` elements that start at `address`, a multiple of [`ELEMENT_ALIGNMENT`](crate::ELEMENT_ALIGNMENT).
    ///
    /// # Safety
    /// The elements must be memory of this rank's GPU until the rank's stream has passed every call that uses them.
    /// While a call writes them, nothing else may use them; while a call reads them, nothing else may write them.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        Self::of(Buffer { address, bytes: (len * size_of::<T>()) as u64 })
    }

    pub(crate) fn of(buffer: Buffer) -> Self {
        Self { buffer, memory: PhantomData }
    }

    /// Returns the elements' buffer; null if there are none.
    pub fn buffer(&self) -> Buffer {
        if self.is_empty() { Buffer::default() } else { self.buffer }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.buffer.bytes as usize / size_of::<T>()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The rows received in a dispatch, `[R, H]`, contiguous.
#[derive(Debug)]
pub struct DeviceReceived<'a, T> {
    /// Their elements.
    pub rows: DeviceRows<'a, T>,
    /// The number of rows and their ranks, without elements.
    pub index: ReceivedRows<'a, T>,
}

impl Space for Gpu {
    type Read<'a, T: Element> = DeviceRows<'a, T>;
    type Write<'a, T: Element> = DeviceRows<'a, T>;
    type Received<'a, T: Element> = DeviceReceived<'a, T>;

    fn elements<T: Element>(rows: &DeviceRows<'_, T>) -> usize {
        rows.len()
    }

    fn elements_mut<T: Element>(rows: &DeviceRows<'_, T>) -> usize {
        rows.len()
    }
}
