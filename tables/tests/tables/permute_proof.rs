//! The numeric self-check against permutations that are wrong in one place.

use crate::checkpoint::folder::{Folder, placed, tables};
use crate::checkpoint::{Checkpoint, EXPERTS, read};
use safetensors::tensor::Dtype;
use semmoe_tables::permute::{Proof, prove};
use serde_json::json;

/// Permutes, changes what was written, and proves it.
fn proof_after(checkpoint: &Checkpoint, change: impl FnOnce(&mut Checkpoint)) -> Result<Proof, String> {
    let folder = Folder::of(checkpoint);
    let tables = if checkpoint.config["n_group"] == 4 { whole_groups() } else { tables(2) };
    folder.permute(&tables).unwrap();
    let mut written = checkpoint.clone();
    written.tensors = read(&folder.out());
    change(&mut written);
    let changed = folder.dir.path().join("changed");
    written.write(&changed);
    std::fs::remove_file(changed.join("config.json")).unwrap();
    prove(&tables, &folder.source(), &changed).map_err(|error| error.to_string())
}

/// Gating groups of three experts, kept whole.
fn whole_groups() -> semmoe_tables::Tables {
    let whole: Vec<u16> = (0..EXPERTS).map(|e| (e / 3) % 2).collect();
    placed(vec![whole.clone(), whole])
}

/// Two rows of a stacked tensor change places.
fn swap_rows(checkpoint: &mut Checkpoint, name: &str, a: usize, b: usize) {
    let (_, _, bytes) = checkpoint.tensors.get_mut(name).unwrap();
    let row = bytes.len() / usize::from(EXPERTS);
    let (first, second) = (bytes[a * row..][..row].to_vec(), bytes[b * row..][..row].to_vec());
    bytes[a * row..][..row].copy_from_slice(&second);
    bytes[b * row..][..row].copy_from_slice(&first);
}

/// Every expert's tensor becomes that of its neighbour.
fn rotate(checkpoint: &mut Checkpoint, leaf: &str) {
    let name = |e: u16| format!("model.layers.2.{}.{}.{leaf}", block(checkpoint), e % EXPERTS);
    let names: Vec<String> = (0..EXPERTS).map(name).collect();
    let old: Vec<_> = names.iter().map(|name| checkpoint.tensors[name].clone()).collect();
    for (at, name) in names.into_iter().enumerate() {
        checkpoint.tensors.insert(name, old[(at + 1) % old.len()].clone());
    }
}

fn block(checkpoint: &Checkpoint) -> &'static str {
    if checkpoint.tensors.contains_key("model.layers.1.block_sparse_moe.gate.weight") {
        "block_sparse_moe.experts"
    } else {
        "mlp.experts"
    }
}

fn grouped(mut checkpoint: Checkpoint) -> Checkpoint {
    checkpoint.set("n_group", json!(4)).set("topk_group", json!(2));
    checkpoint
}

#[test]
fn what_was_permuted_computes_the_same() {
    for checkpoint in [
        Checkpoint::deepseek_v3(),
        Checkpoint::deepseek_v2(),
        grouped(Checkpoint::deepseek_v3()),
        grouped(Checkpoint::deepseek_v2()),
        Checkpoint::qwen3(),
        Checkpoint::mixtral(),
        Checkpoint::gpt_oss(true),
    ] {
        let proof = proof_after(&checkpoint, |_| {}).unwrap();
        assert_eq!(proof, Proof { logits: 4, outputs: 4, ..Proof::default() }, "{}", checkpoint.config);
    }
}

#[test]
fn what_was_permuted_wrongly_is_found() {
    type Change = Box<dyn FnOnce(&mut Checkpoint)>;
    let rows = |name: &'static str| -> Change {
        Box::new(move |checkpoint| swap_rows(checkpoint, &format!("model.layers.1.mlp.{name}"), 3, 7))
    };
    let leaf = |leaf: &'static str| -> Change { Box::new(move |checkpoint| rotate(checkpoint, leaf)) };
    let cases = [
        (Checkpoint::qwen3(), rows("gate.weight"), "layer 1 does not compute", "logit of expert 3"),
        (Checkpoint::deepseek_v3(), rows("gate.e_score_correction_bias"), "layer 1", "score of expert 3"),
        (Checkpoint::gpt_oss(true), rows("router.bias"), "layer 1", "score of expert 3"),
        (Checkpoint::deepseek_v3(), leaf("up_proj.weight_scale_inv"), "layer 2", "output of the experts"),
        (grouped(Checkpoint::deepseek_v2()), leaf("gate_proj.weight"), "layer 2", "output of the experts"),
        (Checkpoint::olmoe(), leaf("down_proj.weight"), "layer 2", "output of the experts"),
        (Checkpoint::mixtral(), leaf("w3.weight"), "layer 2", "output of the experts"),
    ];
    for (checkpoint, change, layer, what) in cases {
        let error = proof_after(&checkpoint, change).unwrap_err();
        assert!(error.contains(layer) && error.contains(what), "{error}\nlacks: {layer}, {what}");
    }
    for name in ["gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_bias"] {
        let rotate = |checkpoint: &mut Checkpoint| {
            (1..usize::from(EXPERTS))
                .for_each(|e| swap_rows(checkpoint, &format!("model.layers.2.mlp.experts.{name}"), e - 1, e));
        };
        let error = proof_after(&Checkpoint::gpt_oss(true), rotate).unwrap_err();
        assert!(error.contains("layer 2") && error.contains("output of the experts"), "{name}: {error}");
    }
}

#[test]
fn ties_and_unknown_forms_are_reported() {
    // Experts with one and the same row of the router: engines give a tie to the lower number.
    let mut equal = Checkpoint::qwen3();
    for layer in [1, 2] {
        let (_, _, bytes) = equal.tensors.get_mut(&format!("model.layers.{layer}.mlp.gate.weight")).unwrap();
        let first = bytes[..bytes.len() / usize::from(EXPERTS)].to_vec();
        *bytes = first.repeat(EXPERTS.into());
    }
    let proof = proof_after(&equal, |_| {}).unwrap();
    assert_eq!((proof.logits, proof.outputs, proof.ties), (4, 0, 4));

    let mut integers = Checkpoint::qwen3();
    for expert in 0..EXPERTS {
        integers.add(&format!("model.layers.2.mlp.experts.{expert}.up_proj.weight"), Dtype::I8, &[64, 32]);
    }
    let proof = proof_after(&integers, |_| {}).unwrap();
    assert_eq!((proof.logits, proof.outputs), (4, 2), "the other layer is computed");
    assert_eq!(proof.not_computed.unwrap(), "weights of the form I8 [64, 32] are not computed with");
}
