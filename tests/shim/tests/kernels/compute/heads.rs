//! Queries, keys and values from a projection's rows, against simple loops.

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::Element;
use semmoe_kernels_cuda::LaunchError;
use semmoe_kernels_cuda::compute::{
    HeadNorms, HeadRows, PAGE_TOKENS, PagedHeads, ProjectedHeads, RotaryAngles, RotaryLayout,
};
use semmoe_kernels_shim::{HostBuffer, Shim};
use semmoe_reference::data::same;

use super::{close, numbers, run};
use crate::support::{holding, read, shim};

const EPSILON: f32 = 1e-6;
const LAYERS: usize = 3;
const LAYER: usize = 1;
const PAGES: usize = 4;
/// Positions with angles.
const ANGLES: usize = 150;
/// Pages and positions of the rows. The last but one row's page is missing; the last one's position has no angle.
const ROWS: [(u32, u32); 6] = [(2, 0), (0, 63), (3, 64), (3, 149), (4, 7), (1, 150)];

#[derive(Clone, Copy, PartialEq, Debug)]
enum Norms {
    None,
    OfHeads,
    Whole,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    kv_heads: usize,
    group: usize,
    dim: usize,
    /// Heads of keys in the projection, and the first one on this rank.
    projected: (usize, usize),
    norms: Norms,
    clip: Option<f32>,
    layout: RotaryLayout,
    rotated: usize,
}

impl Case {
    fn new(kv_heads: usize, group: usize, dim: usize) -> Self {
        let (norms, layout) = (Norms::OfHeads, RotaryLayout::Halves);
        Self { kv_heads, group, dim, projected: (kv_heads, 0), norms, clip: None, layout, rotated: dim }
    }

    /// A norm over more heads than are on this rank.
    pub(super) fn of_whole_norm() -> Self {
        Self { projected: (7, 2), norms: Norms::Whole, ..Self::new(3, 2, 20) }
    }

    fn queries(&self) -> usize {
        self.projected.0 * self.group * self.dim
    }

    fn keys(&self) -> usize {
        self.projected.0 * self.dim
    }

    fn head_elements(&self) -> usize {
        2 * PAGE_TOKENS as usize * self.dim
    }
}

/// The data of a case, and the expected results.
struct Reference<'a> {
    case: &'a Case,
    cos: Vec<f32>,
    sin: Vec<f32>,
    weights: [Vec<f32>; 2],
}

