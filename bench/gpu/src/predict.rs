//! A model of GPUs joined by links: bytes over the slower of link and memory. It contains no measurements.

use semmoe_reference::moved::{Call, Moved, fan_out};
use serde_json::{Value, json};

const TOKENS: usize = 4096;
const HIDDEN: usize = 2048;
const EXPERTS: usize = 64;
const TOP_K: usize = 8;

/// Name, link in GB/s per direction, memory in GB/s, from the vendors' data sheets.
const MACHINES: [(&str, f64, f64); 4] = [
    ("H100 SXM, NVLink 4", 450.0, 3350.0),
    ("H200 SXM, NVLink 4", 450.0, 4800.0),
    ("B200, NVLink 5", 900.0, 8000.0),
    ("PCIe 5.0 x16", 64.0, 2000.0),
];

/// Lower bounds on times; the unfused pair has a separate shuffle before or after the collective.
pub(crate) fn document() -> Value {
    let mut rows = Vec::new();
    for (machine, link, memory) in MACHINES {
        for ranks in [2, 4, 8] {
            let call = Call::new(ranks, TOKENS, HIDDEN, 2);
            let fan_out = fan_out(ranks, EXPERTS, TOP_K);
            let us = |moved: Moved| round(moved.bound_us(ranks, link, memory));
            let (srs, sag) = (us(call.reduce_scatter()), us(call.allgather()));
            let shuffle = us(call.shuffle());
            rows.push(json!({
                "machine": machine, "ranks": ranks,
                "srs_us": srs, "sag_us": sag, "srs_norm_us": us(call.reduce_scatter_norm()),
                "all_reduce_us": us(call.all_reduce()), "shuffle_us": shuffle,
                "srs_nvls_us": us(call.reduce_scatter_nvls()), "sag_nvls_us": us(call.allgather_nvls()),
                "dispatch_us": us(call.dispatch(TOKENS, fan_out, TOP_K)), "combine_us": us(call.combine(fan_out)),
                "unfused_over_pair": round((srs + sag + 2.0 * shuffle) / (srs + sag)),
            }));
        }
    }
    json!({
        "what": "model predictions, not measurements: lower bounds by bytes over link or memory",
        "tokens": TOKENS, "hidden": HIDDEN, "dtype": "bf16", "experts": EXPERTS, "top_k": TOP_K, "predictions": rows,
    })
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_documents_name_says_that_nothing_was_measured() {
        let document = super::document();
        assert!(document["what"].as_str().unwrap().starts_with("model predictions, not measurements"));
        assert_eq!(document["predictions"].as_array().unwrap().len(), 12);
        assert_eq!(document["predictions"][2]["srs_us"], 32.62);
    }
}
