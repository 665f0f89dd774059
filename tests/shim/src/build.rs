//! Building and loading the kernels.

use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library;
use semmoe_kernels_cuda::{HEADERS, SOURCES};

use crate::error::ShimError;
use crate::run::RunFn;

/// The shim's own files, compiled together with the kernels' sources.
const SHIM_FILES: &[(&str, &str)] = &[
    ("shim.h", include_str!("../shim.h")),
    ("scheduler.h", include_str!("../scheduler.h")),
    ("fibers.h", include_str!("../fibers.h")),
    ("scheduler.cpp", include_str!("../scheduler.cpp")),
];

/// A C++ compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    command: PathBuf,
}

/// Checks compiled into the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sanitize {
    /// Only alignment.
    No,
    /// Addresses and undefined behaviour; the process must run with the sanitizer's library preloaded.
    AddressAndUndefined,
}

impl Compiler {
    /// The first of `c++`, `g++`, `clang++` that works; `None` without one.
    pub fn find() -> Option<Self> {
        let answers =
            |command: &&str| Command::new(command).arg("--version").output().is_ok_and(|o| o.status.success());
        ["c++", "g++", "clang++"].iter().copied().find(answers).map(|command| Self { command: command.into() })
    }

    /// The path of one of the compiler's own libraries, such as `libasan.so`; `None` if it has none.
    pub fn library(&self, name: &str) -> Option<PathBuf> {
        let output = Command::new(&self.command).arg(format!("-print-file-name={name}")).output().ok()?;
        let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        path.is_absolute().then_some(path)
    }

    /// Compiles the kernels in `folder`, in a few seconds, or about a minute with sanitizers. Returns the library's
    /// path.
    ///
    /// # Errors
    /// A compiler that fails.
    pub fn compile(&self, folder: &Path, sanitize: Sanitize) -> Result<PathBuf, ShimError> {
        let mut all = String::from("#include \"shim.h\"\n");
        for file in HEADERS.iter().chain(SOURCES) {
            std::fs::write(folder.join(file.name), file.text)?;
        }
        for (name, text) in SHIM_FILES {
            std::fs::write(folder.join(name), text)?;
        }
        for name in SOURCES.iter().map(|source| source.name).chain(["scheduler.cpp"]) {
            all.push_str(&format!("#include \"{name}\"\n"));
        }
        std::fs::write(folder.join("all.cpp"), all)?;
        let library = folder.join("kernels.so");
        let mut command = Command::new(&self.command);
        // Disables contraction: the reference rounds after each operation, as the kernels do on a GPU.
        command.current_dir(folder).args(["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-ffp-contract=off"]);
        command.args(["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-clobbered", "-Wno-unknown-warning-option"]);
        // The fortified longjmp takes a jump to another fiber's stack for an error.
        command.arg("-U_FORTIFY_SOURCE");
        if sanitize == Sanitize::AddressAndUndefined {
            command.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
        }
        let output = command.args(["all.cpp", "-o", "kernels.so"]).output()?;
        if output.status.success() {
            return Ok(library);
        }
        let messages = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(ShimError::Compile { compiler: self.command.display().to_string(), messages })
    }
}

/// The kernels, compiled and loaded.
pub struct Shim {
    // Point into the library.
    pub(crate) run: RunFn,
    pub(crate) beside_others: unsafe extern "C" fn(u32),
    pub(crate) leave_out: unsafe extern "C" fn(*const c_char, u32),
    pub(crate) moved: unsafe extern "C" fn(*mut u64, *mut u64),
    // Dropped before the folder that it was loaded from.
    _library: Library,
    path: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Shim {
    /// Compiles in a temporary folder, in a few seconds.
    ///
    /// # Errors
    /// A compiler that fails, a library that cannot be loaded.
    pub fn build(compiler: &Compiler) -> Result<Self, ShimError> {
        let folder = tempfile::tempdir()?;
        let path = compiler.compile(folder.path(), Sanitize::No)?;
        Self::load(path, Some(folder))
    }

    /// Loads kernels that another process built and keeps at its [`path`](Self::path).
    ///
    /// # Errors
    /// A file that is not a library of this version.
    ///
    /// # Safety
    /// The library was compiled by [`Compiler::compile`].
    pub unsafe fn open(path: &Path) -> Result<Self, ShimError> {
        Self::load(path.to_owned(), None)
    }

    /// The library's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn load(path: PathBuf, folder: Option<tempfile::TempDir>) -> Result<Self, ShimError> {
        // SAFETY: the library was built from this crate's sources; its initialisers only link a list of kernels.
        let library = unsafe { Library::new(&path)? };
        // SAFETY: scheduler.h declares these functions with the types of the fields.
        unsafe {
            Ok(Self {
                run: *library.get(b"semmoe_shim_run\0")?,
                beside_others: *library.get(b"semmoe_shim_beside_others\0")?,
                leave_out: *library.get(b"semmoe_shim_leave_out\0")?,
                moved: *library.get(b"semmoe_shim_moved\0")?,
                _library: library,
                path,
                _folder: folder,
            })
        }
    }
}
