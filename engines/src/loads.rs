//! Requests in flight per rank, as the engine counts them: running and waiting.

use crate::http::{AnswerLimits, BaseUrl, HttpClient, HttpError};
use crate::sglang::{self, Loads};
use crate::{Engine, vllm};

/// One number for each of `ranks` ranks; `None` when the engine does not tell all of them. Unknown is not idle.
pub async fn in_flight(
    client: &HttpClient,
    engine: Engine,
    base: &BaseUrl,
    ranks: u16,
    limits: &AnswerLimits,
) -> Result<Option<Vec<u64>>, HttpError> {
    match engine {
        Engine::Openai => Ok(None),
        Engine::Vllm => {
            let found = vllm::ranks(client, base, limits).await?;
            Ok(found.range().filter(|(_, count)| *count == ranks).map(|_| found.in_flight()))
        }
        Engine::Sglang | Engine::Semmoe => match client.get_json::<Loads>(base, sglang::LOADS, limits).await {
            Ok(loads) => Ok(of_sglang(&loads, ranks)),
            // Before 0.5.8 there is no such route.
            Err(HttpError::Status { .. }) => Ok(None),
            Err(error) => Err(error),
        },
    }
}

fn of_sglang(loads: &Loads, ranks: u16) -> Option<Vec<u64>> {
    let loads = loads.by_rank(ranks).ok()?;
    loads.into_iter().map(|load| load.num_running_reqs?.checked_add(load.num_waiting_reqs?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_missing_number_is_unknown() {
        let loads = |second: serde_json::Value| {
            serde_json::from_value::<Loads>(json!({ "loads": [
            { "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1 }, second
        ] }))
        };
        let full = loads(json!({ "dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 0 })).unwrap();
        assert_eq!(of_sglang(&full, 2), Some(vec![3, 0]));
        assert_eq!(of_sglang(&full, 3), None);
        assert_eq!(of_sglang(&loads(json!({ "dp_rank": 1, "num_running_reqs": 0 })).unwrap(), 2), None);
    }
}
