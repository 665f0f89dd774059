//! `/switch` of semmoe's worker: changes the layout of experts, or their placement, while requests run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// `GET`: [`SwitchStatus`]. `POST`: [`SwitchRequest`], answered with the resulting status.
pub const SWITCH: &str = "/switch";

/// A request to a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchRequest {
    /// The target; absent for a commit or an abort.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<SwitchTarget>,
    /// If attention changes: keys and values move after the switch, before each step of the next sequences, at most
    /// this many bytes per rank, or those of one sequence. Absent: they move during the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_step_bytes: Option<u64>,
    /// Refuse if the unit is at another epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_epoch: Option<u64>,
    /// One phase of a switch; absent: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<SwitchAction>,
}

/// The target of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SwitchTarget {
    /// A layout, by name.
    Layout(String),
    /// Complete experts, placed by a tables file.
    Tables(SwitchTables),
}

/// A tables file readable by the worker's rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchTables {
    /// Path of the tables file.
    pub tables: PathBuf,
}

/// One phase of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchAction {
    /// Every rank checks it; nothing changes yet.
    Prepare,
    /// Carries out what was prepared.
    Commit,
    /// Cancels what was prepared, or rolls back what is being moved.
    Abort,
}

/// The phase that a unit's switch is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchState {
    /// No switch.
    #[default]
    Stable,
    /// The ranks are checking it.
    Preparing,
    /// The switch is waiting for its commit.
    Prepared,
    /// Running steps are finishing.
    Holding,
    /// Experts are moving.
    Moving,
}

/// The answer of `GET /switch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchStatus {
    /// The phase of the switch, if there is one.
    pub state: SwitchState,
    /// Number of switches since the unit started.
    pub epoch: u64,
    /// The layout in force: `ep`, `tp`, `dp-tp`, `tp-ep`.
    pub layout: String,
    /// Digest of the placement in force.
    pub placement_digest: String,
    /// The target layout of the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The MoE layer that is moving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// How long the last switch held requests, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seconds: Option<f64>,
}

/// Queries the status of a unit.
///
/// # Errors
/// [`HttpError`]; other engines have no such route.
pub async fn status(client: &HttpClient, base: &BaseUrl, limits: &AnswerLimits) -> Result<SwitchStatus, HttpError> {
    client.get_json(base, SWITCH, limits).await
}

/// Requests a switch and waits for its end.
///
/// # Errors
/// [`HttpError`]: a 4xx status is a refusal, after which nothing has changed.
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
