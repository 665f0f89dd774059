//! `tables permute` on a model of every family: the new checkpoint with contiguous placement equals the old one placed
//! by the tables.

use std::path::Path;

use crate::common::{FIXTURES, Rank, contiguous_of, dp_tables, fixture, local_mesh, on_ranks_of, relative_error};
use semmoe_tables::permute::{Permutation, permute};
use semmoe_tables::{Placement, Tables};
use semmoe_worker::ep::StepPhase;
use semmoe_worker::model::{ModelConfig, StepItem, Wants};

const PROMPT: [u32; 9] = [3, 77, 41, 8, 90, 12, 55, 0, 31];
/// Groups of a placement. Pairs of neighbours stay together, as required if two experts are a gating group.
const GROUPS: u16 = 2;

/// Tables that place pairs of experts at random.
fn tables(path: &Path, config: &ModelConfig) -> Tables {
    let mut random = fastrand::Rng::with_seed(6);
    let layer = |_| {
        let mut pairs: Vec<u16> = (0..config.num_experts as u16 / 2).map(|pair| pair % GROUPS).collect();
        random.shuffle(&mut pairs);
        pairs.into_iter().flat_map(|group| [group, group]).collect()
    };
    let placement = Placement::new(GROUPS, (0..config.num_moe_layers()).map(layer).collect()).unwrap();
    dp_tables(config.model_info("m", None), placement).write(path).unwrap();
    Tables::open(path).unwrap()
}

/// The last logits and the routes of rank 0's prompt, and the bytes between ranks.
fn run(dir: &Path, placement: &Placement) -> (Vec<f32>, Vec<u16>, u64) {
    let results = on_ranks_of(dir, local_mesh(GROUPS), placement, |mut rank: Rank| {
        let mut kv = rank.model.new_sequence();
        let item = StepItem { kv: &mut kv, tokens: &PROMPT, wants: Wants::Logits, phase: StepPhase::Prefill };
        let mut items = if rank.rank == 0 { vec![item] } else { Vec::new() };
        let found = rank.model.step(&mut items, &mut rank.ep).map(|out| match rank.rank {
            0 => (out.logits(0).unwrap().to_vec(), out.routes(0).to_vec()),
            _ => Default::default(),
        });
        let (logits, routes) = found.unwrap();
        (logits, routes, rank.counted().total().bytes.remote)
    });
    let remote = results.iter().map(|(_, _, bytes)| bytes).sum();
    let (logits, routes, _) = results.into_iter().next().unwrap();
    (logits, routes, remote)
}

#[test]
fn a_permuted_checkpoint_is_the_placed_one_under_other_numbers() {
    for name in FIXTURES {
        let folder = tempfile::tempdir().unwrap();
        let config = ModelConfig::load(&fixture(name)).unwrap();
        let tables = tables(&folder.path().join("t.tables.safetensors"), &config);
        let new = folder.path().join("new");
        permute(&tables, &fixture(name), &new, &mut |_, _| {}).unwrap();
        let (logits, routes, remote) = run(&fixture(name), tables.placement());
        let (new_logits, new_routes, new_remote) = run(&new, &contiguous_of(&config, GROUPS));

        let error = relative_error(&new_logits, &logits);
        assert!(error < 1e-6, "{name}: the logits differ by {error}");
        assert_eq!(new_remote, remote, "{name}: bytes between ranks");
        let permutation = Permutation::of(&tables).unwrap();
        let width = config.num_moe_layers() * config.top_k;
        let old = |(at, slot): (usize, &u16)| {
            let layer = config.moe_layers[at % width / config.top_k];
            permutation.old_experts(layer).unwrap()[usize::from(*slot)]
        };
        let renamed: Vec<u16> = new_routes.iter().enumerate().map(old).collect();
        assert_eq!(renamed, routes, "{name}: the same experts");
        assert_ne!(new_routes, routes, "{name}: under other numbers");
    }
}
