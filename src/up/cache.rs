//! Caches one model's recorded trace and solved tables, keyed by everything they depend on.

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use semmoe_tables::Attention;
use sha2::{Digest, Sha256};

use super::assets::Assets;
use crate::error::CliError;

/// Incremented whenever a change to the pipeline alters its results.
const PIPELINE_VERSION: &str = "5";
/// The checkpoint files that determine the model's routing.
const MODEL_FILES: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// A model's recorded routing, and a locked directory with the tables solved from it for one kind of unit.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Shared by all kinds of units: the routing depends only on the model.
    model: PathBuf,
    pub(crate) folder: PathBuf,
    // Locked while the cache is in use: two `up` processes in one directory would overwrite each other's files.
    _lock: File,
}

impl Cache {
    /// Opens or creates the directory under `data` for `assets` served by `ranks` ranks.
    pub(crate) fn open(data: &Path, assets: &Assets, ranks: u16, attention: Attention) -> Result<Self, CliError> {
        let key = key(assets)?;
        let unit = match attention {
            Attention::Dp => format!("{ranks}-ranks"),
            Attention::Tp => format!("{ranks}-ranks-tp"),
        };
        let model = data.join(format!("{}-{}", assets.model_name()?, &key[..16]));
        let folder = model.join(unit);
        let cannot = |error: std::io::Error| {
            CliError::failed(format!("cannot use the data directory {}: {error}", folder.display()))
        };
        std::fs::create_dir_all(&folder).map_err(cannot)?;
        let lock = File::create(folder.join("lock")).map_err(cannot)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { model, folder, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(CliError::failed(format!(
                "another semmoe process is using the data directory {}: stop it, or choose another directory with --data",
                folder.display()
            ))),
            Err(TryLockError::Error(error)) => Err(cannot(error)),
        }
    }

    /// Routing of the profiled prompts.
    pub(crate) fn trace(&self) -> PathBuf {
        self.model.join("profile.trace.safetensors")
    }

    /// Routing of the held-out prompts, for the prediction of `--check`.
    pub(crate) fn heldout_trace(&self) -> PathBuf {
        self.model.join("heldout.trace.safetensors")
    }

    /// Path of the partial recording of `trace`, separate because units of other kinds may record at the same time. The
    /// next run resumes from it.
    pub(crate) fn recording(&self, trace: &Path) -> PathBuf {
        let mut name = OsString::from("recording.");
        name.push(trace.file_name().unwrap_or_default());
        self.folder.join(name)
    }

    /// Counts of the profiled prompts.
    pub(crate) fn profile(&self) -> PathBuf {
        self.folder.join("profile.safetensors")
    }

    /// Path of the solved tables with `redundant` slots per layer for replicas. Written last: if they exist, all other
    /// files do too.
    pub(crate) fn tables(&self, redundant: u16) -> PathBuf {
        self.folder.join(match redundant {
            0 => "tables.safetensors".to_owned(),
            redundant => format!("tables-redundant-{redundant}.safetensors"),
        })
    }
}

/// SHA-256 of the pipeline version, the checkpoint and the prompts.
fn key(assets: &Assets) -> Result<String, CliError> {
    let mut hash = Sha256::new();
    hash.update(PIPELINE_VERSION);
    for name in MODEL_FILES {
        let path = assets.model.join(name);
        // The worker reports missing files, as it knows which files it needs.
        if path.is_file() {
            hash.update(name);
            hash_file(&path, &mut hash)?;
        }
    }
    hash_file(&assets.profile_prompts, &mut hash)?;
    hash_file(&assets.heldout_prompts, &mut hash)?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn hash_file(path: &Path, hash: &mut Sha256) -> Result<(), CliError> {
    let hashed =
        File::open(path).and_then(|file| std::io::copy(&mut BufReader::with_capacity(1 << 20, file), hash).map(drop));
    hashed.map_err(|error| CliError::input(format!("cannot read {}: {error}", path.display())))
}

/// Default for `--data`: the user's cache directory, otherwise the working directory.
pub(crate) fn default_folder() -> PathBuf {
    let non_empty = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match (non_empty("XDG_CACHE_HOME"), non_empty("HOME")) {
        (Some(cache), _) => cache.join("semmoe"),
        (None, Some(home)) => home.join(".cache/semmoe"),
        (None, None) => PathBuf::from("semmoe-data"),
    }
}
