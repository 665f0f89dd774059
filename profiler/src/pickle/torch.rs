//! `.pt` files: an archive with `NAME/data.pkl`, and `NAME/data/KEY` for each storage.

use std::cell::Cell;
use std::path::Path;

use super::error::shown;
use super::machine::read_pickle;
use super::source::Source;
use super::value::{Document, Value};
use super::zip::Zip;
use super::{Array, PickleError};

/// torch before 1.6 wrote a bare pickle that begins with this number.
const LEGACY: [u8; 14] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// A `.pt` file: its values, and where its tensors' bytes are.
#[derive(Debug)]
pub struct TorchFile {
    source: Source,
    zip: Zip,
    /// `NAME/`.
    prefix: Vec<u8>,
    document: Document,
    /// Bytes of tensors that may still be read: all together once.
    left: Cell<u64>,
}

impl TorchFile {
    /// Opens a file; tensors are read when they are asked for.
    ///
    /// # Errors
    /// Says what is not read, or damaged.
    pub fn open(path: &Path) -> Result<Self, PickleError> {
        Self::from_source(Source::open(path)?)
    }

    /// The same for anything that can be read.
    ///
    /// # Errors
    /// As [`TorchFile::open`].
    pub fn from_source(source: Source) -> Result<Self, PickleError> {
        if !Zip::is_one(&source) {
            return Err(other_kind(&source));
        }
        let zip = Zip::open(&source)?;
        let prefix = prefix(&zip)?;
        let entry = |name: &str| zip.find(&[&prefix[..], name.as_bytes()].concat());
        if let Some(order) = entry("byteorder") {
            let order = source.read("the byte order", order.from, order.length.min(16))?;
            if order != b"little" {
                return Err(PickleError::archive("byte order", shown(&order), "little"));
            }
        }
        let pickle = entry("data.pkl").ok_or_else(|| PickleError::NoEntry { name: "data.pkl".into() })?;
        let pickle = source.read("the pickle", pickle.from, pickle.length)?;
        let bytes_of = |key: &[u8]| zip.find(&storage_name(&prefix, key)).map(|entry| entry.length);
        let document = read_pickle(pickle, source.length(), &bytes_of)?;
        let left = Cell::new(source.length());
        Ok(Self { source, zip, prefix, document, left })
    }

    /// Its values.
    #[must_use]
    pub fn document(&self) -> &Document {
        &self.document
    }

    /// A tensor's elements. `None` for values that are no tensor.
    ///
    /// # Errors
    /// When it cannot be read, and when tensors that share bytes are read until they were all of the file.
    pub fn array(&self, value: Value) -> Result<Option<Array>, PickleError> {
        let Some(tensor) = self.document.tensor(value) else { return Ok(None) };
        let (element, strided) = (tensor.storage.element, tensor.strided.clone());
        let key = self.document.text(tensor.storage.key);
        let entry = self.zip.find(&storage_name(&self.prefix, key));
        let entry = entry.ok_or_else(|| PickleError::NoEntry { name: format!("data/{}", shown(key)) })?;
        // Both were checked against the entry when the tensor was made.
        let used = strided.end().unwrap_or(0).saturating_sub(strided.offset);
        let (from, length) =
            (entry.from + strided.offset.min(tensor.storage.elements) * element.bytes(), used * element.bytes());
        let left = self.left.get().checked_sub(length);
        self.left.set(left.ok_or(PickleError::Memory { limit: self.source.length() })?);
        let bytes = self.source.read("a tensor", from, length)?;
        Ok(Some(Array::new(element, strided, bytes)))
    }
}

fn storage_name(prefix: &[u8], key: &[u8]) -> Vec<u8> {
    [prefix, b"data/", key].concat()
}

/// The folder in the archive that holds `data.pkl`.
fn prefix(zip: &Zip) -> Result<Vec<u8>, PickleError> {
    const NAME: &[u8] = b"/data.pkl";
    let mut found =
        zip.names().filter(|name| name.ends_with(NAME) && name.iter().filter(|byte| **byte == b'/').count() == 1);
    match (found.next(), found.next()) {
        (Some(name), None) => Ok(name[..=name.len() - NAME.len()].to_vec()),
        (None, _) => Err(PickleError::NoEntry { name: "data.pkl".into() }),
        (Some(_), Some(_)) => Err(PickleError::archive("entry", "data.pkl in several folders", "one folder")),
    }
}

fn other_kind(source: &Source) -> PickleError {
    let start = source.read("start", 0, source.length().min(LEGACY.len() as u64)).unwrap_or_default();
    let found = match &start[..] {
        start if *start == LEGACY => "a file of torch before 1.6 (or of torch.save with the old format)",
        [0x80, ..] => "a bare pickle",
        [] => "an empty file",
        _ => "not an archive",
    };
    PickleError::Kind { found, expected: "a .pt file as torch.save has written since 1.6" }
}
