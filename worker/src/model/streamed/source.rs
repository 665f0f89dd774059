//! Reads an expert's tensors from the checkpoint files. It uses positioned reads, because truncating a mapped file
//! would kill the process without an error.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::model::ModelError;
use crate::model::checkpoint::TensorPlace;
use crate::model::expert::Packing;
use crate::model::load::Loader;

/// A checkpoint file, kept open so that it survives removal or replacement.
struct WeightFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    modified: SystemTime,
}

impl WeightFile {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let opened = || -> io::Result<Self> {
            let file = File::open(path)?;
            let metadata = file.metadata()?;
            Ok(Self { path: path.to_owned(), bytes: metadata.len(), modified: metadata.modified()?, file })
        };
        opened().map_err(ModelError::io(path))
    }

    /// Fills `into` with the bytes that start at offset `at` of the file.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), ModelError> {
        let read = self.file.read_exact_at(into, at);
        // The file is checked even after a successful read, because the bytes may come from two versions of it.
        self.check()?;
        read.map_err(ModelError::io(&self.path))
    }

    fn check(&self) -> Result<(), ModelError> {
        let metadata = self.file.metadata().map_err(ModelError::io(&self.path))?;
        let (bytes, modified) = (metadata.len(), metadata.modified().map_err(ModelError::io(&self.path))?);
        let changed = |detail: String| Err(ModelError::FileChanged { path: self.path.clone(), detail });
        match (bytes == self.bytes, modified == self.modified) {
            (true, true) => Ok(()),
            (true, false) => changed("it was written to".to_owned()),
            (false, _) => changed(format!("it has {bytes} bytes instead of {}", self.bytes)),
        }
    }
}

/// Reads and packs a checkpoint's experts, one at a time.
pub(super) struct ExpertSource {
    files: Vec<WeightFile>,
    packing: Packing,
    hidden: usize,
    width: usize,
    /// Gate, up and down of one expert as stored in the files.
    staging: [Vec<u8>; 3],
}

/// Returns the bytes to read of each of an expert's tensors: the packed rows of gate and up, and all of down.
fn read_bytes(packing: &Packing, hidden: usize, width: usize, [gate, up, down]: &[TensorPlace; 3]) -> [usize; 3] {
    let rows = packing.columns().len() * hidden;
    [rows * gate.kind.bytes(), rows * up.kind.bytes(), width * hidden * down.kind.bytes()]
}

/// Returns the largest gate, up and down reads over all experts, in bytes.
pub(super) fn largest(loader: &Loader<'_>, packing: &Packing) -> Result<[usize; 3], ModelError> {
    let mut largest = [0; 3];
    for layer in loader.moe_layers() {
        for expert in (0..loader.config.num_experts as u16).map(semmoe_tables::ExpertId::new) {
            let places = loader.expert_places(layer, expert)?;
            let bytes = read_bytes(packing, loader.config.hidden, loader.config.expert_width, &places);
            largest.iter_mut().zip(bytes).for_each(|(largest, bytes)| *largest = bytes.max(*largest));
        }
    }
    Ok(largest)
}

impl ExpertSource {
    pub(super) fn open(loader: &Loader<'_>, packing: Packing) -> Result<Self, ModelError> {
        let files = loader.checkpoint.files().map(WeightFile::open).collect::<Result<_, _>>()?;
        let staging = largest(loader, &packing)?.map(|bytes| vec![0; bytes]);
        let (hidden, width) = (loader.config.hidden, loader.config.expert_width);
        Ok(Self { files, packing, hidden, width, staging })
    }

    /// Number of 32-bit words in a packed expert.
    pub(super) fn expert_words(&self) -> usize {
        self.packing.array_bytes().iter().sum::<usize>() / size_of::<u32>()
    }

    /// Reads and packs an expert without allocating; returns the bytes read.
    pub(super) fn read(&mut self, places: &[TensorPlace; 3], words: &mut [u32]) -> Result<u64, ModelError> {
        let bytes = read_bytes(&self.packing, self.hidden, self.width, places);
        let first_row = self.packing.columns().start * self.hidden;
        for (tensor, (place, bytes)) in places.iter().zip(bytes).enumerate() {
            let skipped = if tensor < 2 { first_row * place.kind.bytes() } else { 0 };
            self.files[place.file].read(place.at + skipped as u64, &mut self.staging[tensor][..bytes])?;
        }
        let [gate, up, down] = [0, 1, 2].map(|tensor| places[tensor].kind.of(&self.staging[tensor][..bytes[tensor]]));
        let (gate_up, packed_down) = words.split_at_mut(self.packing.array_bytes()[0] / size_of::<u32>());
        self.packing.pack_in_place(&[gate, up, down], self.width, [gate_up, packed_down]);
        Ok(bytes.iter().sum::<usize>() as u64)
    }
}
