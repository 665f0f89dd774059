//! The product against a naive one, in every instruction set of this machine.

use super::*;
use crate::model::checkpoint::{TensorData, TensorKind, bf16_to_f32};
use crate::model::compute::Linear;

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| random.f32() * 2.0 - 1.0).collect()
}

/// `b` `[k, n]` in each of the three layouts.
struct Layouts {
    words: Vec<u32>,
    groups: Vec<f32>,
    /// Columns of a group.
    group: usize,
    rows: Vec<f32>,
    rows_stride: usize,
    plain: Vec<f32>,
}

impl Layouts {
    fn new(k: usize, n: usize) -> Self {
        Self::in_groups(k, n, group_of(n))
    }

    fn in_groups(k: usize, n: usize, columns: usize) -> Self {
        let bits: Vec<u16> = numbers(k * n, 7).iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        let plain: Vec<f32> = bits.iter().map(|&b| bf16_to_f32(b)).collect();
        let rows_stride = n.next_multiple_of(NR);
        let mut words = vec![0; rows_stride * k.div_ceil(2)];
        let mut groups = vec![0.0; rows_stride * k];
        let mut rows = vec![0.0; rows_stride * k];
        for at in 0..k * n {
            let (i, j) = (at / n, at % n);
            let (group, column) = (j / columns, j % columns);
            words[(group * k.div_ceil(2) + i / 2) * columns + column] |= u32::from(bits[at]) << (16 * (i % 2));
            groups[(group * k + i) * columns + column] = plain[at];
            rows[i * rows_stride + j] = plain[at];
        }
        Self { words, groups, group: columns, rows, rows_stride, plain }
    }

    fn all(&self) -> [Columns<'_>; 3] {
        let matrix = Matrix { data: &self.rows, stride: self.rows_stride };
        let next = Some(&self.rows[..]);
        let (words, values, group) = (&self.words[..], &self.groups[..], self.group);
        [Columns::Bf16 { words, group }, Columns::F32 { values, group }, Columns::Rows { matrix, next }]
    }
}

#[test]
fn groups_are_whole_and_as_wide_as_they_can_be() {
    for (n, expected) in [(1, 32), (32, 32), (33, 64), (64, 64), (96, 32), (128, 128), (150, 32), (190, 64), (512, 128)]
    {
        assert_eq!(group_of(n), expected, "{n}");
    }
}

fn naive((m, k, n): (usize, usize, usize), a: &[f32], b: &[f32]) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|x| f64::from(a[i * k + x]) * f64::from(b[x * n + j])).sum();
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

