//! `semmoe-kernels-compile [--out DIR]`: compiles all kernels with NVRTC for all targets, prints their register counts,
//! and fails on spills. It first proves that it detects spills, by compiling a kernel that spills.
//!
//! DIR receives one image per target, for a build with `SEMMOE_KERNEL_IMAGES=DIR`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is a command-line tool")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use semmoe_kernels_cuda::{
    Compiled, GpuError, KernelUse, Target, compile, compile_with_spills, kernels_of, sources_for,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let out = match arguments.as_slice() {
        [] => None,
        [flag, folder] if flag == "--out" => Some(PathBuf::from(folder)),
        _ => {
            eprintln!("error: expected no arguments, or --out DIR");
            return ExitCode::from(2);
        }
    };
    match planted().and_then(|()| all(out.as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// All targets at once.
fn all(out: Option<&Path>) -> Result<(), GpuError> {
    std::thread::scope(|scope| {
        let compiling = Target::ALL.map(|target| (target, scope.spawn(move || compile(target))));
        compiling.into_iter().try_for_each(|(target, compiled)| {
            let compiled = compiled.join().map_err(|_| format!("the compiler for {} panicked", target.name()))??;
            keep(target, &compiled, out)
        })
    })
}

/// Proves that the check detects a planted spill.
fn planted() -> Result<(), GpuError> {
    match spilling(&compile_with_spills(Target::Sm90)?) {
        Some(kernel) if kernel.kernel == "planted" => Ok(()),
        other => Err(format!("the planted spill was not detected: {other:?}").into()),
    }
}

/// Returns the first kernel that spills registers.
fn spilling(compiled: &Compiled) -> Option<&KernelUse> {
    compiled.kernels.iter().find(|kernel| kernel.spilled > 0)
}

fn keep(target: Target, compiled: &Compiled, out: Option<&Path>) -> Result<(), GpuError> {
    println!("{}: {} bytes", target.name(), compiled.image.len());
    for kernel in &compiled.kernels {
        println!("  {:<26} {:>3} registers, {} bytes spilled", kernel.kernel, kernel.registers, kernel.spilled);
    }
    if let Some(KernelUse { kernel, spilled, .. }) = spilling(compiled) {
        return Err(format!("{kernel} spills {spilled} bytes on {}", target.name()).into());
    }
    let expected = sources_for(target.capability()).flat_map(kernels_of).count();
    if target != Target::Ptx90 && compiled.kernels.len() != expected {
        let found = compiled.kernels.len();
        return Err(format!("compiled {found} kernels for {}, expected {expected}", target.name()).into());
    }
    let Some(folder) = out else { return Ok(()) };
    let write = || {
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join(target.file_name()), &compiled.image)
    };
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", target.file_name());
    Ok(write().map_err(failed)?)
}
