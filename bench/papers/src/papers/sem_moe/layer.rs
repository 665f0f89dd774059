//! An MoE layer's time, and what local activations can save of it.

use semmoe_planner::fitted::fitted;
use semmoe_planner::shape::Dtype;
use semmoe_planner::step::{Part, Target, Work, step};

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu};
use crate::papers::inputs::{deepseek_v2_lite, h200, layout};
use crate::papers::{Found, Verdict, near};

/// Figure 1: the largest share of an MoE layer that is communication.
const LARGEST_SHARE: f64 = 0.592;

/// The model's share of dispatch and combine in the MoE layers of DeepSeek-V2-Lite on 8 GPUs with 450 GB/s each.
pub(super) fn figure_1() -> Outcome<Found> {
    let (shape, cluster) = (deepseek_v2_lite()?, h200(1)?);
    let constants = fitted("vllm", "H100", Dtype::of("bf16").ok_or("bf16")?)?.constants;
    let target = Target { shape: &shape, cluster: &cluster, layout: layout([1, 8], [1, 8]), constants: &constants };
    let share = |work: Work| {
        let terms = step(&target, &work);
        terms.exchange() / (terms.exchange() + terms[Part::Experts] + terms[Part::Dense])
    };
    let prefill = share(Work { sequences: 8.0, tokens: 1024.0, cached: 0.0 });
    let decode = share(Work { sequences: 256.0, tokens: 1.0, cached: 1024.0 });
    let ours =
        format!("model: {:.0}% (8 prompts of 1,024 tokens), {:.0}% (256 sequences)", prefill * 1e2, decode * 1e2);
    Ok(Found::new(NeedsGpu, ours))
}

/// The speedup of a layer if `share` of it is proportional to remote activations.
fn saved(share: f64, local: [f64; 2]) -> f64 {
    share * (1.0 - (1.0 - local[1]) / (1.0 - local[0]))
}

pub(super) fn figure_5a() -> Outcome<Found> {
    // 8 GPUs: 1/8 is local by chance. 43% more, as percentage points or as a ratio.
    let (base, more) = (0.125, 0.43);
    let [points, ratio] = [base + more, base * (1.0 + more)].map(|local| saved(LARGEST_SHARE, [base, local]));
    let holds = near(points, 0.466, 0.15) || near(ratio, 0.466, 0.15);
    let ours = format!(
        "at most {:.0}% if 43% are points and {:.0}% if a ratio, as 59.2% is communication (Figure 1)",
        points * 1e2,
        ratio * 1e2
    );
    Ok(Found::new(Verdict::of(holds, Corrected), ours))
}

#[cfg(test)]
mod tests {
    use crate::papers::near;

    /// Tables 5 and 6: requests/s of SGLang and Sem-MoE by data set.
    const TABLES: [[[f64; 2]; 3]; 2] =
        [[[32.7, 38.6], [32.2, 38.6], [2.9, 2.9]], [[37.2, 38.6], [37.9, 38.6], [1.9, 2.4]]];

    /// The printed averages, 1.12 and 1.10, are of ratios; the averaged throughputs have 1.18 and 1.03.
    #[test]
    fn printed_averages_of_tables_5_and_6_are_of_ratios() {
        let means = TABLES.map(|rows| {
            let sum = |side: usize| rows.iter().map(|row| row[side]).sum::<f64>();
            [rows.iter().map(|row| row[1] / row[0]).sum::<f64>() / 3.0, sum(1) / sum(0)]
        });
        let expected = [[1.126, 1.182], [1.106, 1.034]];
        assert!(
            means
                .as_flattened()
                .iter()
                .zip(expected.as_flattened())
                .all(|(found, printed)| near(*found, *printed, 0.001))
        );
    }
}
