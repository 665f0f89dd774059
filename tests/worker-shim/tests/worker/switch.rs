//! Layout switches in mid-request: ranks on GPUs compute the results of ranks on CPUs that switch likewise, and a
//! separate oracle checks the CPU against each layout (worker/src/model/switch/attention_tests.rs).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use semmoe_kernels::Dtype;
use semmoe_tables::{Attention, ExpertCopies, LayerIdx, Placement};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, ExpertPlacement, StepPhase};
use semmoe_worker::model::{
    AttentionSwitch, HeadSlice, KvCache, KvPool, Model, ModelConfig, MovingSequence, StepItem, SwitchOutcome, Wants,
    likeliest,
};
use tempfile::TempDir;

use super::{contiguous, fixture};
use semmoe_worker_shim::{Layout, PAGES, Rank, Watched, on_cpus, on_gpus, on_streams};

/// Tokens of a prompt in a step.
const CHUNK: usize = 64;
/// Steps in each layout, beginning with attention dp and experts ep; then both are tp, and so on.
const STEPS: [usize; 4] = [2, 2, 2, 1];

/// A fixture for sequences of several pages: its own context fits one page.
pub(super) fn long_fixture(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        let to = dir.path().join(entry.file_name());
        if entry.file_name() != "config.json" {
            std::os::unix::fs::symlink(entry.path().canonicalize().unwrap(), to).unwrap();
            continue;
        }
        let config = std::fs::read_to_string(entry.path()).unwrap();
        let (short, long) = ("\"max_position_embeddings\": 64", "\"max_position_embeddings\": 256");
        assert!(config.contains(short));
        std::fs::write(to, config.replace(short, long)).unwrap();
    }
    dir
}

fn layout(config: &ModelConfig, world: usize) -> Layout {
    let heads = |share: HeadSlice| share.cache_shape(config).kv_heads;
    let pages = PAGES * heads(HeadSlice::ALL) / heads(HeadSlice::new(config, 0, world).unwrap());
    let start = Layout::new(world, Attention::Dp, ExpertLayout::Ep, Dtype::F32);
    Layout { other_pages: Some(pages), ..start }
}

/// A sequence generated from its number: its first page is one of two that sequences share.
struct Text {
    prompt: usize,
    home: usize,
    id: u64,
}

impl Text {
    fn of(id: u64, world: usize) -> Self {
        Self { prompt: [100, 70, 9, 130, 64][id as usize % 5], home: id as usize % world, id }
    }

    fn token(&self, at: usize, vocabulary: usize) -> u32 {
        let family = if at < 64 { self.id % 2 } else { self.id };
        ((at as u64 * 31 + family * 17) % vocabulary as u64) as u32
    }

    /// The tokens of its next step after `len` tokens: some of the prompt, or one.
    fn next(&self, len: usize, vocabulary: usize) -> Vec<u32> {
        let end = if len < self.prompt { (len + CHUNK).min(self.prompt) } else { len + 1 };
        (len..end).map(|at| self.token(at, vocabulary)).collect()
    }
}

/// A rank's sequences, and their results so far.
struct Running<'a> {
    rank: &'a mut Rank,
    pool: KvPool,
    caches: BTreeMap<u64, KvCache>,
    /// By step and sequence.
    logits: BTreeMap<(usize, u64), Vec<f32>>,
}

impl<'a> Running<'a> {
    fn new(rank: &'a mut Rank, sequences: u64) -> Self {
        let pool = KvPool::new(rank.model.cache_shape(), PAGES, true);
        let (me, world) = (usize::from(rank.ep.rank().get()), rank.ep.world());
        let texts = (0..sequences).map(|id| Text::of(id, world)).filter(|text| text.home == me);
        let vocabulary = rank.model.config().vocab_size;
        let cache = |text: Text| {
            let prompt: Vec<u32> = (0..text.prompt).map(|at| text.token(at, vocabulary)).collect();
            (text.id, pool.admit(&prompt, text.prompt + 16).unwrap())
        };
        let caches = texts.map(cache).collect();
        Self { rank, pool, caches, logits: BTreeMap::new() }
    }

    fn step(&mut self, at: usize) {
        let (vocabulary, world) = (self.rank.model.config().vocab_size, self.rank.ep.world());
        let tokens: Vec<Vec<u32>> =
            self.caches.iter().map(|(&id, kv)| Text::of(id, world).next(kv.len(), vocabulary)).collect();
        let item = |(kv, tokens)| StepItem { kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill };
        let mut items: Vec<StepItem<'_>> =
            self.caches.values_mut().zip(tokens.iter().map(Vec::as_slice)).map(item).collect();
        let out = self.rank.model.step(&mut items, &mut self.rank.ep).unwrap();
        let logits: Vec<Vec<f32>> = (0..items.len()).map(|item| out.logits(item).unwrap().to_vec()).collect();
        drop(items);
        self.logits.extend(self.caches.keys().map(|&id| (at, id)).zip(logits));
    }

