//! Their parameters, byte for byte as the CUDA sources declare them.

use crate::params::{Params, Raw, params};

params! {
    /// `ArgmaxParams`
    ArgmaxParams { logits: Raw, best: Raw, rows: u32, vocab: u32 }
}

const _: () = {
    assert!(size_of::<ArgmaxParams>() == 24);
};
