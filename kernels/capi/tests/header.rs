//! A program, compiled as C and as C++ without warnings, runs four ranks through the library.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of the library, which Cargo builds next to this program, also as a `cdylib`.
fn library_folder() -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let folder = program.parent().expect("a folder").to_owned();
    assert!(folder.join("libsemmoe_kernels.so").is_file(), "the library is in {}", folder.display());
    folder
}

fn run(compiler: &str, arguments: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("ranks");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library_folder();
    let built = Command::new(compiler)
        .args(arguments)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-I"])
        .arg(here.join("../include"))
        .arg(here.join("tests/ranks.c"))
        .args(["-x", "none", "-L"])
        .arg(&library)
        .args(["-lsemmoe_kernels", "-o"])
        .arg(&program)
        .output()
        .expect("a compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&program).env("LD_LIBRARY_PATH", &library).output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {errors}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n");
}

#[test]
fn the_library_works_from_c() {
    run("cc", &["-std=gnu11", "-x", "c"]);
}

#[test]
fn the_library_works_from_cpp() {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("notice: no C++ compiler (c++), so the header is not tried from C++");
        return;
    }
    run("c++", &["-std=gnu++17", "-x", "c++"]);
}
