//! Appendix A: where TP and EP cross over.

use semmoe_planner::switching::{Crossing, StepPair, crossing};

use crate::Outcome;
use crate::papers::Verdict::Refuted;
use crate::papers::{Found, Verdict, axis, line, lines, near};

/// Milliseconds of a decode step with TP8 and with DP8 EP8: `bench/switch/src/engines.rs` has the source.
const BATCHES: [f64; 5] = [8.0, 64.0, 256.0, 512.0, 2048.0];
const ENGINES: [(&str, [f64; 5], [f64; 5]); 3] = [
    ("TensorRT-LLM", [11.7, 25.7, 36.0, 47.0, 105.9], [19.5, 25.1, 33.2, 39.4, 73.1]),
    ("vLLM", [12.2, 21.4, 32.6, 41.6, 96.2], [19.9, 27.4, 34.9, 41.5, 90.6]),
    ("SGLang", [11.5, 21.8, 31.1, 39.8, 97.2], [18.3, 29.6, 39.6, 49.9, 106.0]),
];

/// FLOP per byte of expert weights read by one of P GPUs, if B tokens each take k of E experts and all experts are
/// read: with slices (TP) and with whole experts (EP).
fn intensities(batch: f64, experts: f64, top_k: f64, ranks: f64) -> [f64; 2] {
    // 2 FLOP per weight and token, 2 bytes per weight; the number of weights of an expert cancels out.
    let tp = batch * top_k * 2.0 / ranks / (experts * 2.0 / ranks);
    let ep = batch * top_k / ranks * 2.0 / (experts / ranks * 2.0);
    [tp, ep]
}

pub(super) fn crossings() -> Outcome<Found> {
    let [tp, ep] = intensities(256.0, 128.0, 8.0, 8.0);
    let printed_ep = 256.0 * 8.0 / (8.0 * 128.0);
    let mut found = Vec::new();
    for (name, tp, ep) in ENGINES {
        let pair = |at: usize| StepPair { sequences: BATCHES[at], tp: tp[at], ep: ep[at] };
        let points: Vec<StepPair> = (0..BATCHES.len()).map(pair).collect();
        found.push((name, crossing(&points)?));
    }
    let shown = |found: &(&str, Crossing)| match found.1 {
        Crossing::At(at) => format!("{} {at:.0}", found.0),
        Crossing::AboveAll => format!("{} above 2048", found.0),
        Crossing::BelowAll => format!("{} below 8", found.0),
    };
    let in_range = |found: &(&str, Crossing)| matches!(found.1, Crossing::At(at) if (128.0..=256.0).contains(&at));
    let holds = !near(tp, ep, 1e-9) && near(ep, printed_ep, 1e-9) && found.iter().all(in_range);
    let names: Vec<String> = found.iter().map(shown).collect();
    let ours =
        format!("both {tp:.0} FLOP a byte at B = 256 (A2 gives {printed_ep:.0}); B* by engine: {}", names.join(", "));
    let ratio =
        |tp: [f64; 5], ep: [f64; 5]| BATCHES.iter().enumerate().map(|(at, batch)| (*batch, ep[at] / tp[at])).collect();
    let panel = lines(
        "Moebius: a step of EP over one of TP, 8 H200, Qwen3-235B",
        [axis("sequences", true), axis("EP / TP", false)],
        ENGINES.map(|(name, tp, ep)| line(name, ratio(tp, ep))).into(),
    );
    Ok(Found::new(Verdict::of(holds, Refuted), ours).with_picture("moebius-crossing", panel))
}
