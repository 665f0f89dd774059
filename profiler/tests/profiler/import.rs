//! Imports of files from SGLang's recorder, EPLB's users and NumPy; tests/data/import/make.py created them with real
//! torch, and semmoe-convert, tested by python/test_convert.py, created those in `converted`.

use std::path::{Path, PathBuf};

use semmoe_profiler::import::{Format, ImportOptions, ImportReport, Imported, import};
use semmoe_profiler::{BuildOptions, NoProgress, ProfilerError, build};
use semmoe_tables::{LayerIdx, ModelInfo, Phase, Trace};

use crate::common;

const CREATED: &str = "2026-01-02T03:04:05Z";

fn data(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/import");
    if name.ends_with(".safetensors") { folder.join("converted").join(name) } else { folder.join(name) }
}

fn model() -> ModelInfo {
    common::model(8, 2, 100, &[1, 2, 3])
}

struct Import {
    folder: tempfile::TempDir,
    options: ImportOptions,
}

impl Import {
    fn of(format: Format, names: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let files = names.iter().map(|name| data(name)).collect();
        let options =
            ImportOptions { format, files, out, model: model(), created: CREATED.into(), max_bad: 0.01, against: None };
        Self { folder, options }
    }

    fn run(&self) -> Result<ImportReport, ProfilerError> {
        import(&self.options)
    }

    fn trace(&self) -> Trace {
        Trace::open(&self.options.out).unwrap()
    }

    /// The message of a rejection that leaves nothing behind.
    fn refused(&self, holds: &[&str]) {
        let error = self.run().expect_err("refused");
        let message = error.to_string();
        holds.iter().for_each(|part| assert!(message.contains(part), "{message:?} has no {part:?}"));
        assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 0, "nothing was written");
    }
}

/// Tokens and prompt lengths of all requests, with routes checked against the truth.
fn requests(trace: &Trace) -> Vec<(Vec<u32>, usize)> {
    let check = |request: semmoe_tables::TraceRequest<'_>| {
        for (position, token) in request.token_ids().iter().enumerate() {
            for layer in 0..3u16 {
                let experts: Vec<u16> = request
                    .route(position, LayerIdx::new(layer))
                    .unwrap()
                    .experts()
                    .map(|expert| expert.get())
                    .collect();
                let first = (*token as u16 + layer + 1) % 8;
                assert_eq!(experts, [first, (first + 3) % 8], "token {token}, layer {layer}");
            }
        }
        (request.token_ids().to_vec(), request.prompt_len())
    };
    trace.iter().map(check).collect()
}

#[test]
fn per_token_dumps_become_traces_of_logical_experts() {
    let import = Import::of(Format::Sglang, &["per_token_0.pt.safetensors"]);
    let report = import.run().unwrap();
    let expected =
        [(vec![1, 2, 3, 4], 4), (vec![50, 60, 70], 3), (vec![8], 0), (vec![9], 0), (vec![10, 11], 2), (vec![12], 0)];
    assert_eq!(requests(&import.trace()), expected);
    assert_eq!((report.records, report.repeated, report.bad_records, report.files), (3, 0, 0, 1));
    assert!(matches!(report.imported, Imported::Trace { requests: 6, tokens: 12, .. }));
    assert_eq!(import.trace().provenance().source, "imported (sglang) from per_token_0.pt.safetensors");
    // Prefill and decode are distinguished.
    for (phase, tokens) in [(Phase::Prefill, 9), (Phase::Decode, 3)] {
        let out = import.folder.path().join("profile");
        assert_eq!(build_profile(&import.options.out, &out, phase), tokens);
    }
}

fn build_profile(trace: &Path, out: &Path, phase: Phase) -> u64 {
    let options = BuildOptions { phase, ..BuildOptions::new(vec![trace.to_owned().into()], out.to_owned()) };
    build(&options, &NoProgress).unwrap().tokens
}

/// Digests of the traces made when the dumps themselves could be read.
#[test]
fn converted_dumps_give_the_same_traces() {
    for (format, names, digest) in [
        (Format::Sglang, &["per_token_0.pt"][..], "f394db966532db22cc7516528afc2f74ce5c0cfa15dacae112777f97b2215f45"),
        (Format::Sglang, &["per_token_1.pt"], "e7388d573516f77008351a62846e3142cabd20f7d3438abfd3805d6041ee1111"),
        (
            Format::Sglang,
            &["per_token_0.pt", "per_token_1.pt"],
            "e7388d573516f77008351a62846e3142cabd20f7d3438abfd3805d6041ee1111",
        ),
        (Format::Sglang, &["per_token_bad.pt"], "d6179621a65a20c07019d2b51d18533390f5d87367287ff54299e8db12c4607f"),
        (Format::Routes, &["routes.npz"], "19404a4231f50d151090fb0260797922762c6384cd5a716b214c9260ba6e824c"),
    ] {
        let files: Vec<String> = names.iter().map(|name| format!("{name}.safetensors")).collect();
        let mut import = Import::of(format, &files.iter().map(String::as_str).collect::<Vec<_>>());
        import.options.max_bad = 0.7;
        import.run().unwrap();
        assert_eq!(import.trace().digest(), digest, "{names:?}");
    }
}

