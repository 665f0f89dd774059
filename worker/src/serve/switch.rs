//! `/switch`: changes the attention layout, expert layout or placement while requests run.

use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use semmoe_engines::switch::{SwitchAction, SwitchRequest, SwitchStatus, SwitchTables, SwitchTarget};
use semmoe_tables::{Attention, ExpertCopies, Tables};

use super::app::App;
use super::error::ApiError;
use super::listen::WholeBody;
use crate::ep::{ExpertLayout, ExpertPlacement};
use crate::unit::UnitLayout;

/// `GET /switch`
pub(super) async fn status(State(app): State<Arc<App>>) -> Json<SwitchStatus> {
    Json(app.unit.switch_status())
}

/// `POST /switch`
pub(super) async fn switch(
    State(app): State<Arc<App>>,
    WholeBody(body): WholeBody,
) -> Result<Json<SwitchStatus>, ApiError> {
    let SwitchRequest { to, kv_step_bytes, if_epoch, action } = serde_json::from_slice(&body).map_err(|error| {
        ApiError::bad(format!("{error}; expected {{\"to\": \"ep\" or \"tp\" or {{\"tables\": FILE}}, \"kv_step_bytes\": N, \"if_epoch\": N, \"action\": \"prepare\" or \"commit\" or \"abort\"}}"))
    })?;
    if app.force_local_rate.is_some() {
        return Err(ApiError::param("to", "a unit with --force-local-rate cannot be switched"));
    }
    let prepares = matches!(action, None | Some(SwitchAction::Prepare));
    if kv_step_bytes.is_some() && !prepares {
        return Err(ApiError::param("kv_step_bytes", "only prepare requests accept kv_step_bytes: leave it out"));
    }
    let target = match to {
        Some(to) if prepares => Some(target(&app, to).await?),
        None if prepares => {
            return Err(ApiError::param("to", "to is missing: specify the layout or tables to switch to"));
        }
        Some(_) => return Err(ApiError::param("to", "only prepare requests accept 'to': leave it out")),
        None => None,
    };
    // The switch runs on a separate task, so it continues if the client disconnects.
    let unit = app.unit.clone();
    let work = tokio::spawn(async move {
        if let Some(target) = target {
            let current = unit.layout();
            if (&current.placement, current.attention) == (&target.placement, target.attention) {
                return Ok(());
            }
            unit.prepare_switch(target, kv_step_bytes, if_epoch).await?;
        }
        match action {
            None | Some(SwitchAction::Commit) => unit.commit_switch(if_epoch).await.map(|_| ()),
            Some(SwitchAction::Abort) => unit.abort_switch(),
            Some(SwitchAction::Prepare) => Ok(()),
        }
    });
    work.await.map_err(|_| ApiError::internal("the switch panicked"))??;
    Ok(Json(app.unit.switch_status()))
}

/// Returns the requested layout; its epoch is set when it is prepared.
async fn target(app: &Arc<App>, to: SwitchTarget) -> Result<UnitLayout, ApiError> {
    let current = app.unit.layout();
    match to {
        SwitchTarget::Layout(name) => {
            let layouts = app.layouts();
            let Some(layout) = layouts.iter().find(|layout| layout.to_string() == name) else {
                let name: String = name.chars().take(64).collect();
                let possible = layouts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let message = format!("this unit cannot be switched to '{name}', only to one of {possible}");
                return Err(ApiError::param("to", message));
            };
            let experts = layout.experts(app.unit.targets.hybrid).unwrap_or(current.placement.layout);
            let placement = ExpertPlacement { layout: experts, replicas: current.placement.replicas.clone() };
            Ok(UnitLayout { placement, attention: layout.attention(), ..(*current).clone() })
        }
        SwitchTarget::Tables(SwitchTables { tables }) => {
            if current.placement.layout.groups().is_some() {
                let message =
                    format!("the unit runs in groups ({}), each with all experts: switch to ep first", current.name());
                return Err(ApiError::param("to", message));
            }
            if app.shuffles {
                let message = "the unit shuffles rows by the tables loaded at startup, which cannot be replaced";
                return Err(ApiError::param("to", message));
            }
            let app = Arc::clone(app);
            let read = tokio::task::spawn_blocking(move || of_tables(&app, &tables, &current));
            read.await.map_err(|_| ApiError::internal("reading the tables panicked"))?
        }
    }
}

/// Opens a tables file below the tables root. An error reveals neither whether files outside the root exist nor the
/// contents of other files inside it; the reason is only logged.
fn open(root: Option<&Path>, path: &Path) -> Result<Tables, ApiError> {
    let bad = |what: &str| ApiError::param("to", format!("{} {what}", path.display()));
    let Some(root) = root else {
        return Err(bad("cannot be loaded: the unit was started without --tables and --tables-root"));
    };
    // Only regular files are accepted: a pipe or device could be endless or block its reader.
    let found = root.join(path).canonicalize().ok().filter(|found| found.starts_with(root) && found.is_file());
    let Some(found) = found else { return Err(bad(&format!("is not a file below {}", root.display()))) };
    Tables::open(&found).map_err(|error| {
        tracing::warn!(%error, "a switch request named a file without usable tables");
        bad("has no usable tables: see this rank's log for the reason")
    })
}

fn of_tables(app: &App, path: &Path, current: &UnitLayout) -> Result<UnitLayout, ApiError> {
    let bad = |message: String| ApiError::param("to", message);
    let tables = open(app.tables_root.as_deref(), path)?;
    let info = app.served.config.model_info(&app.served.name, Some(app.served.tokenizer.sha256().to_owned()));
    tables.model().check_compatible(&info).map_err(|error| bad(error.in_file(path).to_string()))?;
    // Without shuffled rows, tables for attention tp are also accepted, because only their placement is used.
    if current.attention == Attention::Dp && tables.attention() != Attention::Dp {
        return Err(bad(format!(
            "{} is for attention {}, but the unit runs attention dp",
            path.display(),
            tables.attention()
        )));
    }
    let replicas = ExpertCopies::between_groups(&tables).map_err(|error| bad(error.in_file(path).to_string()))?;
    Ok(UnitLayout {
        placement: ExpertPlacement { layout: ExpertLayout::Ep, replicas },
        placement_digest: tables.placement_digest().to_owned(),
        ..current.clone()
    })
}