    /// Switches to the other layout; or returns why pages cannot move.
    fn switch(&mut self, placement: &ExpertCopies) -> Result<(), String> {
        let Self { rank: Rank { model, ep }, pool, caches, .. } = self;
        let to = model.other_attentions().next().unwrap();
        let experts = if to.attention == Attention::Tp { ExpertLayout::Tp } else { ExpertLayout::Ep };
        let capacity = if to.attention == Attention::Tp { other_pages(model.config(), ep.world()) } else { PAGES };
        let sequences: Vec<MovingSequence<'_>> =
            caches.iter().map(|(&id, kv)| MovingSequence { id, kv, shares: Vec::new() }).collect();
        let switch = AttentionSwitch { pool, sequences: &sequences, capacity, lazily: false };
        let prepared = model.prepare_attention(to, &switch, ep, &mut |_| None).map_err(|fault| fault.to_string())?;
        let placement = ExpertPlacement { layout: experts, replicas: placement.clone() };
        model.check_switch(&placement, ep).unwrap();
        assert_eq!(model.switch_experts(&placement, ep, &mut |_| None).unwrap(), SwitchOutcome::Committed);
        model.commit_attention();
        (self.pool, self.caches) = (prepared.pool, prepared.sequences.into_iter().collect());
        Ok(())
    }
}

fn other_pages(config: &ModelConfig, world: usize) -> usize {
    layout(config, world).other_pages.unwrap()
}

/// All logits of a rank through all switches.
fn switched(mut rank: Rank, placement: &ExpertCopies) -> BTreeMap<(usize, u64), Vec<f32>> {
    let sequences = rank.ep.world() as u64 + 2;
    let mut running = Running::new(&mut rank, sequences);
    let mut at = 0;
    for (part, steps) in STEPS.into_iter().enumerate() {
        if part > 0 {
            running.switch(placement).unwrap();
        }
        for _ in 0..steps {
            running.step(at);
            at += 1;
        }
    }
    running.logits
}

/// The logits of all ranks, which must be equal where several ranks have them.
fn joined(ranks: Vec<BTreeMap<(usize, u64), Vec<f32>>>) -> BTreeMap<(usize, u64), Vec<f32>> {
    let mut all = BTreeMap::new();
    for (at, logits) in ranks.into_iter().flatten() {
        let before = all.insert(at, logits.clone());
        assert!(before.is_none_or(|before: Vec<f32>| before == logits), "{at:?}: ranks have other logits");
    }
    all
}

/// The difference of logits relative to the largest of them.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    let scale = expected.iter().fold(1.0f32, |most, logit| most.max(logit.abs()));
    let each = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / scale);
    each.fold(0.0, |most, each| if each.is_nan() { f32::INFINITY } else { most.max(each) })
}

/// The difference between the largest and the second largest logit.
fn gap(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    sorted[sorted.len() - 1] - sorted[sorted.len() - 2]
}

fn check(family: &str, world: usize) {
    let folder = long_fixture(family);
    let config = ModelConfig::load(folder.path()).unwrap();
    let placement = scattered(&config, world);
    let layout = layout(&config, world);
    let Some(found) = on_gpus(folder.path(), &placement, &layout, |rank| switched(rank, &placement)) else { return };
    let found = joined(found);
    let expected = joined(on_cpus(folder.path(), &placement, &layout, |rank| switched(rank, &placement)));
    assert!(found.keys().eq(expected.keys()), "{family}, {world} ranks: other steps");
    assert_eq!(found.len(), STEPS.iter().sum::<usize>() * (world + 2));
    for (at, expected) in &expected {
        let furthest = difference(&found[at], expected);
        assert!(furthest < 1e-4, "{family}, {world} ranks, step and sequence {at:?}: logits differ by {furthest}");
        let same = likeliest(&found[at]) == likeliest(expected);
        assert!(same || gap(expected) < 1e-4, "{family}, {world} ranks, step and sequence {at:?}: another token");
    }
}

/// A random placement, different in each layer.
fn scattered(config: &ModelConfig, world: usize) -> ExpertCopies {
    let layers = (0..config.num_moe_layers()).map(|layer| {
        let group = |expert: usize| ((expert * 5 + layer) % config.num_experts % world) as u16;
        (0..config.num_experts).map(group).collect()
    });
    (&Placement::new(world as u16, layers.collect()).unwrap()).into()
}

#[test]
fn two_ranks_switch_in_mid_request() {
    ["qwen3-moe", "mixtral", "olmoe"].into_iter().for_each(|family| check(family, 2));
}

#[test]
fn four_ranks_switch_in_mid_request() {
    ["qwen3-moe", "mixtral", "olmoe"].into_iter().for_each(|family| check(family, 4));
}

