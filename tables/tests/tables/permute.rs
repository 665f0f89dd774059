//! Permuted checkpoints: every family against an independent oracle, interrupted runs, and rejections.

use std::collections::BTreeMap;
use std::path::Path;

use crate::checkpoint::folder::{Folder, placed, tables};
use crate::checkpoint::{Checkpoint, EXPERTS, Tensor, read};
use semmoe_tables::permute::{permute, write_relabelled};
use semmoe_tables::*;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

fn families() -> Vec<Checkpoint> {
    vec![
        Checkpoint::deepseek_v3(),
        Checkpoint::deepseek_v2(),
        Checkpoint::qwen3(),
        Checkpoint::olmoe(),
        Checkpoint::mixtral(),
        Checkpoint::gpt_oss(true),
        Checkpoint::gpt_oss(false),
    ]
}

/// The expected content of the permuted checkpoint, derived independently of the crate's own code.
fn expected(checkpoint: &Checkpoint, tables: &Tables) -> BTreeMap<String, Tensor> {
    let mut expected = checkpoint.tensors.clone();
    for (index, layer) in [1u16, 2].into_iter().enumerate() {
        let mut pi: Vec<u16> = (0..EXPERTS).collect();
        pi.sort_by_key(|&e| (tables.placement().layer(LayerIdx::new(index as u16))[usize::from(e)], e));
        for (name, tensor) in &checkpoint.tensors {
            let Some(rest) = name.strip_prefix(&format!("model.layers.{layer}.")) else { continue };
            let stacked = rest.contains(".gate.")
                || rest.contains(".router.")
                || rest.contains(".experts.gate_up_proj")
                || rest.contains(".experts.down_proj");
            if stacked {
                let row = tensor.2.len() / usize::from(EXPERTS);
                let rows = pi.iter().flat_map(|&e| tensor.2[usize::from(e) * row..][..row].to_vec()).collect();
                expected.insert(name.clone(), (tensor.0, tensor.1.clone(), rows));
            } else if let Some((before, after)) = name.split_once(".experts.") {
                let (slot, leaf) = after.split_once('.').unwrap();
                let old = pi[slot.parse::<usize>().unwrap()];
                expected.insert(name.clone(), checkpoint.tensors[&format!("{before}.experts.{old}.{leaf}")].clone());
            }
        }
    }
    expected
}

