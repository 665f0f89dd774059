//! The CUDA sources in `kernels/cuda`, and the kernels that they define.

/// A file of CUDA C++.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// The file's name in `#include` and messages.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The first compute capability that has the instructions used, x 10: 80 is sm_80.
    pub least_capability: u32,
}

macro_rules! source {
    ($name:literal, $least:literal) => {
        Source { name: $name, text: include_str!(concat!("../", $name)), least_capability: $least }
    };
}

/// The kernels' headers.
pub const HEADERS: &[Source] = &[
    source!("common.cuh", 80),
    source!("team.cuh", 80),
    source!("reduce.cuh", 80),
    source!("gather.cuh", 80),
    source!("push.cuh", 80),
    source!("sort.cuh", 80),
    source!("compute.cuh", 80),
    source!("logits.cuh", 80),
    source!("matmul.cuh", 80),
    source!("rows.cuh", 80),
    source!("tensor.cuh", 80),
    source!("attend.cuh", 80),
];

/// One source per kernel.
pub const SOURCES: &[Source] = &[
    source!("argsort.cu", 80),
    source!("srs.cu", 80),
    source!("srs_norm.cu", 80),
    source!("sag.cu", 80),
    source!("all_reduce.cu", 80),
    source!("shuffle.cu", 80),
    source!("dispatch_plan.cu", 80),
    source!("dispatch.cu", 80),
    source!("pack.cu", 80),
    source!("combine.cu", 80),
    source!("reshard.cu", 80),
    source!("nvls.cu", 90),
    source!("argmax.cu", 80),
    source!("candidates.cu", 80),
    source!("matmul.cu", 80),
    source!("matmul_many.cu", 80),
    source!("matmul_plain.cu", 80),
    source!("embed.cu", 80),
    source!("norm.cu", 80),
    source!("sort_pairs.cu", 80),
    source!("pairs.cu", 80),
    source!("heads.cu", 80),
    source!("attend.cu", 80),
    source!("route.cu", 80),
];

/// Returns the sources whose instructions a GPU of this capability (x 10) supports.
pub fn sources_for(capability: u32) -> impl Iterator<Item = &'static Source> {
    SOURCES.iter().filter(move |source| source.least_capability <= capability)
}

/// Returns the names of all kernels in a source, as given to `SEMMOE_KERNEL`.
pub fn kernels_of(source: &Source) -> impl Iterator<Item = &'static str> {
    let text: &'static str = source.text;
    text.split("SEMMOE_KERNEL(").skip(1).filter_map(|rest| rest.split(',').next())
}
