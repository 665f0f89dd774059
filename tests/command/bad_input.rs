//! Bad input to `solve`, `evaluate` and `tables`: one sentence on standard error, the right exit code, nothing written.

use std::collections::BTreeMap;
use std::path::PathBuf;

use semmoe_tables::{Phase, Profile, ProfileBuilder, Provenance, Tables, Trace, TraceBuilder, UNKNOWN_EXPERT};

use crate::support::{describe, repository, run};

/// A folder of files; checks that a command leaves it unchanged.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = std::fs::read_dir(self.0.path()).expect("a folder").map(|entry| entry.expect("an entry").path());
        entries.filter(|path| path.is_file()).map(|path| (path.clone(), std::fs::read(&path).expect("read"))).collect()
    }

    /// Runs in this folder. The last line must give the reason in one sentence that contains all of `named`, and no
    /// file may change.
    fn refused(&self, args: &str, code: i32, named: &[&str]) {
        let before = self.files();
        let words: Vec<String> = args.split_whitespace().map(|word| self.resolved(word)).collect();
        let output = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(code), "{args}: {}", describe(&output));
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = said.lines().filter(|line| !line.ends_with(" ...")).collect();
        assert!(matches!(lines[..], [line] if line.starts_with("semmoe: ") && line.len() < 700), "{args}: {said}");
        for name in named {
            assert!(said.contains(name), "{args} does not name {name:?}: {said}");
        }
        assert!(output.stdout.is_empty(), "{args}: {}", describe(&output));
        assert!(self.files() == before, "{args} wrote something");
    }

    /// Replaces `@name` by the path of a file in the folder.
    fn resolved(&self, word: &str) -> String {
        match word.strip_prefix('@') {
            Some(name) => self.path(name).to_str().expect("UTF-8").to_owned(),
            None => word.to_owned(),
        }
    }

    fn runs(&self, args: &str) {
        let words: Vec<String> = args.split_whitespace().map(|word| self.resolved(word)).collect();
        let output = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{args}: {}", describe(&output));
    }
}

fn reference() -> Trace {
    Trace::open(&repository("tests/data/reference.trace.safetensors")).expect("a valid trace")
}

fn provenance() -> Provenance {
    Provenance { source: "a test".to_owned(), created: "2026-01-01T00:00:00Z".to_owned() }
}

/// A profile and a trace of the reference's first `requests`, with only `tokens` kept.
fn write_some(
    folder: &Folder,
    name: &str,
    requests: usize,
    tokens: usize,
    change: impl FnOnce(&mut semmoe_tables::ModelInfo),
) {
    write_without(folder, name, requests, tokens, None, change);
}

/// A profile and a trace of the reference's first `requests`, with only `tokens` kept and one layer's routes unknown.
fn write_without(
    folder: &Folder,
    name: &str,
    requests: usize,
    tokens: usize,
    silent: Option<usize>,
    change: impl FnOnce(&mut semmoe_tables::ModelInfo),
) {
    let reference = reference();
    let mut model = reference.model().clone();
    model.tokenizer_sha256 = Some("b".repeat(64));
    change(&mut model);
    let mut trace = TraceBuilder::new(model.clone(), provenance()).expect("a model");
    for request in reference.iter().take(requests) {
        let experts: Vec<u16> = (0..tokens)
            .flat_map(|position| {
                let layers = (0..model.layers()).map(|layer| semmoe_tables::LayerIdx::new(layer as u16));
                layers.flat_map(move |layer| {
                    if Some(layer.index()) == silent {
                        return vec![UNKNOWN_EXPERT; 4];
                    }
                    let route = request.route(position, layer).expect("a known route");
                    route.experts().map(|expert| expert.get()).collect::<Vec<_>>()
                })
            })
            .collect();
        let ids: Vec<u32> = request.token_ids()[..tokens].to_vec();
        trace.push(&ids, tokens as u32, &experts, None).expect("a request");
    }
    let path = folder.path(&format!("{name}.trace"));
    trace.write(&path).expect("written");
    let trace = Trace::open(&path).expect("valid");
    let mut profile = ProfileBuilder::new(model, provenance(), Phase::All).expect("a model");
    profile.add_trace(&trace).expect("counts");
    profile.write(&folder.path(&format!("{name}.profile"))).expect("written");
}

#[test]
fn inputs_that_say_nothing() {
    let folder = Folder::new();
    write_some(&folder, "empty", 0, 0, |_| {});
    write_some(&folder, "one", 1, 1, |_| {});
    for more in ["", " --attention tp", " --solver paper"] {
        let solve = format!("solve --groups 4 --out @t --profile @empty.profile{more}");
        folder.refused(&solve, 2, &["the profile contains no token with a known route"]);
    }
    folder.refused(
        "solve --groups 4 --out @t --profile @one.profile --trace @empty.trace",
        2,
        &["the trace contains no token"],
    );

    write_without(&folder, "silent", 3, 9, Some(5), |_| {});
    let silent = "solve --groups 4 --profile @silent.profile --attention";
    folder.refused(&format!("{silent} tp --out @t"), 2, &["no known route in the model's layer 5"]);
    folder.runs(&format!("{silent} dp --out @silent.tables"));

    // One token is enough for tables, although only four of the 32 experts are ever active.
    for attention in ["dp", "tp"] {
        folder.runs(&format!(
            "solve --groups 4 --attention {attention} --profile @one.profile --out @{attention}.tables"
        ));
        let tables = Tables::open(&folder.path(&format!("{attention}.tables"))).expect("valid tables");
        assert_eq!(tables.groups(), 4);
        folder.runs(&format!("evaluate --tables @{attention}.tables --trace @one.trace"));
        folder.refused(
            &format!("evaluate --tables @{attention}.tables --profile @empty.profile"),
            2,
            &["the profile contains no"],
        );
        folder.refused(
            &format!("evaluate --tables @{attention}.tables --trace @empty.trace"),
            2,
            &["the trace contains no"],
        );
    }
}

