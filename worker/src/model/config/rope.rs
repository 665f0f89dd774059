//! Reads a configuration's rotary embedding: `rope_theta` with `rope_scaling`, or the newer `rope_parameters`.

use semmoe_tables::{CheckpointConfig, ConfigError};

use super::family::only;
use super::parts::{Rope, RopeLayout, Yarn};

const DEFAULT_THETA: f64 = 10_000.0;
const DEFAULT_BETA_FAST: f64 = 32.0;
const DEFAULT_BETA_SLOW: f64 = 1.0;

/// Reads and checks the rotary embedding. Scaling other than YaRN is rejected with an error that names it.
pub(super) fn read(fields: &CheckpointConfig, layout: RopeLayout, max_positions: usize) -> Result<Rope, ConfigError> {
    only(fields, "partial_rotary_factor", 1.0)?;
    let key = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let nested = fields.section(key)?;
    let theta = match (fields.real("rope_theta")?, &nested) {
        (None, Some(nested)) => nested.real("rope_theta")?,
        (theta, _) => theta,
    };
    let theta = theta.unwrap_or(DEFAULT_THETA);
    if theta <= 1.0 {
        return Err(fields.bad("rope_theta", theta, "a number above 1"));
    }
    let Some(nested) = nested else { return Ok(Rope { theta, layout, yarn: None }) };
    only(&nested, "partial_rotary_factor", 1.0)?;
    let kind = match nested.text("rope_type")? {
        Some(kind) => kind,
        None => nested.text("type")?.unwrap_or("default"),
    };
    let yarn = match kind {
        "default" => None,
        "yarn" => Some(yarn(&nested, max_positions)?),
        other => {
            let found: String = other.chars().take(80).collect();
            return Err(fields.bad(key, format!("of type {found:?}"), "null, \"default\" or \"yarn\""));
        }
    };
    Ok(Rope { theta, layout, yarn })
}

fn yarn(fields: &CheckpointConfig, max_positions: usize) -> Result<Yarn, ConfigError> {
    let factor = match fields.real("factor")? {
        Some(factor) if factor >= 1.0 => factor,
        _ => return Err(fields.unexpected("factor", "a number of at least 1 in rope_scaling of type \"yarn\"")),
    };
    let original_positions = fields.positive("original_max_position_embeddings")?.unwrap_or(max_positions as f64);
    // Transformers treats 0 as absent.
    let given = |value: Option<f64>| value.filter(|value| *value != 0.0);
    let (mscale, all_dim) = (given(fields.real("mscale")?), given(fields.real("mscale_all_dim")?));
    let magnitude = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    let inferred = match (mscale, all_dim) {
        (Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
        (None, None) => magnitude(1.0),
        // Implementations disagree on the meaning of one without the other.
        _ => return Err(fields.unexpected("mscale_all_dim", "both mscale and mscale_all_dim, or neither")),
    };
    let (beta_fast, beta_slow) = (
        fields.positive("beta_fast")?.unwrap_or(DEFAULT_BETA_FAST),
        fields.positive("beta_slow")?.unwrap_or(DEFAULT_BETA_SLOW),
    );
    fields.require(beta_fast >= beta_slow, "beta_fast", || format!("at least beta_slow ({beta_slow})"))?;
    Ok(Yarn {
        factor,
        original_positions,
        beta_fast,
        beta_slow,
        truncate: fields.flag("truncate", true)?,
        attention_factor: fields.positive("attention_factor")?.unwrap_or(inferred),
        score_factor: all_dim.map_or(1.0, |all_dim| magnitude(all_dim) * magnitude(all_dim)),
    })
}
