//! Where a request goes: a rank that the policy chooses, or a backend whose engine chooses the rank.

use semmoe_engines::Route;
use semmoe_engines::pin;
use semmoe_routing::Request;

use crate::backend::Health;
use crate::error::RequestError;
use crate::metrics::Metrics;
use crate::pool::{Lease, Slot};
use crate::snapshot::Member;

use super::read::Job;

/// Places a request on a backend other than `except`.
pub(crate) fn place(job: &Job, route: Route, except: Option<usize>, metrics: &Metrics) -> Result<Lease, RequestError> {
    let model = &job.model;
    if let Some(pin) = job.client_pin.filter(|pin| !model.pool.slots().iter().any(|slot| slot.rank == *pin)) {
        return Err(RequestError::PinRange { pin: pin.get(), model: model.name.clone() });
    }
    let admit = |slot: &Slot| Some(slot.backend) != except && job.client_pin.is_none_or(|pin| pin == slot.rank);
    let narrowed = except.is_some() || job.client_pin.is_some();
    let admit: Option<&dyn Fn(&Slot) -> bool> = if narrowed { Some(&admit) } else { None };
    let request = Request { tokens: job.tokens, share: job.share.as_deref() };
    let lease = if model.members.iter().all(|member| can_pin(member, route)) {
        model.pool.choose(model.policy.as_ref(), &request, admit).map(|(lease, choice)| {
            if let Some(share) = choice.expected_share {
                metrics.predicted_lar(share);
            }
            lease
        })
    } else {
        let gauge = |backend: usize| metrics.inflight(&model.members[backend].backend.name, None);
        model.pool.choose_backend(model.policy.as_ref(), &request, admit, gauge)
    };
    lease.ok_or_else(|| RequestError::NoBackend { model: model.name.clone(), causes: causes(&model.members) })
}

/// Whether a request on this route ends up on the rank that was chosen: by a pin, or as there is only one.
fn can_pin(member: &Member, route: Route) -> bool {
    (member.ranks <= 1 && route.runs_model()) || pin::carrier(member.backend.engine, route).is_ok()
}

/// Every backend of the model with what is wrong with it.
fn causes(members: &[Member]) -> String {
    let cause = |member: &Member| {
        let name = &member.backend.name;
        match member.backend.health() {
            Health::Healthy => format!("backend '{name}' was tried"),
            Health::Unknown => format!("backend '{name}' was not probed yet"),
            Health::Unhealthy { cause } => format!("backend '{name}': {cause}"),
        }
    };
    members.iter().map(cause).collect::<Vec<_>>().join("; ")
}