#[test]
fn groups_that_cannot_be() {
    let folder = Folder::new();
    write_some(&folder, "one", 1, 1, |_| {});
    for groups in ["3", "5", "33", "64"] {
        let solve = format!("solve --profile @one.profile --out @t --groups {groups}");
        folder.refused(&solve, 2, &[groups, "32 experts", "[1, 2, 4, 8, 16, 32]"]);
    }
}

#[test]
fn placements_that_do_not_fit() {
    let folder = Folder::new();
    write_some(&folder, "one", 8, 4, |_| ());
    write_some(&folder, "two", 8, 4, |model| model.model = "another".to_owned());
    folder.runs("solve --profile @two.profile --groups 4 --out @two.tables --time-limit 0.5");
    folder.runs("solve --profile @one.profile --groups 2 --out @halves.tables --time-limit 0.5");
    folder.runs("tables export --tables @halves.tables --format sglang --out @halves.json");
    std::fs::write(folder.path("broken.json"), "{\"physical_to_logical_map\": [[0, 1]]}").expect("written");
    let solve = "solve --profile @one.profile --out @t";
    for (more, named) in [
        ("--groups 4 --placement @nowhere", "nowhere"),
        ("--groups 4 --placement @two.tables", "different models"),
        ("--groups 4 --placement @halves.tables", "2 groups"),
        ("--groups 4 --placement @broken.json", "broken.json"),
        ("--groups 4 --placement @one.profile", "semmoe.profile"),
        ("--groups 5 --placement linear", "do not divide 32 experts"),
        ("--groups 4 --placement linear --redundant 4", "cannot be combined with redundant slots"),
        ("--groups 4 --placement linear --solver paper", "cannot be combined with the paper's algorithm"),
        ("--groups 4 --placement linear --warm-start @halves.tables", "cannot be combined with a warm start"),
        ("--groups 4 --warm-start @halves.tables", "2 groups, expected 4"),
        ("--groups 4 --warm-start @two.tables", "different models"),
        ("--groups 2 --warm-start @halves.tables --redundant 2", "cannot be combined with redundant slots"),
        ("--groups 2 --warm-start @halves.tables --solver paper", "cannot be combined with the paper's algorithm"),
        ("--groups 2 --warm-start @halves.tables --migration-cost nan", "migration_cost"),
        ("--groups 4 --nodes 3", "3 nodes cannot be divided evenly over 4 groups, expected one of [1, 2, 4]"),
        ("--groups 4 --nodes 2 --inter-cost 0", "inter_cost"),
        ("--groups 4 --nodes 2 --redundant 4", "cannot be combined with redundant slots"),
        ("--groups 4 --gating-groups 3", "3 gating groups cannot be divided evenly"),
        ("--groups 5", "do not divide 32 experts evenly, expected one of [1, 2, 4, 8, 16, 32], or padding"),
        ("--groups 5 --pad --redundant 3", "padding cannot be combined with redundant slots"),
        ("--groups 33 --pad", "33 groups"),
    ] {
        folder.refused(&format!("{solve} {more}"), 2, &[named]);
    }
    folder.runs("solve --profile @one.profile --groups 5 --pad --out @five.tables --time-limit 0.5");
    folder.refused("tables export --tables @five.tables --format sglang", 2, &["does not support empty slots"]);
    folder.refused("evaluate --tables @halves.tables --profile @one.profile --nodes 3", 2, &["3 nodes", "[1, 2]"]);
    // The file for two ranks is also valid for four: its slots divide by four.
    folder.runs("solve --profile @one.profile --groups 4 --placement @halves.json --out @quarters.tables");
    folder.runs("solve --profile @one.profile --groups 2 --placement @halves.json --out @again.tables");
    let digest = |name: &str| Tables::open(&folder.path(name)).expect("valid").placement_digest().to_owned();
    assert_eq!(digest("again.tables"), digest("halves.tables"));
    assert_ne!(digest("quarters.tables"), digest("halves.tables"));
}

