//! The collectives behind the interface that workers call, on one GPU: a thread and a stream per rank, checked bit for
//! bit against the conformance test of all carriers.

#[cfg(feature = "cuda")]
use semmoe_reference::law;
#[cfg(feature = "cuda")]
use serde_json::json;

use crate::measure::Report;
use crate::options::Options;

#[cfg(feature = "cuda")]
mod gpu;

#[cfg(not(feature = "cuda"))]
pub(crate) fn report(_: &Options) -> Report {
    Err("unit needs a GPU: build with --features cuda".to_owned())
}

/// All ranks on one GPU, with both element types that workers use.
#[cfg(feature = "cuda")]
pub(crate) fn report(options: &Options) -> Report {
    let mut cases = Vec::new();
    for ranks in [1, 2, 3, 4, 8] {
        for (hidden, tokens, rounds) in [(24, 7, 3), (7, 4, 3), (2048, 96, 4)] {
            let case = law::Case { hidden, tokens, rounds, seed: options.seed, norms_rounded_sums: false };
            gpu::holds::<f32>(ranks, case)?;
            gpu::holds::<half::bf16>(ranks, case)?;
            cases.push(json!({ "ranks": ranks, "hidden": hidden, "tokens": tokens, "rounds": rounds }));
        }
    }
    Ok((json!({ "seed": options.seed, "dtypes": ["f32", "bf16"], "cases": cases }), true))
}
