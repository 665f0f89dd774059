//! External tables files: each is opened once and copied, and the copy is mapped.
//!
//! An unlinked copy in `tables.spool_dir` is mapped rather than the file itself: the kernel kills a process that reads
//! a mapping of a file that was truncated in place, and no check can rule that out for a file that others may write to.
//! A copy on the heap would also be safe, but would stay resident, whereas the kernel can drop a file's pages and read
//! them again.

use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use semmoe_tables::{FormatError, Tables};

/// Number of bytes copied at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Why a file could not be loaded as tables.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TablesFileError {
    /// The path leads, or might lead, outside the tables root.
    #[error("{}: expected a path below the tables root {} without '..'", path.display(), root.display())]
    Outside {
        /// As requested.
        path: PathBuf,
        /// As configured.
        root: PathBuf,
    },
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Read {
        /// The attempted action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Not a regular file: a directory, a device, a pipe.
    #[error("{} is not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// The file exceeds `limits.table_bytes`.
    #[error("{} is longer than the limit of {limit_bytes} bytes (limits.table_bytes)", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
    },
    /// The file was modified while it was copied.
    #[error("{} changed while it was copied", .0.display())]
    Changed(PathBuf),
    /// Writing the copy failed, for example for lack of space or permission.
    #[error("cannot store a copy of the tables in {}: {source}", folder.display())]
    Spool {
        /// The folder.
        folder: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file does not contain tables, or they are corrupt.
    #[error(transparent)]
    Format(FormatError),
}

/// Identifies a file's state. The inode changes when a new file is renamed into place, as in a ConfigMap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    /// The inode's change time, which differs even if other times and the size are preserved, as by `cp -p`.
    changed: (i64, i64),
}

impl Stamp {
    /// Returns the state of the file after following all links; `None` if it does not exist.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for Stamp {
    fn from(it: &Metadata) -> Self {
        let (modified, changed) = ((it.mtime(), it.mtime_nsec()), (it.ctime(), it.ctime_nsec()));
        Self { device: it.dev(), inode: it.ino(), bytes: it.len(), modified, changed }
    }
}

/// The size limit of a copy, and its folder.
#[derive(Clone, Debug)]
pub(crate) struct Spool {
    pub(crate) folder: PathBuf,
    pub(crate) limit_bytes: u64,
}

/// A private copy.
pub(crate) struct Copy {
    file: File,
    spool: Spool,
    bytes: u64,
}

impl Copy {
    pub(crate) fn begin(spool: &Spool) -> Result<Self, TablesFileError> {
        let file = tempfile::tempfile_in(&spool.folder).map_err(|source| no_room(spool, source))?;
        Ok(Self { file, spool: spool.clone(), bytes: 0 })
    }

    /// Appends a piece; returns false once the limit is exceeded.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<bool, TablesFileError> {
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
        if self.bytes > self.spool.limit_bytes {
            return Ok(false);
        }
        self.file.write_all(piece).map(|()| true).map_err(|source| no_room(&self.spool, source))
    }

    /// Maps the copy and validates its content.
    pub(crate) fn tables(self) -> Result<Tables, FormatError> {
        Tables::map(&self.file)
    }
}

fn no_room(spool: &Spool, source: std::io::Error) -> TablesFileError {
    TablesFileError::Spool { folder: spool.folder.clone(), source }
}

/// Opens a configured file; also returns its state.
pub(crate) fn open(path: &Path, spool: &Spool) -> Result<(Tables, Stamp), TablesFileError> {
    copy(&regular(hold(path)?, path)?, path, spool)
}

/// Opens a requested file if it is below `root` after resolving links; also returns its resolved path.
pub(crate) fn open_below(root: &Path, requested: &Path, spool: &Spool) -> Result<(Tables, PathBuf), TablesFileError> {
    let outside = || TablesFileError::Outside { path: requested.to_owned(), root: root.to_owned() };
    let real_root = root.canonicalize().map_err(read_error("open the tables root", root))?;
    let relative = match requested.strip_prefix(root).or_else(|_| requested.strip_prefix(&real_root)) {
        Ok(relative) => relative,
        Err(_) => requested,
    };
    // Do not access anything outside the root, so that a response does not reveal what exists there.
    if !relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(outside());
    }
    let path = real_root.join(relative);
    let held = hold(&path)?;
    // Check the path of the opened file, because `path` may lead elsewhere by now.
    let real = std::fs::read_link(by_descriptor(&held)).map_err(read_error("find", &path))?;
    if !real.starts_with(&real_root) {
        return Err(outside());
    }
    let held = regular(held, &path)?;
    Ok((copy(&held, &path, spool)?.0, path))
}

/// Obtains a handle on the path without opening it for reading, which would block on a pipe and might trigger a device.
fn hold(path: &Path) -> Result<File, TablesFileError> {
    let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    held.map(File::from).map_err(|error| read_error("open", path)(error.into()))
}

fn regular(held: File, path: &Path) -> Result<File, TablesFileError> {
    match held.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(held),
        Ok(_) => Err(TablesFileError::NotRegular(path.to_owned())),
        Err(error) => Err(read_error("open", path)(error)),
    }
}

/// Returns the kernel's name for the file behind the handle, even if its path now leads to another file.
fn by_descriptor(held: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()))
}

fn copy(held: &File, path: &Path, spool: &Spool) -> Result<(Tables, Stamp), TablesFileError> {
    let read = || read_error("read", path);
    let mut from = File::open(by_descriptor(held)).map_err(read_error("open", path))?;
    let before = Stamp::from(&from.metadata().map_err(read())?);
    let too_long = || TablesFileError::TooLong { path: path.to_owned(), limit_bytes: spool.limit_bytes };
    if before.bytes > spool.limit_bytes {
        return Err(too_long());
    }
    let mut copy = Copy::begin(spool)?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match from.read(&mut piece).map_err(read())? {
            0 => break,
            length if copy.push(&piece[..length])? => {}
            _ => return Err(too_long()),
        }
    }
    let after = Stamp::from(&from.metadata().map_err(read())?);
    if before != after || copy.bytes != after.bytes {
        return Err(TablesFileError::Changed(path.to_owned()));
    }
    let tables = copy.tables().map_err(|error| TablesFileError::Format(error.in_file(path)))?;
    Ok((tables, after))
}

fn read_error(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> TablesFileError + use<> {
    let path = path.to_owned();
    move |source| TablesFileError::Read { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_reported() {
        let spool = Spool { folder: "/dev".into(), limit_bytes: 100 };
        let file = File::options().write(true).open("/dev/full").unwrap();
        let mut copy = Copy { file, spool, bytes: 0 };
        let error = copy.push(b"tables").unwrap_err();
        assert!(
            matches!(&error, TablesFileError::Spool { source, .. }
            if source.kind() == std::io::ErrorKind::StorageFull),
            "{error}"
        );
        assert!(!copy.push(&[0; 100]).unwrap(), "beyond the limit nothing is written");
    }

    /// A link that is redirected outside between two checks must not matter: only the opened file does.
    #[test]
    fn what_was_opened_counts_and_not_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let (inside, link) = (folder.path().join("inside"), folder.path().join("link"));
        std::fs::write(&inside, "inside").unwrap();
        std::os::unix::fs::symlink(&inside, &link).unwrap();
        let held = regular(hold(&link).unwrap(), &link).unwrap();
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        assert_eq!(std::fs::read_link(by_descriptor(&held)).unwrap(), inside.canonicalize().unwrap());
        let mut text = String::new();
        File::open(by_descriptor(&held)).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
    }
}
