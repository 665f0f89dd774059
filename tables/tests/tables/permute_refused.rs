//! Rejected checkpoints, configurations and directories: each gives an error of one sentence, and nothing is written.

use crate::common;
use std::path::Path;

use crate::checkpoint::folder::{Folder, placed, tables};
use crate::checkpoint::{Checkpoint, EXPERTS};
use safetensors::tensor::Dtype;
use semmoe_tables::permute::{permute, write_relabelled};
use semmoe_tables::*;
use serde_json::{Value, json};
use tempfile::TempDir;

#[test]
fn output_directories_that_would_do_harm_are_refused() {
    let folder = Folder::of(&Checkpoint::qwen3());
    let (tables, source) = (tables(2), folder.source());
    let link = folder.dir.path().join("link");
    std::os::unix::fs::symlink(&source, &link).unwrap();
    for out in [source.clone(), source.join("."), source.join("new/deep"), link] {
        let error = permute(&tables, &source, &out, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains("is inside the checkpoint's own directory"), "{error}");
    }
    assert!(!source.join("new").exists());
    std::fs::create_dir_all(folder.out()).unwrap();
    std::fs::write(folder.out().join("thesis.txt"), "").unwrap();
    let error = folder.permute(&tables).unwrap_err().to_string();
    assert!(error.contains("thesis.txt is not part of this permutation"), "{error}");
}

/// The error for a changed checkpoint; nothing may have been written.
fn refusal(checkpoint: &Checkpoint, tables: &Tables, damage: impl FnOnce(&Path)) -> String {
    let folder = Folder::of(checkpoint);
    damage(&folder.source());
    let error = folder.permute(tables).unwrap_err().to_string();
    assert!(!folder.dir.path().join("made").exists(), "{error}");
    assert!(!error.contains('\n') && error.len() < 600, "not one sentence: {error}");
    error
}

#[test]
fn configurations_are_checked() {
    for (key, value, expected) in [
        (
            "architectures",
            json!(["GPT2LMHeadModel"]),
            "unsupported architecture GPT2LMHeadModel, expected one of DeepseekV2",
        ),
        ("architectures", json!(null), "unsupported architecture (none)"),
        ("n_routed_experts", json!(16), "n_routed_experts is 16, expected 12, the tables' number of experts"),
        ("n_routed_experts", json!("x"), "n_routed_experts is \"x\", expected 0 to 65535"),
        ("num_experts_per_tok", json!(3), "num_experts_per_tok is 3, expected 2, the tables' top-k"),
        ("num_hidden_layers", json!(4), "num_hidden_layers is 4, expected 3, the tables' number of layers"),
        ("n_group", json!(5), "n_group is 5, expected a number that divides the 12 experts"),
        (
            "quantization_config",
            json!({"ignore": ["model.layers.1.mlp.experts.3.up_proj"]}),
            "no names of single experts",
        ),
    ] {
        let mut checkpoint = Checkpoint::deepseek_v3();
        checkpoint.set(key, value);
        let error = refusal(&checkpoint, &tables(2), |_| {});
        assert!(error.contains(expected) && error.contains("config.json"), "{error}\nlacks: {expected}");
    }
    // Keys about the whole checkpoint may be outside the language model's section.
    let nest = |dir: &Path| {
        let path = dir.join("config.json");
        let inner: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let outer =
            json!({"text_config": inner, "quantization_config": {"ignore": ["model.layers.1.mlp.experts.3.up_proj"]}});
        std::fs::write(path, outer.to_string()).unwrap();
    };
    let error = refusal(&Checkpoint::qwen3(), &tables(2), nest);
    assert!(error.contains("no names of single experts"), "{error}");
    let error = refusal(&Checkpoint::qwen3(), &tables(2), |dir| std::fs::write(dir.join("config.json"), "{").unwrap());
    assert!(error.contains("config.json is not valid JSON"), "{error}");
    let error = refusal(&Checkpoint::qwen3(), &tables(2), |dir| std::fs::remove_file(dir.join("config.json")).unwrap());
    assert!(error.contains("cannot read") && error.contains("config.json"), "{error}");
}

