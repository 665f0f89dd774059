//! Finds the bundled model and prompts.

use std::path::{Path, PathBuf};

use crate::error::CliError;

/// The bundled model's directory inside the assets.
const MODEL: &str = "tiny-qwen3moe-15m";
/// The environment variable with the assets directory.
const VARIABLE: &str = "SEMMOE_ASSETS";

/// The inputs of `up`.
#[derive(Debug, Clone)]
pub(crate) struct Assets {
    /// A Hugging Face checkpoint directory.
    pub(crate) model: PathBuf,
    /// Whether `model` is the bundled model.
    pub(crate) bundled: bool,
    /// Prompts to profile with.
    pub(crate) profile_prompts: PathBuf,
    /// Prompts for `--check`, never used for profiling.
    pub(crate) heldout_prompts: PathBuf,
}

impl Assets {
    /// Finds the bundled assets; `model` replaces the bundled model if given.
    pub(crate) fn find(model: Option<PathBuf>) -> Result<Self, CliError> {
        let folder = assets_folder()?;
        Ok(Self {
            bundled: model.is_none(),
            model: model.unwrap_or_else(|| folder.join(MODEL)),
            profile_prompts: folder.join("prompts/profile.jsonl"),
            heldout_prompts: folder.join("prompts/heldout.jsonl"),
        })
    }

    /// The model's name, taken from its directory.
    pub(crate) fn model_name(&self) -> Result<String, CliError> {
        let folder = self.model.canonicalize().map_err(|error| {
            CliError::input(format!("cannot read the model directory {}: {error}", self.model.display()))
        })?;
        folder
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned)
            .ok_or_else(|| CliError::input(format!("the model directory {} has no readable name", folder.display())))
    }
}

/// Returns the directory in `SEMMOE_ASSETS`; otherwise `assets/` in the working directory, next to the executable or in
/// a parent directory (`target/release/semmoe` in a checkout), `share/semmoe` under an installation prefix, or the
/// source tree of the build.
fn assets_folder() -> Result<PathBuf, CliError> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|named| !named.is_empty()).map(PathBuf::from) {
        return is_assets(&named).then_some(named.clone()).ok_or_else(|| {
            CliError::input(format!(
                "{VARIABLE} is {}, which does not contain {MODEL} and prompts; expected the source tree's `assets` directory",
                named.display()
            ))
        });
    }
    let mut candidates = vec![PathBuf::from("assets")];
    let executable = std::env::current_exe().and_then(|path| path.canonicalize());
    for ancestor in executable.iter().flat_map(|executable| executable.ancestors().skip(1)) {
        candidates.extend([ancestor.join("assets"), ancestor.join("share/semmoe")]);
    }
    candidates.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets"));
    candidates.into_iter().find(|folder| is_assets(folder)).ok_or_else(|| {
        let executable = executable.map_or_else(|_| "the executable".to_owned(), |path| path.display().to_string());
        CliError::input(format!(
            "cannot find the model and prompts of `up` in ./assets, nor in assets or share/semmoe next to {executable} or \
             above it; set {VARIABLE} to the source tree's `assets` directory, or install the wheel or the tarball, which \
             include them (`serve` does not need them)"
        ))
    })
}

fn is_assets(folder: &Path) -> bool {
    folder.join(MODEL).is_dir() && folder.join("prompts").is_dir()
}
