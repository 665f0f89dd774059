//! The bundled model against Transformers' results, on one rank and on several.

use crate::common::{Golden, Rank, contiguous, golden, local_mesh, on_ranks, relative_error, shuffled};
use semmoe_tables::LayerIdx;
use semmoe_worker::ep::StepPhase;
use semmoe_worker::model::{Probe, StepItem, Wants};

/// Router logits closer than this may swap, because they were summed in another order.
const NEAR_TIE: f32 = 1e-4;
const TOLERANCE: f32 = 1e-3;

#[derive(Default)]
struct Recording {
    router_logits: Vec<f32>,
    /// The last row of each boundary between layers.
    hidden: Vec<Vec<f32>>,
    width: usize,
}

impl Probe for Recording {
    fn residual(&mut self, _layers: usize, rows: &[f32]) {
        self.hidden.push(rows[rows.len() - self.width..].to_vec());
    }

    fn router_logits(&mut self, _layer: LayerIdx, logits: &[f32]) {
        self.router_logits.extend_from_slice(logits);
    }

    fn final_norm(&mut self, rows: &[f32]) {
        // The reference records the last residual stream only after the final norm.
        self.hidden.pop();
        self.hidden.push(rows.to_vec());
    }
}

/// (routes that differ without a near-tie, routes that differ, routes)
fn compare_routes(routes: &[u16], golden: &Golden, experts_per_layer: usize) -> (usize, usize, usize) {
    let (layers, tokens, k) = (golden.experts.len(), golden.ids.len(), golden.experts[0][0].len());
    let (mut wrong, mut different) = (0, 0);
    for (at, found) in routes.chunks(k).enumerate() {
        let (token, layer) = (at / layers, at % layers);
        if found == golden.experts[layer][token] {
            continue;
        }
        different += 1;
        let mut logits =
            golden.router_logits[(layer * tokens + token) * experts_per_layer..][..experts_per_layer].to_vec();
        logits.sort_by(|a, b| b.total_cmp(a));
        // The order within the k is compared too, so any gap down to the next one may be the near-tie.
        wrong += usize::from(logits.windows(2).take(k).all(|pair| pair[0] - pair[1] > NEAR_TIE));
    }
    (wrong, different, layers * tokens)
}

#[test]
fn one_rank_agrees_with_transformers() {
    let mut rank = Rank::alone();
    let (mut different, mut routes) = (0, 0);
    for (i, golden) in golden().iter().enumerate() {
        let config = rank.model.config().clone();
        let mut kv = rank.model.new_sequence();
        let mut probe = Recording { width: config.hidden, ..Recording::default() };
        let mut items =
            [StepItem { kv: &mut kv, tokens: &golden.ids, wants: Wants::Logits, phase: StepPhase::Prefill }];
        let out = rank.model.step_probed(&mut items, &mut rank.ep, &mut probe).unwrap();

        let (wrong, differ, all) = compare_routes(out.routes(0), golden, config.num_experts);
        assert_eq!(wrong, 0, "prompt {i}: {differ} of {all} routes differ");
        different += differ;
        routes += all;
        for (name, found, expected) in [
            ("router logits", &probe.router_logits[..], &golden.router_logits),
            ("last logits", out.logits(0).unwrap(), &golden.last_logits),
            ("hidden states", &probe.hidden.concat(), &golden.hidden),
        ] {
            let error = relative_error(found, expected);
            assert!(error < TOLERANCE, "prompt {i}: {name} are off by {error}");
        }
    }
    assert!(different * 1000 < routes.max(1000), "{different} of {routes} routes differ in near ties");
}

#[test]
fn greedy_continuations_are_those_of_transformers_however_many_ranks() {
    let golden = golden();
    let placements = [contiguous(1), contiguous(2), shuffled(2, 1), contiguous(4), shuffled(4, 2)];
    for placement in placements {
        let world = usize::from(placement.groups());
        // Each prompt goes to one rank, so the ranks' batches differ in size; with 4 ranks one has two prompts.
        let texts = on_ranks(local_mesh(placement.groups()), &placement, |mut rank| {
            let mine: Vec<usize> = (0..golden.len()).filter(|i| i % world == rank.rank).collect();
            let prompts: Vec<&[u32]> = mine.iter().map(|&i| &golden[i].ids[..]).collect();
            let texts = rank.greedy(&prompts, 16);
            mine.into_iter().zip(texts).collect::<Vec<_>>()
        });
        let mut found = 0;
        for (prompt, text) in texts.concat() {
            assert_eq!(text, golden[prompt].greedy, "prompt {prompt} on {world} ranks");
            found += 1;
        }
        assert_eq!(found, golden.len());
    }
}
