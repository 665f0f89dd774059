//! Matrix products.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::LaunchError;
use semmoe_kernels_cuda::compute::{Activation, MatMul, MatMulRows, Tile, Variant, tiles};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::product::{Product, rounding};

use super::run;
use crate::support::{holding, read, shim};

#[derive(Clone, Debug)]
struct Case {
    inputs: usize,
    outputs: usize,
    /// Rows of each group; a dense product has a single one.
    counts: Vec<u32>,
    grouped: bool,
    /// Elements of x between one row's inputs and the next row's.
    padding: usize,
    /// Rows of x to choose from; `None`: each row has its own.
    row_of: Option<usize>,
    bias: bool,
    silu: bool,
    out_f32: bool,
    seed: u64,
}

impl Case {
    fn dense(rows: u32, inputs: usize, outputs: usize) -> Self {
        let counts = vec![rows];
        Self {
            inputs,
            outputs,
            counts,
            grouped: false,
            padding: 0,
            row_of: None,
            bias: false,
            silu: false,
            out_f32: false,
            seed: 1,
        }
    }

    fn grouped(counts: &[u32], inputs: usize, outputs: usize) -> Self {
        let dense = Self::dense(0, inputs, outputs);
        Self { counts: counts.to_vec(), grouped: true, row_of: Some(7), silu: true, ..dense }
    }

    fn rows(&self) -> usize {
        self.counts.iter().sum::<u32>() as usize
    }

    fn fold(&self) -> usize {
        if self.silu { 2 } else { 1 }
    }

    fn stride(&self) -> usize {
        self.inputs + self.padding
    }
}

/// The operands of a case; a function of the seed.
struct Operands<T> {
    x: Vec<T>,
    weights: Vec<T>,
    bias: Vec<f32>,
    row_of: Vec<u32>,
}

impl<T: Element> Operands<T> {
    fn product(&self, case: &Case) -> Product<'_, T> {
        Product {
            x: &self.x,
            stride: case.stride(),
            weights: &self.weights,
            inputs: case.inputs,
            outputs: case.outputs,
            bias: case.bias.then_some(&self.bias),
            silu: case.silu,
        }
    }

    fn new(case: &Case) -> Self {
        let mut rng = Rng::with_seed(case.seed);
        let (rows, x_rows) = (case.rows(), case.row_of.unwrap_or(case.rows()));
        let row_of = (0..rows as u32).map(|row| if case.row_of.is_some() { rng.u32(0..x_rows as u32) } else { row });
        let row_of = row_of.collect();
        let weights = case.counts.len() * case.outputs * case.fold() * case.inputs;
        let values = |rng: &mut Rng, count| (0..count).map(|_| T::round(rng.f32() * 2.0 - 1.0)).collect();
        // The last row has no padding.
        let x = (x_rows * case.stride()).saturating_sub(case.padding);
        let (x, weights) = (values(&mut rng, x), values(&mut rng, weights));
        Self { x, weights, bias: (0..case.outputs).map(|_| rng.f32()).collect(), row_of }
    }
}

/// The bytes of the outputs, plus two rows that are in no tile.
fn compute<T: Element>(
    shim: &Shim,
    case: &Case,
    operands: &Operands<T>,
    variant: Variant,
) -> Result<HostBuffer, String> {
    let rows = case.rows() + if case.grouped { 2 } else { 0 };
    let out_bytes = if case.out_f32 { 4 } else { size_of::<T>() };
    let out = HostBuffer::poisoned(rows * case.outputs * out_bytes);
    let (x, weights, bias) = (holding(&operands.x), holding(&operands.weights), holding(&operands.bias));
    let mut row_of = operands.row_of.clone();
    row_of.resize(rows, u32::MAX);
    let row_of = holding(&row_of);
    let list: Vec<Tile> = tiles(case.counts.iter().copied());
    let tile_memory = holding(&list);
    let rows = match case.grouped {
        false => MatMulRows::Dense { rows: rows as u64 },
        true => MatMulRows::Grouped {
            tiles: tile_memory.buffer(),
            count: list.len() as u64,
            most: list.iter().map(|tile| tile.rows).max().unwrap_or(0).into(),
            groups: case.counts.len() as u64,
            rows: rows as u64,
        },
    };
    let call = MatMul {
        x: x.buffer(),
        weights: weights.buffer(),
        out: out.buffer(),
        bias: case.bias.then(|| bias.buffer()),
        inputs: case.inputs as u64,
        outputs: case.outputs as u64,
        x_stride: case.stride() as u64,
        dtype: T::DTYPE,
        out_f32: case.out_f32,
        rows,
        row_of: case.row_of.map(|_| row_of.buffer()),
        activation: if case.silu { Activation::SiluProduct } else { Activation::None },
    };
    run(shim, &[call.launch_as(variant).map_err(|error| error.to_string())?], case.seed)?;
    Ok(out)
}

