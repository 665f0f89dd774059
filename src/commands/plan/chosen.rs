//! The chosen deployment, as written by `semmoe plan --json` and loaded by `worker --plan` and `up --plan`.

use std::fmt::Display;
use std::path::Path;

use semmoe_planner::layout::Layout;
use semmoe_planner::search::Candidate;
use semmoe_planner::shape::ModelShape;
use semmoe_planner::step::Constants;
use semmoe_tables::{Attention, Domains};
use semmoe_worker::{ExpertLayout, WireType};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::commands::read_text;
use crate::error::CliError;

/// Size limit of a plan, which lists the load of each of up to 65,536 ranks.
const MAX_PLAN_BYTES: u64 = 64 << 20;
/// Maximum degree of parallelism, above the number of ranks that a worker unit can have.
const MAX_DEGREE: u64 = 1 << 10;

/// The best plan found by a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chosen {
    /// Version of semmoe that computed the plan.
    version: String,
    /// The model's shape, without element types.
    model: Value,
    /// Number of identical units in the plan.
    pub(crate) units: u64,
    /// Layout of each unit.
    layout: Layout,
    /// Expert domains.
    #[serde(default)]
    domains: Domains,
    /// Bytes per element in rows sent between ranks.
    element_bytes: f64,
}

/// The only part of the document that is read.
#[derive(Deserialize)]
struct Document {
    chosen: Option<Chosen>,
}

/// Layout options for starting a worker unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct UnitPlan {
    pub(crate) ranks: u16,
    pub(crate) attention: Attention,
    pub(crate) attention_groups: u16,
    pub(crate) experts: ExpertLayout,
    pub(crate) domains: Domains,
    pub(crate) wire: WireType,
}

impl Chosen {
    /// Builds the chosen plan from the best candidate, with the expert domains of `--domains`, if any.
    pub(crate) fn of(
        shape: &ModelShape,
        best: &Candidate,
        constants: &Constants,
        domains: Option<&str>,
    ) -> Result<Self, CliError> {
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: identity(shape)?,
            units: best.units,
            layout: best.layout,
            domains: domains.map_or(Ok(Domains::NONE), str::parse).map_err(CliError::failed)?,
            element_bytes: constants.dispatch_bytes.max(constants.combine_bytes),
        })
    }

    /// Reads the output of `semmoe plan --json` for the model in `folder`.
    pub(crate) fn read(path: &Path, folder: &Path) -> Result<Self, CliError> {
        let refuse = |cause: &dyn Display| CliError::input(format!("the plan {}: {cause}", path.display()));
        let text = read_text(path, "plan", MAX_PLAN_BYTES)?;
        let document: Document = serde_json::from_str(&text)
            .map_err(|error| refuse(&format_args!("{error}, expected the output of `semmoe plan --json`")))?;
        let chosen = document
            .chosen
            .ok_or_else(|| refuse(&"`chosen` is missing, expected the output of `semmoe plan --json`"))?;
        if chosen.version != env!("CARGO_PKG_VERSION") {
            let (found, own) = (chosen.version.chars().take(40).collect::<String>(), env!("CARGO_PKG_VERSION"));
            return Err(refuse(&format_args!("it was computed by semmoe {found}, but this is {own}: plan again")));
        }
        let shape = super::parse(&folder.join("config.json"), ModelShape::from_config)?;
        if let Some((key, found, own)) = difference(&chosen.model, &identity(&shape)?) {
            return Err(refuse(&format_args!(
                "it is for another model: its {key} is {found}, {} has {own}",
                folder.display()
            )));
        }
        Ok(chosen)
    }

    /// Converts the plan to the layout options of a worker unit.
    ///
    /// # Errors
    /// If the worker does not support the layout, with its name and the reason.
    pub(crate) fn unit(&self) -> Result<UnitPlan, CliError> {
        let Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep } = self.layout;
        let degrees = [pipeline, attention_tp, attention_dp, expert_tp, expert_ep];
        if degrees.iter().any(|degree| !(1..=MAX_DEGREE).contains(degree)) {
            return Err(CliError::input(format!(
                "the planned layout {degrees:?} has a degree outside 1 to {MAX_DEGREE}"
            )));
        }
        let (name, ranks) = (self.layout.name(), attention_tp * attention_dp);
        let refuse = |cause: &dyn Display| CliError::input(format!("the worker does not run {name}: {cause}"));
        if expert_tp * expert_ep != ranks {
            let experts = expert_tp * expert_ep;
            return Err(refuse(&format_args!("attention is on {ranks} ranks and experts on {experts}")));
        }
        if pipeline > 1 {
            return Err(refuse(&format_args!("it has no pipeline stages, the plan has {pipeline}")));
        }
        // Both degrees are at most 1024.
        let (attention, attention_groups) = match (attention_tp, attention_dp) {
            (1, _) => (Attention::Dp, 1),
            (_, groups) => (Attention::Tp, groups as u16),
        };
        let experts = match (expert_tp, expert_ep) {
            (1, _) => "ep".to_owned(),
            (_, 1) => "tp".to_owned(),
            (width, nodes) => format!("hybrid:{nodes}x{width}"),
        };
        let wire = match self.element_bytes {
            4.0 => WireType::F32,
            2.0 => WireType::Bf16,
            other => {
                return Err(refuse(&format_args!(
                    "row elements have 4 bytes (f32) or 2 (bf16), but the plan has {other}"
                )));
            }
        };
        let ranks = u16::try_from(ranks).map_err(|_| refuse(&format_args!("{ranks} ranks are too many")))?;
        let experts = experts.parse().map_err(CliError::input)?;
        let domains = self.domains;
        if !domains.divide(ranks) {
            return Err(refuse(&format_args!("its expert domains of {domains} do not divide {ranks} ranks")));
        }
        Ok(UnitPlan { ranks, attention, attention_groups, experts, domains, wire })
    }
}