impl Reference<'_> {
    /// This rank's heads of queries (0), keys (1) or values (2) from a projection's row, with norm and rotation
    /// applied.
    fn heads(&self, row: &[f64], part: usize, position: usize) -> Vec<Vec<f64>> {
        let Case { kv_heads, group, dim, projected, .. } = *self.case;
        let (queries, keys) = (self.case.queries(), self.case.keys());
        let (all, first, count) = match part {
            0 => (&row[..queries], projected.1 * group, kv_heads * group),
            1 => (&row[queries..queries + keys], projected.1, kv_heads),
            _ => (&row[queries + keys..], 0, kv_heads),
        };
        let mean = |of: &[f64]| of.iter().map(|x| x * x).sum::<f64>() / of.len() as f64 + f64::from(EPSILON);
        let normed = |head: usize| -> Vec<f64> {
            let of_head = &all[head * dim..][..dim];
            if part == 2 || self.case.norms == Norms::None {
                return of_head.to_vec();
            }
            let whole = self.case.norms == Norms::Whole;
            let root = mean(if whole { all } else { of_head }).sqrt();
            let weights = &self.weights[part][if whole { head * dim } else { 0 }..];
            of_head.iter().zip(weights).map(|(x, weight)| x / root * f64::from(*weight)).collect()
        };
        let finish = |head: usize| {
            let most = self.case.clip.map_or(f64::INFINITY, f64::from);
            let mut head: Vec<f64> = normed(head).iter().map(|x| x.clamp(-most, most)).collect();
            if part != 2 {
                self.turn(&mut head, position);
            }
            head
        };
        (first..first + count).map(finish).collect()
    }

    fn turn(&self, head: &mut [f64], position: usize) {
        let half = self.case.rotated / 2;
        for pair in 0..half {
            let (a, b) = match self.case.layout {
                RotaryLayout::Halves => (pair, pair + half),
                RotaryLayout::Pairs => (2 * pair, 2 * pair + 1),
            };
            let angle = |table: &[f32]| table.get(position * half + pair).map_or(f64::NAN, |&x| f64::from(x));
            let (cos, sin) = (angle(&self.cos), angle(&self.sin));
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
        }
    }

    /// The queries of all rows, and the pool. Anything not written stays poisoned, which is NaN.
    fn rows<T: Element>(&self, qkv: &[T]) -> (Vec<f64>, Vec<f64>) {
        let Case { kv_heads, dim, .. } = *self.case;
        let mut queries = Vec::new();
        let page_elements = LAYERS * kv_heads * self.case.head_elements();
        let mut pool = vec![f64::NAN; PAGES * page_elements];
        for (row, &(page, position)) in qkv.chunks(qkv.len() / ROWS.len()).zip(&ROWS) {
            let row: Vec<f64> = row.iter().map(|x| x.widen().into()).collect();
            let position = position as usize;
            let [turned, keys, values] = [0, 1, 2].map(|part| self.heads(&row, part, position));
            let lost = page as usize >= PAGES;
            queries.extend(turned.concat().iter().map(|&x| if lost { f64::NAN } else { x }));
            for head in (0..kv_heads).filter(|_| !lost) {
                let begins = page as usize * page_elements + (LAYER * kv_heads + head) * self.case.head_elements();
                let token = position % PAGE_TOKENS as usize;
                for i in 0..dim {
                    pool[begins + i * PAGE_TOKENS as usize + token] = keys[head][i];
                    pool[begins + (PAGE_TOKENS as usize + token) * dim + i] = values[head][i];
                }
            }
        }
        (queries, pool)
    }
}

pub(super) fn heads<T: Element>(shim: &Shim, case: &Case, seed: u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let Case { kv_heads, group, dim, .. } = *case;
    let width = case.queries() + case.keys() + kv_heads * dim;
    let qkv: Vec<T> = numbers(&mut rng, ROWS.len() * width);
    let [weights_of_queries, weights_of_keys] = match case.norms {
        Norms::Whole => [case.queries(), case.keys()],
        _ => [dim; 2],
    }
    .map(|count| numbers::<f32>(&mut rng, count));
    let [cos, sin] = [(); 2].map(|()| numbers::<f32>(&mut rng, ANGLES * case.rotated / 2));
    let (pages, positions): (Vec<u32>, Vec<u32>) = ROWS.iter().copied().unzip();
    let inputs = [&weights_of_queries, &weights_of_keys, &cos, &sin].map(|numbers| holding(numbers));
    let [query_weights, key_weights, cos_at, sin_at] = inputs.each_ref().map(HostBuffer::buffer);
    let (qkv_at, pages_at, positions_at) = (holding(&qkv), holding(&pages), holding(&positions));
    let queries = HostBuffer::poisoned(ROWS.len() * kv_heads * group * dim * size_of::<T>());
    let page_elements = LAYERS * kv_heads * case.head_elements();
    let pool = HostBuffer::poisoned(PAGES * page_elements * size_of::<T>());
    let whole = case.norms == Norms::Whole;
    let call = HeadRows {
        heads: PagedHeads {
            pool: pool.buffer(),
            pages: PAGES as u64,
            layer: LAYER as u64,
            layers: LAYERS as u64,
            kv_heads: kv_heads as u64,
            group: group as u64,
            dim: dim as u64,
            dtype: T::DTYPE,
        },
        qkv: qkv_at.buffer(),
        projected: ProjectedHeads {
            queries: case.queries() as u64,
            keys: case.keys() as u64,
            first_query: (case.projected.1 * group * dim) as u64,
            first_key: (case.projected.1 * dim) as u64,
        },
        norms: (case.norms != Norms::None).then_some(HeadNorms {
            query: query_weights,
            key: key_weights,
            whole,
            epsilon: EPSILON,
        }),
        clip: case.clip,
        angles: RotaryAngles {
            cos: cos_at,
            sin: sin_at,
            positions: ANGLES as u64,
            elements: case.rotated as u64,
            layout: case.layout,
        },
        positions: positions_at.buffer(),
        page_of: pages_at.buffer(),
        queries: queries.buffer(),
        rows: ROWS.len() as u64,
    };
    run(shim, &[call.launch().unwrap()], seed)?;

    let of = Reference { case, cos, sin, weights: [weights_of_queries, weights_of_keys] };
    let (expected_queries, expected_pool) = of.rows(&qkv);
    close("queries", &read::<T>(&queries), &expected_queries)?;
    let found = read::<T>(&pool);
    close("pages", &found, &expected_pool)?;
    // Other pages and layers must be unchanged, bit for bit.
    let others = |of: &[T]| of[..LAYER * kv_heads * case.head_elements()].to_vec();
    same("another layer", &others(&found), &others(&read::<T>(&HostBuffer::poisoned(pool.bytes().len()))))
}

