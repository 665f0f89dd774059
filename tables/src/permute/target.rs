//! Writes the permuted checkpoint: every file atomically, reusing the files of an interrupted run.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::plan::{Move, Plan};
use super::source::{Shard, Source};
use super::{Meter, PermuteError};
use crate::FormatError;
use crate::container::{Foreign, INDEX, Storage, is_temporary, write_atomically};

/// Bytes copied at a time. Limits the memory used in addition to the maps, and paces progress reports.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// The output directory.
pub(super) struct Target {
    pub(super) dir: PathBuf,
}

impl Target {
    /// Creates the directory if needed, and requires that it contains only `expected` files.
    pub(super) fn prepare(dir: &Path, source: &Path, expected: &BTreeSet<&str>) -> Result<Self, PermuteError> {
        let inside = |dir: &Path| -> Result<bool, PermuteError> {
            let resolve = |path: &Path| path.canonicalize().map_err(|error| FormatError::io("resolve", path, error));
            Ok(resolve(dir)?.starts_with(resolve(source)?))
        };
        // Checks this before creating anything: the nearest existing ancestor shows where the new directory would be.
        let absolute = std::path::absolute(dir).map_err(|error| FormatError::io("resolve", dir, error))?;
        if let Some(existing) = absolute.ancestors().find(|path| path.exists())
            && inside(existing)?
        {
            return Err(PermuteError::InsideSource(dir.to_path_buf()));
        }
        std::fs::create_dir_all(dir).map_err(|error| FormatError::io("create", dir, error))?;
        let io = |error| FormatError::io("list", dir, error);
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            match name.to_str() {
                Some(name) if expected.contains(name) => {}
                Some(name) if is_temporary(name) => {
                    std::fs::remove_file(entry.path()).map_err(|e| FormatError::io("remove", &entry.path(), e))?;
                }
                _ => return Err(PermuteError::Occupied(entry.path())),
            }
        }
        Ok(Self { dir: dir.to_path_buf() })
    }

    /// Writes a shard, or keeps the one from an interrupted run. Files appear only when complete, so an equal length
    /// and header suffice, and the self-check reads the bytes. Returns whether the shard was written.
    pub(super) fn shard(&self, plan: &Plan<'_>, shard: &Shard, meter: &mut Meter<'_>) -> Result<bool, PermuteError> {
        let path = self.dir.join(&shard.name);
        let header = shard.file.renamed_header(|name| plan.new_name(name)).map_err(|error| error.in_file(&path))?;
        if path.exists() {
            let there = Foreign::open(&path)?;
            if there.header() != header || there.data_len() != shard.file.data_len() {
                return Err(PermuteError::Occupied(path));
            }
            meter.advance(shard.file.data_len());
            return Ok(false);
        }
        write_atomically(&path, |out| {
            out.write_all(&header)?;
            for (name, tensor) in shard.file.in_file_order() {
                let bytes = shard.file.bytes(tensor);
                match plan.movement(name) {
                    Move::Stay | Move::Rename(_) => pass_on(out, bytes, meter)?,
                    Move::Rows(permutation) => {
                        // The plan has checked that there are N rows, and N is not 0.
                        let row = bytes.len() / permutation.old.len();
                        for &old in &permutation.old {
                            pass_on(out, &bytes[usize::from(old) * row..][..row], meter)?;
                        }
                    }
                }
            }
            Ok(())
        })?;
        Ok(true)
    }

    /// Writes the index with the files of the new names, in the order of the old names.
    pub(super) fn index(&self, plan: &Plan<'_>, source: &Source) -> Result<(), PermuteError> {
        let Some(index) = &source.index else { return Ok(()) };
        let mut index = index.clone();
        if let Some(map) = index.get_mut("weight_map").and_then(Value::as_object_mut) {
            let files: Map<String, Value> =
                map.iter().map(|(tensor, file)| (plan.new_name(tensor), file.clone())).collect();
            for (tensor, file) in map.iter_mut() {
                // Expert names are permuted among themselves; other names stay the same.
                if let Some(new) = files.get(tensor) {
                    file.clone_from(new);
                }
            }
        }
        let path = self.dir.join(INDEX);
        let mut text =
            serde_json::to_string_pretty(&index).map_err(|source| PermuteError::Json { path: path.clone(), source })?;
        text.push('\n');
        self.file(INDEX, text.as_bytes())
    }

    /// Copies a file unchanged.
    pub(super) fn copy(&self, source: &Path, name: &str) -> Result<(), PermuteError> {
        self.file(name, &Storage::map(&source.join(name))?)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> Result<(), PermuteError> {
        let path = self.dir.join(name);
        if path.exists() {
            let same = *Storage::map(&path)? == *bytes;
            return if same { Ok(()) } else { Err(PermuteError::Occupied(path)) };
        }
        Ok(write_atomically(&path, |out| out.write_all(bytes))?)
    }
}

fn pass_on(out: &mut dyn Write, bytes: &[u8], meter: &mut Meter<'_>) -> std::io::Result<()> {
    for piece in bytes.chunks(PIECE_BYTES) {
        out.write_all(piece)?;
        meter.advance(piece.len() as u64);
    }
    Ok(())
}
