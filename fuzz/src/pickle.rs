//! Array files of others: torch's and NumPy's.

use semmoe_profiler::pickle::{Array, Document, NpzFile, Source, TorchFile, Value, read_npy, read_pickle};

/// Storages of a bare pickle have this many bytes, whatever their key.
const STORAGE_BYTES: u64 = 64;

/// Any bytes are refused with a reason, or hold no more than they have bytes, and can be read from end to end: as a
/// file of torch, as the pickle in one, and as NumPy's.
pub fn pickle(data: &[u8]) {
    let source = || Source::from_bytes(data.to_vec());
    if let Ok(file) = TorchFile::from_source(source()) {
        let held = walk(file.document(), |value| file.array(value).ok().flatten());
        assert!(held <= data.len(), "{held} bytes of arrays from {}", data.len());
    }
    if let Ok(document) = read_pickle(data.to_vec(), data.len() as u64, &|_| Some(STORAGE_BYTES)) {
        walk(&document, |_| None);
        for tensor in document.tensors() {
            let elements: u64 = if tensor.shape().contains(&0) { 0 } else { tensor.shape().iter().product() };
            assert!(elements * tensor.storage.element.bytes() <= STORAGE_BYTES);
        }
    }
    if let Ok(file) = NpzFile::from_source(source()) {
        let names: Vec<String> = file
            .names()
            .filter_map(|name| Some(std::str::from_utf8(name).ok()?.strip_suffix(".npy")?.to_owned()))
            .collect();
        let held: usize =
            names.iter().filter_map(|name| file.array(name).ok().flatten()).map(|array| read(&array)).sum();
        assert!(held <= data.len(), "{held} bytes of arrays from {}", data.len());
    }
    if let Ok(array) = read_npy(&source()) {
        assert!(read(&array) <= data.len());
    }
}

/// Looks at every value once, although values may hold each other in circles; gives the bytes of all arrays.
fn walk(document: &Document, array: impl Fn(Value) -> Option<Array>) -> usize {
    let (mut seen, mut open, mut held) = (Vec::new(), vec![document.root()], 0);
    while let Some(value) = open.pop() {
        let _ = (Document::kind(value), document.get(value, "records"));
        if let Value::Text(text) = value {
            let _ = document.text(text);
        }
        held += array(value).map_or(0, |array| read(&array));
        if let Some(items) = document.items(value)
            && seen.len() < 100
            && !seen.contains(&value)
        {
            seen.push(value);
            open.extend_from_slice(items);
        }
    }
    held
}

/// Reads an array's first and last element; gives its bytes.
fn read(array: &Array) -> usize {
    let shape: Vec<usize> = array.shape().iter().map(|size| *size as usize).collect();
    let elements: usize = if shape.contains(&0) { 0 } else { shape.iter().product() };
    if elements > 0 {
        let first = vec![0; shape.len()];
        let last: Vec<usize> = shape.iter().map(|size| size - 1).collect();
        let _ = (array.int(&first), array.int(&last));
    }
    elements * array.element().bytes() as usize
}
