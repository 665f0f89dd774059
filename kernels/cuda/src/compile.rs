//! Compiles the kernels with NVRTC, through cudarc. Needs no GPU and no CUDA header, only `libnvrtc.so.13` on the
//! loader's path.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::{result, sys};

use crate::image::Target;
use crate::source::{HEADERS, Source, sources_for};

/// ptxas's report on one kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelUse {
    /// Its name.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes spilled from registers, written and read.
    pub spilled: u32,
}

/// All kernels for one target.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// CUBIN or PTX.
    pub image: Vec<u8>,
    /// Empty for PTX, which the driver compiles.
    pub kernels: Vec<KernelUse>,
    /// The compiler's output.
    pub log: String,
}

/// Why compilation failed.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// `libnvrtc.so` is not on the loader's path.
    #[error("NVRTC was not found: add the directory with libnvrtc.so.13 to LD_LIBRARY_PATH")]
    NotFound,
    /// NVRTC rejected the sources.
    #[error("NVRTC could not compile the kernels for {target}: {cause}: {log}")]
    Refused {
        /// The compilation target.
        target: &'static str,
        /// Its status.
        cause: result::NvrtcError,
        /// Its output.
        log: String,
    },
}

/// Frees the program on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create`, freed once. A failure cannot be handled here.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles all kernels whose instructions the target supports.
///
/// # Errors
/// If NVRTC is missing or rejects the sources.
pub fn compile(target: Target) -> Result<Compiled, CompileError> {
    let sources: Vec<_> = sources_for(target.capability()).collect();
    let all = sources.iter().map(|file| format!("#include \"{}\"\n", file.name)).collect::<String>();
    compile_text(target, &all, &HEADERS.iter().chain(sources).collect::<Vec<_>>())
}

/// A kernel that needs more registers than there are.
const SPILLING: &str = r#"
extern "C" __global__ void __launch_bounds__(1024, 2) planted(float* values) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = values[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i * 1024 + threadIdx.x] = kept[95 - i] * kept[i];
}
"#;

/// Compiles one kernel that spills, which a check for spills must detect.
///
/// # Errors
/// See [`compile`].
pub fn compile_with_spills(target: Target) -> Result<Compiled, CompileError> {
    compile_text(target, SPILLING, &[])
}

/// Compiles a text; `files` are the files that it includes.
fn compile_text(target: Target, text: &str, files: &[&Source]) -> Result<Compiled, CompileError> {
    // SAFETY: this only searches for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(CompileError::NotFound);
    }
    let refused = |cause, log| CompileError::Refused { target: target.name(), cause, log };
    let program = create(text, files).map_err(|cause| refused(cause, String::new()))?;
    let architecture = format!("--gpu-architecture={}", target.name());
    // The reference rounds after each operation. The kernels use intrinsics for that; this option protects operations
    // that are later added without them.
    let options = [architecture.as_str(), "--std=c++17", "--fmad=false", "--ptxas-options=-v"];
    // SAFETY: the program is alive.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    // SAFETY: the program is alive.
    let log = unsafe { result::get_program_log(program.0) }.map(|log| log_text(&log)).unwrap_or_default();
    compiled.map_err(|cause| refused(cause, log.clone()))?;
    let image = image(&program, target).map_err(|cause| refused(cause, log.clone()))?;
    Ok(Compiled { image, kernels: kernel_use(&log), log })
}

fn create(text: &str, files: &[&Source]) -> Result<Program, result::NvrtcError> {
    let owned = |text: &str| CString::new(text).unwrap_or_default();
    let all = owned(text);
    let (names, texts): (Vec<_>, Vec<_>) = files.iter().map(|file| (owned(file.name), owned(file.text))).unzip();
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with 0 and outlive the call, which copies them.
    unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            all.as_ptr(),
            c"all.cu".as_ptr(),
            files.len() as i32,
            text_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
        .result()?;
    }
    Ok(Program(program))
}

fn image(program: &Program, target: Target) -> Result<Vec<u8>, result::NvrtcError> {
    if target == Target::Ptx90 {
        // SAFETY: the program is alive and compiled.
        let ptx = unsafe { result::get_ptx(program.0)? };
        return Ok(ptx.iter().map(|&byte| byte as u8).collect());
    }
    let mut bytes = 0;
    // SAFETY: the program is alive and compiled.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut bytes).result()? };
    let mut cubin = vec![0u8; bytes];
    // SAFETY: the buffer has the size just queried.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()).result()? };
    Ok(cubin)
}

fn log_text(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Parses ptxas's output: for each kernel its name, then its spills, then its registers.
fn kernel_use(log: &str) -> Vec<KernelUse> {
    let mut found: Vec<KernelUse> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(KernelUse { kernel, ..KernelUse::default() });
        }
        let Some(last) = found.last_mut() else { continue };
        for part in line.split(',') {
            let number = || part.split_whitespace().find_map(|word| word.parse::<u32>().ok()).unwrap_or(0);
            if part.contains("bytes spill") {
                last.spilled += number();
            }
            if part.contains("Used") && part.contains("registers") {
                last.registers = number();
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_and_registers_are_read_from_the_log() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'semmoe_a' for 'sm_90'\n\
                   ptxas info    : Function properties for semmoe_a\n\
                   \x20   8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size\n\
                   ptxas info    : Compiling entry function 'semmoe_b' for 'sm_90'\n\
                   \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 41 registers, used 1 barriers\n";
        let expected = |kernel: &str, registers, spilled| KernelUse { kernel: kernel.to_owned(), registers, spilled };
        assert_eq!(kernel_use(log), [expected("semmoe_a", 64, 16), expected("semmoe_b", 41, 0)]);
    }
}