#[test]
fn products_are_right_in_every_shape_layout_and_instruction_set() {
    let shapes = [1, 2, 3, 4, 5, 7, 8, 9, 17, 64, 65, 127, 131]
        .iter()
        .flat_map(|&m| [(m, 1, 1), (m, 5, 33), (m, 64, 32), (m, 47, 200), (m, 31, 250)]);
    for (m, k, n) in shapes {
        let (a, b) = (numbers(m * k, 3), Layouts::new(k, n));
        let expected = naive((m, k, n), &a, &b.plain);
        for isa in Isa::available() {
            for columns in b.all() {
                // The extra column and the padding between rows must stay unchanged.
                let mut c = vec![7.0; m * (n + 1)];
                multiply_on(
                    isa,
                    Sizes { m, k, n },
                    Matrix { data: &a, stride: k },
                    columns,
                    &mut c,
                    n + 1,
                    Begin::AtZero,
                );
                for (i, row) in c.chunks(n + 1).enumerate() {
                    assert_eq!(row[n], 7.0);
                    for (j, &value) in row[..n].iter().enumerate() {
                        let error = (f64::from(value) - expected[i * n + j]).abs();
                        assert!(error < 1e-4, "{isa:?} {m}x{k}x{n} at {i},{j}: off by {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    let (m, k, n) = (150, 96, 150);
    let (a, b) = (numbers(m * k, 3), Layouts::new(k, n));
    for isa in Isa::available() {
        let mut alone = vec![0.0; m * n];
        for (a, c) in a.chunks(k).zip(alone.chunks_mut(n)) {
            multiply_on(isa, Sizes { m: 1, k, n }, Matrix { data: a, stride: k }, b.all()[0], c, n, Begin::AtZero);
        }
        for columns in b.all() {
            for rows in [2, 3, 5, 8, 13, 64, 100, 150] {
                let mut c = vec![0.0; rows * n];
                multiply_on(
                    isa,
                    Sizes { m: rows, k, n },
                    Matrix { data: &a, stride: k },
                    columns,
                    &mut c,
                    n,
                    Begin::AtZero,
                );
                assert!(c == alone[..rows * n], "{isa:?} with {rows} rows");
            }
        }
    }
}

#[test]
fn a_product_in_parts_of_k_gives_the_bits_of_the_whole() {
    let k = 130;
    for (m, n) in [(1, 20), (2, 64), (7, 40), (33_usize, 96_usize)] {
        let a = numbers(m * k, 3);
        let stride = n.next_multiple_of(NR);
        let b = numbers(k * stride, 4);
        for isa in Isa::available() {
            let part = |from: usize, to: usize, c: &mut [f32], begin| {
                let a = Matrix { data: &a[from..], stride: k };
                let matrix = Matrix { data: &b[from * stride..], stride };
                let columns = Columns::Rows { matrix, next: None };
                multiply_on(isa, Sizes { m, k: to - from, n }, a, columns, c, n, begin);
            };
            let (mut whole, mut parts) = (vec![0.0; m * n], vec![f32::NAN; m * n]);
            part(0, k, &mut whole, Begin::AtZero);
            part(0, 64, &mut parts, Begin::AtZero);
            part(64, 128, &mut parts, Begin::AtC);
            part(128, k, &mut parts, Begin::AtC);
            assert!(parts == whole, "{isa:?} {m}x{n}");
        }
    }
}

#[test]
fn several_threads_give_the_bits_of_one() {
    for (m, k, n) in [(70, 200, 900), (1, 3000, 2000), (300, 500, 40)] {
        let (a, b) = (numbers(m * k, 3), Layouts::new(k, n));
        for columns in b.all() {
            let product = || {
                let mut c = vec![f32::NAN; m * n];
                multiply(Sizes { m, k, n }, Matrix { data: &a, stride: k }, columns, &mut c, n);
                c
            };
            let alone = product();
            for threads in [2, 3, 8] {
                assert!(
                    crate::model::with_threads(threads, product).unwrap() == alone,
                    "{threads} threads, {m}x{k}x{n}"
                );
            }
        }
    }
}

#[test]
fn packing_keeps_every_weight() {
    let (inputs, parts) = (24, [40, 3]);
    let weights: Vec<Vec<f32>> = parts.iter().map(|&outputs| numbers(inputs * outputs, 5)).collect();
    let as_f32: Vec<Vec<[u8; 4]>> = weights.iter().map(|w| w.iter().map(|v| v.to_le_bytes()).collect()).collect();
    let as_bf16: Vec<Vec<[u8; 2]>> = as_f32.iter().map(|w| w.iter().map(|b| [b[2], b[3]]).collect()).collect();
    let f32s: Vec<TensorData<'_>> = as_f32.iter().map(|w| TensorKind::F32.of(w.as_flattened())).collect();
    let bf16s: Vec<TensorData<'_>> = as_bf16.iter().map(|w| TensorKind::Bf16.of(w.as_flattened())).collect();
    for parts in [f32s.clone(), bf16s.clone(), vec![f32s[0], bf16s[1]]] {
        let linear = Linear::pack(&parts, inputs);
        assert_eq!(linear.outputs, 43);
        for input in 0..inputs {
            let mut x = vec![0.0; inputs];
            x[input] = 1.0;
            let mut out = vec![0.0; 43];
            linear.apply(&x, &mut out);
            let expected: Vec<f32> =
                parts.iter().flat_map(|p| (0..p.len() / inputs).map(|o| p.get(o * inputs + input))).collect();
            assert_eq!(out, expected);
        }
    }
}

/// Separately packed adjacent operands have narrower groups than one operand with all their columns: the sums are equal
/// bit for bit.
#[test]
fn narrower_groups_give_the_same_bits() {
    let (k, n) = (37, 256);
    let (wide, narrow) = (Layouts::new(k, n), [32, 64].map(|group| Layouts::in_groups(k, n, group)));
    for m in [1, 3, 5, 70] {
        let a = numbers(m * k, 5);
        for isa in Isa::available() {
            let product = |columns| {
                let mut c = vec![0.0; m * n];
                multiply_on(isa, Sizes { m, k, n }, Matrix { data: &a, stride: k }, columns, &mut c, n, Begin::AtZero);
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for narrow in &narrow {
                for (narrow, wide) in narrow.all().into_iter().zip(wide.all()).take(2) {
                    assert_eq!(product(narrow), product(wide), "{m} rows");
                }
            }
        }
    }
}
