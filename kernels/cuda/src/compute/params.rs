//! Their parameters, byte for byte as the CUDA sources declare them.

use crate::params::{Params, Raw, params};

params! {
    /// `ArgmaxParams`
    ArgmaxParams { logits: Raw, best: Raw, rows: u32, vocab: u32 }
    /// `MatMulParams`
    MatMulParams {
        x: Raw, weights: Raw, out: Raw, bias: Raw, row_of: Raw, tiles: Raw, inputs: u32, outputs: u32,
        x_stride: u32, x_rows: u32, rows: u32, tile_count: u32, groups: u32, flags: u32,
    }
}

const _: () = {
    assert!(size_of::<ArgmaxParams>() == 24);
    assert!(size_of::<MatMulParams>() == 80);
};
