//! Decodes the routes in a response and checks them against the model.

use semmoe_tables::ModelInfo;

use super::RecordingError;
use super::encoding::{Encoding, decode_bytes, read_npy};

/// Ids of shape [rows, layers, k] as sent by the engine, including values that are not experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedRoutes {
    /// Number of tokens.
    pub rows: usize,
    /// Number of all layers, or of MoE layers only.
    pub layers: usize,
    /// Experts per token, k.
    pub top_k: usize,
    /// The ids in row-major order [rows, layers, k].
    pub ids: Vec<i32>,
}

/// Decodes the routes of `rows` tokens. Allocates at most the text's length, regardless of the expected shape.
///
/// # Errors
/// If the text is not base64, is not an array of ids, or has another shape.
pub fn decode(text: &str, rows: usize, model: &ModelInfo) -> Result<ReportedRoutes, RecordingError> {
    let (encoding, bytes) = decode_bytes(text)?;
    let (hidden, moe, k) = (usize::from(model.num_hidden_layers), model.layers(), usize::from(model.top_k));
    if encoding == Encoding::Npy {
        let (shape, ids) = read_npy(&bytes)?;
        return match shape[..] {
            [found, layers, top_k] if found == rows && top_k == k && (layers == hidden || layers == moe) => {
                Ok(ReportedRoutes { rows, layers, top_k, ids })
            }
            _ => Err(RecordingError::Shape { found: shape, rows, hidden, moe, top_k: k }),
        };
    }
    let expected = hidden.checked_mul(k).and_then(|row| row.checked_mul(rows)).and_then(|n| n.checked_mul(4));
    if expected != Some(bytes.len()) {
        return Err(RecordingError::Values { found: bytes.len() / 4, rows, layers: hidden, top_k: k });
    }
    let ids = bytes.chunks_exact(4).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
    Ok(ReportedRoutes { rows, layers: hidden, top_k: k, ids })
}

impl ReportedRoutes {
    /// Extracts the MoE layers: [rows, L, k].
    ///
    /// # Errors
    /// Reports the first id that is not an expert, and its position.
    pub fn experts(&self, model: &ModelInfo) -> Result<Vec<u16>, RecordingError> {
        let moe_only = self.layers == model.layers();
        let mut experts = Vec::with_capacity(self.rows * model.layers() * self.top_k);
        for (row, token) in self.ids.chunks_exact((self.layers * self.top_k).max(1)).enumerate() {
            for (index, &layer) in model.layer_ids.iter().enumerate() {
                let place = if moe_only { index } else { usize::from(layer) };
                for &id in &token[place * self.top_k..][..self.top_k] {
                    experts.push(expert(id, row, layer, model)?);
                }
            }
        }
        Ok(experts)
    }

    /// Returns the sent layers in which no token has plausible experts: the ids of each token are all -1 or all equal.
    pub fn dense_layers(&self) -> Vec<usize> {
        let is_dense = |layer: &usize| {
            self.rows > 0
                && self.ids.chunks_exact((self.layers * self.top_k).max(1)).all(|token| {
                    let route = &token[layer * self.top_k..][..self.top_k];
                    route.iter().all(|id| *id == route[0]) && (self.top_k > 1 || route[0] == -1)
                })
        };
        (0..self.layers).filter(is_dense).collect()
    }
}

