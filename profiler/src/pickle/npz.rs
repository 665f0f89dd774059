//! NumPy's `.npz`: an archive of `.npy` files.

use std::path::Path;

use super::npy::read_part;
use super::source::Source;
use super::zip::Zip;
use super::{Array, PickleError};

/// An archive of arrays; each is read when it is asked for.
#[derive(Debug)]
pub struct NpzFile {
    source: Source,
    zip: Zip,
}

impl NpzFile {
    /// Opens a file.
    ///
    /// # Errors
    /// When it is no archive, damaged, or compressed.
    pub fn open(path: &Path) -> Result<Self, PickleError> {
        Self::from_source(Source::open(path)?)
    }

    /// The same for anything that can be read.
    ///
    /// # Errors
    /// As [`NpzFile::open`].
    pub fn from_source(source: Source) -> Result<Self, PickleError> {
        if !Zip::is_one(&source) {
            return Err(PickleError::Kind {
                found: "not an archive",
                expected: "a .npz file, as numpy.savez writes it",
            });
        }
        let zip = Zip::open(&source)?;
        Ok(Self { source, zip })
    }

    /// Names of all entries, with `.npy`, as bytes.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.zip.names()
    }

    /// An array by its name, without `.npy`; `None` when there is none.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn array(&self, name: &str) -> Result<Option<Array>, PickleError> {
        let entry = self.zip.find(format!("{name}.npy").as_bytes());
        entry.map(|entry| read_part(&self.source, entry.from, entry.length)).transpose()
    }
}
