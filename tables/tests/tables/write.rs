//! A file appears complete or not at all, and nothing else is left behind.

use crate::common::*;
use semmoe_tables::*;

fn names(directory: &std::path::Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_cannot_be_written_is_named_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir(path("taken")).unwrap();
    std::fs::write(path("taken/file"), "x").unwrap();
    std::fs::write(path("file"), "x").unwrap();
    let model = model(4, 2, 5, &[0]);
    let builder = trace_builder(&model, &requests(&model, 3, 1, false));
    for (target, action) in [("taken", "write"), ("missing/out", "create"), ("file/out", "create")] {
        let error = builder.write(&path(target)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot {action}")), "{error}");
        assert!(error.contains(path(target).to_str().unwrap()), "{error}");
        assert_eq!(names(directory.path()), ["file", "taken"]);
    }
}

#[test]
fn devices_are_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("null");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    let model = model(4, 2, 5, &[0]);
    let error = trace_builder(&model, &requests(&model, 3, 1, false)).write(&link).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    assert_eq!(std::fs::read_link(&link).unwrap(), std::path::Path::new("/dev/null"));
}

#[test]
fn an_existing_file_is_replaced_and_its_readers_keep_theirs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t.trace.safetensors");
    let model = model(4, 2, 5, &[0]);
    let builder = |seed| trace_builder(&model, &requests(&model, 3, seed, false));
    let first = builder(1).write(&path).unwrap();
    let opened = Trace::open(&path).unwrap();
    let second = builder(2).write(&path).unwrap();
    assert_ne!(first, second);
    assert_eq!((opened.digest(), Trace::open(&path).unwrap().digest()), (first, second));
    assert_eq!(names(directory.path()), ["t.trace.safetensors"]);
}

#[cfg(unix)]
#[test]
fn permissions_are_those_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let mode = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().permissions().mode();
    std::fs::write(directory.path().join("plain"), "x").unwrap();
    let model = model(4, 2, 5, &[0]);
    dp_tables(&model, 2).write(&directory.path().join("tables")).unwrap();
    assert_eq!(mode("tables"), mode("plain"));
}

#[test]
fn what_is_no_regular_file_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let error = Profile::open(directory.path()).unwrap_err().to_string();
    assert!(error.ends_with("not a regular file"), "{error}");
    let error = Profile::open(&directory.path().join("absent")).unwrap_err().to_string();
    assert!(error.starts_with("cannot open "), "{error}");
    std::fs::write(directory.path().join("empty"), "").unwrap();
    let error = Profile::open(&directory.path().join("empty")).unwrap_err().to_string();
    assert!(error.contains("file length: found 0, expected at least 8 bytes"), "{error}");
}

#[test]
fn a_builder_refuses_what_a_reader_would() {
    let model = model(4, 2, 5, &[0]);
    let mut builder = TraceBuilder::new(model.clone(), provenance()).unwrap();
    let w = half::f16::ONE;
    let u = UNKNOWN_EXPERT;
    for (tokens, prompt, experts, weights, part) in [
        (vec![5], 1, vec![0, 1], None, "ids below 5"),
        (vec![1], 2, vec![0, 1], None, "at most its 1 tokens"),
        (vec![1], 1, vec![0, 1, 2, 3], None, "expected [1, 1, 2]"),
        (vec![1], 1, vec![0, 4], None, "ids below 4"),
        (vec![1], 1, vec![0, u], None, "ids below 4"),
        (vec![1], 1, vec![u, 0], None, "as in slot 0"),
        (vec![1], 1, vec![3, 3], None, "distinct"),
        (vec![1], 1, vec![0, 1], Some(vec![w]), "expected [1, 1, 2]"),
        (vec![1], 1, vec![0, 1], Some(vec![w, -w]), "non-negative"),
        (vec![1], 1, vec![0, 1], Some(vec![w, half::f16::NAN]), "a finite, non-negative number"),
    ] {
        let error = builder.push(&tokens, prompt, &experts, weights.as_deref()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((builder.requests(), builder.tokens()), (0, 0));
    builder.push(&[1], 0, &[0, 1], None).unwrap();
    let error = builder.push(&[1], 0, &[0, 1], Some(&[w, w])).unwrap_err().to_string();
    assert!(error.contains("expected none, as in the previous requests"), "{error}");

    let t = vec![half::f16::ONE; 9];
    let placement = Placement::contiguous(1, 4, 2).unwrap();
    let short = TablesBuilder::dp(model.clone(), provenance(), placement, t, vec![0.0; 2]);
    let error = short.finish().unwrap_err().to_string();
    assert_eq!(error, "the tensor `T` has shape 9 elements, expected [5, 2]");
}
