//! Tables whose groups divide experts plus redundant slots, but not the experts, through all commands that take tables.

use std::path::Path;

use semmoe_tables::{ModelInfo, Phase, ProfileBuilder, Provenance, TraceBuilder};
use serde_json::{Value, json};

use crate::support::{describe, json_of, run};

/// Experts, redundant slots, ranks: the bundled model on five ranks, and the shapes of public deployments.
const SHAPES: [(u16, u16, u16); 3] = [(32, 3, 5), (256, 32, 72), (256, 32, 144)];

/// The paths of a profile and a trace of a model with `experts` experts; each token has its own.
fn recorded(folder: &Path, experts: u16) -> [String; 2] {
    let (layers, top_k, vocab_size) = (2, 4, 64);
    let model = ModelInfo {
        model: "wide".to_owned(),
        tokenizer_sha256: None,
        num_experts: experts,
        top_k,
        vocab_size,
        num_hidden_layers: layers,
        layer_ids: (0..layers).collect(),
    };
    let provenance = Provenance { source: "a test".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() };
    let mut trace = TraceBuilder::new(model.clone(), provenance.clone()).expect("a model");
    for request in 0..40 {
        let ids: Vec<u32> = (0..24).map(|at| (request * 7 + at * at) % vocab_size).collect();
        let route =
            |id: u32, layer: u16| (0..top_k).map(move |k| ((id as u16 * 5 + layer) + k * (experts / 4)) % experts);
        let routes: Vec<u16> = ids.iter().flat_map(|&id| (0..layers).flat_map(move |layer| route(id, layer))).collect();
        trace.push(&ids, ids.len() as u32, &routes, None).expect("a request");
    }
    let trace = trace.finish().expect("a trace");
    let mut profile = ProfileBuilder::new(model, provenance, Phase::All).expect("a model");
    profile.add_trace(&trace).expect("counts");
    let paths = ["p.profile", "t.trace"].map(|name| folder.join(name));
    profile.write(&paths[0]).expect("written");
    TraceBuilder::select(&trace, |_, _| true).expect("all").write(&paths[1]).expect("written");
    paths.map(|path| path.to_str().expect("UTF-8").to_owned())
}

/// Solves, and returns the output of `tables show`.
fn solved(args: &[&str], out: &str) -> Value {
    let solved = run(&[&["solve", "--time-limit", "2s", "--out", out], args].concat());
    assert!(solved.status.success(), "{args:?}: {}", describe(&solved));
    json_of(&run(&["tables", "show", out, "--json"]))
}

#[test]
fn groups_that_divide_experts_and_slots_go_through_every_command() {
    for (experts, redundant, groups) in SHAPES {
        let folder = tempfile::tempdir().expect("a folder");
        let [profile, trace] = recorded(folder.path(), experts);
        let file = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
        let (tables, slots) = (file("t.tables"), experts + redundant);
        let [g, r] = [groups, redundant].map(|number| number.to_string());
        let shown = solved(&["--profile", &profile, "--trace", &trace, "--groups", &g, "--redundant", &r], &tables);
        assert_eq!(shown["slots"], json!({ "all": slots, "redundant": redundant, "empty": 0 }), "{shown}");
        assert!(run(&["tables", "verify", &tables]).status.success());

        let export = |format: &str, more: &[&str]| {
            run(&[&["tables", "export", "--tables", &tables, "--format", format], more].concat())
        };
        let sglang = export("sglang", &[]);
        let map = json_of(&sglang)["physical_to_logical_map"].clone();
        assert!(
            map.as_array()
                .expect("layers")
                .iter()
                .all(|row| row.as_array().expect("slots").len() == usize::from(slots))
        );
        let flags = format!("--tp-size {g} --attn-dp-size {g} --ep-size {g} --ep-num-redundant-experts {r}");
        assert!(String::from_utf8_lossy(&sglang.stderr).contains(&flags), "{}", describe(&sglang));
        assert_eq!(json_of(&export("eplb", &[]))["phy2log"], map, "every layer has experts");
        let devices = json_of(&export("ascend", &[]))["layer_list"][0]["device_list"].clone();
        assert_eq!(
            devices[usize::from(groups) - 1]["device_expert"].as_array().map(Vec::len),
            Some((slots / groups).into())
        );
        let tensorrt = export("tensorrt-llm", &[]);
        assert!(String::from_utf8_lossy(&tensorrt.stdout).starts_with(&format!("num_slots: {slots}\n")));
        assert!(String::from_utf8_lossy(&export("vllm", &["--experimental"]).stderr).contains("num_redundant_experts"));

        // The engine's current placement, from the file that it reads.
        let (map_file, given) = (file("e.json"), file("given.tables"));
        assert!(export("sglang", &["--out", &map_file]).status.success());
        let again = solved(&["--profile", &profile, "--groups", &g, "--placement", &map_file], &given);
        assert_eq!(again["placement_digest"], shown["placement_digest"]);

        let judged = json_of(&run(&["evaluate", "--tables", &tables, "--trace", &trace, "--json"]));
        // Without tables every expert has one copy: `before` has no replicas.
        let before = judged["outcome"]["local_activation_rate"]["before"].as_f64().expect("a rate");
        assert!((before - 1.0 / f64::from(groups)).abs() < 1e-9, "{before}");
        let next = judged["verdict"]["next"].as_str().expect("a command");
        assert!(!next.contains("solve") || next.contains(&format!("--groups {g} --redundant {r}")), "{next}");
        let html = file("s.html");
        let page = run(&["profile", "show", &trace, "--tables", &tables, "--html", &html]);
        assert!(page.status.success(), "{}", describe(&page));
    }
}