fn expert(id: i32, token: usize, layer: u16, model: &ModelInfo) -> Result<u16, RecordingError> {
    match u16::try_from(id) {
        Ok(expert) if expert < model.num_experts => Ok(expert),
        _ if id == -1 => Err(RecordingError::NoExpert { token, layer, top_k: model.top_k }),
        _ => Err(RecordingError::UnknownExpert { token, found: id, layer, experts: model.num_experts }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::recording::encode_npy;
    use crate::sglang::encode_routed_experts;

    fn model() -> ModelInfo {
        ModelInfo {
            model: "tiny".into(),
            tokenizer_sha256: None,
            num_experts: 8,
            top_k: 2,
            vocab_size: 10,
            num_hidden_layers: 3,
            layer_ids: vec![1, 2],
        }
    }

    fn all_moe(layers: u16, top_k: u16) -> ModelInfo {
        ModelInfo { num_experts: 32, top_k, num_hidden_layers: layers, layer_ids: (0..layers).collect(), ..model() }
    }

    proptest! {
        #[test]
        fn round_trip(rows in 0usize..6, layers in 1u16..5, top_k in 1u16..5, seed in any::<u64>()) {
            let (count, model) = (rows * usize::from(layers * top_k), all_moe(layers, top_k));
            let ids: Vec<i32> = (0..count).map(|i| ((seed.rotate_left(i as u32) % 33) as i32) - 1).collect();
            let data = encode_routed_experts(&ids);
            let reported = decode(&data, rows, &model).unwrap();
            prop_assert_eq!((reported.rows, &reported.ids), (rows, &ids));
            prop_assert_eq!(reported.experts(&model).is_ok(), !ids.contains(&-1));
            prop_assert!(decode(&data, rows + 1, &model).is_err());
        }

        #[test]
        fn any_text_is_refused_or_decoded(data in "\\PC{0,40}", rows in 0usize..4, layers in any::<u16>(), top_k in 0u16..4) {
            let model = all_moe(layers, top_k);
            let _ = decode(&data, rows, &model).map(|reported| reported.experts(&model));
        }
    }

    #[test]
    fn little_endian_and_range() {
        assert_eq!(encode_routed_experts(&[1, -1, 258, 3]), "AQAAAP////8CAQAAAwAAAA==");
        let (model, data) = (all_moe(1, 2), encode_routed_experts(&[1, 2, 258, 3]));
        let error = decode(&data, 2, &model).unwrap().experts(&model).unwrap_err().to_string();
        assert_eq!(error, "token 1 is routed to expert 258 in layer 0, expected ids below 32");
        assert!(decode("AAAA!AAA", 1, &all_moe(1, 1)).is_err());
        assert!(decode("", usize::MAX, &all_moe(u16::MAX, 2)).is_err());
    }

    const IDS: [i32; 12] = [0, 0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 0];

    #[test]
    fn both_forms_with_dense_layers_or_without() {
        let model = model();
        let raw = decode(&encode_routed_experts(&IDS), 2, &model).unwrap();
        let words: Vec<u16> = IDS.iter().map(|&id| id as u16).collect();
        for wide in [false, true] {
            let npy = decode(&encode_npy(&[2, 3, 2], &words, wide), 2, &model).unwrap();
            assert_eq!(npy, raw);
        }
        assert_eq!(raw.experts(&model).unwrap(), [1, 2, 3, 4, 5, 6, 7, 0]);
        assert_eq!(raw.dense_layers(), [0]);
        let moe = [1, 2, 3, 4, 5, 6, 7, 0];
        let npy = decode(&encode_npy(&[2, 2, 2], &moe, false), 2, &model).unwrap();
        assert_eq!(npy.experts(&model).unwrap(), moe);
        let same = decode(&encode_routed_experts(&[1; 12]), 2, &model).unwrap();
        assert_eq!(same.dense_layers(), [0, 1, 2]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let model = model();
        let whole = encode_routed_experts(&IDS);
        assert!(decode(&whole[..whole.len() - 3], 2, &model).unwrap_err().to_string().contains("not base64"));
        let error = decode(&whole, 3, &model).unwrap_err().to_string();
        assert_eq!(error, "routed experts have 12 values, expected 3 rows x 3 layers x 2 experts");
        assert!(decode(&whole, usize::MAX, &model).is_err());
        let npy = |shape: &[usize]| encode_npy(shape, &vec![1; shape.iter().product()], false);
        for shape in [&[2, 4, 2][..], &[3, 3, 2], &[2, 3, 3], &[12]] {
            let error = decode(&npy(shape), 2, &model).unwrap_err().to_string();
            assert!(error.ends_with("expected [2, 3 or 2, 2]"), "{error}");
        }
        let cut = &encode_npy(&[2, 3, 2], &[1; 12], false)[..180];
        let error = decode(cut, 2, &model).unwrap_err().to_string();
        assert_eq!(error, "routed experts of shape [2, 3, 2] have 7 bytes, expected 12");
        for (at, id, reason) in [
            (3, -1, "token 0 has no expert in MoE layer 1, expected 2"),
            (8, 8, "token 1 is routed to expert 8 in layer 1, expected ids below 8"),
            (11, i32::MIN, "token 1 is routed to expert -2147483648 in layer 2, expected ids below 8"),
        ] {
            let mut ids = IDS;
            ids[at] = id;
            let reported = decode(&encode_routed_experts(&ids), 2, &model).unwrap();
            assert_eq!(reported.experts(&model).unwrap_err().to_string(), reason);
        }
    }
}