#[test]
fn passes_that_every_rank_recorded_count_once() {
    let import = Import::of(Format::Sglang, &["per_token_0.pt.safetensors", "per_token_1.pt.safetensors"]);
    let report = import.run().unwrap();
    assert_eq!((report.records, report.repeated), (7, 3));
    assert_eq!(requests(&import.trace()).last().unwrap(), &(vec![99], 1));
    assert_eq!(import.trace().tokens(), 13);
}

#[test]
fn bad_records_are_left_out_counted_and_named() {
    let mut import = Import::of(Format::Sglang, &["per_token_bad.pt.safetensors"]);
    import.refused(&[
        "2 of 3 records were bad, more than the 0 allowed",
        "per_token_bad.pt.safetensors record 0",
        "shape [4, 6, 8]",
        "[4, 7, 2",
    ]);
    import.options.max_bad = 0.7;
    let report = import.run().unwrap();
    assert_eq!((report.records, report.bad_records, report.bad.len()), (3, 2, 2));
    assert_eq!(report.bad[1].record, "record 2");
    assert!(report.bad[1].reason.contains("physical expert 77, expected one below 12"), "{}", report.bad[1].reason);
    assert_eq!(requests(&import.trace()), [(vec![8], 0), (vec![9], 0)]);
    import.options.max_bad = 1.5;
    assert!(import.run().unwrap_err().to_string().contains("max_bad is 1.5"));
}

#[test]
fn dumps_of_another_model_are_refused() {
    let with = |change: &dyn Fn(&mut ModelInfo)| {
        let mut import = Import::of(Format::Sglang, &["per_token_0.pt.safetensors"]);
        change(&mut import.options.model);
        import
    };
    with(&|model| model.num_experts = 16).refused(&["per_token_0.pt.safetensors", "no slot for expert 8"]);
    with(&|model| model.num_experts = 6).refused(&["contains 6 at layer 1", "experts below 6"]);
    with(&|model| model.num_hidden_layers = 9).refused(&["4 layers, expected all 9 layers of the model or its 3"]);
    with(&|model| model.top_k = 3).refused(&["2 experts, expected 3: another model"]);
    with(&|model| model.top_k = 1).refused(&["2 experts, expected 1: another model"]);
    with(&|model| model.vocab_size = 40).refused(&["holds 50 at token 4, expected ids below 40"]);
    with(&|model| model.model = String::new()).refused(&["model"]);
}

#[test]
fn what_is_no_dump_says_what_it_is() {
    for (name, said) in [
        ("per_pass.pt.safetensors", "per_pass counts experts without tokens"),
        ("logcnt.pt.safetensors", "neither `records` nor `logical_count`"),
        ("views.pt.safetensors", "neither `records` nor `logical_count`"),
        ("config.json", "not a valid safetensors container"),
        ("absent.safetensors", "cannot open"),
    ] {
        Import::of(Format::Sglang, &[name]).refused(&[name, said]);
    }
    Import::of(Format::Sglang, &[]).refused(&["no file"]);
    Import::of(Format::Sglang, &["stat.pt.safetensors", "per_token_0.pt.safetensors"]).refused(&["files of one kind"]);
}

