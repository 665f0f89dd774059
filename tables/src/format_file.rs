//! Code shared by the three formats to open, identify and write files.

/// Implements `open`, `from_bytes`, `model`, `provenance`, `has_stored_digest` and `write` for a file type with the
/// fields `container`, `model` and `provenance`. Its `from_container` checks everything except the stored digest.
macro_rules! format_file {
    ($file:ident, $format:expr) => {
        impl $file {
            /// Maps a file and checks all of it, the stored digest last.
            ///
            /// # Errors
            /// Names the file, the field or tensor, what was found and what was expected.
            pub fn open(path: &std::path::Path) -> Result<Self, FormatError> {
                Container::open(path, $format).and_then(Self::checked).map_err(|e| e.in_file(path))
            }

            /// Parses an in-memory file and checks all of it.
            ///
            /// # Errors
            /// Names the field or tensor, what was found and what was expected.
            pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, FormatError> {
                Self::checked(Container::from_bytes(bytes, $format)?)
            }

            fn checked(container: Container) -> Result<Self, FormatError> {
                let file = Self::from_container(container)?;
                file.container.check_digest()?;
                Ok(file)
            }

            /// Returns the model that the file belongs to.
            pub fn model(&self) -> &ModelInfo {
                &self.model
            }

            /// Returns the origin of the data.
            pub fn provenance(&self) -> &Provenance {
                &self.provenance
            }

            /// Whether the file contains its digest, which was then checked. Files written before version 0.2 do not
            /// contain it.
            pub fn has_stored_digest(&self) -> bool {
                self.container.metadata.contains_key(crate::container::DIGEST_KEY)
            }

            /// Writes the file atomically; returns the digest.
            ///
            /// # Errors
            /// [`FormatError::Io`] names the path.
            pub fn write(&self, path: &std::path::Path) -> Result<String, FormatError> {
                self.container.layout().write(path)
            }
        }
    };
}