/// Identifies a plan's model by its shape, without the element types, which `--weights` and `--cache` override.
fn identity(shape: &ModelShape) -> Result<Value, CliError> {
    let mut value = serde_json::to_value(shape).map_err(CliError::failed)?;
    if let Value::Object(fields) = &mut value {
        fields.remove("precision");
    }
    Ok(value)
}

/// Returns the first key that differs, and both values, truncated.
fn difference(found: &Value, own: &Value) -> Option<(String, String, String)> {
    let short = |value: Option<&Value>| {
        value.map_or_else(|| "missing".to_owned(), |value| value.to_string().chars().take(60).collect())
    };
    if found == own {
        return None;
    }
    let keys = own.as_object().into_iter().flat_map(|fields| fields.keys());
    let key = keys.into_iter().find(|key| found.get(key) != own.get(key));
    let key = key.map_or_else(|| "shape".to_owned(), Clone::clone);
    Some((key.clone(), short(found.get(&key)), short(own.get(&key))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(layout: [u64; 5]) -> Chosen {
        let [pipeline, attention_tp, attention_dp, expert_tp, expert_ep] = layout;
        Chosen {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: Value::Null,
            units: 1,
            layout: Layout { pipeline, attention_tp, attention_dp, expert_tp, expert_ep },
            domains: Domains::NONE,
            element_bytes: 4.0,
        }
    }

    /// MixServe's three cases: as many attention groups as expert groups, more, and fewer; each with and without TP of
    /// attention.
    #[test]
    fn the_workers_layouts_are_found_by_their_degrees() {
        for (layout, attention, experts) in [
            ([1, 2, 2, 2, 2], Attention::Tp, "hybrid:2x2"),
            ([1, 2, 2, 4, 1], Attention::Tp, "tp"),
            ([1, 2, 2, 1, 4], Attention::Tp, "ep"),
            ([1, 1, 4, 1, 4], Attention::Dp, "ep"),
            ([1, 1, 4, 4, 1], Attention::Dp, "tp"),
            ([1, 1, 4, 2, 2], Attention::Dp, "hybrid:2x2"),
            ([1, 4, 1, 1, 4], Attention::Tp, "ep"),
            ([1, 4, 1, 4, 1], Attention::Tp, "tp"),
            ([1, 4, 1, 2, 2], Attention::Tp, "hybrid:2x2"),
            ([1, 1, 1, 1, 1], Attention::Dp, "ep"),
        ] {
            let unit = chosen(layout).unit().unwrap();
            let ranks = (layout[1] * layout[2]) as u16;
            assert_eq!(unit.attention_groups, if attention == Attention::Tp { layout[2] as u16 } else { 1 });
            assert_eq!((unit.ranks, unit.attention, unit.experts.to_string().as_str()), (ranks, attention, experts));
        }
    }

    #[test]
    fn what_the_worker_lacks_is_refused_by_name() {
        for (layout, message) in [
            ([2, 1, 2, 1, 2], "the worker does not run DP2, EP2 PP2: it has no pipeline stages, the plan has 2"),
            ([1, 1, 4, 1, 2], "attention is on 4 ranks and experts on 2"),
            ([1, 0, 4, 1, 4], "a degree outside 1 to 1024"),
            ([1, u64::MAX, u64::MAX, 1, 4], "a degree outside 1 to 1024"),
            ([1, 1, 1024, 1024, 1], ""),
            ([1, 1024, 1024, 1024, 1024], "1048576 ranks are too many"),
        ] {
            let outcome = chosen(layout).unit();
            match message {
                "" => assert!(outcome.is_ok()),
                message => {
                    let error = outcome.unwrap_err().to_string();
                    assert!(error.contains(message), "{error}\nlacks: {message}");
                }
            }
        }
        let error = Chosen { element_bytes: 1.0, ..chosen([1, 1, 2, 1, 2]) }.unit().unwrap_err().to_string();
        assert!(error.contains("but the plan has 1"), "{error}");
        let domains = |text: &str| Chosen { domains: text.parse().unwrap(), ..chosen([1, 1, 4, 1, 4]) }.unit();
        assert_eq!(domains("2:1/2").unwrap().domains.to_string(), "2:1/2");
        let error = domains("3").unwrap_err().to_string();
        assert_eq!(error, "the worker does not run DP4, EP4: its expert domains of 3 do not divide 4 ranks");
    }
}
