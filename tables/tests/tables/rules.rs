//! One case per rule of the formats: the error names the tensor or field, what was found and what was expected.

use crate::common::*;
use half::f16;
use safetensors::Dtype;
use semmoe_tables::*;

fn check<T: std::fmt::Debug>(open: fn(Vec<u8>) -> Result<T, FormatError>, good: &Parts, cases: Vec<(Parts, &str)>) {
    open(good.bytes()).unwrap();
    for (parts, expected) in cases {
        let error = open(parts.bytes()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

fn u64s(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn u16s(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn f16s(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| f16::from_f32(*n).to_le_bytes()).collect()
}

#[test]
fn metadata() {
    let model = model(4, 2, 5, &[0, 2]);
    let good = Parts::of(&trace_builder(&model, &[]).to_bytes().unwrap());
    let with = |key: &str, value: &str| good.clone().meta(key, value);
    check(
        Trace::from_bytes,
        &good,
        vec![
            (good.clone().without_meta("format"), "the metadata field `format` is missing"),
            (with("format", "semmoe.profile"), "the format is \"semmoe.profile\", expected \"semmoe.trace\""),
            (with("version", "2"), "version \"2\" of semmoe.trace is not supported, expected \"1\""),
            (with("model", ""), "the field `model` is empty"),
            (with("model", &"m".repeat(5000)), "5000 bytes long"),
            (with("tokenizer_sha256", "xyz"), "64 lower-case hexadecimal digits"),
            (with("num_experts", "0"), "the field `num_experts` is 0, expected 1 to 65534"),
            (with("num_experts", "65535"), "expected 1 to 65534"),
            (with("num_experts", "+4"), "a decimal number up to 65535"),
            (with("top_k", "5"), "the field `top_k` is 5, expected 1 to 4"),
            (with("top_k", "0"), "expected 1 to 4"),
            (with("vocab_size", "0"), "at least 1"),
            (with("vocab_size", "-5"), "a decimal number up to 4294967295"),
            (with("vocab_size", "4294967295"), "layers x (vocab_size + 1) at most"),
            (with("layer_ids", "[]"), "at least one layer"),
            (with("layer_ids", "[2,0]"), "is 0 after 2, expected strictly ascending ids"),
            (with("layer_ids", "[0,3]"), "below num_hidden_layers (3)"),
            (with("layer_ids", "0,3"), "a JSON list of numbers"),
            (good.clone().without_meta("created"), "`created` is missing"),
            (good.clone().without("experts"), "the tensor `experts` is missing"),
            (good.clone().put("extra", Dtype::U8, &[0], &[]), "the tensor `extra` does not belong in semmoe.trace"),
        ],
    );
    let unknown = Trace::from_bytes(good.clone().without_meta("num_hidden_layers").bytes()).unwrap();
    assert_eq!(unknown.model().num_hidden_layers, 0);
    unknown.model().check_compatible(&model).unwrap();
}

#[test]
fn different_models_are_distinguished() {
    let a = model(4, 2, 5, &[0, 2]);
    let hash = |digit: &str| Some(digit.repeat(64));
    for (b, field) in [
        (ModelInfo { model: "other".into(), ..a.clone() }, "model"),
        (ModelInfo { num_experts: 8, ..a.clone() }, "num_experts"),
        (ModelInfo { top_k: 1, ..a.clone() }, "top_k"),
        (ModelInfo { vocab_size: 6, ..a.clone() }, "vocab_size"),
        (ModelInfo { num_hidden_layers: 4, ..a.clone() }, "num_hidden_layers"),
        (ModelInfo { layer_ids: vec![1, 2], ..a.clone() }, "layer_ids"),
    ] {
        let error = a.check_compatible(&b).unwrap_err().to_string();
        assert!(error.starts_with(&format!("different models: `{field}` is ")), "{error}");
    }
    let known = ModelInfo { tokenizer_sha256: hash("a"), ..a.clone() };
    known.check_compatible(&a).unwrap();
    a.check_compatible(&known).unwrap();
    known.check_compatible(&ModelInfo { tokenizer_sha256: hash("b"), ..a.clone() }).unwrap_err();
}

#[test]
fn traces() {
    let model = model(4, 2, 5, &[0, 2]);
    let mut builder = TraceBuilder::new(model, provenance()).unwrap();
    let one = f16::ONE;
    builder.push(&[1, 2], 1, &[0, 1, 2, 3, 1, 0, UNKNOWN_EXPERT, UNKNOWN_EXPERT], Some(&[one; 8])).unwrap();
    builder.push(&[4], 1, &[3, 2, 1, 0], Some(&[one; 4])).unwrap();
    let good = Parts::of(&builder.to_bytes().unwrap());
    let poke = |tensor: &str, at: usize, bytes: &[u8]| good.clone().poke(tensor, at, bytes);
    check(
        Trace::from_bytes,
        &good,
        vec![
            (poke("token_ids", 8, &[5]), "the tensor `token_ids` holds 5 at token 2, expected ids below 5"),
            (poke("request_offsets", 0, &[1]), "`request_offsets` holds 1 at index 0, expected 0"),
            (poke("request_offsets", 8, &[4]), "`request_offsets` holds 3 at index 2, expected at least 4"),
            (poke("request_offsets", 16, &[2]), "`request_offsets` holds 2 at index 2, expected 3"),
            (poke("request_offsets", 15, &[255]), "expected at least 18374686479671623682"),
            (poke("prompt_lengths", 0, &[3]), "holds 3 at request 0, expected at most its 2 tokens"),
            (poke("experts", 3, &[4]), "holds 4 at token 0, layer 1, slot 1, expected ids below 4, or 255 in every"),
            (poke("experts", 3, &[2]), "distinct experts per token"),
            (poke("experts", 3, &[255]), "holds 255 at token 0, layer 1, slot 1"),
            (poke("experts", 7, &[0]), "holds 0 at token 1, layer 1, slot 1, expected 255"),
            (poke("weights", 2, &f16s(&[f32::INFINITY])), "`weights` holds inf at token 0, layer 0, slot 1"),
            (poke("weights", 2, &f16s(&[f32::NAN])), "a finite, non-negative number"),
            (poke("weights", 2, &f16s(&[-1.0])), "non-negative"),
            (good.clone().put("request_offsets", Dtype::U64, &[0], &[]), "at least one offset"),
            (good.clone().put("prompt_lengths", Dtype::U32, &[0], &[]), "shape [0], expected [2]"),
            (good.clone().put("experts", Dtype::U8, &[3, 4], &[0; 12]), "shape [3, 4], expected [3, 2, 2]"),
            (good.clone().put("experts", Dtype::I32, &[3, 2, 2], &[0; 48]), "`experts` is I32, expected U8 or U16"),
            (good.clone().put("token_ids", Dtype::I32, &[3], &[0; 12]), "`token_ids` is I32, expected U32"),
            (good.clone().put("token_ids", Dtype::U32, &[3, 1], &[0; 12]), "shape [3, 1], expected one dimension"),
        ],
    );
    let plain = Trace::from_bytes(good.without("prompt_lengths").without("weights").bytes()).unwrap();
    assert_eq!(plain.request(0).prompt_len(), 2);
}

#[test]
fn profiles() {
    let model = model(4, 2, 3, &[0, 2]);
    let mut trace = TraceBuilder::new(model.clone(), provenance()).unwrap();
    trace.push(&[0, 0, 2], 3, &[0, 1, 2, 3, 0, 2, 2, 3, 1, 3, 0, 1], None).unwrap();
    let mut builder = profile_builder(&model, Phase::Prefill);
    builder.add_trace(&trace.finish().unwrap()).unwrap();
    // expert: 0 1 2 | 1 3 || 2 3 | 0 1; count: 2 1 1 | 1 1 || 2 2 | 1 1
    let good = Parts::of(&builder.to_bytes().unwrap());
    let poke = |tensor: &str, at: usize, bytes: &[u8]| good.clone().poke(tensor, at, bytes);
    check(
        Profile::from_bytes,
        &good,
        vec![
            (good.clone().meta("phase", "both"), "`phase` is \"both\", expected prefill, decode or all"),
            (poke("indptr", 0, &[1]), "`indptr` holds 1 at layer 0, index 0, expected exactly 0"),
            (poke("indptr", 8, &[6]), "holds 3 at layer 0, index 2, expected at least 6"),
            (poke("indptr", 32, &[6]), "holds 6 at layer 1, index 0, expected exactly 5"),
            (poke("indptr", 56, &[8]), "`indptr` holds 8 at its end, expected 9"),
            (poke("expert", 0, &[1]), "`expert` holds 1 after 1 at layer 0, token 0"),
            (poke("expert", 8, &[4]), "`expert` holds 4 at layer 0, token 2, expected ids below 4"),
            (poke("count", 0, &[1]), "add up to 3 at layer 0, token 0, expected a multiple of top_k (2)"),
            (poke("count", 0, &[4]), "add up to 6 at layer 0, token 0, expected at most top_k x token_count (2 x 2)"),
            (poke("count", 0, &[3, 0, 0, 0, 0]), "`count` holds 3 at layer 0, token 0, expected 1 to 2"),
            (poke("count", 4, &[2, 0, 0, 0, 0]), "`count` holds 0 at layer 0, token 0, expected 1 to 2"),
            (poke("token_count", 8, &[1]), "`token_count` holds 1 at token 1, expected 0"),
            (poke("token_count", 0, &u64s(&[u64::MAX])), "the count of all tokens does not fit into 48 bits"),
            (good.clone().put("count", Dtype::U32, &[8], &[0; 32]), "`count` has shape [8], expected [9]"),
            (good.clone().put("indptr", Dtype::U64, &[8], &[0; 64]), "`indptr` has shape [8], expected [2, 4]"),
        ],
    );
    assert_eq!(Profile::from_bytes(good.without_meta("phase").bytes()).unwrap().phase(), Phase::All);
}

#[test]
fn tables_for_dp() {
    let good = Parts::of(&dp_tables(&model(4, 2, 3, &[0, 2]), 2).to_bytes().unwrap());
    let with = |key: &str, value: &str| good.clone().meta(key, value);
    let poke = |tensor: &str, at: usize, bytes: &[u8]| good.clone().poke(tensor, at, bytes);
    let slots: Vec<u8> = [0i32, 1, 2, 3].repeat(2).iter().flat_map(|e| e.to_le_bytes()).collect();
    check(
        Tables::from_bytes,
        &good,
        vec![
            (with("attention", "mla"), "`attention` is \"mla\", expected dp or tp"),
            (with("groups", "0"), "`groups` is 0"),
            (with("groups", "3"), "one rank for each of 3 groups"),
            (with("groups", "3").meta("group_to_dp", "[0,1,1]"), "a number that divides the 4 experts: 1, 2, 4"),
            (with("dp_ranks", "0"), "`dp_ranks` is 0"),
            (with("group_to_dp", "[0,2]"), "is rank 2, expected ranks below dp_ranks (2)"),
            (with("placement_digest", "00"), "`placement_digest` is \"00\""),
            (good.clone().without_meta("solver"), "`solver` is missing"),
            (poke("E", 0, &u16s(&[2])), "`E` holds 2 at layer 0, expert 0, expected groups below 2"),
            (poke("E", 8, &u16s(&[1])), "`E` holds 1 experts in group 0 at layer 1, expected 2"),
            (poke("E", 0, &u16s(&[1, 0, 1, 0])), "`placement_digest`"),
            (poke("T", 6, &f16s(&[1.5])), "`T` holds 1.5 at token 1, rank 1, expected a share between 0 and 1"),
            (poke("T", 6, &f16s(&[f32::NAN])), "holds NaN at token 1, rank 1"),
            (poke("T", 6, &f16s(&[0.6])), "a sum of 1.1001 at token 1, expected at most 1"),
            (poke("price", 4, &f32::NAN.to_le_bytes()), "`price` holds NaN at index 1, expected a finite number"),
            (good.clone().put("price", Dtype::F32, &[1], &[0; 4]), "`price` has shape [1], expected [2]"),
            (
                good.clone().put("sequence_price", Dtype::F32, &[2], &[0, 0, 0, 0, 0, 0, 0x80, 0x7f]),
                "`sequence_price` holds inf at index 1, expected a finite number",
            ),
            (
                good.clone().put("sequence_price", Dtype::F32, &[1], &[0; 4]),
                "`sequence_price` has shape [1], expected [2]",
            ),
            (good.clone().put("T_group", Dtype::U16, &[0], &[]), "`T_group` does not belong in semmoe.tables"),
            (good.clone().put("physical_to_logical", Dtype::I32, &[2, 4], &slots), "`E` does not belong"),
            (good.clone().without("E").put("physical_to_logical", Dtype::I32, &[2, 4], &slots), "`placement_digest`"),
            (
                good.clone().without("E").put("physical_to_logical", Dtype::I32, &[8], &slots),
                "expected [layers, slots]",
            ),
        ],
    );
}

#[test]
fn tables_for_tp() {
    let good = Parts::of(&tp_tables(&model(4, 2, 3, &[0, 2]), 2).to_bytes().unwrap());
    let poke = |tensor: &str, at: usize, bytes: &[u8]| good.clone().poke(tensor, at, bytes);
    check(
        Tables::from_bytes,
        &good,
        vec![
            (good.clone().meta("labels", "5"), "`labels` is 5, expected 1 to 4"),
            (good.clone().meta("labels", "1"), "`T_group` has shape [2, 3, 2], expected [2, 3, 1]"),
            (poke("T_group", 4, &u16s(&[2])), "`T_group` holds 2 at row 1, label 0, expected groups below 2"),
            (poke("T_group", 6, &u16s(&[1])), "holds 1 at row 1, label 1, expected distinct groups"),
            (poke("T_group", 2, &u16s(&[1])), "65535 after the first unused label"),
            (poke("T_prob", 4, &f16s(&[2.0])), "`T_prob` holds 2 at row 1, label 0, expected a probability"),
            (poke("T_prob", 6, &f16s(&[0.1])), "expected 0 for an unused label"),
            (poke("T_prob", 6, &f16s(&[0.8])).poke("T_group", 6, &u16s(&[0])), "because the best label comes first"),
            (poke("T_prob", 6, &f16s(&[0.7])).poke("T_group", 6, &u16s(&[0])), "add up to at most 1, not 1.4"),
            (poke("A_group", 4, &u16s(&[9])), "`A_group` holds 9 at row 1, label 0"),
            (good.clone().without("A_prob"), "the tensor `A_prob` is missing"),
            (good.clone().put("T", Dtype::F16, &[0], &[]), "`T` does not belong in semmoe.tables"),
        ],
    );
}
