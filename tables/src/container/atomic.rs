//! Atomic writes: a file appears complete under its name, or not at all.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::FormatError;

const PREFIX: &str = ".semmoe-";
const SUFFIX: &str = ".tmp";

/// Whether a name is that of one of our temporary files. A leftover temporary file belonged to a process that was
/// killed.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// The directory that contains `path`.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Writes to a temporary file in the directory of `path`, flushes it to disk and renames it. On any error the temporary
/// file is removed and `path` is left untouched. Anything at `path` other than a regular file (a directory, a device)
/// is never replaced.
///
/// # Errors
/// [`FormatError::Io`] names the path.
pub fn write(path: &Path, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<(), FormatError> {
    let io = |action| move |source| FormatError::io(action, path, source);
    let directory = directory_of(path);
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io("write")(std::io::Error::other("it exists and is not a regular file")));
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX);
    #[cfg(unix)]
    {
        // Use the umask as any program would, not tempfile's owner-only default.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut temporary = builder.tempfile_in(directory).map_err(io("create"))?;
    let mut buffered = BufWriter::new(temporary.as_file_mut());
    fill(&mut buffered).and_then(|()| buffered.flush()).map_err(io("write"))?;
    drop(buffered);
    temporary.as_file().sync_all().map_err(io("write"))?;
    temporary.persist(path).map_err(|e| FormatError::io("rename the temporary file to", path, e.error))?;
    // The rename survives a crash only once the directory is flushed. Some file systems refuse to flush one; the file
    // is complete either way.
    if let Ok(directory) = File::open(directory) {
        let _ = directory.sync_all();
    }
    Ok(())
}
