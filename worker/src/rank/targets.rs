//! Checks attention groups and the layouts that a unit can switch to, before anything is bound or loaded.

use semmoe_tables::{Attention, Domains};

use super::config::WorkerConfig;
use super::device::DeviceChoice;
use super::error::WorkerError;
use crate::ep::{ExpertLayout, RankGroups};
use crate::model::{HeadSlice, ModelConfig, expert_columns};

pub(super) fn refused<T>(detail: String) -> Result<T, WorkerError> {
    Err(WorkerError::Arguments(detail))
}

/// Returns the name of the first setting that is given.
pub(super) fn first_given(settings: &[(bool, &'static str)]) -> Option<&'static str> {
    settings.iter().find(|(given, _)| *given).map(|(_, name)| *name)
}

/// Checks that attention can be divided into this many groups.
pub(super) fn check_attention_groups(config: &WorkerConfig) -> Result<(), WorkerError> {
    let (groups, world) = (config.attention_groups, config.world);
    let refused = |detail: &str| refused(format!("{groups} attention groups {detail}"));
    if groups == 1 {
        return Ok(());
    }
    if config.attention != Attention::Tp || config.both_attentions {
        return refused("are only for attention tp");
    }
    if groups == 0 || groups == world || !world.is_multiple_of(groups) {
        return refused(&format!("of at least two ranks each do not divide the world of {world}"));
    }
    match &config.tables {
        Some(path) => refused(&format!("do not support tables, but {} was given", path.display())),
        None => Ok(()),
    }
}

/// Checks that the unit can switch to the groups and nodes in its arguments.
pub(super) fn check_targets(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    if config.targets().is_empty() && config.switch_groups.is_empty() {
        return Ok(());
    }
    check_hybrid(config)?;
    check_groups(config, model)?;
    // Slices move individually, so no layout may cut one.
    expert_columns(model, ExpertLayout::Tp, config.rank.into(), config.world.into())
        .map(|_| ())
        .map_err(WorkerError::from)
}

/// Returns a setting that rules out switches to groups and to hybrid nodes.
fn first_obstacle(config: &WorkerConfig) -> Option<&'static str> {
    let tp_alone = !config.attentions().contains(&Attention::Dp);
    first_given(&[
        (config.device != DeviceChoice::Cpu, "a GPU"),
        (tp_alone, "attention tp alone: start with dp, or with both"),
        (config.experts.nodes().is_some() && config.switch_hybrid.is_none(), "experts hybrid"),
        (config.domains != Domains::NONE, "expert domains"),
        (config.expert_memory.is_some(), "streamed experts"),
    ])
}

fn check_groups(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    let (all, world) = (&config.switch_groups, config.world);
    let refused = |groups: u16, detail: String| refused(format!("--switch-groups {groups}: {detail}"));
    if let (Some(first), Some(other)) = (all.first(), first_obstacle(config)) {
        return refused(*first, format!("cannot be combined with {other}"));
    }
    for (at, &groups) in all.iter().enumerate() {
        let Some(RankGroups { ranks, .. }) = RankGroups::new(groups, world) else {
            return refused(groups, format!("a world of {world} does not divide into equal groups of two or more"));
        };
        if all[..at].contains(&groups) {
            return refused(groups, "given twice".to_owned());
        }
        HeadSlice::new(model, (config.rank % ranks).into(), ranks.into())?;
    }
    Ok(())
}

fn check_hybrid(config: &WorkerConfig) -> Result<(), WorkerError> {
    let (Some(hybrid), world) = (config.switch_hybrid, config.world) else { return Ok(()) };
    let refused = |detail: String| refused(format!("--switch-hybrid {hybrid}: {detail}"));
    if let Some(other) = first_obstacle(config) {
        return refused(format!("cannot be combined with {other}"));
    }
    if hybrid.nodes * hybrid.width != world {
        return refused(format!("{} nodes of {} ranks are not the world of {world}", hybrid.nodes, hybrid.width));
    }
    match config.experts {
        ExpertLayout::Hybrid(nodes) if nodes != hybrid => refused(format!("contradicts experts {}", config.experts)),
        ExpertLayout::Hybrid(_) if config.attention == Attention::Tp => {
            refused("cannot start with attention tp and experts hybrid, which no switch reaches".to_owned())
        }
        _ => Ok(()),
    }
}