fn check_as<T: Element>(shim: &Shim, case: &Case) -> Result<(), String> {
    let operands = Operands::<T>::new(case);
    let out = compute(shim, case, &operands, Variant::FewRows)?;
    if T::DTYPE == Dtype::Bf16 && out.bytes() != compute(shim, case, &operands, Variant::ManyRows)?.bytes() {
        return Err("the variant for many rows has other bits".to_owned());
    }
    let found: Vec<f64> = match case.out_f32 {
        true => read::<f32>(&out).into_iter().map(f64::from).collect(),
        false => read::<T>(&out).into_iter().map(|value| value.widen().into()).collect(),
    };
    let rounded = if case.out_f32 { rounding::<f32>() } else { rounding::<T>() };
    let product = operands.product(case);
    let groups = (0..).zip(&case.counts).flat_map(|(group, &count)| (0..count).map(move |_| group));
    for (row, group) in groups.enumerate() {
        for feature in 0..case.outputs {
            let near = product.output(operands.row_of[row] as usize, group, feature);
            let found = found[row * case.outputs + feature];
            if !near.is(found, rounded) {
                return Err(format!("row {row}, feature {feature}: found {found}, expected {near:?}"));
            }
        }
    }
    match found[case.rows() * case.outputs..].iter().all(|value| value.is_nan()) {
        true => Ok(()),
        false => Err("a row that is in no tile was written".to_owned()),
    }
}

pub(super) fn results(shim: &Shim, seed: u64) -> Vec<(&'static str, Result<(), String>)> {
    let dense = Case { seed, ..Case::dense(20, 320, 24) };
    vec![("matmul", check_as::<bf16>(shim, &dense)), ("matmul", check_as::<f32>(shim, &dense))]
}

fn check(case: Case) {
    let Some(shim) = shim() else { return };
    for seed in [1, 2] {
        let case = Case { seed, ..case.clone() };
        check_as::<f32>(shim, &case).unwrap_or_else(|error| panic!("f32, {case:?}: {error}"));
        check_as::<bf16>(shim, &case).unwrap_or_else(|error| panic!("bf16, {case:?}: {error}"));
    }
}

#[test]
fn a_dense_product_is_that_of_the_reference() {
    // Inputs and outputs that do not divide evenly, vectors and elements, all tile sizes.
    for (rows, inputs, outputs) in
        [(1, 12, 12), (3, 32, 12), (8, 264, 33), (9, 40, 16), (17, 296, 20), (33, 72, 5), (64, 32, 16), (70, 100, 40)]
    {
        check(Case::dense(rows, inputs, outputs));
    }
    // Three iterations of all warps, and one that only some have.
    check(Case::dense(2, 3 * 8 * 32 + 72, 17));
}

/// Blocks of 128 features, and splits of several chunks, the last of them shorter.
#[test]
fn the_variant_for_many_rows_has_the_same_bits() {
    check(Case::dense(65, 488, 150));
    check(Case { silu: false, ..Case::grouped(&[40, 3, 64], 264, 129) });
    check(Case::grouped(&[33, 1], 296, 70));
}

#[test]
fn rows_come_from_anywhere_and_biases_are_added() {
    let case = Case::dense(11, 48, 21);
    check(Case { padding: 8, row_of: Some(4), bias: true, ..case.clone() });
    check(Case { padding: 3, bias: true, out_f32: true, ..case.clone() });
    check(Case { silu: true, out_f32: true, ..case });
}

#[test]
fn each_group_has_its_own_weights() {
    for counts in [&[0, 3, 0, 1][..], &[66, 0, 9], &[0, 0], &[16, 130]] {
        let case = Case::grouped(counts, 40, 19);
        check(Case { silu: false, ..case.clone() });
        check(Case { inputs: 36, out_f32: true, ..case.clone() });
        check(case);
    }
}

