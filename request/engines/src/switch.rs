//! `/switch` of semmoe's worker: changes the layout of experts, or their placement, while requests run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};

/// `GET`: [`SwitchStatus`]. `POST`: [`SwitchRequest`], answered with the resulting status.
pub const SWITCH: &str = "/switch";

/// A switch request to a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchRequest {
    /// The target; absent for a commit or an abort.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<SwitchTarget>,
    /// If attention changes, keys and values are moved after the switch, in batches before each step: at most this many
    /// bytes per rank, or one sequence if that is larger. If absent, they are moved during the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_step_bytes: Option<u64>,
    /// Epoch that the unit must be at; otherwise, the request is rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_epoch: Option<u64>,
    /// The phase of the switch to run; if absent, the entire switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<SwitchAction>,
}

/// The target of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SwitchTarget {
    /// A layout, by name.
    Layout(String),
    /// Whole experts, placed by a tables file.
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
    /// Every rank checks the switch; nothing changes yet.
    Prepare,
    /// Carries out the prepared switch.
    Commit,
    /// Cancels the prepared switch, or rolls back the one in progress.
    Abort,
}

/// The current phase of a unit's switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchState {
    /// No switch.
    #[default]
    Stable,
    /// The ranks are checking the switch.
    Preparing,
    /// The switch is waiting for its commit.
    Prepared,
    /// Running steps are finishing.
    Holding,
    /// Experts are moving.
    Moving,
}

/// The response of `GET /switch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchStatus {
    /// The phase of the switch, if there is one.
    pub state: SwitchState,
    /// Number of switches since the unit started.
    pub epoch: u64,
    /// The current layout: `ep`, `tp`, `dp-tp`, `tp-ep`.
    pub layout: String,
    /// Digest of the current placement.
    pub placement_digest: String,
    /// The target layout of the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The MoE layer being moved.
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

/// Requests a switch and waits for it to finish.
///
/// # Errors
/// [`HttpError`]: a 4xx status means that the switch was rejected and nothing changed.
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
