//! Routed experts per token: base64 of raw little-endian i32, no header, rows x layers x k.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Encodes ids in the order rows x layers x k. [`crate::recording::decode`] reads them.
pub fn encode_routed_experts(ids: &[i32]) -> String {
    let bytes: Vec<[u8; 4]> = ids.iter().map(|id| id.to_le_bytes()).collect();
    STANDARD.encode(bytes.as_flattened())
}
