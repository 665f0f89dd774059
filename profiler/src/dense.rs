//! Dense layers that a model's configuration does not tell: engines report rows of them as well, without experts.

use semmoe_tables::ModelInfo;

use crate::answer::tokens;
use crate::drive::Engine;
use crate::prompts::Prompt;
use crate::routes::decode;

/// The model without the layers whose rows in the answer to one prompt are constant (no expert, or the same one in every slot),
/// and these layers. As it is where the answer is of no use, or no layer would be left: then the recording tells what is wrong.
pub(crate) async fn without_dense_layers(engine: &Engine<'_>, prompt: &Prompt) -> (ModelInfo, Vec<u16>) {
    let dense = match engine.told(prompt).await {
        Ok(told) => {
            let rows = tokens(&prompt.input, &told).map(|(ids, _)| ids.len());
            let routes =
                rows.and_then(|rows| decode(told.routed_experts.as_deref().unwrap_or_default(), rows, engine.model));
            routes.ok().filter(|routes| routes.layers == usize::from(engine.model.num_hidden_layers))
        }
        Err(_) => None,
    };
    let dense = dense.map(|routes| routes.dense_layers()).unwrap_or_default();
    let is_dense = |layer: &u16| dense.contains(&usize::from(*layer));
    let (dense, moe): (Vec<u16>, Vec<u16>) = engine.model.layer_ids.iter().partition(|layer| is_dense(layer));
    match moe.is_empty() {
        true => (engine.model.clone(), Vec::new()),
        false => (ModelInfo { layer_ids: moe, ..engine.model.clone() }, dense),
    }
}