/// One rank objects before the last layer: layers that have moved go back, although others have overwritten some of
/// them, and the next attempt succeeds.
#[test]
fn an_objection_takes_the_switch_back() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m");
    let config = ModelConfig::load(&dir).unwrap();
    let placement = scattered(&config, 2);
    let layout = Layout::new(2, Attention::Dp, ExpertLayout::Ep, Dtype::F32);
    on_gpus(&dir, &placement, &layout, |Rank { mut model, mut ep }| {
        let objects = ep.rank().get() == 1;
        let step = |model: &mut Model, ep: &mut ExpertParallel| {
            let mut kv = model.new_sequence();
            let mut items =
                [StepItem { kv: &mut kv, tokens: &[3, 1], wants: Wants::Logits, phase: StepPhase::Prefill }];
            model.step(&mut items, ep).unwrap().logits(0).unwrap().to_vec()
        };
        let before = step(&mut model, &mut ep);
        let placement = ExpertPlacement { layout: ExpertLayout::Tp, replicas: placement.clone() };
        let mut objection = |layer: LayerIdx| (objects && layer.index() == 0).then(|| "it was asked to".to_owned());
        let outcome = model.switch_experts(&placement, &mut ep, &mut objection).unwrap();
        assert_eq!(outcome, SwitchOutcome::RolledBack { cause: "rank 1: it was asked to".to_owned() });
        assert!(step(&mut model, &mut ep) == before, "the way back changed something");
        assert_eq!(model.switch_experts(&placement, &mut ep, &mut |_| None).unwrap(), SwitchOutcome::Committed);
        assert!(difference(&step(&mut model, &mut ep), &before) < 1e-4);
        // Back to whole experts, on other ranks each time: tokens must go where the experts are now.
        for owners in [(&contiguous(&config, 2)).into(), scattered(&config, 2)] {
            let placement = ExpertPlacement { layout: ExpertLayout::Ep, replicas: owners };
            assert_eq!(model.switch_experts(&placement, &mut ep, &mut |_| None).unwrap(), SwitchOutcome::Committed);
            assert!(difference(&step(&mut model, &mut ep), &before) < 1e-4);
        }
    });
}

/// Pages without room beside those in use stay where they are.
#[test]
fn pages_without_room_are_refused_and_stay() {
    let folder = long_fixture("mixtral");
    let config = ModelConfig::load(folder.path()).unwrap();
    let placement: ExpertCopies = (&contiguous(&config, 2)).into();
    let layout = Layout { other_pages: Some(6), ..layout(&config, 2) };
    on_gpus(folder.path(), &placement, &layout, |mut rank| {
        let mut running = Running::new(&mut rank, 6);
        running.step(0);
        let cause = running.switch(&placement).unwrap_err();
        assert!(cause.starts_with("rank 0: ") && cause.contains("alongside those in use"), "{cause}");
        running.step(1);
        assert_eq!(running.rank.model.attention(), Attention::Dp);
    });
}

/// Kernels and their parameters.
type Launched = Vec<(&'static str, Vec<u8>)>;

/// After switching back and forth, a step launches exactly what it launched before, address by address, so its graphs
/// stay valid.
#[test]
fn each_layout_has_its_addresses() {
    let folder = long_fixture("qwen3-moe");
    let dir: &Path = folder.path();
    let config = ModelConfig::load(dir).unwrap();
    let placement: ExpertCopies = (&contiguous(&config, 2)).into();
    let all: [Arc<Mutex<Launched>>; 2] = Default::default();
    let recorded = |rank: usize, stream| {
        let launches = Arc::clone(&all[rank]);
        Watched::new(stream, move |_, launch| {
            launches.lock().unwrap().push((launch.kernel(), launch.params().to_vec()));
            Ok(())
        })
    };
    on_streams(dir, &placement, &layout(&config, 2), recorded, |mut rank| {
        let launches = &all[usize::from(rank.ep.rank().get())];
        let mut running = Running::new(&mut rank, 0);
        let steps = [(); 5].map(|()| {
            launches.lock().unwrap().clear();
            let tokens = [3, 1, 4];
            let mut kv = running.rank.model.new_sequence();
            let mut items =
                [StepItem { kv: &mut kv, tokens: &tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
            running.rank.model.step(&mut items, &mut running.rank.ep).unwrap();
            drop(kv);
            let step = launches.lock().unwrap().clone();
            running.switch(&placement).unwrap();
            step
        });
        for (first, again) in [(0, 4), (1, 3)] {
            assert!(!steps[first].is_empty() && steps[first].len() == steps[again].len());
            for (before, after) in steps[first].iter().zip(&steps[again]) {
                assert!(before == after, "{} is launched elsewhere", before.0);
            }
        }
    });
}
