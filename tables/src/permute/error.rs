//! Errors from permuting a checkpoint.

use std::path::{Path, PathBuf};

use crate::{ConfigError, FormatError};

/// Reasons why a checkpoint was not permuted, or fails the self-check.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PermuteError {
    /// A file could not be read or written, or is not a safetensors file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// `config.json` cannot be read or has an unsupported value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A JSON file is not valid JSON.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        source: serde_json::Error,
    },
    /// The tensor names of this architecture are unknown.
    #[error("{}: unsupported architecture {found}, expected one of {known}", path.display())]
    Architecture {
        /// `config.json`.
        path: PathBuf,
        /// The architectures named in the file.
        found: String,
        /// The architectures that can be permuted.
        known: String,
    },
    /// The index has an invalid value.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Value of the field.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// A tensor that the architecture requires is missing.
    #[error("{}: the tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The file or directory that should contain the tensor.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// There is no rule for moving this tensor.
    #[error("{}: unexpected tensor `{tensor}`, expected {expected}", path.display())]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The allowed values.
        expected: String,
    },
    /// A tensor has the wrong shape or element type.
    #[error("{}: the tensor `{tensor}` is {found}, expected {expected}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Element type and shape of the tensor.
        found: String,
        /// The element type and shape required.
        expected: String,
    },
    /// The tables have replicas, but a checkpoint contains each expert once.
    #[error("the tables have {slots} slots for {experts} experts, but a checkpoint contains each expert exactly once")]
    Replicas {
        /// Number of experts, N.
        experts: u16,
        /// Number of slots per layer, S.
        slots: usize,
    },
    /// With group-limited gating, the router chooses among groups of consecutive experts, which this placement would
    /// split.
    #[error(
        "layer {layer} would put experts {first} and {second} of different gating groups into the same one: the model chooses \
         among n_group = {n_group} groups of consecutive experts, so the placement must not split these groups"
    )]
    SplitsGatingGroup {
        /// The model's layer number.
        layer: u16,
        /// An expert of one gating group.
        first: u16,
        /// An expert of another gating group.
        second: u16,
        /// The value in `config.json`.
        n_group: u16,
    },
    /// The output directory is the checkpoint itself, or inside it.
    #[error("{} is inside the checkpoint's own directory, expected a directory outside it", .0.display())]
    InsideSource(PathBuf),
    /// The output directory contains unrelated files.
    #[error(
        "{} is not part of this permutation, expected an empty directory or the output of an interrupted run of this permutation",
        .0.display()
    )]
    Occupied(PathBuf),
    /// The self-check failed.
    #[error("{}: the tensor `{tensor}` does not match the permuted {original}; delete the file and run again", path.display())]
    Differs {
        /// The output file.
        path: PathBuf,
        /// The tensor in the output file.
        tensor: String,
        /// The original tensor that its bytes should match.
        original: String,
    },
}

impl PermuteError {
    pub(super) fn field(
        path: &Path,
        field: impl Into<String>,
        found: impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        let (field, expected) = (field.into(), expected.into());
        PermuteError::Field { path: path.to_path_buf(), field, found: found.to_string(), expected }
    }

    pub(super) fn missing(path: &Path, tensor: impl Into<String>) -> Self {
        PermuteError::MissingTensor { path: path.to_path_buf(), tensor: tensor.into() }
    }
}