#[test]
fn counts_become_loads_and_never_a_profile() {
    let expected: Vec<u64> = (0..8).map(|expert| (0..3).map(|step| step * 32 + 8 + expert).sum()).collect();
    for (format, name) in [
        (Format::Sglang, "stat.pt.safetensors"),
        (Format::Eplb, "stat.pt.safetensors"),
        (Format::Eplb, "logcnt.pt.safetensors"),
        (Format::Eplb, "logcnt_strided.pt.safetensors"),
        (Format::Eplb, "logcnt.npy.safetensors"),
        (Format::Eplb, "logcnt.npz.safetensors"),
        (Format::Eplb, "fortran.npy.safetensors"),
    ] {
        let import = Import::of(format, &[name]);
        let report = import.run().unwrap();
        let Imported::Loads(loads) = &report.imported else { panic!("{name}: loads") };
        assert_eq!(loads.layers[0].counts, expected, "{name}");
        assert_eq!((loads.layers.len(), loads.layers[0].layer_id, loads.layers[0].busiest.get()), (3, 1, 7));
        assert_eq!(loads.layers[0].activations, expected.iter().sum::<u64>());
        let text = std::fs::read_to_string(&import.options.out).unwrap();
        assert!(text.contains("\"format\": \"semmoe.loads\""), "{text}");
        assert!(Trace::open(&import.options.out).is_err());
    }
    for (name, said) in [
        ("routes.npz.safetensors", "no array `logical_count`"),
        ("make.py", "not a valid safetensors container"),
        ("views.pt.safetensors", "no array `logical_count`"),
    ] {
        Import::of(Format::Eplb, &[name]).refused(&[name, said]);
    }
    let mut other = Import::of(Format::Eplb, &["logcnt.pt.safetensors"]);
    other.options.model.num_experts = 16;
    other.refused(&["shape [4, 8], expected [layers, 16]"]);
}

#[test]
fn files_of_torch_and_numpy_name_the_converter() {
    for (format, name) in [
        (Format::Sglang, "per_token_0.pt"),
        (Format::Eplb, "logcnt.npy"),
        (Format::Eplb, "logcnt.pt"),
        (Format::Routes, "routes.npz"),
        (Format::Routes, "absent.pth"),
    ] {
        let import = Import::of(format, &[name]);
        let command = format!("`semmoe-convert {0}` writes {0}.safetensors", data(name).display());
        import.refused(&[&command, "files first"]);
        assert_eq!(import.run().unwrap_err().to_string().lines().count(), 1);
    }
}

#[test]
fn json_counts_as_sglang_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counts.json");
    let mut import = Import::of(Format::Eplb, &[]);
    import.options.files = vec![path.clone()];
    std::fs::write(
        &path,
        r#"{"logical_count": [[0,0,0,0,0,0,0,0],[1,1,1,1,1,1,1,1],[8,0,0,0,0,0,0,0],[2,2,2,2,0,0,0,0]]}"#,
    )
    .unwrap();
    let Imported::Loads(loads) = import.run().unwrap().imported else { panic!("loads") };
    let figures: Vec<(u64, f64)> = loads.layers.iter().map(|layer| (layer.activations, layer.max_over_mean)).collect();
    assert_eq!(figures, [(8, 1.0), (8, 8.0), (8, 2.0)]);
    std::fs::remove_file(&import.options.out).unwrap();
    for (text, said) in [
        ("{}", "logical_count"),
        (r#"{"logical_count": [[-1]]}"#, "counts.json"),
        (r#"{"logical_count": [[1],[1],[1]]}"#, "1 counts in layer 0, expected 8"),
    ] {
        std::fs::write(&path, text).unwrap();
        import.refused(&["counts.json", said]);
    }
}

#[test]
fn loads_are_compared_with_a_profile() {
    let trace = Import::of(Format::Sglang, &["per_token_0.pt.safetensors"]);
    trace.run().unwrap();
    let profile = trace.folder.path().join("profile");
    build_profile(&trace.options.out, &profile, Phase::All);
    let mut loads = Import::of(Format::Eplb, &["logcnt.pt.safetensors"]);
    loads.options.against = Some(profile.clone());
    let Imported::Loads(found) = loads.run().unwrap().imported else { panic!("loads") };
    for layer in &found.layers {
        let distance = layer.distance.unwrap();
        assert!((0.05..0.6).contains(&distance), "{distance}");
    }
    std::fs::remove_file(&loads.options.out).unwrap();
    loads.options.model.model = "other".into();
    loads.refused(&["profile", "different models"]);
}

#[test]
fn arrays_of_routes_become_traces() {
    let import = Import::of(Format::Routes, &["routes.npz.safetensors"]);
    import.run().unwrap();
    assert_eq!(requests(&import.trace()), [(vec![1, 2, 3], 2), (vec![50, 60], 2)]);
    Import::of(Format::Routes, &["logcnt.npz.safetensors"]).refused(&["the array `logical_count` is not known"]);
    let mut other = Import::of(Format::Routes, &["routes.npz.safetensors"]);
    other.options.model.top_k = 4;
    other.refused(&["`experts` has shape [5, 3, 2], expected [5, layers, 4]"]);
    let mut small = Import::of(Format::Routes, &["routes.npz.safetensors"]);
    small.options.model.vocab_size = 40;
    small.refused(&["1 of 2 records", "request 1", "ids below 40"]);
}
