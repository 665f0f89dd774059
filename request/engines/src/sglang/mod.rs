//! SGLang's dialect, shared by unmodified SGLang and semmoe's worker.
//!
//! Unknown fields are ignored in both directions, as in SGLang itself; missing fields have SGLang's defaults.

mod generate;
mod info;
mod location;

pub use generate::{
    FinishReason, GenerateRequest, GenerateResponse, MetaInfo, SamplingParams, StopStrings, encode_routed_experts,
};
pub use info::{LoadCoverageError, Loads, RankLoads, ServerInfo};
pub use location::{PlacementDifference, ShownPlacement, Unseen};

/// `GET`: 200 if the HTTP server is up; does not run the model.
pub const PING: &str = "/ping";
/// `GET`: 200 if the engine can serve. SGLang generates one token for it.
pub const HEALTH: &str = "/health";
/// `GET`: the server's arguments and more; see [`ServerInfo`].
pub const SERVER_INFO: &str = "/server_info";
/// The older name of [`SERVER_INFO`].
pub const GET_SERVER_INFO: &str = "/get_server_info";
/// `GET`: load per attention-DP rank; see [`Loads`].
pub const LOADS: &str = "/v1/loads?include=core";
/// `POST`: SGLang's own generation route.
pub const GENERATE: &str = "/generate";
