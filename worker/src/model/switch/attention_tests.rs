//! Attention switches while sequences run: every step equals, bit for bit, that of an oracle that replays the schedule.
//! The oracle has no pages: at each switch it loads a model with only the new layout, and copies keys and values token
//! by token and head by head from all ranks' published caches. This proves that pages, prefixes, partial pages and
//! routes arrive correctly. Which rank a sequence moves to is taken from the run under test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Barrier, Mutex};

use semmoe_kernels::collectives::{PrivateMemory, RowCollectives, Unobserved};
use semmoe_tables::{ExpertCopies, RankId};
use tempfile::TempDir;

use super::*;
use crate::ep::{
    ExpertLayout, LocalTransport, Lockstep, RankGroups, StepPhase, SwitchTargets, SwitchableRows, WireRows,
};
use crate::model::kv::{KvArrival, KvCache, KvPhase, KvUsage, MovingSequence, PAGE_TOKENS};
use crate::model::slices::HeadSlice;
use crate::model::step::{StepItem, Wants};
use crate::model::{AttentionPlan, ExpertRoom, SwitchOutcome};

#[path = "content_tests.rs"]
mod content;
#[path = "schedule_tests.rs"]
mod schedule;

use content::{Content, bits, content, first_head, rebuilt};
use schedule::{Part, dp_and_tp, named, targets};

const FIXTURES: [&str; 7] =
    ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"];

/// A fixture for sequences of several pages: its own context fits one page.
fn fixture(name: &str) -> TempDir {
    let from = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name);
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = dir.path().join(entry.file_name());
        match entry.file_name() == "config.json" {
            false => std::os::unix::fs::symlink(entry.path(), to).unwrap(),
            true => {
                let config = std::fs::read_to_string(entry.path()).unwrap();
                let (short, long) = ("\"max_position_embeddings\": 64", "\"max_position_embeddings\": 512");
                assert!(config.contains(short));
                std::fs::write(to, config.replace(short, long)).unwrap();
            }
        }
    }
    dir
}

/// A sequence's prompt and continuation.
#[derive(Clone, Debug)]
struct Text {
    prompt: Vec<u32>,
    generated: Vec<u32>,
    /// Tokens of the prompt that went through the model.
    fed: usize,
    /// Its group of ranks, which is its rank with dp.
    home: usize,
}

/// State that all ranks can see.
struct Shared {
    world: usize,
    parts: Vec<Part>,
    barrier: Barrier,
    texts: Mutex<BTreeMap<u64, Text>>,
    contents: Mutex<BTreeMap<u64, Content>>,
    logits: Mutex<BTreeMap<(usize, u64), Vec<u32>>>,
    /// Homes after the current switch, as far as ranks have reported them.
    moved: Mutex<BTreeMap<u64, u16>>,
    /// Homes after each switch.
    homes: Mutex<Vec<BTreeMap<u64, u16>>>,
    digests: Mutex<Vec<u64>>,
    /// For the oracle: the sequences of each step.
    schedule: Option<BTreeSet<(usize, u64)>>,
}

const CHUNK: usize = 45;
/// A cancelled sequence, and the switch before which that happens.
const CANCELLED: (usize, u64) = (1, 4);

/// Two families of prompts that share their first pages, within a rank and, unless `apart`, between ranks, and some
/// others, longer and shorter.
fn texts(config: &ModelConfig, world: usize, apart: bool) -> BTreeMap<u64, Text> {
    let longest = config.max_positions - 24;
    let text = |id: u64| {
        let (family, home) = (id % 3, id as usize % world);
        let shift = family as u32 + if apart { 3 * home as u32 } else { 0 };
        let length = [150, 131, 64, 9, 215][id as usize % 5].min(longest);
        let token = |at: usize| match at < 130 && family < 2 {
            true => (at as u32 * 7 + shift) % config.vocab_size as u32,
            false => (at as u32 * 31 + id as u32 * 17) % config.vocab_size as u32,
        };
        Text { prompt: (0..length).map(token).collect(), generated: Vec::new(), fed: 0, home }
    };
    (0..3 * world as u64 + 1).map(|id| (id, text(id))).collect()
}

