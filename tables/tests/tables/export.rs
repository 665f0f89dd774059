//! Exports: golden text, and the laws that hold between the arrays.

use crate::common;
use crate::common::{dp_tables, model};
use proptest::prelude::*;
use safetensors::SafeTensors;
use semmoe_tables::export::{
    Eplb, SglangSpelling, ascend, ascend_flags, sglang, sglang_flags, tensorrt_llm, tensorrt_llm_options, vllm,
    vllm_flags,
};
use semmoe_tables::*;
use serde_json::{Value, json};

/// MoE in layers 1 and 3 of 4; the second layer's experts alternate between two groups.
fn tables() -> Tables {
    let mut info = model(4, 2, 3, &[1, 3]);
    info.num_hidden_layers = 5;
    let placement = Placement::new(2, vec![vec![1, 0, 0, 1], vec![0, 1, 0, 1]]).unwrap();
    let t = vec![half::f16::ZERO; 6];
    TablesBuilder::dp(info, common::provenance(), placement, t, vec![0.0; 2]).finish().unwrap()
}

/// Adds one slot to each group.
fn replicated(padding: bool) -> Tables {
    let last = if padding { -1 } else { 3 };
    let slots = vec![0, 1, 3, 2, 3, if padding { -1 } else { 3 }, 0, 1, 2, 0, 1, last];
    let slots = if padding { slots } else { vec![0, 1, 3, 0, 2, 3, 0, 1, 2, 0, 1, last] };
    let info = ModelInfo { num_hidden_layers: 5, ..model(4, 2, 3, &[1, 3]) };
    let slots = if padding { vec![0, 1, -1, 2, 3, -1, 0, 1, 2, 0, 1, 3] } else { slots };
    let replicas = Replicas::new(&info, 2, 6, slots).unwrap();
    dp_tables(&info, 2).replicas(replicas).finish().unwrap()
}

#[test]
fn sglang_has_a_row_for_every_layer_and_no_other_key() {
    assert_eq!(
        sglang(&tables()).unwrap(),
        "{\"physical_to_logical_map\":[[0,1,2,3],[1,2,0,3],[0,1,2,3],[0,2,1,3],[0,1,2,3]]}\n"
    );
    // SGLang 0.5.17 and later refuse `--ep-dispatch-algorithm static` without an all-to-all backend.
    for (spelling, attention) in [
        (SglangSpelling::AttnDpSize, "--attn-dp-size 2"),
        (SglangSpelling::EnableDpAttention, "--dp-size 2 --enable-dp-attention"),
    ] {
        assert_eq!(
            sglang_flags(&tables(), "a b.json", spelling),
            format!(
                "--tp-size 2 {attention} --ep-size 2 --ep-num-redundant-experts 0 --init-expert-location 'a b.json'"
            )
        );
    }
    // Dense rows get SGLang's default placement: slot p holds expert p modulo N.
    assert_eq!(
        sglang(&replicated(false)).unwrap(),
        "{\"physical_to_logical_map\":[[0,1,2,3,0,1],[0,1,3,0,2,3],[0,1,2,3,0,1],[0,1,2,0,1,3],[0,1,2,3,0,1]]}\n"
    );
    assert!(
        sglang_flags(&replicated(false), "x.json", SglangSpelling::default()).contains("--ep-num-redundant-experts 2 ")
    );
}

#[test]
fn vllm_has_the_moe_layers_only() {
    assert_eq!(vllm(&tables()).unwrap(), "[[1,2,0,3],[0,2,1,3]]\n");
    let flags = vllm_flags(&replicated(false), "it's.json");
    assert!(flags.contains("'{\"initial_expert_map_path\":\"it'\\''s.json\",\"num_redundant_experts\":2,"), "{flags}");
}

#[test]
fn tensorrt_llm_has_layers_by_their_number_in_the_model() {
    assert_eq!(
        tensorrt_llm(&replicated(false)).unwrap(),
        "num_slots: 6\ninitial_global_assignments:\n  1: [0, 1, 3, 0, 2, 3]\n  3: [0, 1, 2, 0, 1, 3]\n\
         layer_updates_per_iter: 0\n"
    );
    assert_eq!(
        tensorrt_llm_options(&tables(), "a b.yaml"),
        r#"{"enable_attention_dp":true,"moe_config":{"backend":"WIDEEP","load_balancer":"a b.yaml"}}"#
    );
}

#[test]
fn ascend_has_layers_by_their_number_among_those_with_experts() {
    let map: Value = serde_json::from_str(&ascend(&replicated(false)).unwrap()).unwrap();
    let layer = |id: u16, first: [u16; 3], second: [u16; 3]| {
        json!({ "layer_id": id, "device_count": 2, "device_list": [
            { "device_id": 0, "device_expert": first }, { "device_id": 1, "device_expert": second },
        ] })
    };
    let layers = [layer(0, [0, 1, 3], [0, 2, 3]), layer(1, [0, 1, 2], [0, 1, 3])];
    assert_eq!(map, json!({ "moe_layer_count": 2, "layer_list": layers }));
    assert_eq!(
        ascend_flags("m.json"),
        r#"--enable-expert-parallel --additional-config '{"eplb_config":{"expert_map_path":"m.json"}}'"#
    );
}

