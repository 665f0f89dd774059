//! The input embeddings of a checkpoint, which represent each token of the vocabulary inside the model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::container::{FloatType, Foreign, ForeignTensor, INDEX, MAX_INDEX_BYTES, SINGLE, Storage, is_plain_name};
use crate::model::short;
use crate::{FormatError, TokenId};

/// The usual suffix of the tensor's name in language model checkpoints, with or without a prefix before it.
const USUAL_END: &str = "embed_tokens.weight";
/// Maximum width, far above the hidden size of any model.
const MAX_WIDTH: u64 = 1 << 20;

/// A tensor [V', H] of a mapped checkpoint; all its values are finite.
#[derive(Debug)]
pub struct Embeddings {
    file: Foreign,
    path: PathBuf,
    tensor: ForeignTensor,
    element: FloatType,
    rows: usize,
    width: usize,
}

/// Errors from reading input embeddings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddingsError {
    /// The file cannot be read or is not a safetensors file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The index of a checkpoint is not valid JSON of the expected form.
    #[error("{}: not a checkpoint index: {source}", path.display())]
    Json {
        /// The index.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// The index is too large or refers to a file in another directory, or the input embeddings cannot be identified as
    /// exactly one tensor.
    #[error("{}: {found}, expected {expected}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The value found.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The tensor is not a matrix of finite numbers.
    #[error("{}: the tensor `{tensor}` is {found}, expected {expected}", path.display())]
    Tensor {
        /// The file concerned.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The value found.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
}

impl Embeddings {
    /// Maps the embeddings of a checkpoint, given as a safetensors file, the index of a sharded checkpoint, or a
    /// directory with either. The tensor is `name` or, without a name, the only one whose name ends with
    /// `embed_tokens.weight`. Reads every value.
    ///
    /// # Errors
    /// Returns an [`EmbeddingsError`] for a missing file or tensor, an element type other than BF16, F16 or F32, a
    /// shape that is not a matrix, or values that are not finite.
    pub fn open(path: &Path, name: Option<&str>) -> Result<Self, EmbeddingsError> {
        let path = match path.is_dir() {
            true if path.join(INDEX).exists() => path.join(INDEX),
            true => path.join(SINGLE),
            false => path.to_path_buf(),
        };
        let (path, name) = match path.extension() {
            Some(extension) if extension == "json" => {
                let map = weight_map(&path)?;
                let name = choose(map.keys(), name, &path)?;
                let file = map.get(&name).cloned().unwrap_or_default();
                if !is_plain_name(&file) {
                    let found = format!("{name} is in {:?}", short(&file));
                    return Err(EmbeddingsError::Content {
                        path,
                        found,
                        expected: "a file in the same directory".into(),
                    });
                }
                (path.with_file_name(file), Some(name))
            }
            _ => (path, name.map(str::to_owned)),
        };
        Self::of_tensor(Foreign::open(&path)?, path, name.as_deref())
    }

    /// Reads the embeddings from the bytes of a safetensors file.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn from_bytes(bytes: Vec<u8>, name: Option<&str>) -> Result<Self, EmbeddingsError> {
        Self::of_tensor(Foreign::from_bytes(bytes)?, PathBuf::from("(in memory)"), name)
    }

    fn of_tensor(file: Foreign, path: PathBuf, name: Option<&str>) -> Result<Self, EmbeddingsError> {
        let name = choose(file.tensors.keys(), name, &path)?;
        let tensor = &file.tensors[&name];
        let wrong = |found: String, expected| EmbeddingsError::Tensor {
            path: path.clone(),
            tensor: short(&name),
            found,
            expected,
        };
        let Some(element) = FloatType::of(&tensor.dtype) else {
            return Err(wrong(short(&tensor.dtype), "BF16, F16 or F32"));
        };
        let [rows, width] = match tensor.shape[..] {
            [rows, width @ 1..=MAX_WIDTH] if rows > 0 => [rows, width],
            _ => return Err(wrong(format!("of shape {:?}", tensor.shape), "a matrix, tokens by hidden size")),
        };
        let all = file.bytes(tensor);
        if let Some(at) = all.chunks_exact(element.size()).position(|value| !element.decode(value).is_finite()) {
            let found = format!("not finite at row {}, column {}", at as u64 / width, at as u64 % width);
            return Err(wrong(found, "finite numbers"));
        }
        // Cannot overflow: the product is the size of a mapped tensor.
        let (rows, width) = (rows as usize, width as usize);
        Ok(Embeddings { tensor: tensor.clone(), file, path, element, rows, width })
    }

    /// V': the number of rows, one per token; a checkpoint may have more rows than its tokenizer has tokens.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// H: the number of values per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the file that contains the tensor.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `row` (H values) with the embedding of a token below [`rows`](Self::rows).
    ///
    /// # Panics
    /// If the token has no row.
    pub fn read(&self, token: TokenId, row: &mut [f32]) {
        let size = self.element.size();
        let row_bytes = self.width * size;
        let bytes = &self.file.bytes(&self.tensor)[token.index() * row_bytes..(token.index() + 1) * row_bytes];
        row.iter_mut().zip(bytes.chunks_exact(size)).for_each(|(to, value)| *to = self.element.decode(value));
    }
}

/// Returns the tensor with this name or, without a name, the only tensor with the usual suffix.
fn choose<'a>(
    names: impl Iterator<Item = &'a String>,
    name: Option<&str>,
    path: &Path,
) -> Result<String, EmbeddingsError> {
    let fits = |other: &&String| match name {
        Some(name) => *other == name,
        None => other.ends_with(USUAL_END),
    };
    let found: Vec<&String> = names.filter(fits).take(3).collect();
    if let [only] = found[..] {
        return Ok(only.clone());
    }
    let expected = match name {
        Some(name) => format!("the tensor `{}`", short(name)),
        None => format!("one whose name ends with `{USUAL_END}`, or the tensor's name"),
    };
    let found = match found[..] {
        [first, second, ..] => format!("found both `{}` and `{}`", short(first), short(second)),
        _ => "found no such tensor".to_owned(),
    };
    Err(EmbeddingsError::Content { path: path.to_path_buf(), found, expected })
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Returns the file that contains each tensor, according to the index.
fn weight_map(path: &Path) -> Result<BTreeMap<String, String>, EmbeddingsError> {
    let bytes = Storage::map(path)?;
    let path = path.to_path_buf();
    if bytes.len() > MAX_INDEX_BYTES {
        let (found, expected) = (format!("{} bytes", bytes.len()), format!("at most {MAX_INDEX_BYTES}"));
        return Err(EmbeddingsError::Content { path, found, expected });
    }
    let index: Index = serde_json::from_slice(&bytes).map_err(|source| EmbeddingsError::Json { path, source })?;
    Ok(index.weight_map)
}
