//! Element types, shapes and strides, checked against the bytes that are there.

use super::PickleError;

/// The element type of an array; all little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Element {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    /// Size of one in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether its values are integers.
    #[must_use]
    pub fn is_integer(self) -> bool {
        !matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }
}

/// Where the elements of an array lie in its storage, in elements.
#[derive(Clone, Debug)]
pub(super) struct Strided {
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

impl Strided {
    /// More than anything here has.
    pub(super) const MAX_DIMENSIONS: usize = 8;

    /// One without gaps, the last index fastest, or the first as in Fortran.
    pub(super) fn dense(shape: Vec<u64>, fortran: bool) -> Result<Self, PickleError> {
        let mut strides = vec![1u64; shape.len()];
        let mut step = 1u64;
        for turn in 0..shape.len() {
            let at = if fortran { turn } else { shape.len() - 1 - turn };
            strides[at] = step;
            step = step
                .checked_mul(shape[at].max(1))
                .ok_or_else(|| PickleError::array("shape", format!("{shape:?}"), "one that fits"))?;
        }
        Ok(Self { offset: 0, shape, strides })
    }

    /// Number of elements.
    pub(super) fn elements(&self) -> Option<u64> {
        // Zero before overflow: an empty array may have any other sizes.
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))
    }

    /// One past the last element used; 0 of an empty array.
    pub(super) fn end(&self) -> Option<u64> {
        if self.elements()? == 0 {
            return Some(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(self.offset, |at, (size, stride)| at.checked_add((size - 1).checked_mul(*stride)?))?;
        last.checked_add(1)
    }

    /// Refuses what reaches outside its storage, and what would be larger than it: a step of zero repeats elements.
    pub(super) fn check(&self, stored: u64) -> Result<(), PickleError> {
        let wrong = |what, expected: String| {
            let found = format!("{:?} with strides {:?} at {}", self.shape, self.strides, self.offset);
            Err(PickleError::array(what, found, expected))
        };
        if self.shape.len() != self.strides.len() {
            return wrong("strides", "one for each size".into());
        }
        if self.shape.iter().zip(&self.strides).any(|(size, stride)| *size > 1 && *stride == 0) {
            return wrong("strides", "no repeated elements".into());
        }
        match (self.elements(), self.end()) {
            (Some(elements), Some(end)) if elements <= stored && end <= stored => Ok(()),
            _ => wrong("shape", format!("one within the {stored} elements stored")),
        }
    }
}

/// An array in memory, as it lies in the file.
#[derive(Clone, Debug)]
pub struct Array {
    element: Element,
    strided: Strided,
    /// From the first element used to the last; the offset is taken off.
    bytes: Vec<u8>,
}

impl Array {
    /// `bytes` from element `strided.offset` of the storage to `strided.end()`.
    pub(super) fn new(element: Element, strided: Strided, bytes: Vec<u8>) -> Self {
        Self { element, strided: Strided { offset: 0, ..strided }, bytes }
    }

    /// Its element type.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.strided.shape
    }

    /// An integer; `None` when the array holds no integers, and for numbers above [`i64::MAX`].
    ///
    /// # Panics
    /// When the index is not one of the array's.
    #[must_use]
    pub fn int(&self, index: &[usize]) -> Option<i64> {
        let at = self.place(index);
        match self.element {
            Element::Bool | Element::U8 => Some(self.word::<1>(at)[0].into()),
            Element::I8 => Some(i8::from_le_bytes(self.word(at)).into()),
            Element::U16 => Some(u16::from_le_bytes(self.word(at)).into()),
            Element::I16 => Some(i16::from_le_bytes(self.word(at)).into()),
            Element::U32 => Some(u32::from_le_bytes(self.word(at)).into()),
            Element::I32 => Some(i32::from_le_bytes(self.word(at)).into()),
            Element::U64 => i64::try_from(u64::from_le_bytes(self.word(at))).ok(),
            Element::I64 => Some(i64::from_le_bytes(self.word(at))),
            Element::F16 | Element::BF16 | Element::F32 | Element::F64 => None,
        }
    }

    fn word<const W: usize>(&self, at: usize) -> [u8; W] {
        let mut word = [0; W];
        word.copy_from_slice(&self.bytes[at * W..(at + 1) * W]);
        word
    }

    fn place(&self, index: &[usize]) -> usize {
        assert_eq!(index.len(), self.strided.shape.len(), "one index for each dimension");
        let dimensions = index.iter().zip(self.strided.shape.iter().zip(&self.strided.strides));
        dimensions.fold(0, |at, (index, (size, stride))| {
            assert!((*index as u64) < *size, "an index within the array");
            at + index * *stride as usize
        })
    }
}
