//! The C program of `kernels/capi/tests` with CUDA communicators. It loads the library as C programs do.

use std::path::Path;
use std::process::Command;

use semmoe_kernels_shim::Compiler;

const LIBRARY: &str = "libsemmoe_kernels_capi_shim.so";

#[test]
fn calls_for_cuda_work_from_c() {
    if Compiler::find().is_none() {
        eprintln!("notice: no C++ compiler (c++, g++ or clang++), so the CUDA kernels are not run");
        return;
    }
    let program = std::env::current_exe().expect("this program");
    // Cargo builds the library, also as a `cdylib`, before this program, next to it.
    let folder = program.parent().expect("a folder");
    let own = tempfile::tempdir().expect("a folder");
    let ranks = own.path().join("ranks");
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/capi");
    let built = Command::new("cc")
        .args(["-std=gnu11", "-DSEMMOE_TEST_CUDA", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-I"])
        .arg(capi.join("../include"))
        .arg(capi.join("tests/ranks.c"))
        .arg(folder.join(LIBRARY))
        .arg("-o")
        .arg(&ranks)
        .output()
        .expect("a compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&ranks).env("LD_LIBRARY_PATH", folder).output().expect("the program starts");
    assert!(output.status.success(), "{} {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n");
}
