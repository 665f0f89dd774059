//! Reads a placement back from SGLang's file.

use super::ExpertLocation;
use crate::model::short;
use crate::{FormatError, ModelInfo, Replicas};

const MAP: &str = "physical_to_logical_map";

/// Parses a placement written by [`super::sglang`] or SGLang itself: one row of P columns for each of the model's
/// layers, slot p on rank p / (P / G). Rows of dense layers are dropped. The order of slots within a rank has no
/// meaning, so they are sorted. Use [`Replicas::to_placement`] for a form without replicas.
///
/// # Errors
/// Malformed text; a row count that differs from the model's number of layers (or is too small, if that is unknown);
/// rows of different lengths; slots not divisible by the ranks; experts out of range, missing, or duplicated on a rank.
pub fn read_sglang(text: &str, model: &ModelInfo, groups: u16) -> Result<Replicas, FormatError> {
    let location: ExpertLocation = serde_json::from_str(text).map_err(|error| {
        let expected = format!("one JSON object whose only key is {MAP}, a list of lists of expert numbers");
        FormatError::field(MAP, short(&error.to_string()), expected)
    })?;
    let rows = location.physical_to_logical_map;
    let layers = usize::from(model.num_hidden_layers);
    // The model has been checked to have at least one layer.
    let least = model.layer_ids.last().map_or(0, |&last| usize::from(last) + 1);
    if rows.len() < least || (layers > 0 && rows.len() != layers) {
        let wanted = if layers > 0 { format!("[{layers}]") } else { format!("at least [{least}]") };
        let expected = wanted + ", a row for each of the model's layers";
        return Err(FormatError::shape(MAP, format!("[{}]", rows.len()), expected));
    }
    let slots = rows[0].len();
    if let Some(layer) = rows.iter().position(|row| row.len() != slots) {
        let found = format!("{} slots in layer {layer}", rows[layer].len());
        return Err(FormatError::shape(MAP, found, format!("{slots}, as in layer 0")));
    }
    if groups == 0 || slots == 0 || !slots.is_multiple_of(usize::from(groups)) {
        let found = format!("{slots} slots per layer");
        return Err(FormatError::shape(MAP, found, format!("a multiple of {groups}, the number of groups")));
    }
    let mut logical = Vec::with_capacity(model.layers() * slots);
    for &layer in &model.layer_ids {
        for (rank, held) in rows[usize::from(layer)].chunks_exact(slots / usize::from(groups)).enumerate() {
            logical.extend(sorted(held, layer, rank)?);
        }
    }
    Replicas::new(model, groups, slots, logical)
}

/// Returns the experts of one rank, ascending.
fn sorted(held: &[i32], layer: u16, rank: usize) -> Result<Vec<i32>, FormatError> {
    let mut held = held.to_vec();
    held.sort_unstable();
    let wrong =
        |found: String, expected| Err(FormatError::value(MAP, format!("layer {layer}, rank {rank}"), found, expected));
    if let Some(expert) = held.iter().find(|expert| **expert < 0) {
        return wrong(expert.to_string(), "an expert in every slot");
    }
    if let Some(pair) = held.windows(2).find(|pair| pair[0] == pair[1]) {
        return wrong(format!("expert {} twice", pair[0]), "each expert at most once on a rank");
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerIdx;

    /// Layers 1 and 3 of 4 have experts.
    fn model() -> ModelInfo {
        ModelInfo {
            model: "m".into(),
            tokenizer_sha256: None,
            num_experts: 4,
            top_k: 2,
            vocab_size: 8,
            num_hidden_layers: 4,
            layer_ids: vec![1, 3],
        }
    }

    #[test]
    fn dense_rows_are_dropped_and_slots_sorted() {
        let text = r#"{"physical_to_logical_map": [[0,1,2,3],[3,0,2,1],[0,1,2,3],[1,2,0,3]]}"#;
        let placement = read_sglang(text, &model(), 2).unwrap().to_placement().unwrap();
        assert_eq!(placement.layer(LayerIdx::new(0)), [0, 1, 1, 0]);
        assert_eq!(placement.layer(LayerIdx::new(1)), [1, 0, 0, 1]);
    }

    #[test]
    fn replicas_stay() {
        let row = "[0,1,2,0,3,2]";
        let text = format!(r#"{{"physical_to_logical_map": [{row},{row},{row},{row}]}}"#);
        let replicas = read_sglang(&text, &model(), 2).unwrap();
        assert_eq!(replicas.layer(LayerIdx::new(1)), [0, 1, 2, 0, 2, 3]);
        assert!(replicas.to_placement().is_none());
    }

    proptest::proptest! {
        /// Any row gives an error, or slots that hold every expert, each at most once per rank.
        #[test]
        fn any_row_is_read_or_reported(
            mut row in proptest::sample::subsequence(vec![0, 1, 2, 3, 3, -1], 4..6),
            more in proptest::collection::vec(0i32..4, 0..4),
            rotation in 0usize..4,
            groups in 0u16..4,
        ) {
            row.extend(more);
            row.rotate_left(rotation);
            let row = serde_json::to_string(&row).unwrap();
            let text = format!(r#"{{"physical_to_logical_map": [{row},{row},{row},{row}]}}"#);
            if let Ok(replicas) = read_sglang(&text, &model(), groups) {
                let slots = replicas.layer(LayerIdx::new(1));
                proptest::prop_assert!((0..4).all(|expert| slots.contains(&expert)), "{:?}", slots);
                for rank in slots.chunks_exact(slots.len() / usize::from(groups)) {
                    proptest::prop_assert!(rank.is_sorted_by(|a, b| a < b), "{:?}", rank);
                }
            }
        }
    }

    #[test]
    fn wrong_files_are_reported() {
        let rows = |row: &str| format!(r#"{{"physical_to_logical_map": [{row},{row},{row},{row}]}}"#);
        for (text, part) in [
            ("[1]".to_owned(), "only key is physical_to_logical_map"),
            (r#"{"physical_to_logical_map": [], "more": 1}"#.to_owned(), "only key"),
            (r#"{"physical_to_logical_map": []}"#.to_owned(), "[0], expected [4]"),
            (r#"{"physical_to_logical_map": [[0,1,2,3]]}"#.to_owned(), "[1], expected [4]"),
            (r#"{"physical_to_logical_map": [[0],[0,1],[0],[0]]}"#.to_owned(), "2 slots in layer 1"),
            (rows("[]"), "0 slots"),
            (rows("[0,1,2,3,0]"), "a multiple of 2, the number of groups"),
            (rows("[0,1,2,2]"), "layer 1, rank 1, expected each expert at most once"),
            (rows("[0,1,2,-1]"), "an expert in every slot"),
            (rows("[0,1,2,9]"), "experts below 4"),
            (rows("[0,1,2,99999999999]"), "only key"),
            (rows("[0,1,1,2]"), "no slot for expert 3"),
        ] {
            let error = read_sglang(&text, &model(), 2).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let unknown = ModelInfo { num_hidden_layers: 0, ..model() };
        let error = read_sglang(r#"{"physical_to_logical_map": [[0,1,2,3]]}"#, &unknown, 2).unwrap_err().to_string();
        assert!(error.contains("at least [4]"), "{error}");
    }
}
