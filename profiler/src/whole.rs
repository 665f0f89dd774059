//! Text files that appear whole under their name, or not at all.

use std::io::Write;
use std::path::Path;

use crate::ProfilerError;

/// Writes to a temporary file beside `path`, flushes it to the disk and renames it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), ProfilerError> {
    let io = |source| ProfilerError::Io { path: path.to_owned(), action: "write", source };
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".semmoe-").suffix(".tmp");
    #[cfg(unix)]
    {
        // As for any file a program creates: the umask decides, not tempfile's owner-only default.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut temporary = builder.tempfile_in(directory).map_err(io)?;
    temporary.write_all(bytes).and_then(|()| temporary.as_file().sync_all()).map_err(io)?;
    temporary.persist(path).map_err(|error| io(error.error))?;
    Ok(())
}
