//! The bundled model's routing, recorded in this process.

use std::path::Path;
use std::sync::OnceLock;

use semmoe_tables::{Placement, Profile, Provenance, RankId, Trace, TraceBuilder};
use semmoe_text::Tokenizer;
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, Wants};

use crate::Outcome;
use crate::papers::Size;
use crate::perplexity::MODEL;
use crate::texts::{HELD_OUT, PROFILE, prompts};

/// Most tokens of a prompt, and prompts of a step.
const TOKENS: usize = 192;
const TOGETHER: usize = 16;

/// Prompts and their routing: one set to solve on, another to judge on.
pub(super) struct Recorded {
    pub(super) solving: Trace,
    pub(super) profile: Profile,
    pub(super) judging: Trace,
    /// The kind of each prompt in the judging set.
    pub(super) kinds: Vec<String>,
}

/// Recorded once per process.
pub(super) fn recorded(size: Size) -> Outcome<&'static Recorded> {
    static FOUND: OnceLock<Result<Recorded, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| record(size).map_err(|error| error.to_string()));
    found.as_ref().map_err(|error| error.as_str().into())
}

fn record(size: Size) -> Outcome<Recorded> {
    let [solving, judging] = match size {
        Size::Full => [1600, 400],
        Size::Small => [600, 200],
    };
    let mut recorder = Recorder::new()?;
    let (solving, _) = recorder.trace(PROFILE, solving)?;
    let (judging, kinds) = recorder.trace(HELD_OUT, judging)?;
    Ok(Recorded { profile: Profile::of_trace(&solving)?, solving, judging, kinds })
}

pub(super) fn provenance() -> Provenance {
    Provenance { source: "assets/prompts".into(), created: "2026-01-01T00:00:00Z".into() }
}

struct Recorder {
    tokenizer: Tokenizer,
    config: ModelConfig,
    model: Model,
    ep: ExpertParallel,
}

impl Recorder {
    fn new() -> Outcome<Self> {
        let dir = Path::new(MODEL);
        let config = ModelConfig::load(dir)?;
        let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1)?;
        let ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement)?;
        let model = Model::load(dir, RankId::new(0), &placement)?;
        Ok(Self { tokenizer: Tokenizer::from_file(&dir.join("tokenizer.json"))?, config, model, ep })
    }

    /// The first prompts of a file, and their kinds.
    fn trace(&mut self, file: &str, most: usize) -> Outcome<(Trace, Vec<String>)> {
        let mut builder = TraceBuilder::new(self.config.model_info("tiny-qwen3moe-15m", None), provenance())?;
        let (mut ids, mut kinds) = (Vec::new(), Vec::new());
        for prompt in prompts(file)?.into_iter().take(most) {
            let kind = prompt.domain.clone();
            let mut tokens = self.tokenizer.encode(&prompt.text())?;
            tokens.truncate(TOKENS);
            if !tokens.is_empty() {
                ids.push(tokens);
                kinds.push(kind);
            }
        }
        for prompts in ids.chunks(TOGETHER) {
            self.push(&mut builder, prompts)?;
        }
        Ok((builder.finish()?, kinds))
    }

    fn push(&mut self, builder: &mut TraceBuilder, prompts: &[Vec<u32>]) -> Outcome<()> {
        let mut kvs: Vec<KvCache> = prompts.iter().map(|_| self.model.new_sequence()).collect();
        let item = |(kv, tokens)| StepItem { kv, tokens, wants: Wants::Nothing, phase: StepPhase::Prefill };
        let mut items: Vec<StepItem<'_>> = kvs.iter_mut().zip(prompts.iter().map(Vec::as_slice)).map(item).collect();
        let out = self.model.step(&mut items, &mut self.ep)?;
        for (index, tokens) in prompts.iter().enumerate() {
            builder.push(tokens, tokens.len() as u32, out.routes(index), None)?;
        }
        Ok(())
    }
}