#[test]
fn counts_that_do_not_fit() {
    let folder = Folder::new();
    write_some(&folder, "one", 1, 1, |_| {});
    let token = reference().iter().next().expect("a request").token_ids()[0];
    for (count, said) in [(1u64 << 48, "48 bits"), (u64::MAX, "48 bits"), (0, "`count`")] {
        let mut bytes = std::fs::read(folder.path("one.profile")).expect("the profile");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
        let start = header["token_count"]["data_offsets"][0].as_u64().expect("an offset") as usize;
        bytes[8 + length + start + 8 * token as usize..][..8].copy_from_slice(&count.to_le_bytes());
        std::fs::write(folder.path("huge.profile"), bytes).expect("written");
        folder.refused("solve --groups 4 --profile @huge.profile --out @t", 2, &["huge.profile", said]);
    }
}

#[test]
fn files_about_different_models() {
    let folder = Folder::new();
    write_some(&folder, "one", 1, 1, |_| {});
    write_some(&folder, "other", 1, 1, |model| model.model = "other".to_owned());
    write_some(&folder, "tokenizer", 1, 1, |model| model.tokenizer_sha256 = Some("a".repeat(64)));
    write_some(&folder, "vocabulary", 1, 1, |model| model.vocab_size += 1);
    folder.runs("solve --groups 4 --profile @one.profile --out @t.tables");
    for (name, field) in [("other", "`model`"), ("tokenizer", "`tokenizer_sha256`"), ("vocabulary", "`vocab_size`")] {
        let named = [&format!("{name}.profile"), "t.tables", "different models", field].map(|name| name.to_owned());
        let named: Vec<&str> = named.iter().map(String::as_str).collect();
        folder.refused(&format!("evaluate --tables @t.tables --profile @{name}.profile"), 2, &named);
        folder.refused(&format!("evaluate --tables @t.tables --trace @{name}.trace"), 2, &["different models", field]);
        let solve = format!("solve --groups 4 --profile @one.profile --trace @{name}.trace --out @t2.tables");
        folder.refused(&solve, 2, &["one.profile", &format!("{name}.trace"), "different models", field]);
    }
}

#[test]
fn tokenizers_of_other_models() {
    let folder = Folder::new();
    // The bundled model's tokenizer has another digest, and more than 100 tokens.
    write_some(&folder, "other", 1, 1, |_| {});
    write_some(&folder, "small", 1, 1, |model| {
        model.tokenizer_sha256 = None;
        model.vocab_size = 1 + reference().iter().next().expect("a request").token_ids()[0];
    });
    std::fs::write(folder.path("broken.json"), "{}").expect("written");
    let tokenizer = crate::support::model_dir().join("tokenizer.json");
    let bundled = tokenizer.to_str().expect("UTF-8");
    let solve = "solve --groups 4 --out @t --report @r --tokenizer";
    for more in ["", " --attention tp", " --trace @other.trace"] {
        let other = ["the tokenizer has SHA-256", "bbbb"];
        folder.refused(&format!("{solve} {bundled} --profile @other.profile{more}"), 2, &other);
    }
    folder.refused(&format!("{solve} {bundled} --profile @small.profile"), 2, &["the tokenizer has", "at most"]);
    folder.refused(&format!("{solve} @broken.json --profile @other.profile"), 2, &["broken.json"]);
    folder.refused(&format!("{solve} @none --profile @other.profile"), 2, &["none"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let folder = Folder::new();
    write_some(&folder, "one", 1, 1, |_| {});
    std::fs::create_dir(folder.path("directory")).expect("a folder");
    std::os::unix::fs::symlink(folder.path("one.profile"), folder.path("link")).expect("a link");
    let solve = "solve --groups 4 --profile @one.profile --trace @one.trace";
    for (more, code, named) in [
        ("--out @one.profile", 2, "is the input"),
        ("--out @directory/../one.trace", 2, "is the input"),
        ("--out @link", 2, "is the input"),
        ("--out @t --report @one.trace", 2, "is the input"),
        ("--out @t --report @t", 2, "two outputs"),
        ("--out @directory", 2, "not a regular file"),
        ("--out /dev/null", 2, "not a regular file"),
        ("--out @t --report @directory", 2, "not a regular file"),
        ("--out @none/t", 1, "none/t"),
        ("--out @one.profile/t", 1, "one.profile/t"),
        ("--out @t --report @none/r", 1, "none/r"),
    ] {
        folder.refused(&format!("{solve} {more}"), code, &[named]);
    }
    // A report may be piped.
    folder.runs(&format!("{solve} --out @t --report /dev/null"));
}

#[test]
fn files_of_another_kind_or_damaged() {
    let folder = Folder::new();
    write_some(&folder, "one", 1, 1, |_| {});
    std::fs::write(folder.path("text"), "no container").expect("written");
    std::fs::write(folder.path("header"), [&2u64.to_le_bytes()[..], b"[]"].concat()).expect("written");
    std::fs::write(folder.path("none"), "").expect("written");
    for name in ["text", "header", "none", "one.trace"] {
        folder.refused(&format!("solve --groups 4 --profile @{name} --out @t"), 2, &[name]);
        for command in [
            "tables show",
            "tables verify",
            "tables export --format sglang --tables",
            "evaluate --profile @one.profile --tables",
        ] {
            folder.refused(&format!("{command} @{name}"), 2, &[name]);
        }
    }
    Profile::open(&folder.path("one.profile")).expect("untouched");
}
