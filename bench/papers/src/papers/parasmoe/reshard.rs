//! The four steps from EP's experts to TP's slices, on arrays of numbers that identify each element.

use crate::Outcome;
use crate::papers::Verdict::{Refuted, Reproduced};
use crate::papers::{Found, Verdict};

/// Elements of a tensor and its shape, row-major.
#[derive(Clone, Debug, PartialEq)]
struct Tensor {
    shape: Vec<usize>,
    data: Vec<usize>,
}

impl Tensor {
    /// Permutes the dimensions.
    fn permute(&self, order: &[usize]) -> Self {
        let shape: Vec<usize> = order.iter().map(|&from| self.shape[from]).collect();
        let strides: Vec<usize> =
            (0..self.shape.len()).map(|at| self.shape[at + 1..].iter().product::<usize>()).collect();
        let data = (0..self.data.len()).map(|mut index| {
            let mut from = 0;
            for at in (0..shape.len()).rev() {
                from += index % shape[at] * strides[order[at]];
                index /= shape[at];
            }
            self.data[from]
        });
        Self { data: data.collect(), shape: shape.clone() }
    }

    /// Stacks tensors of one shape along a new first dimension.
    fn stack<'a>(parts: impl ExactSizeIterator<Item = &'a Self>) -> Self {
        let mut all = Self { shape: vec![parts.len()], data: Vec::new() };
        for part in parts {
            all.shape.splice(1.., part.shape.iter().copied());
            all.data.extend(&part.data);
        }
        all
    }

    /// The part at `index` of the first dimension.
    fn at(&self, index: usize) -> Self {
        let size: usize = self.shape[1..].iter().product();
        Self { shape: self.shape[1..].to_vec(), data: self.data[index * size..(index + 1) * size].to_vec() }
    }
}

/// N nodes of P GPUs, L experts per GPU, and one expert's matrix: the rows or columns that TP cuts, and the others.
#[derive(Clone, Copy)]
struct Case {
    nodes: usize,
    gpus: usize,
    local: usize,
    slice: usize,
    other: usize,
}

impl Case {
    fn small() -> impl Iterator<Item = Self> {
        let sizes = [1, 2, 3];
        let of = move |nodes| {
            sizes.into_iter().flat_map(move |gpus| {
                sizes.into_iter().map(move |local| Self { nodes, gpus, local, slice: 2, other: 3 })
            })
        };
        sizes.into_iter().flat_map(of)
    }

    /// The number of the weight at row (or column) `cut` of an expert.
    fn element(&self, expert: usize, cut: usize, other: usize) -> usize {
        (expert * self.gpus * self.slice + cut) * self.other + other
    }

    /// The matrices of `experts`, restricted to the rows (columns, with `down`) `cut`.
    fn experts(&self, experts: std::ops::Range<usize>, cut: std::ops::Range<usize>, down: bool) -> Vec<usize> {
        let mut data = Vec::new();
        for expert in experts {
            let (first, second) = if down { (0..self.other, cut.clone()) } else { (cut.clone(), 0..self.other) };
            for one in first {
                for two in second.clone() {
                    let (cut, other) = if down { (two, one) } else { (one, two) };
                    data.push(self.element(expert, cut, other));
                }
            }
        }
        data
    }

    /// Whether the four steps give every rank the slices of TP's layout. `gathered` is the permutation in step 2 of
    /// `[N, L, ...]`.
    fn holds(&self, down: bool) -> bool {
        let Self { nodes, gpus, local, slice, other } = *self;
        let width = gpus * slice;
        let (own, gathered): (&[usize], &[usize]) = match down {
            false => (&[local, gpus, slice, other], &[2, 0, 1, 3, 4]),
            true => (&[local, other, gpus, slice], &[3, 0, 1, 2, 4]),
        };
        // EP rank n P + p starts at expert (n P + p) L.
        let before: Vec<Tensor> = (0..nodes * gpus)
            .map(|rank| Tensor {
                shape: own.to_vec(),
                data: self.experts(rank * local..(rank + 1) * local, 0..width, down),
            })
            .collect();
        // Steps 1 and 2: the GPUs at the same position of every node gather, and permute.
        let packed: Vec<Tensor> = (0..gpus)
            .map(|gpu| Tensor::stack((0..nodes).map(|node| &before[node * gpus + gpu])).permute(gathered))
            .collect();
        (0..gpus).all(|gpu| {
            // Steps 3 and 4: slice `gpu` from all GPUs of the node; [P, N, L, ...] to [N, P, L, ...].
            let slices: Vec<Tensor> = packed.iter().map(|from| from.at(gpu)).collect();
            let after = Tensor::stack(slices.iter()).permute(&[1, 0, 2, 3, 4]);
            after.data == self.experts(0..nodes * gpus * local, gpu * slice..(gpu + 1) * slice, down)
        })
    }
}

fn found(down: bool) -> Outcome<Found> {
    let all = Case::small().count();
    let right = Case::small().filter(|case| case.holds(down)).count();
    let verdict: Verdict = if right == all { Reproduced } else { Refuted };
    Ok(Found::new(verdict, format!("every slice right in {right} of {all} cases of 1 to 3 nodes, GPUs and experts")))
}

pub(super) fn up() -> Outcome<Found> {
    found(false)
}

pub(super) fn down() -> Outcome<Found> {
    found(true)
}
