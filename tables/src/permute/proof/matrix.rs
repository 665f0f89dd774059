//! Stored matrices as rows of f32.

use crate::container::{FloatType, ForeignTensor};

/// DeepSeek's FP8 has one scale for each block of 128 x 128.
const FP8_BLOCK: usize = 128;
/// MXFP4 has one scale for 32 numbers, which take 16 bytes.
const MX_BLOCK: usize = 32;
const MX_BLOCK_BYTES: usize = MX_BLOCK / 2;
/// The eight magnitudes of FP4 (E2M1).
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A tensor with its bytes.
pub(super) type Stored<'s> = (&'s ForeignTensor, &'s [u8]);

/// A matrix of some stored form: \[rows, cols\].
#[derive(Debug)]
pub(super) struct Matrix<'s> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    form: Form<'s>,
}

#[derive(Debug)]
enum Form<'s> {
    Plain { element: FloatType, bytes: &'s [u8] },
    Fp8 { bytes: &'s [u8], scales: Vec<f32>, values: Vec<f32> },
    Mxfp4 { blocks: &'s [u8], scales: &'s [u8] },
}

/// All numbers of a plain tensor.
pub(super) fn numbers((tensor, bytes): Stored<'_>) -> Result<Vec<f32>, String> {
    let element = FloatType::of(&tensor.dtype).ok_or_else(|| form_of(tensor))?;
    Ok(bytes.chunks_exact(element.size()).map(|bytes| element.decode(bytes)).collect())
}

impl<'s> Matrix<'s> {
    /// A matrix with the scales beside it, if it has any; an error names a form that is not known.
    pub(super) fn open((tensor, bytes): Stored<'s>, scale: Option<Stored<'s>>) -> Result<Self, String> {
        let &[rows, cols] = &tensor.shape[..] else { return Err(form_of(tensor)) };
        // The bytes of the tensor are mapped, but a dimension beside a zero may be anything.
        let (Ok(rows), Ok(cols), false) = (usize::try_from(rows), usize::try_from(cols), bytes.is_empty()) else {
            return Err(form_of(tensor));
        };
        let form = match (FloatType::of(&tensor.dtype), scale) {
            (Some(element), None) => Form::Plain { element, bytes },
            (None, Some(scale)) if tensor.dtype == "F8_E4M3" => {
                let expected = [rows.div_ceil(FP8_BLOCK) as u64, cols.div_ceil(FP8_BLOCK) as u64];
                if scale.0.shape != expected {
                    return Err(form_of(scale.0));
                }
                let values = (0..=u8::MAX).map(fp8_e4m3).collect();
                Form::Fp8 { bytes, scales: numbers(scale)?, values }
            }
            _ => return Err(form_of(tensor)),
        };
        Ok(Self { rows, cols, form })
    }

    /// One expert's matrix of stacked MXFP4: blocks \[N, rows, cols / 32, 16\], scales \[N, rows, cols / 32\].
    pub(super) fn open_mxfp4(blocks: Stored<'s>, scales: Stored<'s>, expert: usize) -> Result<Self, String> {
        let &[experts, rows, groups, width] = &blocks.0.shape[..] else { return Err(form_of(blocks.0)) };
        let bytes_fit = blocks.0.dtype == "U8" && width as usize == MX_BLOCK_BYTES && !blocks.1.is_empty();
        if !bytes_fit || expert as u64 >= experts {
            return Err(form_of(blocks.0));
        }
        if scales.0.dtype != "U8" || scales.0.shape != [experts, rows, groups] {
            return Err(form_of(scales.0));
        }
        // The product of the dimensions is the number of mapped bytes.
        let (rows, groups) = (rows as usize, groups as usize);
        let each = rows * groups;
        let blocks = &blocks.1[expert * each * MX_BLOCK_BYTES..][..each * MX_BLOCK_BYTES];
        let scales = &scales.1[expert * each..][..each];
        Ok(Self { rows, cols: groups * MX_BLOCK, form: Form::Mxfp4 { blocks, scales } })
    }

    /// M x, each element summed in one fixed order. `x` has as many numbers as there are columns.
    pub(super) fn times(&self, x: &[f32]) -> Vec<f32> {
        let mut row = vec![0.0; self.cols];
        let element = |at| {
            self.decode(at, &mut row);
            dot(&row, x)
        };
        (0..self.rows).map(element).collect()
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        match &self.form {
            Form::Plain { element, bytes } => {
                let bytes = &bytes[row * self.cols * element.size()..];
                into.iter_mut()
                    .zip(bytes.chunks_exact(element.size()))
                    .for_each(|(into, bytes)| *into = element.decode(bytes));
            }
            Form::Fp8 { bytes, scales, values } => {
                let scales = &scales[row / FP8_BLOCK * self.cols.div_ceil(FP8_BLOCK)..];
                let bytes = &bytes[row * self.cols..];
                for ((into, bytes), scale) in into.chunks_mut(FP8_BLOCK).zip(bytes.chunks(FP8_BLOCK)).zip(scales) {
                    into.iter_mut().zip(bytes).for_each(|(into, &byte)| *into = values[usize::from(byte)] * scale);
                }
            }
            Form::Mxfp4 { blocks, scales } => {
                let groups = self.cols / MX_BLOCK;
                let blocks = blocks[row * groups * MX_BLOCK_BYTES..].chunks_exact(MX_BLOCK_BYTES);
                for ((into, block), &scale) in into.chunks_exact_mut(MX_BLOCK).zip(blocks).zip(&scales[row * groups..])
                {
                    let scale = (f32::from(scale) - 127.0).exp2();
                    for (pair, &byte) in into.chunks_exact_mut(2).zip(block) {
                        pair[0] = fp4(byte & 15) * scale;
                        pair[1] = fp4(byte >> 4) * scale;
                    }
                }
            }
        }
    }
}

/// Sums in eight lanes, then the lanes: the order depends on the length only.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter().sum()
}

/// Four exponent bits with bias 7, three of fraction; all ones are no number, there is no infinity.
fn fp8_e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 512.0,
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 128 == 0 { magnitude } else { -magnitude }
}

fn fp4(bits: u8) -> f32 {
    let magnitude = FP4[usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// Why a tensor is not computed with.
fn form_of(tensor: &ForeignTensor) -> String {
    let dtype: String = tensor.dtype.chars().take(20).collect();
    let dims: Vec<u64> = tensor.shape.iter().copied().take(8).collect();
    format!("weights of the form {dtype} {dims:?} are not computed with")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_are_decoded() {
        for (byte, value) in
            [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0), (0xb9, -1.125), (0x7e, 448.0)]
        {
            assert_eq!(fp8_e4m3(byte), value, "{byte:#x}");
        }
        assert!(fp8_e4m3(0x7f).is_nan());
        assert_eq!((fp4(0b0111), fp4(0b1001), fp4(0)), (6.0, -0.5, 0.0));
    }

    #[test]
    fn dots_of_any_length() {
        for len in [0usize, 1, 7, 8, 9, 31] {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let expected: f32 = a.iter().map(|x| x * 2.0).sum();
            assert_eq!(dot(&a, &vec![2.0; len]), expected, "{len}");
        }
    }
}
