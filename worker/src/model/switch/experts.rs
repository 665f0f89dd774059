//! Moves experts between ranks, from one placement to another or back, as planned by [`semmoe_kernels::reshard`].
//!
//! All ranks take part, between two steps. Each rank copies the experts it needs into its own buffer: directly from
//! ranks whose memory it can map, and through messages from the others. It verifies each piece against the checksum
//! recorded at load time, and all ranks vote after each layer. If a rank objects, the layers already moved are moved
//! back in reverse order. A rank needs one spare slot and, to exchange experts with ranks whose memory it cannot map,
//! messages of at most [`CHUNK_BYTES`]: the next ones are in flight while the previous ones are being placed.

use std::time::Instant;

use semmoe_kernels::reshard::{ExpertMemory, Outcome, ReshardError, Resharder, Switch, SwitchError};
use semmoe_ranks::BufferAddress;
use semmoe_tables::{GroupId, LayerIdx};

use super::{Objection, SwitchOutcome, stays, unfit};
use crate::ep::{ExpertLayout, ExpertParallel, ExpertPlacement, UnitError};
use crate::model::cpu::{CpuBackend, Peers};
use crate::model::expert::Experts;
use crate::model::slices::expert_columns;
use crate::model::streamed::RankExperts;
use crate::model::{Backend, Model, ModelError, check_placement};

/// Maximum expert bytes per message.
const CHUNK_BYTES: usize = 8 << 20;

/// Returns the expert bytes per message for slots of this size. The messages in one direction, both in flight and being
/// placed, must together never exceed a slot.
fn chunk_bytes(slot: usize, world: usize) -> usize {
    CHUNK_BYTES.min(slot / (2 * world.saturating_sub(1).max(1))).max(1)
}

impl Model {
    /// Sets a list of ranks on the same host, which may or may not include this rank. Experts that move between these
    /// ranks are copied from memory to memory. All ranks must be given the same list. By default, experts are sent in
    /// messages.
    pub fn share_experts(&mut self, ranks: &[usize]) {
        if let Some(cpu) = self.backend.cpu_mut() {
            cpu.peers = Peers::OnHost(ranks.to_vec());
        }
    }

    /// Checks that a placement matches this model, its unit and the memory allocated for experts at load time.
    ///
    /// # Errors
    /// See [`Model::load_divided`]. Also fails if a rank would have more experts than slots.
    pub fn check_switch(&self, to: &ExpertPlacement, ep: &ExpertParallel) -> Result<(), ModelError> {
        let is_fixed = |layout: &ExpertLayout| layout.nodes().is_some() && !ep.is_target(*layout);
        if let Some(fixed) = [ep.placement().layout, to.layout].into_iter().find(is_fixed) {
            return Err(ModelError::FixedLayout(fixed));
        }
        if let Some(groups) = to.layout.groups().filter(|_| !ep.is_target(to.layout)) {
            return Err(ModelError::Groups { groups });
        }
        let world = ep.world();
        for (field, found) in [("groups", to.replicas.groups().into()), ("places", to.replicas.places())] {
            if found != world {
                return Err(ModelError::Placement { field, found, of: "unit", expected: world });
            }
        }
        check_placement(&self.config, GroupId::new(ep.rank().get()), &to.replicas)?;
        expert_columns(&self.config, to.layout, ep.rank().index(), world)?;
        let arranged = match &self.backend {
            Backend::Cpu(cpu) => cpu.experts.resident()?.arrange(to),
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => gpu.experts().arrange(to),
        };
        match arranged {
            Ok(_) => Ok(()),
            Err(ReshardError::Slots { found, limit }) => Err(ModelError::ExpertSlots { found, limit }),
            Err(error) => Err(ModelError::Experts(error)),
        }
    }

    /// Returns the experts in host memory if they can be moved.
    fn resident(&self) -> Option<&Experts> {
        self.backend.cpu()?.experts.resident().ok()
    }

    /// Returns the additional bytes that this rank needs while experts move: expert memory that has never been written,
    /// and messages exchanged with ranks without shared memory.
    pub(crate) fn switch_bytes(&self, to: &ExpertPlacement, ep: &ExpertParallel) -> usize {
        let (Some(experts), Some(cpu)) = (self.resident(), self.backend.cpu()) else { return 0 };
        let slot = experts.arrange(to).map_or(0, |layout| experts.pool.slot_bytes(&layout));
        let near = |peer: usize| match &cpu.peers {
            Peers::OnHost(ranks) => ranks.contains(&peer),
            Peers::Mapped => experts.memory.reaches(peer),
        };
        let far = (0..ep.world()).filter(|&peer| peer != ep.rank().index() && !near(peer)).count();
        experts.untouched(to) + 3 * far * chunk_bytes(slot, ep.world())
    }

