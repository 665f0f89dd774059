//! A file appears whole under its name, or not at all.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::FormatError;

const PREFIX: &str = ".semmoe-";
const SUFFIX: &str = ".tmp";

/// Whether a name is that of a temporary file here: one that lies about was left by a process that was killed.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// Where a file at `path` lies.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Writes to a temporary file in the directory of `path`, flushes it to the disk and renames it. On any error the
/// temporary file is removed and what stood at `path` is untouched. What stands there and is no regular file (a
/// directory, a device) is never replaced.
///
/// # Errors
/// [`FormatError::Io`] names the path.
pub fn write(path: &Path, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<(), FormatError> {
    let io = |action| move |source| FormatError::io(action, path, source);
    let directory = directory_of(path);
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io("write")(std::io::Error::other("it is there and is not a regular file")));
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX);
    #[cfg(unix)]
    {
        // As for any file a program creates: the umask decides, not tempfile's owner-only default.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut temporary = builder.tempfile_in(directory).map_err(io("create"))?;
    let mut buffered = BufWriter::new(temporary.as_file_mut());
    fill(&mut buffered).and_then(|()| buffered.flush()).map_err(io("write"))?;
    drop(buffered);
    temporary.as_file().sync_all().map_err(io("write"))?;
    temporary.persist(path).map_err(|e| FormatError::io("rename a finished file to", path, e.error))?;
    // The rename itself survives a crash only once the directory is flushed; some file systems refuse that, and the
    // file is complete either way.
    if let Ok(directory) = File::open(directory) {
        let _ = directory.sync_all();
    }
    Ok(())
}
