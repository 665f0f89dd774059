//! Sends one prompt before all others. It reveals dense layers that the configuration does not mention, as engines
//! report rows without experts for them. The self-check uses its routes too.

use semmoe_engines::recording::{ReportedAnswer, decode};
use semmoe_tables::ModelInfo;

use crate::answer::{check, rules, tokens};
use crate::drive::{Alone, Engine};
use crate::prompts::Prompt;

/// The response to the first prompt.
pub(crate) struct Probed {
    /// The model without its dense layers.
    pub(crate) model: ModelInfo,
    pub(crate) dense_layers: Vec<u16>,
    /// `None` if the response is unusable; the recording then reports the reason.
    pub(crate) alone: Option<Alone>,
}

/// Sends the first prompt that the engine does not reject, while nothing else in this recording runs. Layers with
/// constant rows (no expert, or the same expert in every slot) are dense. If all layers look dense, none are removed.
pub(crate) async fn probe(engine: &Engine<'_>, prompts: &[&Prompt]) -> Probed {
    for prompt in prompts {
        match engine.reported(prompt).await {
            Err(error) if error.is_refusal() => {}
            Err(_) => break,
            Ok(reported) => return probed(engine, prompt, &reported),
        }
    }
    Probed { model: engine.model.clone(), dense_layers: Vec::new(), alone: None }
}

fn probed(engine: &Engine<'_>, prompt: &Prompt, reported: &ReportedAnswer) -> Probed {
    let (model, dense_layers) = without_dense_layers(engine.model, prompt, reported);
    let routed = rules(&model).ok().and_then(|rules| check(&rules, &prompt.input, reported).ok());
    let alone = routed.map(|routed| Alone { key: prompt.key, routed });
    Probed { model, dense_layers, alone }
}

fn without_dense_layers(model: &ModelInfo, prompt: &Prompt, reported: &ReportedAnswer) -> (ModelInfo, Vec<u16>) {
    let ids = tokens(&prompt.input, reported).ok().map(|(ids, _)| ids);
    let routes =
        ids.and_then(|ids| decode(reported.routed_experts.as_deref().unwrap_or_default(), ids.len(), model).ok());
    let routes = routes.filter(|routes| routes.layers == usize::from(model.num_hidden_layers));
    let dense = routes.map(|routes| routes.dense_layers()).unwrap_or_default();
    let is_dense = |layer: &u16| dense.contains(&usize::from(*layer));
    let (dense, moe): (Vec<u16>, Vec<u16>) = model.layer_ids.iter().partition(|layer| is_dense(layer));
    match moe.is_empty() {
        true => (model.clone(), Vec::new()),
        false => (ModelInfo { layer_ids: moe, ..model.clone() }, dense),
    }
}