/// The bits of each row when computed with others.
fn rows_among<T: Element>(shim: &Shim, case: &Case, order: &[u32]) -> Vec<Vec<u8>> {
    let mut operands = Operands::<T>::new(case);
    operands.row_of = order.to_vec();
    let case = Case { counts: vec![order.len() as u32], row_of: Some(case.rows()), ..case.clone() };
    let out = compute(shim, &case, &operands, Variant::FewRows).unwrap();
    let width = case.outputs * if case.out_f32 { 4 } else { size_of::<T>() };
    out.bytes()[..order.len() * width].chunks(width).map(<[u8]>::to_vec).collect()
}

fn depends_on_itself_alone<T: Element>(case: &Case) {
    let Some(shim) = shim() else { return };
    let all: Vec<u32> = (0..case.rows() as u32).collect();
    let together = rows_among::<T>(shim, case, &all);
    for count in [1, 5, 8, 12, 16, 30, 50, 64] {
        let order: Vec<u32> = all.iter().rev().copied().skip(count % 3).take(count).collect();
        for (row, found) in order.iter().zip(rows_among::<T>(shim, case, &order)) {
            assert!(found == together[*row as usize], "row {row} of {count} is not what it is among all: {case:?}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_any_others() {
    for (inputs, outputs) in [(328, 18), (100, 9)] {
        let case = Case { out_f32: true, ..Case::dense(67, inputs, outputs) };
        depends_on_itself_alone::<bf16>(&case);
        depends_on_itself_alone::<f32>(&case);
        let case = Case { silu: true, ..case };
        depends_on_itself_alone::<bf16>(&case);
    }
}

#[test]
fn a_call_that_does_not_fit_is_refused_before_its_launch() {
    let [x, weights, out] = [2 * 40, 3 * 40, 2 * 3].map(|elements| HostBuffer::poisoned(elements * 2));
    let call = MatMul {
        x: x.buffer(),
        weights: weights.buffer(),
        out: out.buffer(),
        bias: None,
        inputs: 40,
        outputs: 3,
        x_stride: 40,
        dtype: Dtype::Bf16,
        out_f32: false,
        rows: MatMulRows::Dense { rows: 2 },
        row_of: None,
        activation: Activation::None,
    };
    call.launch().unwrap();
    let small = |call: MatMul, expected: &str| match call.launch() {
        Err(LaunchError::TooSmall { what, .. }) => assert_eq!(what, expected),
        other => panic!("{expected}: {other:?}"),
    };
    small(MatMul { rows: MatMulRows::Dense { rows: 3 }, ..call }, "x");
    small(MatMul { outputs: 4, ..call }, "weights");
    small(MatMul { activation: Activation::SiluProduct, ..call }, "weights");
    small(MatMul { out_f32: true, ..call }, "out");
    small(MatMul { x_stride: 48, ..call }, "x");
    small(MatMul { bias: Some(weights.buffer().from_offset(232)), ..call }, "bias");
    small(MatMul { row_of: Some(weights.buffer().from_offset(236)), ..call }, "row of");
    let refused = |call: MatMul, expected: &str| {
        let error = call.launch().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(MatMul { dtype: Dtype::F16, ..call }, "elements of type f16");
    refused(MatMul { x_stride: 39, ..call }, "stride of x is 39");
    refused(MatMul { weights: weights.buffer().from_offset(2), outputs: 2, ..call }, "expected a multiple of 16");
    let grouped = |most| MatMulRows::Grouped { tiles: out.buffer(), count: 1, most, groups: 1, rows: 2 };
    small(
        MatMul { rows: MatMulRows::Grouped { tiles: out.buffer(), count: 2, most: 2, groups: 1, rows: 2 }, ..call },
        "tiles",
    );
    refused(MatMul { rows: grouped(65), ..call }, "rows of the largest tile is 65");
    refused(MatMul { rows: grouped(2), bias: Some(weights.buffer()), ..call }, "number of biases with groups");
}

#[test]
fn a_tile_or_a_row_out_of_range_stops_the_kernel() {
    let Some(shim) = shim() else { return };
    let case = Case { silu: false, ..Case::grouped(&[2, 1], 32, 4) };
    let mut operands = Operands::<bf16>::new(&case);
    let few = Variant::FewRows;
    compute(shim, &case, &operands, few).unwrap();
    operands.row_of[2] = 7;
    assert_eq!(compute(shim, &case, &operands, few).err().unwrap(), "a kernel stopped");
}
