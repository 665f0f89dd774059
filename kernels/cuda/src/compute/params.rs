//! The compute kernels' parameters, byte for byte as the CUDA sources declare them.

use crate::params::{Params, Raw, params};

params! {
    /// `ArgmaxParams`
    ArgmaxParams { logits: Raw, best: Raw, rows: u32, vocab: u32 }
    /// `CandidatesParams`
    CandidatesParams { logits: Raw, asks: Raw, out: Raw, rows: u32, vocab: u32 }
    /// `MatMulParams`
    MatMulParams {
        x: Raw, weights: Raw, out: Raw, bias: Raw, row_of: Raw, tiles: Raw, inputs: u32, outputs: u32,
        x_stride: u32, x_rows: u32, rows: u32, tile_count: u32, groups: u32, flags: u32,
    }
    /// `EmbedParams`
    EmbedParams { table: Raw, tokens: Raw, out: Raw, rows: u32, hidden: u32, vocab: u32, padding: u32 }
    /// `RowNormParams`
    RowNormParams {
        residual: Raw, added: Raw, row_of: Raw, weight: Raw, out: Raw, rows: u32, sources: u32, hidden: u32,
        epsilon: f32,
    }
    /// `AddRowsParams`
    AddRowsParams { residual: Raw, added: Raw, gate: Raw, rows: u32, hidden: u32 }
    /// `SortPairsParams`
    SortPairsParams {
        experts: Raw, weights: Raw, row_of: Raw, sorted: Raw, first_pair: Raw, pair_of: Raw, tiles: Raw,
        arrived: Raw, arrived_rows: Raw, slot_of: Raw, rows: u32, top_k: u32, num_experts: u32, slots: u32,
        tile_count: u32, tile_rows: u32,
    }
    /// `SumPairsParams`
    SumPairsParams {
        y: Raw, first_pair: Raw, pair_of: Raw, weights: Raw, out: Raw, rows: u32, pairs: u32, hidden: u32,
        padding: u32,
    }
    /// `HeadRowsParams`
    HeadRowsParams {
        qkv: Raw, query_norm: Raw, key_norm: Raw, cos: Raw, sin: Raw, positions: Raw, page_of: Raw, queries: Raw,
        pool: Raw, page_elements: u64, layer_begins: u64, rows: u32, pages: u32, query_elements: u32,
        key_elements: u32, first_query: u32, first_key: u32, kv_heads: u32, group: u32, dim: u32, rotated: u32,
        angles: u32, neighbours: u32, whole: u32, epsilon: f32, clip: f32, padding: u32,
    }
    /// `AttendParams`
    AttendParams {
        queries: Raw, pool: Raw, positions: Raw, sequence_of: Raw, page_table: Raw, values: Raw, totals: Raw,
        out: Raw, page_elements: u64, layer_begins: u64, rows: u32, kv_heads: u32, group: u32, dim: u32, pages: u32,
        sequences: u32, table_width: u32, slots: u32, rows_of_block: u32, longest: u32, scale: f32, padding: u32,
    }
    /// `RouteParams`
    RouteParams {
        logits: Raw, correction: Raw, experts: Raw, weights: Raw, ids: Raw, rows: u32, num_experts: u32, top_k: u32,
        groups: u32, kept: u32, two_best: u32, sigmoid: u32, normalise: u32, scale: f32, padding: u32,
    }
}

const _: () = {
    assert!(size_of::<ArgmaxParams>() == 24);
    assert!(size_of::<CandidatesParams>() == 3 * 8 + 2 * 4);
    assert!(size_of::<MatMulParams>() == 80);
    assert!(size_of::<EmbedParams>() == 3 * 8 + 4 * 4);
    assert!(size_of::<RowNormParams>() == 5 * 8 + 4 * 4);
    assert!(size_of::<AddRowsParams>() == 3 * 8 + 2 * 4);
    assert!(size_of::<SortPairsParams>() == 10 * 8 + 6 * 4);
    assert!(size_of::<SumPairsParams>() == 5 * 8 + 4 * 4);
    assert!(size_of::<HeadRowsParams>() == 11 * 8 + 16 * 4);
    assert!(size_of::<AttendParams>() == 10 * 8 + 12 * 4);
    assert!(size_of::<RouteParams>() == 5 * 8 + 10 * 4);
};
