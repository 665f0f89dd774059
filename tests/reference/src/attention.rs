//! Causal attention over pages of keys and values, written as plainly as possible: a softmax in f64.

use fastrand::Rng;
use semmoe_kernels::Element;

/// Tokens of a page.
const TOKENS: usize = 64;
/// Layers per page.
pub const LAYERS: usize = 2;
/// The layer that the tests use.
pub const LAYER: usize = 1;

/// The heads of a layer, and the sequences of a call.
#[derive(Clone, Debug)]
pub struct Case {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads of each of them.
    pub group: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Per sequence: its tokens, and how many rows, the last ones, are computed.
    pub sequences: Vec<(usize, usize)>,
}

impl Case {
    /// A case with these sequences.
    pub fn new(kv_heads: usize, group: usize, dim: usize, sequences: &[(usize, usize)]) -> Self {
        Self { kv_heads, group, dim, sequences: sequences.to_vec() }
    }

    /// Rows of all sequences.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|(_, rows)| rows).sum()
    }

    /// Elements of one row's queries.
    pub fn width(&self) -> usize {
        self.kv_heads * self.group * self.dim
    }

    /// Factor of the scores.
    pub fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// Elements of a page: of each layer and head keys `[dim, TOKENS]`, then values `[TOKENS, dim]`.
    fn page_elements(&self) -> usize {
        LAYERS * self.kv_heads * self.head_elements()
    }

    fn head_elements(&self) -> usize {
        2 * TOKENS * self.dim
    }
}

/// Random queries, keys and values of a case.
pub struct Paged<T> {
    /// Heads and sequences.
    pub case: Case,
    /// `[rows, kv_heads, group, dim]`
    pub queries: Vec<T>,
    /// `[rows]`
    pub positions: Vec<u32>,
    /// `[rows]`
    pub sequence_of: Vec<u32>,
    /// Pages of the longest sequence, plus one.
    pub table_width: usize,
    /// `[sequences, table_width]`: pages in random order.
    pub table: Vec<u32>,
    /// All pages. Everything behind a sequence's end and in other layers is NaN.
    pub pool: Vec<T>,
    /// For each sequence `[kv_heads, tokens, dim]`.
    keys: Vec<Vec<T>>,
    values: Vec<Vec<T>>,
}

fn numbers<T: Element>(rng: &mut Rng, count: usize) -> Vec<T> {
    (0..count).map(|_| T::round(rng.f32() * 2.0 - 1.0)).collect()
}

impl<T: Element> Paged<T> {
    /// Random values from -1 to 1.
    pub fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let longest = case.sequences.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0);
        let table_width = longest.div_ceil(TOKENS) + 1;
        let pages = case.sequences.len() * table_width;
        let mut table: Vec<u32> = (0..pages as u32).collect();
        rng.shuffle(&mut table);
        let rows = |(sequence, (tokens, rows)): (usize, &(usize, usize))| {
            (tokens - rows..*tokens).map(move |position| (position as u32, sequence as u32)).collect::<Vec<_>>()
        };
        let (positions, sequence_of) = case.sequences.iter().enumerate().flat_map(rows).unzip();
        let mut paged = Self {
            case: case.clone(),
            queries: numbers(&mut rng, case.rows() * case.width()),
            positions,
            sequence_of,
            table_width,
            table,
            pool: vec![T::round(f32::NAN); pages * case.page_elements()],
            keys: Vec::new(),
            values: Vec::new(),
        };
        for (sequence, (tokens, _)) in case.sequences.iter().enumerate() {
            let [keys, values] = [(); 2].map(|()| numbers(&mut rng, case.kv_heads * tokens * case.dim));
            paged.write(sequence, &keys, &values);
            paged.keys.push(keys);
            paged.values.push(values);
        }
        paged
    }

    /// Total number of pages.
    pub fn pages(&self) -> usize {
        self.table.len()
    }

    fn write(&mut self, sequence: usize, keys: &[T], values: &[T]) {
        let Case { kv_heads, dim, ref sequences, .. } = self.case;
        let tokens = sequences[sequence].0;
        for (at, (&key, &value)) in keys.iter().zip(values).enumerate() {
            let (head, token, i) = (at / dim / tokens, at / dim % tokens, at % dim);
            let page = self.table[sequence * self.table_width + token / TOKENS] as usize;
            let begins = page * self.case.page_elements() + (LAYER * kv_heads + head) * self.case.head_elements();
            self.pool[begins + i * TOKENS + token % TOKENS] = key;
            self.pool[begins + (TOKENS + token % TOKENS) * dim + i] = value;
        }
    }

    /// The output of one row, `[kv_heads, group, dim]`.
    pub fn row(&self, row: usize) -> Vec<f64> {
        let Case { kv_heads, group, dim, .. } = self.case;
        (0..kv_heads * group).flat_map(|head| self.head(row, head, head / group * dim)).collect()
    }

    /// One head of queries; its keys and values begin at `first` x tokens.
    fn head(&self, row: usize, head: usize, first: usize) -> Vec<f64> {
        let dim = self.case.dim;
        let (sequence, sees) = (self.sequence_of[row] as usize, self.positions[row] as usize + 1);
        let from = first * self.case.sequences[sequence].0;
        let of_head = |list: &'_ [T]| list[from..from + sees * dim].iter().map(|x| f64::from(x.widen())).collect();
        let (keys, values): (Vec<f64>, Vec<f64>) = (of_head(&self.keys[sequence]), of_head(&self.values[sequence]));
        let query = &self.queries[row * self.case.width() + head * dim..][..dim];
        let weight = |key: &[f64]| {
            let sum: f64 = key.iter().zip(query).map(|(k, q)| k * f64::from(q.widen())).sum();
            (sum * f64::from(self.case.scale())).exp()
        };
        let weights: Vec<f64> = keys.chunks(dim).map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; dim];
        for (value, weight) in values.chunks(dim).zip(&weights) {
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight / total * value);
        }
        out
    }
}