/// Interprets a file as its reader would: the experts of all slots, layer by layer.
fn slots_of_tensorrt_llm(text: &str) -> Vec<i32> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("  ")?.split_once(": "));
    rows.flat_map(|(_, row)| serde_json::from_str::<Vec<i32>>(row).unwrap()).collect()
}

fn slots_of_ascend(text: &str) -> Vec<i32> {
    let map: Value = serde_json::from_str(text).unwrap();
    let devices =
        map["layer_list"].as_array().unwrap().iter().flat_map(|layer| layer["device_list"].as_array().unwrap());
    let experts = devices.flat_map(|device| device["device_expert"].as_array().unwrap());
    experts.map(|expert| expert.as_i64().unwrap() as i32).collect()
}

#[test]
fn eplb_arrays_as_json_and_as_tensors() {
    let eplb = Eplb::new(&replicated(false)).unwrap();
    let json: Value = serde_json::from_str(&eplb.to_json()).unwrap();
    assert_eq!(
        json,
        json!({
            "phy2log": [[0, 1, 3, 0, 2, 3], [0, 1, 2, 0, 1, 3]],
            "log2phy": [[[0, 3], [1, -1], [4, -1], [2, 5]], [[0, 3], [1, 4], [2, -1], [5, -1]]],
            "logcnt": [[2, 1, 1, 2], [2, 2, 1, 1]],
        })
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("eplb.safetensors");
    eplb.write_safetensors(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (name, shape, values) in [
        ("phy2log", &[2, 6][..], &eplb.phy2log),
        ("log2phy", &[2, 4, 2], &eplb.log2phy),
        ("logcnt", &[2, 4], &eplb.logcnt),
    ] {
        let view = tensors.tensor(name).unwrap();
        assert_eq!((view.dtype(), view.shape()), (safetensors::Dtype::I32, shape), "{name}");
        assert_eq!(view.data(), bytemuck::cast_slice::<i32, u8>(values), "{name}");
    }
}

#[test]
fn what_an_engine_cannot_take_is_refused() {
    let padded = replicated(true);
    let eplb = |tables: &Tables| Eplb::new(tables).map(|eplb| eplb.to_json());
    for (export, reader) in [
        (sglang as fn(&Tables) -> _, "SGLang"),
        (vllm, "vLLM"),
        (eplb, "EPLB"),
        (tensorrt_llm, "TensorRT-LLM"),
        (ascend, "vLLM-Ascend"),
    ] {
        let error = export(&padded).unwrap_err().to_string();
        assert!(error.contains("layer 0, slot 2") && error.contains("holds -1") && error.contains(reader), "{error}");
    }
    let info = ModelInfo { num_hidden_layers: 0, ..model(4, 2, 3, &[1, 3]) };
    let unknown = dp_tables(&info, 2).finish().unwrap();
    let error = sglang(&unknown).unwrap_err().to_string();
    assert!(error.contains("`num_hidden_layers` is unknown"), "{error}");
    assert_eq!(vllm(&unknown).unwrap(), "[[0,1,2,3],[0,1,2,3]]\n");
}

proptest! {
    #[test]
    fn arrays_are_each_others_inverse(extra in 0usize..4, seed in 0u64..1000, groups in 1u16..4) {
        let experts = 12u16;
        let info = model(experts, 2, 2, &[0, 2]);
        let mut random = seed;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % below
        };
        let each = usize::from(experts / groups);
        let mut row = || -> Vec<i32> {
            let mut all: Vec<i32> = (0..i32::from(experts)).collect();
            (1..all.len()).rev().for_each(|i| all.swap(i, next(i + 1)));
            let group = |own: &[i32]| {
                let mut group = own.to_vec();
                group.extend((0..i32::from(experts)).filter(|e| !own.contains(e)).take(extra));
                group.sort_unstable();
                group
            };
            all.chunks(each).flat_map(group).collect()
        };
        let slots = [row(), row()].concat();
        let width = slots.len() / 2;
        let replicas = Replicas::new(&info, groups, width, slots.clone()).unwrap();
        let tables = dp_tables(&info, groups).replicas(replicas).finish().unwrap();
        let eplb = Eplb::new(&tables).unwrap();
        prop_assert_eq!(eplb.phy2log, &slots[..]);
        prop_assert_eq!(slots_of_tensorrt_llm(&tensorrt_llm(&tables).unwrap()), slots.clone());
        prop_assert_eq!(slots_of_ascend(&ascend(&tables).unwrap()), slots.clone());
        let (n, most) = (usize::from(experts), eplb.most_replicas);
        for (at, physical) in eplb.log2phy.chunks(most).enumerate() {
            let (layer, expert) = (at / n, (at % n) as i32);
            let known: Vec<i32> = physical.iter().copied().filter(|&p| p >= 0).collect();
            prop_assert_eq!(known.len() as i32, eplb.logcnt[at]);
            prop_assert!(known.is_sorted());
            prop_assert!(known.iter().all(|&p| slots[layer * width + p as usize] == expert));
        }
        prop_assert_eq!(eplb.logcnt.iter().sum::<i32>() as usize, slots.len());
    }
}