#[test]
fn heads_are_normed_clipped_turned_and_put_into_their_pages() {
    let Some(shim) = shim() else { return };
    let cases = [
        Case::new(2, 1, 8),
        Case::new(1, 8, 128),
        Case { layout: RotaryLayout::Pairs, ..Case::new(2, 2, 20) },
        Case { norms: Norms::None, clip: Some(0.4), ..Case::new(3, 1, 64) },
        Case { rotated: 24, ..Case::new(1, 2, 64) },
        Case { rotated: 6, layout: RotaryLayout::Pairs, ..Case::new(1, 2, 20) },
        Case { clip: Some(0.7), ..Case::of_whole_norm() },
        Case::of_whole_norm(),
        Case::new(1, 1, 256),
    ];
    for (seed, case) in cases.iter().enumerate() {
        heads::<f32>(shim, case, seed as u64).unwrap_or_else(|error| panic!("f32, {case:?}: {error}"));
        heads::<bf16>(shim, case, seed as u64).unwrap_or_else(|error| panic!("bf16, {case:?}: {error}"));
    }
}

#[test]
fn heads_and_pages_that_do_not_fit_are_refused() {
    let memory = HostBuffer::zeroed(1 << 16);
    let pool = memory.buffer();
    let heads = PagedHeads { pool, pages: 4, layer: 1, layers: 2, kv_heads: 1, group: 2, dim: 8, dtype: f32::DTYPE };
    assert_eq!(heads.page_bytes(), 2 * 2 * 64 * 8 * 4);
    let call = HeadRows {
        heads,
        qkv: pool,
        projected: ProjectedHeads { queries: 32, keys: 16, first_query: 16, first_key: 8 },
        norms: None,
        clip: None,
        angles: RotaryAngles { cos: pool, sin: pool, positions: 9, elements: 8, layout: RotaryLayout::Halves },
        positions: pool,
        page_of: pool,
        queries: pool,
        rows: 3,
    };
    assert!(call.launch().is_ok());
    let out_of_range = |call: HeadRows| matches!(call.launch(), Err(LaunchError::OutOfRange { .. }));
    let with = |heads: PagedHeads| HeadRows { heads, ..call };
    assert!(out_of_range(with(PagedHeads { layer: 2, ..heads })));
    assert!(out_of_range(with(PagedHeads { dim: 7, ..heads })));
    assert!(out_of_range(with(PagedHeads { kv_heads: 3, pages: 1, ..heads })), "more heads than are projected");
    let projected = ProjectedHeads { first_key: 9, ..call.projected };
    assert!(out_of_range(HeadRows { projected, ..call }), "keys after the last");
    let angles = RotaryAngles { elements: 10, ..call.angles };
    assert!(out_of_range(HeadRows { angles, ..call }), "more rotates than a head has");
    let too_small = |call: HeadRows| matches!(call.launch(), Err(LaunchError::TooSmall { .. }));
    assert!(too_small(with(PagedHeads { pages: 17, ..heads })) && too_small(HeadRows { rows: 20_000, ..call }));
}
