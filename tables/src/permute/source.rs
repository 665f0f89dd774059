//! The source checkpoint: memory-mapped shards, the index, and the other files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::PermuteError;
use crate::FormatError;
use crate::container::{Foreign, INDEX, MAX_INDEX_BYTES, SINGLE, Storage, is_plain_name};

pub(super) const CONFIG: &str = "config.json";
/// Extensions of weight files that are not copied: next to the new weights, they would have the old expert order.
const OTHER_WEIGHTS: &[&str] =
    &["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "ggml", "h5", "msgpack", "onnx", "npz", "index.json"];

/// A checkpoint with checked headers.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) dir: PathBuf,
    /// Sorted by file name.
    pub(super) shards: Vec<Shard>,
    /// The index file, if there is one; its `weight_map` agrees with the shards.
    pub(super) index: Option<Value>,
    /// The shard of each tensor.
    pub(super) shard_of: BTreeMap<String, usize>,
}

/// One safetensors file.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) file: Foreign,
}

impl Source {
    /// Returns the path of a shard.
    pub(super) fn shard_path(&self, shard: usize) -> PathBuf {
        self.dir.join(&self.shards[shard].name)
    }

    /// Opens `model.safetensors`, or the shards of the index.
    pub(super) fn open(dir: &Path) -> Result<Self, PermuteError> {
        let index_path = dir.join(INDEX);
        let index = if index_path.exists() { Some(read_json(&index_path, MAX_INDEX_BYTES)?) } else { None };
        let weight_map = index.as_ref().map(|index| weight_map(index, &index_path)).transpose()?;
        let mut names: Vec<&str> = match &weight_map {
            Some(map) => map.values().copied().collect(),
            None => vec![SINGLE],
        };
        names.sort_unstable();
        names.dedup();
        if !names.contains(&SINGLE) && dir.join(SINGLE).exists() {
            let expected = "only one of them: engines disagree on which of the two to load";
            return Err(PermuteError::field(&index_path, "the index", format!("beside {SINGLE}"), expected));
        }
        let open = |name: &str| Ok(Shard { name: name.to_owned(), file: Foreign::open(&dir.join(name))? });
        let shards = names.into_iter().map(open).collect::<Result<Vec<_>, FormatError>>()?;
        let shard_of = shard_of(dir, &shards)?;
        if let Some(weight_map) = weight_map {
            check_index(dir, &weight_map, &shards, &shard_of)?;
        }
        Ok(Self { dir: dir.to_path_buf(), shards, index, shard_of })
    }

    /// Returns the size of all tensors in bytes.
    pub(super) fn data_len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.file.data_len()).sum()
    }

    /// Returns the names of the other files: those to copy, and those left out (directories, weights in other formats).
    pub(super) fn others(&self) -> Result<(Vec<String>, Vec<String>), PermuteError> {
        let io = |source| FormatError::io("list", &self.dir, source);
        let (mut copied, mut left_out) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(&self.dir).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            let Some(name) = name.to_str() else {
                left_out.push(name.to_string_lossy().into_owned());
                continue;
            };
            if name == CONFIG || name == INDEX || self.shards.iter().any(|shard| shard.name == name) {
                continue;
            }
            let weights = OTHER_WEIGHTS.iter().any(|ending| name.ends_with(&format!(".{ending}")));
            // Follows links, because the files of hub snapshots are links.
            let file = self.dir.join(name).is_file();
            if file && !weights { &mut copied } else { &mut left_out }.push(name.to_owned());
        }
        copied.sort_unstable();
        left_out.sort_unstable();
        Ok((copied, left_out))
    }
}

/// Returns the file of each tensor, according to the index.
fn weight_map<'a>(index: &'a Value, path: &Path) -> Result<BTreeMap<&'a str, &'a str>, PermuteError> {
    let Some(map) = index.get("weight_map").and_then(Value::as_object).filter(|map| !map.is_empty()) else {
        let expected = "an object that maps tensors to files";
        return Err(PermuteError::field(path, "weight_map", "missing or empty", expected));
    };
    let entry = |(tensor, file): (&'a String, &'a Value)| match file.as_str().filter(|file| is_plain(file)) {
        Some(file) => Ok((tensor.as_str(), file)),
        None => {
            let [tensor, file]: [String; 2] = [tensor, &file.to_string()].map(|text| text.chars().take(100).collect());
            let expected = "the name of a safetensors file in the same directory";
            Err(PermuteError::field(path, format!("weight_map.{tensor}"), file, expected))
        }
    };
    map.iter().map(entry).collect()
}

/// Checks that the index lists every tensor with the file that contains it.
fn check_index(
    dir: &Path,
    weight_map: &BTreeMap<&str, &str>,
    shards: &[Shard],
    shard_of: &BTreeMap<String, usize>,
) -> Result<(), PermuteError> {
    for (tensor, file) in weight_map {
        if shard_of.get(*tensor).is_none_or(|&shard| shards[shard].name != *file) {
            return Err(PermuteError::missing(&dir.join(file), *tensor));
        }
    }
    match shard_of.iter().find(|(tensor, _)| !weight_map.contains_key(tensor.as_str())) {
        None => Ok(()),
        Some((tensor, &shard)) => {
            let (path, tensor) = (dir.join(&shards[shard].name), tensor.clone());
            let expected = format!("only tensors that {INDEX} lists");
            Err(PermuteError::UnexpectedTensor { path, tensor, expected })
        }
    }
}

/// Whether this is the name of a safetensors file, without directories.
fn is_plain(name: &str) -> bool {
    is_plain_name(name) && name.ends_with(".safetensors")
}

/// Maps each tensor to its shard; a tensor in two shards is an error.
fn shard_of(dir: &Path, shards: &[Shard]) -> Result<BTreeMap<String, usize>, PermuteError> {
    let mut shard_of = BTreeMap::new();
    for (at, shard) in shards.iter().enumerate() {
        for tensor in shard.file.tensors.keys() {
            if let Some(other) = shard_of.insert(tensor.clone(), at) {
                let expected = format!("the tensor in only one file, but {} contains it as well", shards[other].name);
                let (path, tensor) = (dir.join(&shard.name), tensor.clone());
                return Err(PermuteError::UnexpectedTensor { path, tensor, expected });
            }
        }
    }
    Ok(shard_of)
}

/// Reads a JSON file of bounded size.
fn read_json(path: &Path, max_bytes: usize) -> Result<Value, PermuteError> {
    let file = Storage::map(path)?;
    if file.len() > max_bytes {
        let found = format!("{} bytes long", file.len());
        return Err(PermuteError::field(path, "the file", found, format!("at most {max_bytes} bytes")));
    }
    serde_json::from_slice(&file).map_err(|source| PermuteError::Json { path: path.to_path_buf(), source })
}
