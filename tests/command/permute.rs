//! `tables permute` on the bundled model: the new checkpoint generates and routes as the old one does, and is written
//! completely or not at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use semmoe_tables::{GroupId, LayerIdx, Placement, Tables, Trace, TraceRequest};

use crate::support::{MODEL, Ranks, describe, json_of, model_dir, repository, run, semmoe, solved_tables};

const RANKS: u16 = 4;

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

fn permute_args(tables: &Path, checkpoint: &Path, out: &Path) -> Vec<String> {
    let [tables, checkpoint, out] = [tables, checkpoint, out].map(text);
    ["tables", "permute", "--tables", &tables, "--checkpoint", &checkpoint, "--out", &out].map(str::to_owned).to_vec()
}

fn permute(tables: &Path, checkpoint: &Path, out: &Path, more: &[&str]) -> Output {
    let args = permute_args(tables, checkpoint, out);
    semmoe(&args.iter().map(String::as_str).collect::<Vec<_>>()).args(more).output().expect("the command starts")
}

/// Every file of a directory, with its content.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let files = entries.filter(|path| path.is_file());
    files.map(|path| (path.file_name().expect("a name").into(), std::fs::read(&path).expect("read"))).collect()
}

/// Generates greedily on ranks of a checkpoint and records tokens and routes.
fn record(model: &Path, tables: &Path, out: &Path) -> Trace {
    let ranks = Ranks::start_model(model, RANKS, Some(tables));
    let prompts = text(&repository("tests/data/reference.prompts.jsonl"));
    let (model, path) = (text(model), text(out));
    let mut args = vec!["profile", "record", "--engine", "semmoe", "--url", &ranks.url, "--prompts", &prompts];
    args.extend(["--tokenizer", &model, "--out", &path, "--max-tokens", "8"]);
    let recorded = run(&args);
    assert!(recorded.status.success(), "{}", describe(&recorded));
    ranks.stop();
    Trace::open(out).expect("a valid trace")
}

#[test]
fn the_permuted_model_says_and_routes_what_the_original_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = solved_tables(folder.path());
    let (out, out_tables) = (folder.path().join("new").join(MODEL), folder.path().join("new.tables.safetensors"));
    let report = json_of(&permute(&tables, &model_dir(), &out, &["--json", "--out-tables", &text(&out_tables)]));
    assert_eq!(report["moe_layers"], 7, "{report}");

    let (tables_before, tables_after) =
        (Tables::open(&tables).expect("valid"), Tables::open(&out_tables).expect("valid"));
    let contiguous = Placement::contiguous(7, 32, RANKS).expect("32 experts on 4 ranks");
    assert_ne!(tables_before.placement(), &contiguous, "the solver moved experts");
    assert_eq!(tables_after.placement(), &contiguous);

    let before = record(&model_dir(), &tables, &folder.path().join("before.trace.safetensors"));
    let after = record(&out, &out_tables, &folder.path().join("after.trace.safetensors"));
    assert_eq!((before.requests(), before.tokens()), (after.requests(), after.tokens()));
    for (number, (ours, theirs)) in after.iter().zip(before.iter()).enumerate() {
        assert_eq!(ours.token_ids(), theirs.token_ids(), "greedy tokens of prompt {number}");
        for position in 0..ours.token_ids().len() {
            for layer in (0..7).map(LayerIdx::new) {
                let pi = old_experts(&tables_before, layer);
                let renumbered =
                    experts(ours, position, layer).map(|e| e.into_iter().map(|p| pi[usize::from(p)]).collect());
                assert_eq!(
                    renumbered,
                    experts(theirs, position, layer),
                    "prompt {number}, token {position}, {layer:?}"
                );
            }
        }
    }
}

/// pi: the old expert of each new one.
fn old_experts(tables: &Tables, layer: LayerIdx) -> Vec<u16> {
    let of = |group| tables.placement().experts_of(layer, GroupId::new(group));
    (0..RANKS).flat_map(of).map(|expert| expert.get()).collect()
}

fn experts(request: TraceRequest<'_>, position: usize, layer: LayerIdx) -> Option<Vec<u16>> {
    request.route(position, layer).map(|route| route.experts().map(|expert| expert.get()).collect())
}

#[test]
fn a_run_that_was_killed_is_continued_and_a_full_disk_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = solved_tables(folder.path());
    let [whole, killed, full] = ["whole", "killed", "full"].map(|name| folder.path().join(name));
    assert!(permute(&tables, &model_dir(), &whole, &[]).status.success());

    // A file size limit stops the command while it writes the weights: by a signal, or, if that is ignored, by a write
    // error, as a full disk would.
    let limited = |out: &Path, before: &str| {
        let script = format!("ulimit -c 0; ulimit -f 20000; {before} exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_semmoe")).args(permute_args(&tables, &model_dir(), out));
        shell.output().expect("a shell")
    };
    let output = limited(&killed, "");
    assert_eq!(output.status.code(), None, "{}", describe(&output));
    let left: Vec<_> = files(&killed).into_keys().collect();
    assert!(left.len() == 1 && text(&left[0]).ends_with(".tmp"), "nothing under a name of the checkpoint: {left:?}");

    let output = limited(&full, "trap '' XFSZ;");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    assert!(said.contains("cannot write") && said.contains("model.safetensors"), "{said}");
    assert!(files(&full).is_empty(), "{:?}", files(&full).keys());

    for out in [&killed, &full, &whole] {
        let continued = permute(&tables, &model_dir(), out, &[]);
        assert!(continued.status.success(), "{}", describe(&continued));
        assert!(files(out) == files(&whole), "the same bytes in {}", out.display());
    }
    for (name, bytes) in files(&model_dir()) {
        let same = files(&whole).get(&name) == Some(&bytes);
        assert_eq!(same, name != Path::new("model.safetensors"), "{}", name.display());
    }
}

#[test]
fn what_cannot_be_permuted_is_reported_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let tables = solved_tables(folder.path());
    let (out, cut) = (folder.path().join("out"), folder.path().join("cut"));
    std::fs::create_dir(&cut).expect("a folder");
    for (name, mut bytes) in files(&model_dir()) {
        if name == Path::new("model.safetensors") {
            bytes.truncate(bytes.len() - 1);
        }
        std::fs::write(cut.join(name), bytes).expect("written");
    }
    let inside = text(&out.join("t.tables.safetensors"));
    for (checkpoint, more, named) in [
        (&cut, &[][..], "cut/model.safetensors: not a valid safetensors container"),
        (&folder.path().to_owned(), &[], "config.json"),
        (&folder.path().join("none"), &[], "none/config.json"),
        (&model_dir(), &["--out-tables", &inside], "is inside the checkpoint"),
        (&model_dir(), &["--out-tables", &text(&tables)], "is the input"),
    ] {
        let output = permute(&tables, checkpoint, &out, more);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
        assert!(said.contains(named) && !said.contains("panicked"), "{said}");
        assert!(!out.exists(), "{said}");
    }
    let output = permute(&tables, &cut, &cut, &[]);
    assert_eq!(output.status.code(), Some(2), "{}", describe(&output));
    let output = permute(&tables, &model_dir(), Path::new("/proc/nowhere"), &[]);
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
}
