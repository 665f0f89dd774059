//! Finds the bundled model and prompts.

use std::path::{Path, PathBuf};

use crate::error::CliError;

/// Folder of the bundled model inside the assets.
const MODEL: &str = "tiny-qwen3moe-15m";

/// Where the inputs of `up` lie.
#[derive(Debug, Clone)]
pub(crate) struct Assets {
    /// A Hugging Face checkpoint directory.
    pub(crate) model: PathBuf,
    /// Prompts to profile with.
    pub(crate) profile_prompts: PathBuf,
    /// Prompts never used to profile, for `--check`.
    pub(crate) heldout_prompts: PathBuf,
}

impl Assets {
    /// The bundled assets, with `model` in place of the bundled model when given.
    pub(crate) fn find(model: Option<PathBuf>) -> Result<Self, CliError> {
        let folder = assets_folder()?;
        Ok(Self {
            model: model.unwrap_or_else(|| folder.join(MODEL)),
            profile_prompts: folder.join("prompts/profile.jsonl"),
            heldout_prompts: folder.join("prompts/heldout.jsonl"),
        })
    }

    /// The model's name: that of its folder.
    pub(crate) fn model_name(&self) -> Result<String, CliError> {
        let folder = self.model.canonicalize().map_err(|error| {
            CliError::input(format!("the model directory {} cannot be read: {error}", self.model.display()))
        })?;
        folder
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned)
            .ok_or_else(|| CliError::input(format!("the model directory {} has no readable name", folder.display())))
    }
}

/// `assets/` in the working directory, else beside the executable or above it (`target/release/semmoe` in a checkout),
/// else `share/semmoe` of an installation prefix.
fn assets_folder() -> Result<PathBuf, CliError> {
    let mut candidates = vec![PathBuf::from("assets")];
    let executable = std::env::current_exe().and_then(|path| path.canonicalize());
    if let Ok(executable) = &executable {
        for ancestor in executable.ancestors().skip(1) {
            candidates.push(ancestor.join("assets"));
            candidates.push(ancestor.join("share/semmoe"));
        }
    }
    candidates
        .into_iter()
        .find(|folder| is_assets(folder))
        .ok_or_else(|| {
            CliError::input(format!(
                "the bundled assets were not found: no folder assets/{MODEL} in the working directory nor above the executable"
            ))
        })
}

fn is_assets(folder: &Path) -> bool {
    folder.join(MODEL).is_dir() && folder.join("prompts").is_dir()
}
