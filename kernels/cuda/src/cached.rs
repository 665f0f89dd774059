//! Images that are compiled on the machine with the GPU and cached for the next start.

use std::path::{Path, PathBuf};

use semmoe_kernels::reshard::PieceHash;

use crate::image::Target;
use crate::source::{HEADERS, sources_for};

/// Maximum size of an image file; larger files are ignored.
const MAX_BYTES: u64 = 256 << 20;

/// All inputs that determine an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ImageKey {
    pub(crate) target: Target,
    /// Driver version in the driver's encoding.
    pub(crate) driver: i32,
    /// A hash of the sources.
    pub(crate) sources: u64,
}

impl ImageKey {
    /// Creates the key for this library's sources.
    pub(crate) fn new(target: Target, driver: i32) -> Self {
        let files = HEADERS.iter().chain(sources_for(target.capability()));
        let text = files.flat_map(|file| [file.name, "\n", file.text]).collect::<String>();
        Self { target, driver, sources: hash(text.as_bytes()) }
    }

    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}-{}-{:016x}.image", self.target.name(), self.driver, self.sources))
    }
}

/// Returns the image that a folder caches under a key, or compiles and caches a new one. If the folder is not writable,
/// nothing is cached.
pub(crate) fn kept_or<E>(
    key: &ImageKey,
    folder: &Path,
    compile: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, E> {
    let file = key.file(folder);
    if let Some(image) = kept(&file) {
        return Ok(image);
    }
    let image = compile()?;
    let _ = keep(&file, &image);
    Ok(image)
}

/// Returns the file's image if it is intact, that is, if it matches the hash that precedes it.
fn kept(file: &Path) -> Option<Vec<u8>> {
    if std::fs::metadata(file).ok()?.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = std::fs::read(file).ok()?;
    let expected = u64::from_le_bytes(*bytes.first_chunk()?);
    bytes.drain(..8);
    (!bytes.is_empty() && hash(&bytes) == expected).then_some(bytes)
}

/// Writes the image atomically, even if other processes write it at the same time.
fn keep(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let unfinished = file.with_extension(format!("{}.part", std::process::id()));
    file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    std::fs::write(&unfinished, [&hash(image).to_le_bytes(), image].concat())?;
    std::fs::rename(unfinished, file)
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = PieceHash::default();
    hash.update(bytes);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The image, and whether it was compiled.
    fn image(key: &ImageKey, folder: &Path) -> (Vec<u8>, bool) {
        let mut compiled = false;
        let compile = || {
            compiled = true;
            Ok::<_, ()>(vec![key.driver as u8; 100])
        };
        let image = kept_or(key, folder, compile).unwrap();
        (image, compiled)
    }

    #[test]
    fn an_image_is_compiled_once_for_its_sources_target_and_driver() {
        let folder = std::env::temp_dir().join(format!("semmoe-images-{}", std::process::id()));
        let key = ImageKey::new(Target::Sm90, 13_000);
        let others = [
            ImageKey { driver: 13_010, ..key },
            ImageKey { sources: key.sources ^ 1, ..key },
            ImageKey { target: Target::Sm80, ..key },
        ];
        for key in [key].iter().chain(&others) {
            assert_eq!(image(key, &folder), (vec![key.driver as u8; 100], true), "{key:?}");
            assert_eq!(image(key, &folder), (vec![key.driver as u8; 100], false), "{key:?}");
        }
        let whole = std::fs::read(key.file(&folder)).unwrap();
        for broken in [&whole[..50], &whole[..8], &[], &[&whole[..107], &[7]].concat()] {
            std::fs::write(key.file(&folder), broken).unwrap();
            assert_eq!(image(&key, &folder), (vec![key.driver as u8; 100], true), "{} bytes", broken.len());
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 4, "nothing unfinished is left");
        std::fs::remove_dir_all(&folder).unwrap();
        // A file in place of the folder.
        std::fs::write(&folder, "").unwrap();
        assert!(image(&key, &folder).1 && image(&key, &folder).1, "nothing can be kept there");
        std::fs::remove_file(&folder).unwrap();
        assert_ne!(ImageKey::new(Target::Sm80, 1).sources, key.sources, "sm_80 lacks a source");
    }

    #[test]
    fn a_compiler_that_refuses_is_the_error() {
        let refused = kept_or(&ImageKey::new(Target::Sm90, 1), Path::new("/dev/null/none"), || Err("refused"));
        assert_eq!(refused, Err("refused"));
    }
}
