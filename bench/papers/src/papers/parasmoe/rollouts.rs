//! Appendix C: a batch of answers, generated until the last one ends.

use semmoe_bench_papers::rollout::{LayoutSpeed, Rollout, RolloutTimes};

use crate::Outcome;
use crate::papers::Verdict::{Corrected, Refuted, Reproduced};
use crate::papers::{Found, Verdict, axis, line, lines, near};

/// Appendix C: T and l of EP and TP, N.
const EP: LayoutSpeed = LayoutSpeed { tokens_per_second: 22_000.0, token_seconds: 0.05 };
const TP: LayoutSpeed = LayoutSpeed { tokens_per_second: 4_500.0, token_seconds: 0.02 };
const ANSWERS: f64 = 8192.0;

fn times(major_tokens: f64, most_tokens: f64) -> Outcome<RolloutTimes> {
    Ok(Rollout { answers: ANSWERS, major_tokens, most_tokens }.times(EP, TP, 0.0)?)
}

/// Gains over EP and TP at L_max = r L_maj.
fn gains(ratio: f64) -> Outcome<[f64; 2]> {
    let found = times(2048.0, 2048.0 * ratio)?;
    Ok([found.ep / found.adaptive, found.tp / found.adaptive])
}

pub(super) fn figure_6() -> Outcome<Found> {
    let ratios: Vec<f64> = (1..=7).map(|power| f64::from(1 << power)).collect();
    let gains = ratios.iter().map(|&ratio| gains(ratio)).collect::<Outcome<Vec<_>>>()?;
    let mut table = String::from("L_max / L_maj   over EP   over TP\n");
    for (ratio, [ep, tp]) in ratios.iter().zip(&gains) {
        table += &format!("{ratio:>13}   {ep:>7.3}   {tp:>7.3}\n");
    }
    let [ep, tp] = gains[2];
    let printed = near(ep, 1.41, 0.01) && near(tp, 3.75, 0.01);
    let series = |at: usize| ratios.iter().zip(&gains).map(|(ratio, gains)| (*ratio, gains[at])).collect();
    let panel = lines(
        "ParaSMoE, figure 6: gain of a switch",
        [axis("L_max / L_maj", true), axis("times as fast", false)],
        vec![line("over EP alone", series(0)), line("over TP alone", series(1))],
    );
    let ours = format!("where it is {ep:.2} over EP it is {tp:.2} over TP (L_max = 8 L_maj)");
    Ok(Found::new(Verdict::of(printed, Corrected), ours).with_table(table).with_picture("parasmoe-figure-6", panel))
}

pub(super) fn which_is_better() -> Outcome<Found> {
    // EP is better below this ratio, TP above: N L / T + (r - 1) L l is equal.
    let even = 1.0
        + ANSWERS * (1.0 / TP.tokens_per_second - 1.0 / EP.tokens_per_second) / (EP.token_seconds - TP.token_seconds);
    let lengths = [64.0, 512.0, 2048.0, 16_384.0];
    let mut as_printed = true;
    for major in lengths {
        for (ratio, ep_wins) in [(even * 0.9, true), (even * 1.1, false)] {
            let found = times(major, major * ratio)?;
            as_printed &= (found.ep < found.tp) != ep_wins;
        }
    }
    let verdict = if as_printed { Reproduced } else { Refuted };
    Ok(Found::new(verdict, format!("EP is faster below L_max = {even:.1} L_maj at every length, TP above")))
}
