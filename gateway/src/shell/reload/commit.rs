//! Swaps in a prepared state, and applies the consequences.

use std::sync::Arc;

use crate::backends::{Member, Model, Snapshot};
use crate::shell::control::Control;
use crate::shell::watchers;

use super::outcome::Reloaded;
use super::prepare::{Prepared, same};

/// Swaps in the prepared state. Returns `None` if the state it was based on has changed in a relevant way. Blocking,
/// but briefly.
pub(super) fn commit(control: &Arc<Control>, mut prepared: Prepared) -> Option<Reloaded> {
    prepared.renew_pools(control);
    let Prepared { base, config, mut models, keys, probes, .. } = prepared;
    let changing = control.backends.changing();
    let current = control.backends.snapshot();
    for model in &mut models {
        take_over(model, &base, &current)?;
    }
    let generation = current.generation + 1;
    let mut reloaded = compare(&current, &models);
    for member in models.iter_mut().flat_map(|model| &mut model.members) {
        // Only tables loaded for this swap are not shared with another state.
        if let Some(tables) = member.tables.as_mut().and_then(Arc::get_mut) {
            tables.generation = generation;
        }
    }
    let models: Vec<Arc<Model>> = models.into_iter().map(|model| keep_or_wrap(model, &current)).collect();
    let next = Arc::new(current.with_models(config, models));
    for (backend, verdict) in &probes {
        match (verdict, next.position(backend)) {
            (Ok(probe), Some(at)) => {
                let (model, member) = next.at(at);
                control.backends.note_admission(model, member, probe, &member.fit);
            }
            (Err(health), _) => control.backends.note_health(backend, health.clone()),
            (Ok(_), None) => {}
        }
    }
    for (_, member) in next.members() {
        match current.position(&member.backend) {
            Some(_) => control.backends.note_fit(&member.backend, &member.fit),
            None => control.backends.keep_drained(&member.backend),
        }
    }
    for (backend, key) in keys {
        backend.client.set_authorization(key);
    }
    control.backends.swap(&changing, Arc::clone(&next));
    control.data.answer_memory.set_limit(next.config.limits.answer_memory_bytes);
    for model in &next.models {
        settle(control, model, &reloaded.tables_loaded);
    }
    drop(changing);
    watchers::follow(control, &next);
    control.backends.retire(&current, &next);
    reloaded.generation = next.generation;
    Some(reloaded)
}

/// Merges changes made in the meantime into a prepared model. Returns `None` if they conflict.
fn take_over(model: &mut Model, base: &Snapshot, current: &Snapshot) -> Option<()> {
    let named = |snapshot: &Snapshot, name: &str| snapshot.models.iter().find(|model| model.name == name).cloned();
    let (Some(old), Some(now)) = (named(base, &model.name), named(current, &model.name)) else { return Some(()) };
    if Arc::ptr_eq(&old, &now) {
        return Some(());
    }
    let of = |model: &Model, member: &Member| {
        model.members.iter().find(|other| Arc::ptr_eq(&other.backend, &member.backend)).cloned()
    };
    let kept =
        |member: &Member| of(&old, member).is_some_and(|before| same(before.tables.as_ref(), member.tables.as_ref()));
    // The prepared model was judged with a pool, a tokenizer or tables that are no longer current.
    if !Arc::ptr_eq(&old.pool, &now.pool)
        || !same(model.text.as_ref(), old.text.as_ref())
        || !model.members.iter().all(|member| kept(member) || of(&old, member).is_none())
    {
        return None;
    }
    for member in &mut model.members {
        if let Some(now) = of(&now, member) {
            *member = now;
        }
    }
    Some(())
}

/// Returns the running model if nothing about it changes, otherwise the new one.
fn keep_or_wrap(model: Model, current: &Snapshot) -> Arc<Model> {
    let Some(now) = current.models.iter().find(|now| now.name == model.name) else { return Arc::new(model) };
    let same_members = model.members.len() == now.members.len()
        && model.members.iter().zip(&now.members).all(|(next, now)| {
            Arc::ptr_eq(&next.backend, &now.backend)
                && same(next.tables.as_ref(), now.tables.as_ref())
                && next.fit == now.fit
                && next.tables_file == now.tables_file
                && next.unread.as_ref().map(|unread| &unread.error) == now.unread.as_ref().map(|unread| &unread.error)
        });
    let same_rest = Arc::ptr_eq(&model.plan, &now.plan)
        && Arc::ptr_eq(&model.pool, &now.pool)
        && same(model.text.as_ref(), now.text.as_ref())
        && model.unread == now.unread
        && model.other_names == now.other_names;
    if same_members && same_rest { Arc::clone(now) } else { Arc::new(model) }
}

/// Opens and closes ranks, because a pool may be new, and resets state that depends on the tables.
fn settle(control: &Control, model: &Model, tables_loaded: &[String]) {
    let mut other_tables = false;
    for member in &model.members {
        member.backend.live.follow(member.tables_generation());
        if tables_loaded.contains(&member.backend.name) {
            other_tables = true;
            control.backends.metrics.live.drift(&member.backend.name, false);
        }
    }
    if other_tables {
        model.reset_prices();
    }
    control.backends.refresh_model(model);
}

/// Returns the difference between two states.
fn compare(current: &Snapshot, models: &[Model]) -> Reloaded {
    let was = |name: &str| current.models.iter().find(|model| model.name == name);
    let mut reloaded = Reloaded::default();
    for model in models {
        let Some(was) = was(&model.name) else {
            reloaded.models_added.push(model.name.clone());
            reloaded.backends_added.extend(model.members.iter().map(|member| member.backend.name.clone()));
            continue;
        };
        if !same(model.text.as_ref(), was.text.as_ref()) {
            reloaded.tokenizers_loaded.push(model.name.clone());
        }
        for member in &model.members {
            let name = &member.backend.name;
            match was.members.iter().find(|was| Arc::ptr_eq(&was.backend, &member.backend)) {
                None => reloaded.backends_added.push(name.clone()),
                Some(was) if !same(was.tables.as_ref(), member.tables.as_ref()) => {
                    reloaded.tables_loaded.push(name.clone());
                }
                Some(_) => {}
            }
        }
    }
    let stays = |member: &Member| {
        models.iter().flat_map(|model| &model.members).any(|next| Arc::ptr_eq(&next.backend, &member.backend))
    };
    let gone = current.members().filter(|(_, member)| !stays(member));
    reloaded.backends_removed = gone.map(|(_, member)| member.backend.name.clone()).collect();
    let gone = current.models.iter().filter(|was| models.iter().all(|model| model.name != was.name));
    reloaded.models_removed = gone.map(|model| model.name.clone()).collect();
    reloaded
}