/// As specified in tables/README.md.
fn digest(tensors: &BTreeMap<String, Tensor>) -> String {
    let mut hash = Sha256::new();
    for (name, (dtype, shape, data)) in tensors {
        for part in [name.as_bytes(), dtype.to_string().as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.update((shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|dim| hash.update((*dim as u64).to_le_bytes()));
        hash.update((data.len() as u64).to_le_bytes());
        hash.update(data);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn same(a: &Path, b: &Path, name: &str) -> bool {
    std::fs::read(a.join(name)).unwrap() == std::fs::read(b.join(name)).unwrap()
}

#[test]
fn every_family_is_permuted_in_one_file_and_in_shards() {
    for family in families() {
        for shards in [1, 3] {
            let checkpoint = family.clone().sharded(shards);
            let folder = Folder::of(&checkpoint);
            let tables = tables(2);
            let report = folder.permute(&tables).unwrap();
            let name = &checkpoint.config["architectures"][0];
            assert!(read(&folder.out()) == expected(&checkpoint, &tables), "{name} in {shards}");
            assert!(read(&folder.out()) != checkpoint.tensors, "{name}: something moved");
            assert_eq!(report.digest, digest(&checkpoint.tensors), "{name}");
            assert_eq!((report.moe_layers, report.shards_written, report.shards_kept), (2, shards, 0));
            assert_eq!(report.tensors, checkpoint.tensors.len());
            let speculative = checkpoint.tensors.contains_key("model.layers.3.mlp.gate.weight");
            assert_eq!(report.layers_kept, if speculative { vec![3] } else { vec![] });
            assert_eq!(report.left_out, ["consolidated.00.pth", "original"]);
            for file in ["config.json", "tokenizer.json", "empty.txt"] {
                assert!(same(&folder.source(), &folder.out(), file), "{file}");
            }
            let mut files: Vec<_> = std::fs::read_dir(folder.out()).unwrap().map(|e| e.unwrap().file_name()).collect();
            files.sort();
            assert_eq!(files.len(), 3 + shards + usize::from(shards > 1), "{files:?}");
        }
    }
}

#[test]
fn contiguous_tables_change_nothing() {
    let checkpoint = Checkpoint::deepseek_v3().sharded(2);
    let folder = Folder::of(&checkpoint);
    let row: Vec<u16> = (0..EXPERTS).map(|e| e / 4).collect();
    folder.permute(&placed(vec![row.clone(), row])).unwrap();
    assert!(read(&folder.out()) == checkpoint.tensors);
}

#[test]
fn permuting_back_gives_the_original() {
    let checkpoint = Checkpoint::qwen3();
    let folder = Folder::of(&checkpoint);
    // Its own inverse: the two experts of each pair trade places.
    let swap: Vec<u16> = (0..EXPERTS).map(|e| e ^ 1).collect();
    let tables = placed(vec![swap.clone(), swap]);
    folder.permute(&tables).unwrap();
    assert!(read(&folder.out()) != checkpoint.tensors);
    let back = folder.dir.path().join("back");
    permute(&tables, &folder.out(), &back, &mut |_, _| {}).unwrap();
    assert!(read(&back) == checkpoint.tensors);
}

#[test]
fn an_interrupted_run_is_continued() {
    let checkpoint = Checkpoint::gpt_oss(true).sharded(3);
    let folder = Folder::of(&checkpoint);
    let tables = tables(2);
    let first = folder.permute(&tables).unwrap();
    let again = folder.permute(&tables).unwrap();
    assert_eq!((again.shards_written, again.shards_kept, &again.digest), (0, 3, &first.digest));

    // As if the run had been killed while writing the second shard.
    for name in [&checkpoint.file_of(1), "config.json", "model.safetensors.index.json", "tokenizer.json"] {
        std::fs::remove_file(folder.out().join(name)).unwrap();
    }
    std::fs::write(folder.out().join(".semmoe-abc.tmp"), "half").unwrap();
    let rest = folder.permute(&tables).unwrap();
    assert_eq!((rest.shards_written, rest.shards_kept, &rest.digest), (1, 2, &first.digest));
    assert!(!folder.out().join(".semmoe-abc.tmp").exists());
    assert!(read(&folder.out()) == expected(&checkpoint, &tables));
}

#[test]
fn files_of_another_permutation_are_not_taken_over() {
    let folder = Folder::of(&Checkpoint::qwen3().sharded(2));
    folder.permute(&tables(2)).unwrap();
    let error = folder.permute(&tables(1)).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00002.safetensors is not part of this permutation"), "{error}");

    // Where no names change, the self-check detects it.
    let folder = Folder::of(&Checkpoint::gpt_oss(true));
    folder.permute(&tables(2)).unwrap();
    std::fs::remove_file(folder.out().join("config.json")).unwrap();
    let error = folder.permute(&tables(1)).unwrap_err().to_string();
    assert!(error.contains("does not match the permuted `model.layers.1.mlp."), "{error}");
    assert!(!folder.out().join("config.json").exists(), "no configuration without a passed check");
}

#[test]
fn a_byte_that_changed_on_the_disk_is_found() {
    let folder = Folder::of(&Checkpoint::mixtral());
    folder.permute(&tables(2)).unwrap();
    let path = folder.out().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = folder.permute(&tables(2)).unwrap_err().to_string();
    assert!(error.contains("delete the file and run again"), "{error}");
}

#[test]
fn group_limited_gating_allows_whole_groups() {
    let mut checkpoint = Checkpoint::deepseek_v3();
    checkpoint.set("n_group", serde_json::json!(4)).set("topk_group", serde_json::json!(2));
    // Groups of three experts: 2 and 0 on the first rank, 3 and 1 on the second.
    let whole: Vec<u16> = (0..EXPERTS).map(|e| (e / 3) % 2).collect();
    let tables = placed(vec![whole.clone(), whole]);
    let folder = Folder::of(&checkpoint);
    folder.permute(&tables).unwrap();
    assert!(read(&folder.out()) == expected(&checkpoint, &tables));
}

#[test]
fn relabelled_tables_are_contiguous_and_otherwise_the_same() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.tables.safetensors");
    let before = tables(2);
    write_relabelled(&before, &path).unwrap();
    let after = Tables::open(&path).unwrap();
    let contiguous = Placement::contiguous(2, EXPERTS, 3).unwrap();
    assert_eq!(after.placement(), &contiguous);
    assert_eq!(after.placement_digest(), contiguous.digest());
    assert_eq!((after.model(), after.price()), (before.model(), before.price()));
    assert_eq!(after.token_row(TokenId::new(4)), before.token_row(TokenId::new(4)));
}
