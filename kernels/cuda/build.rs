//! Embeds the kernels that `semmoe-kernels-compile` wrote into the folder `SEMMOE_KERNEL_IMAGES`. If the variable is
//! not set, none are embedded, which the library reports when a GPU is opened.

use std::fmt::Write as _;
use std::path::PathBuf;

const FILES: [&str; 4] = ["sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "compute_90.ptx"];

fn main() {
    println!("cargo::rerun-if-env-changed=SEMMOE_KERNEL_IMAGES");
    let mut list = String::from("&[");
    if let Some(folder) = std::env::var_os("SEMMOE_KERNEL_IMAGES").map(PathBuf::from) {
        for file in FILES {
            let path = folder.join(file);
            assert!(path.is_file(), "SEMMOE_KERNEL_IMAGES has no {file}: create it with semmoe-kernels-compile --out");
            println!("cargo::rerun-if-changed={}", path.display());
            let _ = write!(list, "include_bytes!({:?}), ", path.display().to_string());
        }
    }
    list.push(']');
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("images.rs"), list).expect("OUT_DIR is writable");
}
