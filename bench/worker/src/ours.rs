//! One rank of the worker, stepped by this thread.

use std::collections::HashSet;
use std::path::Path;

use semmoe_tables::{Placement, RankId};
use semmoe_worker::ep::{ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{KvCache, Model, ModelConfig, StepItem, likeliest, Wants};

use crate::parts::Parts;
use crate::{Engine, Outcome};

pub(crate) struct Ours {
    model: Model,
    ep: ExpertParallel,
    top_k: usize,
    caches: Vec<KvCache>,
    /// If counting: the distinct experts of each decode step, summed over layers.
    counted: Option<Vec<usize>>,
    parts: Option<Parts>,
}

impl Ours {
    pub(crate) fn load(model_dir: &Path) -> Outcome<Self> {
        let config = ModelConfig::load(model_dir)?;
        let placement = Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, 1)?;
        let model = Model::load(model_dir, RankId::new(0), &placement)?;
        let ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement)?;
        Ok(Self { top_k: config.top_k, model, ep, caches: Vec::new(), counted: None, parts: None })
    }

    pub(crate) fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    pub(crate) fn count_experts(&mut self, on: bool) {
        self.counted = on.then(Vec::new);
    }

    /// Starts or stops timing the parts of each decode step; returns the times so far.
    pub(crate) fn time_parts(&mut self, on: bool) -> Option<Parts> {
        std::mem::replace(&mut self.parts, on.then(Parts::default))
    }

    /// Mean number of distinct experts per step.
    pub(crate) fn experts_per_step(&self) -> f64 {
        let counted = self.counted.as_deref().unwrap_or_default();
        counted.iter().sum::<usize>() as f64 / counted.len().max(1) as f64
    }

    fn step(&mut self, tokens: &[&[u32]], phase: StepPhase) -> Outcome<Vec<u32>> {
        let item = |(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase };
        let mut items: Vec<StepItem<'_>> = self.caches.iter_mut().zip(tokens.iter().copied()).map(item).collect();
        let mut parts = self.parts.as_mut().filter(|_| phase == StepPhase::Decode);
        let out = match &mut parts {
            None => self.model.step(&mut items, &mut self.ep)?,
            Some(parts) => {
                parts.steps += 1;
                parts.begin();
                self.model.step_probed(&mut items, &mut self.ep, *parts)?
            }
        };
        if let Some(parts) = &mut parts {
            parts.ends(3);
        }
        if let (Some(counted), StepPhase::Decode) = (&mut self.counted, phase) {
            // A token's routes are [L, k].
            let routes = (0..tokens.len()).flat_map(|item| out.routes(item).iter().enumerate());
            let experts = routes.map(|(at, expert)| (at / self.top_k, *expert));
            counted.push(experts.collect::<HashSet<_>>().len());
        }
        let next = (0..tokens.len()).map(|item| out.logits(item).and_then(likeliest).unwrap_or(0)).collect();
        if let Some(parts) = &mut parts {
            parts.ends(4);
        }
        Ok(next)
    }
}

impl Engine for Ours {
    fn prefill(&mut self, prompts: &[Vec<u32>]) -> Outcome<Vec<u32>> {
        self.caches = prompts.iter().map(|_| self.model.new_sequence()).collect();
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        self.step(&prompts, StepPhase::Prefill)
    }

    fn decode(&mut self, tokens: &[u32]) -> Outcome<Vec<u32>> {
        let tokens: Vec<&[u32]> = tokens.chunks(1).collect();
        self.step(&tokens, StepPhase::Decode)
    }
}
