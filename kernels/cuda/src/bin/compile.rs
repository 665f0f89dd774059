//! `semmoe-kernels-compile [--out DIR]`: compiles all kernels with NVRTC for all targets, prints their registers, and
//! fails on spills. It first proves that it detects spills, with a kernel that spills.
//!
//! DIR gets one image per target, for a build with `SEMMOE_KERNEL_IMAGES=DIR`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use semmoe_kernels_cuda::{
    CompileError, Compiled, KernelUse, Target, compile, compile_with_spills, kernels_of, sources_for,
};

/// Why the kernels are not usable.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error("the compiler of {0} panicked")]
    Panicked(&'static str),
    #[error("{kernel} spills {bytes} bytes on {target}")]
    Spills { kernel: String, bytes: u64, target: &'static str },
    #[error("a kernel that spills was not found")]
    NotFound,
    #[error("{found} kernels were compiled for {target}, expected {expected}")]
    Count { found: usize, target: &'static str, expected: usize },
    #[error("{file} could not be written: {source}")]
    Write { file: String, source: std::io::Error },
}

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
fn all(out: Option<&Path>) -> Result<(), Failure> {
    std::thread::scope(|scope| {
        let compiling = Target::ALL.map(|target| (target, scope.spawn(move || compile(target))));
        compiling.into_iter().try_for_each(|(target, compiled)| {
            let compiled = compiled.join().map_err(|_| Failure::Panicked(target.name()))??;
            keep(target, &compiled, out)
        })
    })
}

/// Proves that the check finds a planted spill.
fn planted() -> Result<(), Failure> {
    match no_spills(Target::Sm90, &compile_with_spills(Target::Sm90)?) {
        Err(Failure::Spills { kernel, .. }) if kernel == "planted" => Ok(()),
        _ => Err(Failure::NotFound),
    }
}

fn no_spills(target: Target, compiled: &Compiled) -> Result<(), Failure> {
    match compiled.kernels.iter().find(|kernel| kernel.spilled > 0) {
        None => Ok(()),
        Some(KernelUse { kernel, spilled: bytes, .. }) => {
            Err(Failure::Spills { kernel: kernel.to_string(), bytes: u64::from(*bytes), target: target.name() })
        }
    }
}

fn keep(target: Target, compiled: &Compiled, out: Option<&Path>) -> Result<(), Failure> {
    println!("{}: {} bytes", target.name(), compiled.image.len());
    for kernel in &compiled.kernels {
        println!("  {:<26} {:>3} registers, {} bytes spilled", kernel.kernel, kernel.registers, kernel.spilled);
    }
    no_spills(target, compiled)?;
    let expected = sources_for(target.capability()).flat_map(kernels_of).count();
    if target != Target::Ptx90 && compiled.kernels.len() != expected {
        let found = compiled.kernels.len();
        return Err(Failure::Count { found, target: target.name(), expected });
    }
    let Some(folder) = out else { return Ok(()) };
    let write = || {
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join(target.file_name()), &compiled.image)
    };
    write().map_err(|source: std::io::Error| Failure::Write { file: target.file_name().to_string(), source })
}