impl Shared {
    fn new(config: &ModelConfig, world: usize, parts: Vec<Part>) -> Self {
        // With replicas, ranks compute the same prefix with experts of other ranks, so it differs in the last bits. A
        // switch keeps one rank's, the oracle all.
        let apart = parts.iter().any(|part| part.replicas);
        Self {
            world,
            parts,
            barrier: Barrier::new(world),
            texts: Mutex::new(texts(config, world, apart)),
            contents: Mutex::default(),
            logits: Mutex::default(),
            moved: Mutex::default(),
            homes: Mutex::default(),
            digests: Mutex::default(),
            schedule: None,
        }
    }

    /// The sequences that a rank runs.
    fn own(&self, rank: usize, shape: AttentionShape) -> BTreeMap<u64, Text> {
        let texts = self.texts.lock().unwrap().clone();
        texts.into_iter().filter(|(_, text)| text.home == rank / shape.ranks).collect()
    }

    /// One step of all present and scheduled sequences of a rank: a chunk of the prompt, or a token.
    fn step(&self, at: usize, model: &mut Model, ep: &mut ExpertParallel, caches: &mut BTreeMap<u64, KvCache>) {
        let mut texts = self.own(ep.rank().index(), model.attention_shape());
        let scheduled = |id: u64| self.schedule.as_ref().is_none_or(|schedule| schedule.contains(&(at, id)));
        texts.retain(|id, _| caches.contains_key(id) && scheduled(*id));
        let tokens: BTreeMap<u64, Vec<u32>> = texts
            .iter()
            .map(|(&id, text)| match text.generated.last() {
                Some(&last) => (id, vec![last]),
                None => (id, text.prompt[text.fed..].iter().take(CHUNK).copied().collect()),
            })
            .collect();
        let item =
            |(id, kv)| Some(StepItem { kv, tokens: tokens.get(id)?, wants: Wants::Logits, phase: StepPhase::Prefill });
        let mut items: Vec<StepItem<'_>> = caches.iter_mut().filter_map(item).collect();
        let out = model.step(&mut items, ep).unwrap();
        let mut seen = Vec::new();
        for (item, &id) in tokens.keys().enumerate() {
            seen.push((id, out.logits(item).unwrap().to_vec()));
        }
        for (id, logits) in seen {
            let mut text = texts[&id].clone();
            text.fed = (text.fed + tokens[&id].len()).min(text.prompt.len());
            if text.fed == text.prompt.len() {
                text.generated.extend(crate::model::likeliest(&logits));
            }
            self.texts.lock().unwrap().insert(id, text);
            let logits = bits(logits.into_iter());
            let before = self.logits.lock().unwrap().insert((at, id), logits.clone());
            assert!(before.is_none_or(|before| before == logits), "all ranks have the same logits");
        }
        self.barrier.wait();
    }

    /// Collects the homes of sequences after a switch, of which each rank reports some.
    fn rehome(&self, rank: usize, homes: Vec<(u64, u16)>) {
        self.moved.lock().unwrap().extend(homes);
        self.barrier.wait();
        if rank == 0 {
            let homes = std::mem::take(&mut *self.moved.lock().unwrap());
            let mut texts = self.texts.lock().unwrap();
            texts.iter_mut().for_each(|(id, text)| text.home = homes[id].into());
            self.homes.lock().unwrap().push(homes);
        }
    }

    /// Publishes a rank's sequences.
    fn publish(&self, caches: &BTreeMap<u64, KvCache>, first: usize) {
        for (&id, cache) in caches {
            let own = content(cache, first);
            let mut contents = self.contents.lock().unwrap();
            let all = contents.entry(id).or_default();
            (all.tokens, all.routes) = (own.tokens, own.routes);
            all.heads.extend(own.heads);
        }
        self.barrier.wait();
    }
}

fn joined(link: LocalTransport, placement: &ExpertCopies) -> ExpertParallel {
    let memory = PrivateMemory::new(Lockstep::rank(&link));
    let unit = WireRows::f32(Box::new(RowCollectives::new(link, memory)));
    ExpertParallel::over(unit, placement, ExpertLayout::Ep).unwrap()
}

/// A rank of a unit that can switch to these targets.
fn switchable(
    link: LocalTransport,
    placement: &ExpertCopies,
    experts: ExpertLayout,
    targets: &SwitchTargets,
) -> ExpertParallel {
    let memory = PrivateMemory::new(Lockstep::rank(&link));
    let rows = SwitchableRows::join(targets, WireRows::f32, link, memory, Box::new(Unobserved)).unwrap();
    ExpertParallel::over(rows, placement, experts).unwrap()
}