#[test]
fn gating_groups_are_not_torn_apart() {
    let mut checkpoint = Checkpoint::deepseek_v3();
    checkpoint.set("n_group", json!(4)).set("topk_group", json!(2));
    let error = refusal(&checkpoint, &tables(2), |_| {});
    assert!(error.contains("layer 1") && error.contains("n_group = 4"), "{error}");
    // One layer that splits them is enough.
    let whole: Vec<u16> = (0..EXPERTS).map(|e| (e / 3) % 2).collect();
    let split: Vec<u16> = (0..EXPERTS).map(|e| e % 2).collect();
    let error = refusal(&checkpoint, &placed(vec![whole, split]), |_| {});
    assert!(error.contains("layer 2 would put experts 0 and "), "{error}");
}

type Change = fn(&mut Checkpoint);

fn check_tensors(mut checkpoint: Checkpoint, change: Change, expected: &str) {
    change(&mut checkpoint);
    let error = refusal(&checkpoint, &tables(2), |_| {});
    assert!(error.contains(expected) && error.contains("safetensors"), "{error}\nlacks: {expected}");
}

#[test]
fn missing_tensors_are_named() {
    let cases: [(Checkpoint, Change, &str); 8] = [
        (
            Checkpoint::qwen3(),
            |c| drop(c.tensors.remove("model.layers.2.mlp.gate.weight")),
            "`model.layers.2.mlp.gate.weight` is missing",
        ),
        (
            Checkpoint::qwen3(),
            |c| drop(c.tensors.remove("model.layers.1.mlp.experts.7.up_proj.weight")),
            "`model.layers.1.mlp.experts.7.up_proj.weight` is missing",
        ),
        (
            Checkpoint::deepseek_v3(),
            |c| drop(c.tensors.remove("model.layers.1.mlp.gate.e_score_correction_bias")),
            "`model.layers.1.mlp.gate.e_score_correction_bias` is missing",
        ),
        (
            Checkpoint::deepseek_v3(),
            |c| drop(c.tensors.remove("model.layers.2.mlp.experts.11.up_proj.weight_scale_inv")),
            "`model.layers.2.mlp.experts.11.up_proj.weight_scale_inv` is missing",
        ),
        (
            Checkpoint::mixtral(),
            |c| c.tensors.retain(|name, _| !name.ends_with("w3.weight")),
            "`model.layers.1.block_sparse_moe.experts.0.w3.weight` is missing",
        ),
        (
            Checkpoint::gpt_oss(true),
            |c| drop(c.tensors.remove("model.layers.1.mlp.experts.down_proj_scales")),
            "`model.layers.1.mlp.experts.down_proj_scales` is missing",
        ),
        (
            Checkpoint::gpt_oss(false),
            |c| drop(c.tensors.remove("model.layers.2.mlp.router.bias")),
            "`model.layers.2.mlp.router.bias` is missing",
        ),
        (
            Checkpoint::gpt_oss(false),
            |c| drop(c.tensors.remove("model.layers.2.mlp.experts.down_proj_bias")),
            "`model.layers.2.mlp.experts.down_proj_bias` is missing",
        ),
    ];
    for (checkpoint, change, expected) in cases {
        check_tensors(checkpoint, change, expected);
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let cases: [(Checkpoint, Change, &str); 6] = [
        (
            Checkpoint::qwen3(),
            |c| c.add("model.layers.1.mlp.experts.12.up_proj.weight", Dtype::BF16, &[2, 3]),
            "unexpected tensor `model.layers.1.mlp.experts.12.up_proj.weight`, expected experts below 12",
        ),
        (
            Checkpoint::qwen3(),
            |c| c.add("model.layers.1.mlp.experts.gate_up_proj", Dtype::BF16, &[12, 3]),
            "unexpected tensor `model.layers.1.mlp.experts.gate_up_proj`, expected names such as model.layers.1.mlp.experts.0.",
        ),
        (
            Checkpoint::qwen3(),
            |c| c.add("model.layers.0.mlp.gate.weight", Dtype::BF16, &[12, 3]),
            "no experts in a layer that the tables do not place",
        ),
        (
            Checkpoint::qwen3(),
            |c| c.add("model.layers.1.mlp.gate.weight", Dtype::BF16, &[11, 3]),
            "`model.layers.1.mlp.gate.weight` is BF16 [11, 3], expected a tensor with 12 rows",
        ),
        (
            Checkpoint::qwen3(),
            |c| c.add("model.layers.1.mlp.experts.5.up_proj.weight", Dtype::BF16, &[3, 2]),
            "is BF16 [3, 2], expected BF16 [64, 32], as model.layers.1.mlp.experts.0.up_proj.weight",
        ),
        (
            Checkpoint::gpt_oss(true),
            |c| c.add("model.layers.1.mlp.experts.down_proj_scales", Dtype::U8, &[2, 12]),
            "is U8 [2, 12], expected a tensor with 12 rows",
        ),
    ];
    for (checkpoint, change, expected) in cases {
        check_tensors(checkpoint, change, expected);
    }
}

#[test]
fn damaged_files_are_named() {
    let checkpoint = Checkpoint::qwen3().sharded(2);
    let (second, index) = (checkpoint.file_of(1), "model.safetensors.index.json");
    let cut = |dir: &Path, keep: fn(usize) -> usize| {
        let bytes = std::fs::read(dir.join(&second)).unwrap();
        std::fs::write(dir.join(&second), &bytes[..keep(bytes.len())]).unwrap();
    };
    let edit = |dir: &Path, edit: &dyn Fn(&mut serde_json::Value)| {
        let mut value = serde_json::from_slice(&std::fs::read(dir.join(index)).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(dir.join(index), value.to_string()).unwrap();
    };
    let entry = "model.layers.1.mlp.gate.weight";
    type Damage<'a> = Box<dyn Fn(&Path) + 'a>;
    let cases: Vec<(Damage<'_>, &str)> = vec![
        (
            Box::new(|dir| cut(dir, |len| len - 1)),
            "00002.safetensors: not a valid safetensors container: data_offsets of",
        ),
        (Box::new(|dir| cut(dir, |_| 100)), "00002.safetensors: not a valid safetensors container: header length"),
        (Box::new(|dir| cut(dir, |_| 0)), "file length: found 0, expected at least 8 bytes"),
        (Box::new(|dir| std::fs::remove_file(dir.join(&second)).unwrap()), "00002.safetensors: No such file"),
        (
            Box::new(|dir| edit(dir, &|v| v["weight_map"][entry] = json!("../x.safetensors"))),
            "the name of a safetensors file in the same directory",
        ),
        (
            Box::new(|dir| edit(dir, &|v| v["weight_map"][entry] = json!(7))),
            "weight_map.model.layers.1.mlp.gate.weight is 7",
        ),
        (Box::new(|dir| edit(dir, &|v| v["weight_map"] = json!([]))), "weight_map is missing or empty"),
        (Box::new(|dir| edit(dir, &|v| v["weight_map"]["other"] = json!(second))), "the tensor `other` is missing"),
        (
            Box::new(|dir| edit(dir, &|v| drop(v["weight_map"].as_object_mut().unwrap().remove(entry)))),
            "expected only tensors that model.safetensors.index.json lists",
        ),
        (
            Box::new(|dir| std::fs::rename(dir.join("empty.txt"), dir.join("model.safetensors")).unwrap()),
            "the index is beside model.safetensors, expected only one of them",
        ),
        (Box::new(|dir| std::fs::write(dir.join(index), "[").unwrap()), "index.json is not valid JSON"),
        (Box::new(|dir| std::fs::remove_file(dir.join(index)).unwrap()), "model.safetensors: No such file"),
    ];
    for (damage, expected) in cases {
        let error = refusal(&checkpoint, &tables(2), damage);
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
    let twice = |dir: &Path| {
        let all = Checkpoint::qwen3();
        all.write(dir);
        std::fs::rename(dir.join("model.safetensors"), dir.join(&second)).unwrap();
    };
    let error = refusal(&checkpoint, &tables(2), twice);
    assert!(
        error
            .contains("expected the tensor in only one file, but model-00001-of-00002.safetensors contains it as well"),
        "{error}"
    );
}

#[test]
fn replicas_are_refused() {
    let model = common::model(EXPERTS, 2, 5, &[1, 2]);
    let row: Vec<i32> = (0..6).chain([0]).chain(6..12).chain([-1]).collect();
    let row = [vec![0, 1, 2, 3, 4, 5, 6], row[7..14].to_vec()].concat();
    let replicas = Replicas::new(&model, 2, 14, row.repeat(2)).unwrap();
    let tables = common::dp_tables(&model, 2).replicas(replicas).finish().unwrap();
    let error = refusal(&Checkpoint::qwen3(), &tables, |_| {});
    assert!(error.contains("14 slots for 12 experts"), "{error}");
    let folder = TempDir::new().unwrap();
    assert!(write_relabelled(&tables, &folder.path().join("t")).unwrap_err().to_string().contains("no replicas"));
}
