//! Memory-mapped tensors of a Hugging Face checkpoint: a single `model.safetensors`, or the shards listed in an index.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use half::f16;
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata, SafeTensors};
use serde::Deserialize;

use super::ModelError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Size limit for the index. For reference, the index of a model with 62 layers of 256 experts takes about 6 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Bytes of the header length field at the start of a safetensors file.
const SIZE_BYTES: usize = 8;

/// All tensors in a model directory.
pub(super) struct Checkpoint {
    /// The file that lists the tensors: the index, or the single checkpoint file.
    path: PathBuf,
    shards: Vec<Shard>,
    /// Maps each tensor to its shard; `None` without an index.
    shard_of: Option<HashMap<String, usize>>,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    /// Offset of the tensor data in the file.
    data_start: usize,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// A tensor whose type and shape have been checked.
#[derive(Clone, Copy)]
pub(super) struct TensorData<'a> {
    pub(super) kind: TensorKind,
    /// Elements, little-endian.
    pub(super) bytes: &'a [u8],
}

/// A tensor's element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TensorKind {
    Bf16,
    F16,
    F32,
}

impl TensorKind {
    /// Bytes of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    pub(super) fn of(self, bytes: &[u8]) -> TensorData<'_> {
        TensorData { kind: self, bytes }
    }
}

/// A tensor's location in the checkpoint files.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorPlace {
    /// Index into [`Checkpoint::files`].
    pub(super) file: usize,
    /// Offset of the tensor's first byte in the file.
    pub(super) at: u64,
    pub(super) bytes: usize,
    pub(super) kind: TensorKind,
}

impl<'a> TensorData<'a> {
    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.kind.bytes()
    }

    /// Returns a range of the tensor's elements.
    pub(super) fn part(&self, range: Range<usize>) -> TensorData<'a> {
        let size = self.kind.bytes();
        self.kind.of(&self.bytes[range.start * size..range.end * size])
    }

    /// Returns element i as f32; the conversion is exact for both half-precision types.
    pub(super) fn get(&self, i: usize) -> f32 {
        match self.kind {
            TensorKind::Bf16 => bf16_to_f32(u16::from_le_bytes(self.bytes.as_chunks().0[i])),
            TensorKind::F16 => f16::from_le_bytes(self.bytes.as_chunks().0[i]).to_f32(),
            TensorKind::F32 => f32::from_le_bytes(self.bytes.as_chunks().0[i]),
        }
    }

    /// All elements.
    pub(super) fn to_vec(self) -> Vec<f32> {
        (0..self.len()).map(|i| self.get(i)).collect()
    }
}

/// Converts bf16 to f32: a bf16 value is the upper half of an f32.
pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Checkpoint {
    /// Memory-maps a directory's checkpoint files and reads their headers.
    pub(super) fn open(model_dir: &Path) -> Result<Self, ModelError> {
        let single = model_dir.join(SINGLE);
        let index = model_dir.join(INDEX);
        if single.exists() {
            return Ok(Self { shards: vec![Shard::open(&single)?], path: single, shard_of: None });
        }
        if !index.exists() {
            let expected = "the weights, or model.safetensors.index.json with its shards";
            return Err(ModelError::Missing { path: single, expected });
        }
        Self::open_index(model_dir, index)
    }

    fn open_index(model_dir: &Path, path: PathBuf) -> Result<Self, ModelError> {
        let json = read_small_file(&path, MAX_INDEX_BYTES, "the checkpoint's weight index")?;
        let invalid = |detail: String| ModelError::Json { path: path.clone(), detail };
        let index: Index = serde_json::from_slice(&json).map_err(|error| invalid(error.to_string()))?;
        let mut names: Vec<&String> = index.weight_map.values().collect();
        names.sort_unstable();
        names.dedup();
        let mut shards = Vec::with_capacity(names.len());
        for name in &names {
            if !is_plain_name(name) {
                return Err(invalid(format!("it refers to the file {name:?}, expected a file in the same directory")));
            }
            shards.push(Shard::open(&model_dir.join(name))?);
        }
        let position = |name: &String| names.binary_search(&name).unwrap_or_default();
        let shard_of = index.weight_map.iter().map(|(tensor, file)| (tensor.clone(), position(file))).collect();
        Ok(Self { path, shards, shard_of: Some(shard_of) })
    }

    /// Returns a tensor, after checking that it has exactly this shape.
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorData<'_>, ModelError> {
        Ok(self.data(self.place(name, shape)?))
    }

    /// Returns a tensor's elements.
    pub(super) fn data(&self, place: TensorPlace) -> TensorData<'_> {
        let from = place.at as usize;
        place.kind.of(&self.shards[place.file].map[from..from + place.bytes])
    }

    /// Locates a tensor, after checking that it has exactly this shape.
    pub(super) fn place(&self, name: &str, shape: &[usize]) -> Result<TensorPlace, ModelError> {
        let file = match &self.shard_of {
            None => Some(0),
            Some(shard_of) => shard_of.get(name).copied(),
        };
        let missing = |path: &Path| ModelError::MissingTensor { path: path.to_path_buf(), tensor: name.to_owned() };
        let shard = file.and_then(|file| Some((file, self.shards.get(file)?)));
        let (file, shard) = shard.ok_or_else(|| missing(&self.path))?;
        let info = shard.metadata.info(name).ok_or_else(|| missing(&shard.path))?;
        let unfit = |problem| ModelError::Tensor { path: shard.path.clone(), tensor: name.to_owned(), problem };
        if info.shape != shape {
            return Err(unfit(format!("shape {:?}, but config.json requires {shape:?}", info.shape)));
        }
        let (from, to) = info.data_offsets;
        let kind = match info.dtype {
            Dtype::BF16 => TensorKind::Bf16,
            Dtype::F16 => TensorKind::F16,
            Dtype::F32 => TensorKind::F32,
            other => return Err(unfit(format!("type {other}, expected BF16, F16 or F32"))),
        };
        Ok(TensorPlace { file, at: (shard.data_start + from) as u64, bytes: to - from, kind })
    }

    /// Returns the checkpoint files, indexed by [`TensorPlace::file`].
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let file = open(path, "a checkpoint file")?;
        // SAFETY: the map is only read, and only while the model is being loaded, since packed weights are copies. If
        // another process truncates the file in the meantime, this process may crash, but nothing worse.
        let map = unsafe { Mmap::map(&file) }.map_err(ModelError::io(path))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| ModelError::Checkpoint { path: path.to_path_buf(), detail: error.to_string() })?;
        Ok(Self { path: path.to_path_buf(), map, metadata, data_start: SIZE_BYTES + header })
    }
}

/// An index must not refer to files outside its directory.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}

fn open(path: &Path, expected: &'static str) -> Result<File, ModelError> {
    File::open(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => ModelError::Missing { path: path.to_path_buf(), expected },
        _ => ModelError::io(path)(source),
    })
}

/// Reads a file, which must not exceed `most` bytes.
pub(crate) fn read_small_file(path: &Path, most: u64, expected: &'static str) -> Result<Vec<u8>, ModelError> {
    let mut bytes = Vec::new();
    open(path, expected)?.take(most + 1).read_to_end(&mut bytes).map_err(ModelError::io(path))?;
    if bytes.len() as u64 > most {
        let detail = format!("it exceeds the limit of {most} bytes");
        return Err(ModelError::Json { path: path.to_path_buf(), detail });
    }
    Ok(bytes)
}
