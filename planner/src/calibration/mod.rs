//! Calibrations: fitted constants with the prediction errors that accompany every answer.

mod fit;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::error::{not_negative, positive};
use crate::fields::json;
use crate::step::Constants;
pub use fit::{StepPoint, errors, fit, fit_contention};

/// Fitted constants and their residuals, as stored in the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The engine and its version.
    pub engine: String,
    /// The GPU that the measurements ran on.
    pub gpu: String,
    /// Description of the measurements, such as the command that made them and their licence.
    pub source: String,
    /// The fitted constants.
    pub constants: Constants,
    /// Errors of TTFT on held-out rows.
    pub ttft: Errors,
    /// Errors of TPOT on held-out rows.
    pub tpot: Errors,
    /// Interpolation errors of measured links at sizes between table entries; `None` if none were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<Errors>,
}

/// Relative errors of predictions: |predicted - measured| / measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// Number of measured rows.
    pub rows: u64,
    /// Median.
    pub median: f64,
    /// Mean (MAPE).
    pub mean: f64,
}

impl Errors {
    /// Computes the errors of (predicted, measured) pairs.
    ///
    /// # Errors
    /// [`PlanError::Value`] if there are no pairs, or a measured value is not positive.
    pub fn of(pairs: &[[f64; 2]]) -> Result<Self, PlanError> {
        positive("the measured rows", pairs.len() as f64)?;
        let mut errors = Vec::with_capacity(pairs.len());
        for [predicted, measured] in pairs {
            positive("a measured value", *measured)?;
            errors.push((predicted - measured).abs() / measured);
        }
        errors.sort_by(f64::total_cmp);
        let (low, high) = (errors[(errors.len() - 1) / 2], errors[errors.len() / 2]);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        Ok(Self { rows: pairs.len() as u64, median: f64::midpoint(low, high), mean })
    }
}

impl Calibration {
    /// Reads a calibration; `file` names it in errors.
    ///
    /// # Errors
    /// [`PlanError::Syntax`] if the text is malformed, [`PlanError::Value`] if a constant is outside its domain.
    pub fn from_json(file: &str, text: &str) -> Result<Self, PlanError> {
        let calibration: Self = json(file, "JSON of a calibration", text)?;
        calibration.constants.check()?;
        for errors in [calibration.ttft, calibration.tpot].into_iter().chain(calibration.links) {
            positive("the number of rows in a calibration", errors.rows as f64)?;
            not_negative("the mean error of a calibration", errors.mean)?;
            not_negative("the median error of a calibration", errors.median)?;
        }
        Ok(calibration)
    }
}

/// The expected error of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Accuracy {
    /// Nothing was measured.
    Uncalibrated,
    /// Known from a calibration's residuals.
    Calibrated {
        /// The engine.
        engine: String,
        /// The measured GPU.
        gpu: String,
        /// Errors of TTFT.
        ttft: Errors,
        /// Errors of TPOT.
        tpot: Errors,
    },
}

impl Accuracy {
    /// Returns the accuracy of answers that use these constants.
    pub fn of(calibration: Option<&Calibration>) -> Self {
        calibration.map_or(Self::Uncalibrated, |found| Self::Calibrated {
            engine: found.engine.clone(),
            gpu: found.gpu.clone(),
            ttft: found.ttft,
            tpot: found.tpot,
        })
    }

    /// Returns the factor by which a predicted time is typically off, in either direction.
    pub fn factor(&self) -> f64 {
        match self {
            Self::Uncalibrated => crate::affinity::UNCALIBRATED_FACTOR,
            Self::Calibrated { tpot, .. } => 1.0 + tpot.mean,
        }
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncalibrated => f.write_str("uncalibrated: times may be off by a factor of 2 or more"),
            Self::Calibrated { engine, gpu, ttft, tpot } => {
                let [tpot, ttft] = [tpot, ttft].map(|of| (of.median * 100.0, of.mean * 100.0, of.rows));
                let (median, mean, rows) = tpot;
                write!(f, "calibrated for {engine} on {gpu}; on held-out rows TPOT is off by {median:.0}% ")?;
                write!(f, "(median; mean {mean:.0}%, {rows} rows), ")?;
                let (median, mean, rows) = ttft;
                write!(f, "TTFT by {median:.0}% (mean {mean:.0}%, {rows} rows)")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_medians_and_means() {
        let errors = Errors::of(&[[11.0, 10.0], [9.0, 10.0], [15.0, 10.0], [10.0, 10.0]]).unwrap();
        assert_eq!((errors.rows, errors.median), (4, 0.1));
        assert!((errors.mean - 0.175).abs() < 1e-12);
        assert!(Errors::of(&[]).is_err() && Errors::of(&[[1.0, 0.0]]).is_err());
    }

    #[test]
    fn calibrations_are_read_and_checked() {
        let errors = Errors { rows: 100, median: 0.08, mean: 0.15 };
        let good = Calibration {
            engine: "sglang 0.5.23".into(),
            gpu: "H200".into(),
            source: "made up".into(),
            constants: Constants::uncalibrated(),
            ttft: errors,
            tpot: errors,
            links: None,
        };
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(Calibration::from_json("f", &text).unwrap(), good);
        let shown = Accuracy::of(Some(&good)).to_string();
        assert!(shown.contains("TPOT is off by 8% (median; mean 15%, 100 rows)"), "{shown}");
        assert!(Accuracy::of(None).to_string().starts_with("uncalibrated"));
        let cases = [
            ("\"overlap_share\":0.0", "\"overlap_share\":-1.0", "overlap_share is -1"),
            ("overlap_share", "overlap", "f is not valid JSON of a calibration: unknown field `overlap`"),
            ("\"rows\":100", "\"rows\":0", "the number of rows in a calibration is 0"),
        ];
        for (from, to, message) in cases {
            let error = Calibration::from_json("f", &text.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}\nlacks: {message}");
        }
    }
}
