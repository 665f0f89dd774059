//! `/switch` of semmoe's worker: another layout of experts, or another placement, while requests run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// `GET`: [`SwitchStatus`]. `POST`: [`SwitchRequest`], answered with the status after it.
pub const SWITCH: &str = "/switch";

/// A request to a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchRequest {
    /// Where to; absent for a commit and an abort.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<SwitchTarget>,
    /// Where attention changes: keys and values move after the switch, before each step of the next sequences, no more
    /// than so many bytes to a rank, or those of one sequence. Absent: they move in the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_step_bytes: Option<u64>,
    /// Refused if the unit is at another epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_epoch: Option<u64>,
    /// A part of a switch; absent: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<SwitchAction>,
}

/// Where to switch to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SwitchTarget {
    /// A layout by its name.
    Layout(String),
    /// Whole experts where a tables file says.
    Tables(SwitchTables),
}

/// A tables file that the worker's rank 0 can read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchTables {
    /// Its path.
    pub tables: PathBuf,
}

/// A part of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchAction {
    /// Every rank checks it; nothing changes yet.
    Prepare,
    /// Does what was prepared.
    Commit,
    /// Forgets what was prepared, or takes back what is being moved.
    Abort,
}

/// Where a unit's switch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchState {
    /// There is none.
    #[default]
    Stable,
    /// The ranks check it.
    Preparing,
    /// It waits for its commit.
    Prepared,
    /// Steps that run are let to their end.
    Holding,
    /// Experts move.
    Moving,
}

/// The answer of `GET /switch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchStatus {
    /// Where a switch is, if there is one.
    pub state: SwitchState,
    /// Switches since the unit's start.
    pub epoch: u64,
    /// The layout in force: `ep`, `tp`, `dp-tp`, `tp-ep`.
    pub layout: String,
    /// Of the placement in force.
    pub placement_digest: String,
    /// The layout that it is switching to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The MoE layer that is moving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// For how long the last switch held requests, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seconds: Option<f64>,
}

/// Asks where a unit is.
///
/// # Errors
/// See [`HttpError`]; other engines have no such route.
pub async fn status(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<SwitchStatus, HttpError> {
    client.get_json(base, SWITCH, limits).await
}

/// Asks for a switch and waits for its end.
///
/// # Errors
/// See [`HttpError`]: a status of 4xx is a refusal, after which nothing has changed.
pub async fn switch(
    client: &HttpClient,
    base: &BaseUrl,
    request: &SwitchRequest,
    limits: &AnswerLimits,
) -> Result<SwitchStatus, HttpError> {
    client.post_json(base, SWITCH, request, limits).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_are_what_the_contract_says() {
        let request = |json: serde_json::Value| serde_json::from_value::<SwitchRequest>(json);
        for body in [
            json!({"to": "ep"}),
            json!({"to": "tp", "kv_step_bytes": 1}),
            json!({"to": {"tables": "a.safetensors"}, "if_epoch": 3, "action": "prepare"}),
            json!({"action": "commit"}),
        ] {
            let parsed = request(body.clone()).unwrap();
            assert_eq!(serde_json::to_value(&parsed).unwrap(), body);
        }
        for wrong in [json!({"to": 3}), json!({"when": 1}), json!({"action": "go"}), json!({"to": {"file": "x"}})] {
            assert!(request(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
