//! Rolling profiles on disk: one file per model, written atomically and readable only by its owner.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Returns the path of a model's profile.
pub(crate) fn path(dir: &Path, model: &str) -> PathBuf {
    dir.join(format!("{}.profile.safetensors", name(model)))
}

/// Escapes all characters of a model's name except letters, digits, `-`, `_` and inner dots as `%XX`, so that no name
/// leads outside the folder and no two names share a file.
pub(super) fn name(model: &str) -> String {
    let mut name = String::new();
    for (at, byte) in model.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || byte == b'.' && at > 0 {
            name.push(char::from(byte));
        } else {
            // Writing into a String cannot fail.
            let _ = write!(name, "%{byte:02X}");
        }
    }
    name
}

/// Replaces the file atomically. The temporary file has mode 0600 from the start.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".semmoe-").suffix(".tmp").tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_folder_and_apart() {
        for (model, file) in [
            ("tiny", "tiny"),
            ("Qwen/Qwen3-30B-A3B", "Qwen%2FQwen3-30B-A3B"),
            ("Qwen_Qwen3.5", "Qwen_Qwen3.5"),
            ("..", "%2E."),
            ("../x", "%2E.%2Fx"),
            ("a%2Fb", "a%252Fb"),
            ("é", "%C3%A9"),
        ] {
            assert_eq!(path(Path::new("d"), model), Path::new("d").join(format!("{file}.profile.safetensors")));
        }
    }

    #[cfg(unix)]
    #[test]
    fn files_are_replaced_whole_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), "m");
        for bytes in [&b"one"[..], b"two"] {
            write(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
        assert!(write(&dir.path().join("missing").join("m"), b"x").is_err());
    }
}
