//! Encoded routes of an answer, decoded and checked against the model.

use semmoe_engines::recording::{Encoding, decode_bytes};
use semmoe_tables::ModelInfo;

use crate::pickle::{Array, Source, read_npy};

/// [rows, layers, k] ids as an engine told them; what is no expert is kept as it was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToldRoutes {
    /// Tokens.
    pub(crate) rows: usize,
    /// All layers, or those with experts alone.
    pub(crate) layers: usize,
    /// k.
    pub(crate) top_k: usize,
    /// In that order.
    pub(crate) ids: Vec<i32>,
}

/// Decodes the routes of `rows` tokens. Allocates no more than the text is long, whatever shape is expected.
///
/// # Errors
/// In one sentence: no base64, no array of ids, another shape.
pub(crate) fn decode(text: &str, rows: usize, model: &ModelInfo) -> Result<ToldRoutes, String> {
    let (encoding, bytes) = decode_bytes(text)?;
    let (hidden, moe, k) = (usize::from(model.num_hidden_layers), model.layers(), usize::from(model.top_k));
    if encoding == Encoding::Npy {
        let array = read_npy(&Source::from_bytes(bytes)).map_err(|error| format!("routed experts: {error}"))?;
        let shape: Vec<usize> = array.shape().iter().map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX)).collect();
        let layers = match shape[..] {
            [found, layers, top_k] if found == rows && top_k == k && (layers == hidden || layers == moe) => layers,
            _ => {
                return Err(format!(
                    "routed experts have the shape {shape:?}, expected [{rows}, {hidden} or {moe}, {k}]"
                ));
            }
        };
        let ids = ids_of(&array, [rows, layers, k])?;
        return Ok(ToldRoutes { rows, layers, top_k: k, ids });
    }
    let expected = hidden.checked_mul(k).and_then(|row| row.checked_mul(rows)).and_then(|n| n.checked_mul(4));
    if expected != Some(bytes.len()) {
        let found = bytes.len() / 4;
        return Err(format!(
            "routed experts hold {found} values, expected {rows} rows x {hidden} layers x {k} experts"
        ));
    }
    let ids = bytes.chunks_exact(4).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
    Ok(ToldRoutes { rows, layers: hidden, top_k: k, ids })
}

fn ids_of(array: &Array, [rows, layers, k]: [usize; 3]) -> Result<Vec<i32>, String> {
    let id = |row, layer, slot| {
        let id = array.int(&[row, layer, slot]).ok_or("routed experts are no whole numbers")?;
        // What does not fit is no expert either, and is told as such.
        Ok(i32::try_from(id).unwrap_or(i32::MAX))
    };
    let places =
        (0..rows).flat_map(|row| (0..layers).flat_map(move |layer| (0..k).map(move |slot| (row, layer, slot))));
    places.map(|(row, layer, slot)| id(row, layer, slot)).collect()
}

impl ToldRoutes {
    /// Keeps the MoE layers: [rows, L, k].
    ///
    /// # Errors
    /// In one sentence: an id that is no expert, and where.
    pub(crate) fn experts(&self, model: &ModelInfo) -> Result<Vec<u16>, String> {
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

    /// Layers (as told) in which no token has experts as a router gives them: all ids -1, or all of a token equal.
    pub(crate) fn dense_layers(&self) -> Vec<usize> {
        let is_dense = |layer: &usize| {
            self.rows > 0
                && self.ids.chunks_exact((self.layers * self.top_k).max(1)).all(|token| {
                    let route = &token[layer * self.top_k..][..self.top_k];
                    route.iter().all(|id| *id == route[0]) && (self.top_k > 1 || route[0] == -1)
                })
        };
        (0..self.layers).filter(is_dense).collect()
    }

    /// Whether every token has the same experts in every layer, which no router gives.
    pub(crate) fn all_tokens_alike(&self) -> bool {
        let row = (self.layers * self.top_k).max(1);
        let mut tokens = self.ids.chunks_exact(row);
        let first = tokens.next();
        self.rows > 1 && tokens.all(|token| Some(token) == first)
    }
}

fn expert(id: i32, row: usize, layer: u16, model: &ModelInfo) -> Result<u16, String> {
    match u16::try_from(id) {
        Ok(expert) if expert < model.num_experts => Ok(expert),
        _ if id == -1 => Err(format!("token {row} has no expert in MoE layer {layer}, expected {}", model.top_k)),
        _ => Err(format!("token {row} names expert {id} in layer {layer}, expected ids below {}", model.num_experts)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use semmoe_engines::recording::encode_npy;
    use semmoe_engines::sglang::encode_routed_experts;

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
        assert_eq!((raw.dense_layers(), raw.all_tokens_alike()), (vec![0], false));
        let moe = [1, 2, 3, 4, 5, 6, 7, 0];
        let npy = decode(&encode_npy(&[2, 2, 2], &moe, false), 2, &model).unwrap();
        assert_eq!(npy.experts(&model).unwrap(), moe);
        let same = decode(&encode_routed_experts(&[1; 12]), 2, &model).unwrap();
        assert!(same.all_tokens_alike() && same.dense_layers() == [0, 1, 2]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let model = model();
        let whole = encode_routed_experts(&IDS);
        assert!(decode(&whole[..whole.len() - 3], 2, &model).unwrap_err().contains("not base64"));
        let error = decode(&whole, 3, &model).unwrap_err();
        assert_eq!(error, "routed experts hold 12 values, expected 3 rows x 3 layers x 2 experts");
        assert!(decode(&whole, usize::MAX, &model).is_err());
        let npy = |shape: &[usize]| encode_npy(shape, &vec![1; shape.iter().product()], false);
        for shape in [&[2, 4, 2][..], &[3, 3, 2], &[2, 3, 3], &[12]] {
            let error = decode(&npy(shape), 2, &model).unwrap_err();
            assert!(error.ends_with("expected [2, 3 or 2, 2]"), "{error}");
        }
        let cut = &encode_npy(&[2, 3, 2], &[1; 12], false)[..136];
        assert!(decode(cut, 2, &model).unwrap_err().starts_with("routed experts: "));
        for (at, id, reason) in [
            (3, -1, "token 0 has no expert in MoE layer 1, expected 2"),
            (8, 8, "token 1 names expert 8 in layer 1, expected ids below 8"),
            (11, i32::MIN, "token 1 names expert -2147483648 in layer 2, expected ids below 8"),
        ] {
            let mut ids = IDS;
            ids[at] = id;
            let told = decode(&encode_routed_experts(&ids), 2, &model).unwrap();
            assert_eq!(told.experts(&model).unwrap_err(), reason);
        }
    }
}