/// A rank of a unit that has this layout only.
fn fixed(link: LocalTransport, placement: &ExpertCopies, experts: ExpertLayout) -> ExpertParallel {
    if let Some(groups) = experts.groups() {
        return switchable(link, placement, experts, &SwitchTargets { groups: vec![groups], hybrid: None });
    }
    let memory = PrivateMemory::new(Lockstep::rank(&link));
    let rows = experts.join(link, memory, Box::new(Unobserved)).unwrap();
    ExpertParallel::over(WireRows::f32(rows), placement, experts).unwrap()
}

fn both(dir: &Path, rank: usize, world: usize) -> Model {
    able(dir, rank, world, &dp_and_tp())
}

/// A model that can run in all these layouts.
fn able(dir: &Path, rank: usize, world: usize, parts: &[Part]) -> Model {
    let config = ModelConfig::load(dir).unwrap();
    let SwitchTargets { groups, hybrid } = targets(parts);
    let groups = groups.iter().map(|groups| groups.ranks.into()).collect();
    let tp = parts.iter().any(|part| part.attention == Attention::Tp && part.experts.groups().is_none());
    let plan = AttentionPlan { both: tp, groups, ..Attention::Dp.into() };
    let slots = parts.iter().map(|part| part.slots(&config, world)).max();
    let room = ExpertRoom { slots, hybrid, ..parts[0].experts.into() };
    Model::load_divided(dir, RankId::new(rank as u16), parts[0].copies(&config, world), room, plan).unwrap()
}

