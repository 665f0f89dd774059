//! Integer arrays in safetensors files written by other programs.

use std::path::Path;

use crate::FormatError;
use crate::container::{Foreign, element_bytes};

/// A mapped safetensors file with a checked header. Names, element types and metadata are up to its writer.
#[derive(Debug)]
pub struct Arrays(Foreign);

/// One array of the file, in row-major order.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    bytes: &'a [u8],
    /// Bytes per element; 0 for types other than integers.
    width: usize,
}

impl Arrays {
    /// Maps a file.
    ///
    /// # Errors
    /// If the file cannot be read or is not a valid safetensors container.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        Foreign::open(path).map(Self)
    }

    /// Parses an in-memory safetensors file.
    ///
    /// # Errors
    /// See [`Arrays::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, FormatError> {
        Foreign::from_bytes(bytes).map(Self)
    }

    /// Returns the names of all arrays, in ascending order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.tensors.keys().map(String::as_str)
    }

    /// Looks up an array by name.
    pub fn get(&self, name: &str) -> Option<Array<'_>> {
        let tensor = self.0.tensors.get(name)?;
        let integer = tensor.dtype == "BOOL" || tensor.dtype.starts_with(['U', 'I']);
        let width = element_bytes(&tensor.dtype).filter(|_| integer).unwrap_or(0) as usize;
        Some(Array { dtype: &tensor.dtype, shape: &tensor.shape, bytes: self.0.bytes(tensor), width })
    }
}

impl<'a> Array<'a> {
    /// Returns the element type as spelled in safetensors.
    pub fn dtype(&self) -> &'a str {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &'a [u64] {
        self.shape
    }

    /// Whether the elements are integers (or booleans).
    pub fn is_integer(&self) -> bool {
        self.width > 0
    }

    /// Reads one integer. Returns `None` if the elements are not integers, or the number exceeds [`i64::MAX`].
    ///
    /// # Panics
    /// If the index is out of range.
    pub fn int(&self, index: &[usize]) -> Option<i64> {
        assert_eq!(index.len(), self.shape.len(), "one index for each dimension");
        if !self.is_integer() {
            return None;
        }
        let at = index.iter().zip(self.shape).fold(0, |at, (index, size)| {
            assert!((*index as u64) < *size, "an index within the array");
            at * *size as usize + index
        });
        self.element(at)
    }

    /// Iterates over all integers in storage order; yields nothing if the elements are not integers.
    pub fn ints(self) -> impl Iterator<Item = Option<i64>> {
        (0..self.bytes.len().checked_div(self.width).unwrap_or(0)).map(move |at| self.element(at))
    }

    fn element(&self, at: usize) -> Option<i64> {
        let bytes = &self.bytes[at * self.width..][..self.width];
        let negative = self.dtype.starts_with('I') && bytes.last()? & 0x80 != 0;
        let mut word = [if negative { 0xff } else { 0 }; 8];
        word[..self.width].copy_from_slice(bytes);
        if negative { Some(i64::from_le_bytes(word)) } else { i64::try_from(u64::from_le_bytes(word)).ok() }
    }
}
