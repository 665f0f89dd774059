//! `tables export` as an operator runs it: the engines' files, the arguments to pass, and refusals.

use std::path::Path;

use semmoe_tables::{GroupId, LayerIdx, Tables};
use serde_json::{Value, json};

use crate::support::{describe, json_of, run, solved_tables};

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// The experts of every layer, group by group, as the tables place them.
fn rows(tables: &Path) -> Value {
    let tables = Tables::open(tables).expect("valid tables");
    let row = |layer: usize| -> Vec<u16> {
        let of = |group| tables.placement().experts_of(LayerIdx::new(layer as u16), GroupId::new(group));
        (0..4).flat_map(of).map(|expert| expert.get()).collect()
    };
    json!((0..tables.model().layers()).map(row).collect::<Vec<_>>())
}

#[test]
fn every_form_is_written_with_its_arguments() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = solved_tables(folder.path());
    let (rows, tables) = (rows(&tables), text(&tables));
    let export = |format: &str, more: &[&str]| {
        let args = ["tables", "export", "--tables", &tables, "--format", format];
        run(&[&args[..], more].concat())
    };

    // All layers of the bundled model have experts, so SGLang's rows equal those of the tables.
    let sglang = export("sglang", &[]);
    assert_eq!(json_of(&sglang), json!({ "physical_to_logical_map": rows }));
    let said = String::from_utf8_lossy(&sglang.stderr);
    let flags = "--tp-size 4 --attn-dp-size 4 --ep-size 4 --ep-num-redundant-experts 0";
    assert!(said.contains(flags) && said.contains("--init-expert-location FILE"), "{said}");

    let file = text(&folder.path().join("my experts.json"));
    let written = export("sglang", &["--out", &file]);
    assert!(written.status.success(), "{}", describe(&written));
    let printed = String::from_utf8_lossy(&written.stdout);
    assert!(printed.contains(&format!("{flags} --init-expert-location '{file}'")), "{printed}");
    assert_eq!(std::fs::read(&file).expect("written"), sglang.stdout, "one text for any sink");
    let said = String::from_utf8_lossy(&written.stderr);
    assert!(said.contains("--moe-a2a-backend deepep"), "where locality saves bytes: {said}");
    let older = export("sglang", &["--sglang-version", "0.5.21", "--out", &file]);
    let printed = String::from_utf8_lossy(&older.stdout);
    assert!(printed.contains("--tp-size 4 --dp-size 4 --enable-dp-attention --ep-size 4"), "{printed}");

    let eplb = json_of(&export("eplb", &[]));
    assert_eq!(eplb["phy2log"], rows);
    let tensors = text(&folder.path().join("eplb.safetensors"));
    assert!(export("eplb", &["--out", &tensors]).status.success());
    let header = std::fs::read(&tensors).expect("written");
    assert!(String::from_utf8_lossy(&header[8..400]).contains("log2phy"), "a safetensors header");

    let ascend = export("ascend", &[]);
    assert_eq!(
        json_of(&ascend)["layer_list"][0]["device_list"][0]["device_expert"],
        json!(rows[0].as_array().expect("experts")[..8])
    );
    assert!(String::from_utf8_lossy(&ascend.stderr).contains(r#"{"expert_map_path":"FILE"}"#), "{}", describe(&ascend));
    let tensorrt = export("tensorrt-llm", &[]);
    assert!(
        String::from_utf8_lossy(&tensorrt.stdout).starts_with("num_slots: 32\ninitial_global_assignments:\n  0: [")
    );
    assert!(String::from_utf8_lossy(&tensorrt.stderr).contains("load_balancer"), "{}", describe(&tensorrt));

    let vllm = export("vllm", &["--experimental"]);
    assert_eq!(json_of(&vllm), rows);
    assert!(String::from_utf8_lossy(&vllm.stderr).contains("initial_expert_map_path"), "{}", describe(&vllm));
}

#[test]
fn what_cannot_be_exported_is_reported_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = solved_tables(folder.path());
    let before = std::fs::read(&tables).expect("the tables");
    let link = folder.path().join("link.json");
    std::os::unix::fs::symlink(&tables, &link).expect("a link");
    let (tables, link) = (text(&tables), text(&link));
    let new = text(&folder.path().join("new.json"));
    for (more, code, named) in [
        (&["--format", "vllm", "--out", &new][..], 2, "--experimental"),
        (&["--format", "csv", "--out", &new], 2, "csv"),
        (&["--format", "sglang", "--sglang-version", "newest", "--out", &new], 2, "newest"),
        (&["--format", "eplb", "--sglang-version", "0.5.21", "--out", &new], 2, "--sglang-version"),
        (&["--format", "sglang", "--out", &tables], 2, "is the input"),
        (&["--format", "sglang", "--out", &link], 2, "is the input"),
        (&["--format", "sglang", "--out", "/nowhere/x.json"], 1, "/nowhere/x.json"),
    ] {
        let output = run(&[&["tables", "export", "--tables", &tables], more].concat());
        assert_eq!(output.status.code(), Some(code), "{more:?}: {}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains(named), "{more:?}: {}", describe(&output));
    }
    assert!(!Path::new(&new).exists());
    assert_eq!(std::fs::read(&tables).expect("the tables"), before, "the input is untouched");
}