fn on_ranks<T: Send>(world: usize, work: impl Fn(usize, LocalTransport) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |(rank, link)| scope.spawn(move || work(rank, link));
        let threads: Vec<_> = LocalTransport::mesh(world).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A rank's sequences, each with a promise of all that it may need.
fn admitted(pool: &KvPool, texts: BTreeMap<u64, Text>) -> BTreeMap<u64, KvCache> {
    texts.into_iter().map(|(id, text)| (id, pool.admit(&text.prompt, text.prompt.len() + 20).unwrap())).collect()
}

/// Prepares a switch of attention, with a pool large enough for all.
fn prepare(
    model: &mut Model,
    ep: &mut ExpertParallel,
    pages: (&KvPool, &BTreeMap<u64, KvCache>),
    (capacity, lazily): (usize, bool),
    objection: KvObjection<'_>,
) -> Result<PreparedKv, String> {
    let to = model.other_attentions().next().unwrap();
    prepare_to(to, model, ep, pages, (capacity, lazily), objection)
}

/// Prepares a switch to any layout of attention.
fn prepare_to(
    to: AttentionShape,
    model: &mut Model,
    ep: &mut ExpertParallel,
    (pool, caches): (&KvPool, &BTreeMap<u64, KvCache>),
    (capacity, lazily): (usize, bool),
    objection: KvObjection<'_>,
) -> Result<PreparedKv, String> {
    let sequences: Vec<MovingSequence<'_>> =
        caches.iter().map(|(&id, kv)| MovingSequence { id, kv, shares: Vec::new() }).collect();
    let switch = AttentionSwitch { pool, sequences: &sequences, capacity, lazily };
    model.prepare_attention(to, &switch, ep, objection).map_err(|fault| fault.to_string())
}

/// Lazily, one sequence arrives before each step, and the remaining ones before the next switch.
fn run_switched(dir: &Path, (shared, lazily): (&Shared, bool), rank: usize, link: LocalTransport) {
    let config = ModelConfig::load(dir).unwrap();
    let mut model = able(dir, rank, shared.world, &shared.parts);
    let copies = shared.parts[0].copies(&config, shared.world);
    let mut ep = switchable(link, &copies, shared.parts[0].experts, &targets(&shared.parts));
    let mut pool = KvPool::new(model.cache_shape(), 400, true);
    let mut caches = admitted(&pool, shared.own(rank, model.attention_shape()));
    let mut arrival: Option<KvArrival> = None;
    let mut at = 0;
    for (part, layout) in shared.parts.iter().enumerate() {
        if part > 0 {
            if let Some(mut arrival) = arrival.take() {
                assert!(!arrival.is_over(), "some arrive while others run");
                caches.extend(arrival.advance(u64::MAX, &mut ep).unwrap());
                assert!(arrival.is_over());
            }
            shared.barrier.wait();
            if part == CANCELLED.0 {
                caches.remove(&CANCELLED.1);
                shared.texts.lock().unwrap().remove(&CANCELLED.1);
            }
            let to = layout.shape(shared.world);
            let prepared = (to != model.attention_shape()).then(|| {
                let pages = (&pool, &caches);
                prepare_to(to, &mut model, &mut ep, pages, (400, lazily), &mut |_| None).unwrap()
            });
            let placement = layout.placement(&config, shared.world);
            if placement != *ep.placement() {
                model.check_switch(&placement, &ep).unwrap();
                let outcome = model.switch_experts(&placement, &mut ep, &mut |_| None).unwrap();
                assert_eq!(outcome, SwitchOutcome::Committed);
            }
            let homes = match &prepared {
                Some(prepared) => prepared.groups.clone(),
                None => caches.keys().map(|id| (*id, rank as u16)).collect(),
            };
            shared.rehome(rank, homes);
            if let Some(prepared) = prepared {
                model.commit_attention();
                if to.ranks == shared.world {
                    shared.digests.lock().unwrap().push(prepared.digest);
                }
                let old = std::mem::replace(&mut caches, prepared.sequences.into_iter().collect());
                (pool, arrival) = (prepared.pool, prepared.arrival);
                if let Some(arrival) = &mut arrival {
                    arrival.old = old.into_values().collect();
                }
            }
            let ranks = layout.experts.groups().map_or(shared.world, |_| to.ranks);
            assert_eq!((model.attention_shape(), ep.step_ranks().len()), (to, ranks));
            shared.barrier.wait();
        }
        for _ in 0..layout.steps {
            if let Some(arrival) = &mut arrival {
                caches.extend(arrival.advance(0, &mut ep).unwrap());
            }
            shared.step(at, &mut model, &mut ep, &mut caches);
            at += 1;
        }
    }
}

/// Runs the oracle.
fn run_naively(dir: &Path, shared: &Shared, homes: &[BTreeMap<u64, u16>], rank: usize, links: Vec<LocalTransport>) {
    let config = ModelConfig::load(dir).unwrap();
    let mut caches: BTreeMap<u64, KvCache> = BTreeMap::new();
    let mut first = 0;
    let mut at = 0;
    for ((part, layout), link) in shared.parts.iter().enumerate().zip(links) {
        let Part { attention, experts, .. } = *layout;
        let (id, ranks) = (RankId::new(rank as u16), layout.shape(shared.world).ranks);
        let groups: Vec<RankGroups> = experts.groups().into_iter().collect();
        let widths = groups.iter().map(|groups| groups.ranks.into()).collect();
        let plan = AttentionPlan { group: Some(ranks), groups: widths, ..attention.into() };
        let copies = layout.fixed_copies(&config, shared.world);
        let mut model = Model::load_divided(dir, id, copies.clone(), experts, plan).unwrap();
        let mut ep = fixed(link, &copies, experts);
        if part == 0 {
            caches =
                shared.own(rank, model.attention_shape()).into_keys().map(|id| (id, model.new_sequence())).collect();
        } else {
            shared.barrier.wait();
            shared.publish(&caches, first);
            if rank == 0 {
                let mut texts = shared.texts.lock().unwrap();
                if part == CANCELLED.0 {
                    texts.remove(&CANCELLED.1);
                }
                texts.iter_mut().for_each(|(id, text)| text.home = homes[part - 1][id].into());
            }
            shared.barrier.wait();
            first = first_head(&config, HeadSlice::new(&config, rank % ranks, ranks).unwrap());
            let contents = shared.contents.lock().unwrap().clone();
            let own = shared.own(rank, model.attention_shape());
            caches = own.into_keys().map(|id| (id, rebuilt(&model, &contents[&id], first))).collect();
            shared.barrier.wait();
            if rank == 0 {
                shared.contents.lock().unwrap().clear();
            }
            shared.barrier.wait();
        }
        for _ in 0..layout.steps {
            shared.step(at, &mut model, &mut ep, &mut caches);
            at += 1;
        }
    }
}

fn check(name: &str, world: usize, parts: Vec<Part>, lazily: bool) {
    let folder = fixture(name);
    let dir = folder.path();
    let config = ModelConfig::load(dir).unwrap();
    let whole = parts.iter().filter(|part| part.shape(world).ranks == world).count();
    let found = Shared::new(&config, world, parts.clone());
    on_ranks(world, |rank, link| run_switched(dir, (&found, lazily), rank, link));
    let homes = found.homes.into_inner().unwrap();
    let found_logits = found.logits.into_inner().unwrap();
    let schedule = Some(found_logits.keys().copied().collect());
    let expected = Shared { schedule, ..Shared::new(&config, world, parts.clone()) };
    let meshes: Vec<Mutex<Vec<Option<LocalTransport>>>> =
        parts.iter().map(|_| Mutex::new(LocalTransport::mesh(world).into_iter().map(Some).collect())).collect();
    on_ranks(world, |rank, _| {
        let links = meshes.iter().map(|mesh| mesh.lock().unwrap()[rank].take().unwrap()).collect();
        run_naively(dir, &expected, &homes, rank, links);
    });
    let expected = expected.logits.into_inner().unwrap();
    assert!(found_logits.keys().eq(expected.keys()), "{name}, {world} ranks: other steps");
    for (step, logits) in &found_logits {
        assert!(logits == &expected[step], "{name}, {world} ranks: step and sequence {step:?}");
    }
    let spread_out = parts[1..].iter().zip(&homes).filter(|(part, _)| part.shape(world).ranks < world);
    for (_, homes) in spread_out {
        assert!(homes.values().any(|home| *home != homes[&0]), "{name}: more than one group has sequences");
    }
    let digests = found.digests.into_inner().unwrap();
    assert_eq!(digests.len(), whole * world);
    for change in digests.chunks(world) {
        assert!(change.iter().all(|digest| *digest == change[0]), "{name}: pools differ between ranks");
    }
}

#[test]
fn every_family_steps_as_the_oracle_through_four_changes() {
    for name in FIXTURES {
        for (world, lazily) in [(2, false), (2, true), (4, false), (4, true)] {
            check(name, world, dp_and_tp(), lazily);
        }
    }
}

/// Between any two of ep, ep with replicas, tp and two groups of two, and over the mixed layouts.
#[test]
fn every_family_steps_as_the_oracle_between_any_two_layouts() {
    for name in FIXTURES {
        check(name, 4, named(&["ep", "tp", "tp:2", "ep", "tp:2", "tp", "ep"], 4), false);
        check(name, 4, named(&["ep", "ep+", "tp", "ep+", "tp:2", "ep+", "ep"], 4), false);
    }
    check("qwen3-moe", 4, named(&["ep", "tp:2", "dp-tp", "tp:2", "tp-ep", "tp:2", "ep"], 4), false);
}

/// Between two nodes of two and each of ep, ep with replicas, tp, two groups of two and the mixed layouts. The oracle's
/// ranks are loaded with experts hybrid and a placement over nodes, and cannot switch.
#[test]
fn every_family_steps_as_the_oracle_to_hybrid_nodes_and_back() {
    for name in FIXTURES {
        let (hybrid, replicated) = ("hybrid:2x2", "hybrid:2x2+");
        check(name, 4, named(&["ep", hybrid, "tp", hybrid, "tp:2", hybrid, "ep"], 4), false);
        check(name, 4, named(&["ep+", replicated, "ep+", hybrid, "ep+", replicated, hybrid], 4), false);
    }
    let fused = "hybrid:2x2:2";
    check("qwen3-moe", 4, named(&[fused, "dp-tp", fused, "tp-ep", fused, "tp", fused], 4), true);
    check("mixtral", 8, named(&["ep", "hybrid:2x4", "tp:4", "hybrid:2x4", "tp:2", "hybrid:2x4", "ep"], 8), false);
}

/// Groups of two, of four, and all heads again, on a unit that cannot have attention tp over all its ranks.
#[test]
fn groups_become_larger_and_smaller_as_the_oracle_says() {
    check("mixtral", 8, named(&["ep", "tp:4", "tp:2", "tp:4", "ep", "tp:2", "ep"], 8), false);
}

/// The content of a rank's sequences, and its pool's counts.
fn state(pool: &KvPool, caches: &BTreeMap<u64, KvCache>, first: usize) -> (Vec<Content>, KvUsage) {
    (caches.values().map(|cache| content(cache, first)).collect(), pool.usage())
}

/// Switching back and forth without a step in between keeps all bytes of keys, values and routes, wherever they are,
/// and prefixes stay known.
#[test]
fn there_and_back_every_byte_is_the_same() {
    for (name, world) in [("qwen3-moe", 2), ("qwen3-moe", 4), ("deepseek-v2-lite", 2)] {
        let folder = fixture(name);
        let dir = folder.path();
        let config = ModelConfig::load(dir).unwrap();
        let copies = dp_and_tp()[0].copies(&config, world);
        let shared = Shared::new(&config, world, dp_and_tp());
        let found: Vec<(usize, usize)> = on_ranks(world, |rank, link| {
            let (mut model, mut ep) = (both(dir, rank, world), joined(link, &copies));
            let mut pool = KvPool::new(model.cache_shape(), 400, true);
            let mut caches = admitted(&pool, shared.own(rank, model.attention_shape()));
            (0..3).for_each(|at| shared.step(at, &mut model, &mut ep, &mut caches));
            let texts = shared.texts.lock().unwrap().clone();
            // One sequence ends: its pages stay known, and move along.
            caches.pop_first();
            shared.publish(&caches, 0);
            let before = shared.contents.lock().unwrap().clone();
            for _ in 0..2 {
                let prepared = prepare(&mut model, &mut ep, (&pool, &caches), (400, false), &mut |_| None).unwrap();
                model.commit_attention();
                (pool, caches) = (prepared.pool, prepared.sequences.into_iter().collect());
            }
            assert_eq!(model.attention(), Attention::Dp);
            for (id, cache) in &caches {
                assert!(content(cache, 0) == before[id], "{name}: sequence {id}");
            }
            // The first sequence of each rank has ended; its pages may be on any rank.
            let prompts = (0..world as u64).map(|ended| texts[&ended].prompt.clone());
            (caches.len(), prompts.map(|prompt| pool.admit(&prompt, prompt.len()).map_or(0, |cache| cache.len())).sum())
        });
        assert_eq!(found.iter().map(|(sequences, _)| sequences).sum::<usize>(), 2 * world + 1, "{name}");
        assert!(found.iter().any(|(_, known)| *known > 0), "{name}: pages that no sequence holds are known still");
    }
}

/// An objection in any phase, by any rank, in both directions, and too little room: nothing changes, and the next
/// attempt succeeds.
#[test]
fn an_objection_changes_nothing_on_any_rank() {
    let (folder, world) = (fixture("qwen3-moe"), 2);
    let dir = folder.path();
    let config = ModelConfig::load(dir).unwrap();
    let copies = dp_and_tp()[0].copies(&config, world);
    let shared = Shared::new(&config, world, dp_and_tp());
    on_ranks(world, |rank, link| {
        let (mut model, mut ep) = (both(dir, rank, world), joined(link, &copies));
        let mut pool = KvPool::new(model.cache_shape(), 400, true);
        let mut caches = admitted(&pool, shared.own(rank, model.attention_shape()));
        let mut first = 0;
        (0..2).for_each(|at| shared.step(at, &mut model, &mut ep, &mut caches));
        for _ in 0..2 {
            let before = state(&pool, &caches, first);
            // Lazily, nothing moves yet.
            let phases = [KvPhase::Planning, KvPhase::Moving { round: 0 }, KvPhase::Checking];
            for (lazily, phases) in [(false, &phases[..]), (true, &phases[..1])] {
                for (objector, &phase) in (0..world).flat_map(|rank| phases.iter().map(move |phase| (rank, phase))) {
                    let mut objection =
                        |at| (objector == rank && at == phase).then(|| format!("it was asked to in {at:?}"));
                    let cause =
                        prepare(&mut model, &mut ep, (&pool, &caches), (400, lazily), &mut objection).unwrap_err();
                    assert_eq!(cause, format!("rank {objector}: it was asked to in {phase:?}"));
                    assert!(state(&pool, &caches, first) == before);
                }
                let cause = prepare(&mut model, &mut ep, (&pool, &caches), (3, lazily), &mut |_| None).unwrap_err();
                assert!(cause.starts_with("rank 0: ") && cause.contains("pages") && cause.contains('3'), "{cause}");
                assert!(state(&pool, &caches, first) == before);
            }
            let prepared = prepare(&mut model, &mut ep, (&pool, &caches), (400, false), &mut |_| None).unwrap();
            model.commit_attention();
            (pool, caches) = (prepared.pool, prepared.sequences.into_iter().collect());
            first = first_head(&config, HeadSlice::new(&config, rank, world).unwrap());
        }
    });
}
