//! Constants fitted to published measurements, one set per engine, GPU and weight type, with their errors on held-out
//! configurations.
//!
//! `bench/papers/python/fit.py` generates the file; its README explains how.

use serde::Deserialize;

use crate::PlanError;
use crate::calibration::{Calibration, Errors};
use crate::fields::json;
use crate::shape::Dtype;
use crate::step::Constants;

const FILE: &str = include_str!("../fitted/aiconfigurator.json");
const NAME: &str = "planner/fitted/aiconfigurator.json";

/// The file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fitted {
    source: String,
    licence: String,
    script: String,
    date: String,
    regimes: Vec<Regime>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Regime {
    engine: String,
    gpu: String,
    /// Type of the routed experts, or of all products in a dense model.
    weights: String,
    constants: Constants,
    ttft: Errors,
    tpot: Errors,
}

impl Fitted {
    fn read(file: &str, text: &str) -> Result<Self, PlanError> {
        let found: Self = json(file, "JSON of fitted constants", text)?;
        for regime in &found.regimes {
            regime.constants.check()?;
            if Dtype::of(&regime.weights).is_none() {
                let (key, found) = ("weights".to_owned(), regime.weights.clone());
                return Err(PlanError::Key { file: file.to_owned(), key, found, expected: "a weight type".to_owned() });
            }
        }
        Ok(found)
    }
}

/// Returns the constants fitted for `engine` (`sglang`, `trtllm` or `vllm`) on `gpu` with experts of type `weights`.
///
/// # Errors
/// [`PlanError::Key`] if this combination was not fitted; it lists the fitted engines, GPUs and types.
pub fn fitted(engine: &str, gpu: &str, weights: Dtype) -> Result<Calibration, PlanError> {
    let file = Fitted::read(NAME, FILE)?;
    let fits = |regime: &&Regime| regime.engine == engine && regime.gpu == gpu && regime.weights == weights.name();
    let Some(regime) = file.regimes.iter().find(fits) else {
        let known = file.regimes.iter().map(|of| format!("{} {} {}", of.engine, of.gpu, of.weights));
        return Err(PlanError::Key {
            file: NAME.to_owned(),
            key: "regimes".to_owned(),
            found: format!("without {engine} {gpu} {}", weights.name()),
            expected: format!("one of {}", known.collect::<Vec<_>>().join(", ")),
        });
    };
    Ok(Calibration {
        engine: format!("{engine}, {} weights", regime.weights),
        gpu: regime.gpu.clone(),
        source: format!("{} ({}), by {} on {}", file.source, file.licence, file.script, file.date),
        constants: regime.constants,
        ttft: regime.ttft,
        tpot: regime.tpot,
        links: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{Load, Target, predict};
    use crate::tests::fixtures::{deepseek_v3, h200, layout};

    #[test]
    fn every_regime_is_valid_and_found() {
        let file = Fitted::read(NAME, FILE).unwrap();
        assert!(file.regimes.len() > 10 && file.licence == "Apache-2.0");
        for regime in &file.regimes {
            let found = fitted(&regime.engine, &regime.gpu, Dtype::of(&regime.weights).unwrap()).unwrap();
            assert_eq!(found.constants, regime.constants, "{} {} twice", regime.engine, regime.gpu);
            assert!(found.tpot.rows >= 20 && found.tpot.median > 0.0 && found.tpot.median < 0.5);
        }
        let error = fitted("sglang", "H20", Dtype::Fp8).unwrap_err().to_string();
        assert!(error.contains("`regimes` is without sglang H20 fp8, expected one of "), "{error}");
        let broken = FILE.replacen("\"dense_flops_share\": ", "\"dense_flops_share\": -", 1);
        assert!(Fitted::read("f", &broken).is_err());
    }

    /// Golden predictions: DeepSeek-R1 in FP8 on 8 H200, SGLang, TP8, prompts and answers of 1,024 tokens. Measured
    /// (aiconfigurator's `silicon_sample.csv`): see `MEASURED`. They change only with the model or the file.
    #[test]
    fn golden_predictions() {
        let (shape, cluster) = (deepseek_v3(), h200(1));
        let constants = fitted("sglang", "H200", Dtype::Fp8).unwrap().constants;
        for [concurrency, ttft, tpot, measured] in MEASURED {
            let layout = layout(1, [8, 1], [8, 1]);
            let target = Target { shape: &shape, cluster: &cluster, layout, constants: &constants };
            let found = predict(&target, &Load { concurrency, input_tokens: 1024.0, output_tokens: 1024.0 });
            let (found_ttft, found_tpot) = (found.ttft * 1e3, found.tpot * 1e3);
            assert!((found_ttft / ttft - 1.0).abs() < 1e-3, "TTFT at {concurrency}: {found_ttft}");
            assert!((found_tpot / tpot - 1.0).abs() < 1e-3, "TPOT at {concurrency}: {found_tpot}");
            assert!(
                (found_tpot / measured - 1.0).abs() < 0.1,
                "TPOT at {concurrency}: {found_tpot}, measured {measured}"
            );
        }
    }

    /// Requests in flight; TTFT and TPOT as predicted, TPOT as measured, ms.
    const MEASURED: [[f64; 4]; 3] =
        [[4.0, 230.449, 10.6844, 10.2923], [16.0, 334.466, 17.6740, 16.6298], [64.0, 643.060, 32.1936, 32.9872]];
}
