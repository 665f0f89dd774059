//! Safetensors files of other programs, and their import.

use semmoe_profiler::import::{Format, ImportOptions, import};
use semmoe_tables::{Arrays, ModelInfo, Trace};

/// Arbitrary bytes are refused with a reason, or contain no more integers than bytes, can be read completely, and are
/// imported or refused.
pub fn arrays(data: &[u8]) {
    let Ok(arrays) = Arrays::from_bytes(data.to_vec()) else { return };
    let mut held = 0;
    for array in arrays.names().filter_map(|name| arrays.get(name)) {
        let integers: Vec<Option<i64>> = array.ints().collect();
        held += integers.len();
        if let (Some(first), Some(last)) = (integers.first(), integers.last()) {
            let shape: Vec<usize> = array.shape().iter().map(|size| *size as usize).collect();
            let end: Vec<usize> = shape.iter().map(|size| size - 1).collect();
            assert_eq!((array.int(&vec![0; shape.len()]), array.int(&end)), (*first, *last));
        }
    }
    assert!(held <= data.len(), "{held} integers from {} bytes", data.len());
    for format in [Format::Sglang, Format::Eplb, Format::Routes] {
        imported(data, format).expect("a folder to write to");
    }
}

/// Imports the bytes with the seeds' model; a resulting trace can be opened.
fn imported(data: &[u8], format: Format) -> std::io::Result<()> {
    let folder = tempfile::tempdir()?;
    let (file, out) = (folder.path().join("file.safetensors"), folder.path().join("out"));
    std::fs::write(&file, data)?;
    let model = ModelInfo {
        model: "mock".into(),
        tokenizer_sha256: None,
        num_experts: 8,
        top_k: 2,
        vocab_size: 100,
        num_hidden_layers: 4,
        layer_ids: vec![1, 2, 3],
    };
    let created = "2026-01-02T03:04:05Z".into();
    let options =
        ImportOptions { format, files: vec![file], out: out.clone(), model, created, max_bad: 1.0, against: None };
    if let Ok(report) = import(&options)
        && report.records > 0
    {
        assert!(Trace::open(&out).is_ok(), "{format:?}");
    }
    Ok(())
}