    /// Moves the experts to another placement and makes it the unit's placement. Every rank must have checked this
    /// placement, and all ranks must call this between the same two steps.
    ///
    /// # Errors
    /// Fails if a rank was lost or the rollback failed; the unit cannot continue.
    pub fn switch_experts(
        &mut self,
        to: &ExpertPlacement,
        ep: &mut ExpertParallel,
        objection: Objection<'_>,
    ) -> Result<SwitchOutcome, UnitError> {
        let (began, rank) = (Instant::now(), ep.rank());
        let outcome = match &mut self.backend {
            Backend::Cpu(cpu) => switch_on_host(cpu, to, ep, objection)?,
            #[cfg(feature = "gpu")]
            Backend::Gpu(gpu) => gpu.parts_to_switch().move_experts(ep, to, objection)?,
        };
        match &outcome {
            SwitchOutcome::Committed => {
                ep.set_placement(to.clone());
                tracing::info!(%rank, seconds = began.elapsed().as_secs_f64(), "the expert switch is complete");
            }
            SwitchOutcome::RolledBack { cause } => {
                tracing::warn!(%rank, "the expert switch was rolled back: {cause}");
            }
        }
        Ok(outcome)
    }
}

fn switch_on_host(
    cpu: &mut CpuBackend,
    to: &ExpertPlacement,
    ep: &mut ExpertParallel,
    objection: Objection<'_>,
) -> Result<SwitchOutcome, UnitError> {
    let CpuBackend { experts, peers, .. } = cpu;
    let RankExperts::Resident(experts) = experts else {
        let detail = ModelError::StreamedExperts.to_string();
        return Err(UnitError::Operands { rank: ep.rank().index(), detail });
    };
    if let Peers::OnHost(near) = peers {
        map_peers(experts, near, ep)?;
        *peers = Peers::Mapped;
    }
    let is_new = experts.untouched(to) > 0;
    let outcome = move_experts(experts, to, ep, objection)?;
    if is_new {
        // The switch wrote to memory that had never been written before.
        experts.settle();
        experts.touch();
    }
    Ok(outcome)
}

/// Maps the buffers of ranks on this host, and collects the checksums of all experts. If either rank of a pair cannot
/// map the other's buffer, neither rank uses the other's.
fn map_peers(experts: &mut Experts, near: &[usize], ep: &mut ExpertParallel) -> Result<(), UnitError> {
    let (me, world) = (ep.rank().index(), ep.world());
    let BufferAddress { pid, fd } = experts.memory.address();
    let own = [pid.to_le_bytes(), fd.to_le_bytes()].concat();
    for (peer, address) in ep.exchange(vec![own; world])?.into_iter().enumerate() {
        if peer == me || !near.contains(&peer) {
            continue;
        }
        let Ok([p0, p1, p2, p3, fd @ ..]) = <[u8; 8]>::try_from(address.as_slice()) else {
            return Err(UnitError::protocol(peer, format!("its address has {} bytes, expected 8", address.len())));
        };
        let address = BufferAddress { pid: u32::from_le_bytes([p0, p1, p2, p3]), fd: i32::from_le_bytes(fd) };
        // SAFETY: the address was sent by the rank that owns the buffer, and each rank has only one. Once buffers are
        // mapped, only `Resharder` writes to them.
        if let Err(error) = unsafe { experts.memory.reach(peer, address) } {
            tracing::info!(rank = me, "cannot map rank {peer}'s buffer; its experts will be sent in messages: {error}");
        }
    }
    let reached = (0..world).map(|peer| vec![u8::from(experts.memory.reaches(peer))]).collect();
    for (peer, reached) in ep.exchange(reached)?.into_iter().enumerate() {
        if peer != me && reached != [1] {
            experts.memory.leave(peer);
        }
    }
    let Experts { memory, checksums, .. } = experts;
    Resharder::new(ep.link(), memory, CHUNK_BYTES).gather(checksums)
}

fn move_experts(
    experts: &mut Experts,
    to: &ExpertPlacement,
    ep: &mut ExpertParallel,
    objection: Objection<'_>,
) -> Result<SwitchOutcome, UnitError> {
    let rank = ep.rank().index();
    let unfit = unfit(rank);
    let next = experts.arrange(to).map_err(unfit)?;
    let Experts { pool, layout, side, memory, checksums, .. } = experts;
    if stays(layout, &next) {
        return Ok(SwitchOutcome::Committed);
    }
    let switch = Switch::new(pool, layout, &next, *side).map_err(unfit)?;
    let chunk_bytes = chunk_bytes(pool.slot_bytes(&next), ep.world());
    let mut resharder = Resharder::new(ep.link(), memory, chunk_bytes);
    let ended = resharder.run(&switch, checksums, &mut |progress| {
        let cause = objection(LayerIdx::new(progress.layer as u16));
        cause
            .inspect(|cause| tracing::info!(rank, layer = progress.layer, "this rank is stopping the switch: {cause}"))
            .is_none()
    });
    if let Some(fault) = resharder.fault() {
        tracing::warn!(rank, "this rank refuses to continue: {fault}");
    }
    match ended {
        Ok(Outcome::Switched) => {
            (*side, *layout) = (side.other(), next);
            Ok(SwitchOutcome::Committed)
        }
        Ok(Outcome::RolledBack(refusal)) => Ok(SwitchOutcome::RolledBack { cause: refusal.to_string() }),
        Err(SwitchError::Lost { cause, .. }) => Err(cause),
        Err(SwitchError::Operands(error)) => Err(unfit(error)),
        Err(error @ SwitchError::Stuck { .. }) => Err(UnitError::protocol(rank, error.to_string())),
    }
}

#[cfg(test)]
#[path = "experts_tests.rs"]
mod tests;
