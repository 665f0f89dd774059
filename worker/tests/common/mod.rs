//! The bundled model, its golden vectors, the small models of every family, and several ranks as threads.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::f16;
use safetensors::SafeTensors;
use semmoe_kernels::collectives::{Exchange, PrivateMemory, Unobserved};
use semmoe_tables::{
    Attention, ExpertCopies, GroupId, LayerIdx, ModelInfo, NO_GROUP, Placement, Provenance, RankId, Replicas, Tables,
    TablesBuilder, TpParts,
};
use semmoe_worker::ep::{
    Counters, ExpertLayout, ExpertParallel, LocalTransport, Lockstep, StepPhase, SwitchTargets, SwitchableRows,
    UnitError, Wake, Waker, WireRows, WireType,
};
use semmoe_worker::model::{AttentionPlan, ExpertRoom, KvCache, Model, ModelConfig, StepItem, Wants};
use serde_json::Value;

pub(crate) fn model_dir() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/tiny-qwen3moe-15m")).to_path_buf()
}

/// Small models of every family: folders of `tests/fixtures`.
pub(crate) const FIXTURES: [&str; 7] =
    ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"];
/// Tokens in each golden text.
pub(crate) const FIXTURE_TOKENS: usize = 16;
/// Tolerance for f32 sums in another order.
pub(crate) const TOLERANCE: f32 = 1e-5;

/// A fixture's folder.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

pub(crate) fn config() -> ModelConfig {
    ModelConfig::load(&model_dir()).unwrap()
}

/// The results of Transformers for one prompt.
pub(crate) struct Golden {
    pub(crate) ids: Vec<u32>,
    /// `[L][position][k]`
    pub(crate) experts: Vec<Vec<Vec<u16>>>,
    pub(crate) greedy: Vec<u32>,
    /// `[V]`
    pub(crate) last_logits: Vec<f32>,
    /// `[L, positions, N]`
    pub(crate) router_logits: Vec<f32>,
    /// `[layers + 1, H]`
    pub(crate) hidden: Vec<f32>,
}

pub(crate) fn golden() -> Vec<Golden> {
    let dir = model_dir().join("golden");
    let json: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |prompt: usize, name: &str| -> Vec<f32> {
        let view = tensors.tensor(&format!("{prompt}.{name}")).unwrap();
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let prompts = json["prompts"].as_array().unwrap();
    let golden = |(i, prompt): (usize, &Value)| {
        let field = |name: &str| prompt[name].clone();
        Golden {
            ids: serde_json::from_value(field("input_ids")).unwrap(),
            experts: serde_json::from_value(field("router_topk_ids")).unwrap(),
            greedy: serde_json::from_value(field("greedy_16")).unwrap(),
            last_logits: tensor(i, "logits_last"),
            router_logits: tensor(i, "router_logits"),
            hidden: tensor(i, "hidden_last_position"),
        }
    };
    prompts.iter().enumerate().map(golden).collect()
}

/// The largest difference relative to the largest expected magnitude.
pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / scale
}

pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, best) as u32
}

/// Contiguous halves, quarters and so on.
pub(crate) fn contiguous(world: u16) -> Placement {
    contiguous_of(&config(), world)
}

/// Equal contiguous parts of another model's experts.
pub(crate) fn contiguous_of(config: &ModelConfig, world: u16) -> Placement {
    Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, world).unwrap()
}

/// Equally many random experts on each rank.
pub(crate) fn shuffled(world: u16, seed: u64) -> Placement {
    shuffled_of(&config(), world, seed)
}

/// Equally many random experts of another model on each rank.
pub(crate) fn shuffled_of(config: &ModelConfig, world: u16, seed: u64) -> Placement {
    let mut random = fastrand::Rng::with_seed(seed);
    let layer = |_| {
        let mut groups: Vec<u16> = (0..config.num_experts as u16).map(|expert| expert % world).collect();
        random.shuffle(&mut groups);
        groups
    };
    Placement::new(world, (0..config.num_moe_layers()).map(layer).collect()).unwrap()
}

/// A random placement in which every rank has `extra` additional experts and an empty slot in every layer.
pub(crate) fn replicated_of(config: &ModelConfig, world: u16, extra: usize, seed: u64) -> Replicas {
    let placement = shuffled_of(config, world, seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut slots = Vec::new();
    for layer in (0..config.num_moe_layers()).map(|layer| LayerIdx::new(layer as u16)) {
        for group in (0..world).map(GroupId::new) {
            let mut held: Vec<i32> = placement.experts_of(layer, group).map(|expert| expert.get().into()).collect();
            let mut others: Vec<i32> = (0..config.num_experts as i32).filter(|expert| !held.contains(expert)).collect();
            random.shuffle(&mut others);
            held.extend(&others[..extra]);
            held.sort_unstable();
            slots.push(-1);
            slots.extend(held);
        }
    }
    let each = slots.len() / config.num_moe_layers();
    Replicas::new(&config.model_info("tiny-qwen3moe-15m", None), world, each, slots).unwrap()
}

/// A placement with or without replicas.
pub(crate) trait Placed: Into<ExpertCopies> + Copy + Send + Sync {}

impl<P: Into<ExpertCopies> + Copy + Send + Sync> Placed for P {}

/// One rank with its model.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) model: Model,
    pub(crate) ep: ExpertParallel,
}

impl Rank {
    pub(crate) fn new(transport: Box<dyn Lockstep>, placement: impl Placed) -> Self {
        Self::of(&model_dir(), transport, placement)
    }

    /// A rank of another model.
    pub(crate) fn of(model_dir: &Path, transport: Box<dyn Lockstep>, placement: impl Placed) -> Self {
        Self::with_experts(model_dir, transport, placement, ExpertLayout::Ep)
    }

    /// A rank with its experts, or its slices of all.
    pub(crate) fn with_experts(
        model_dir: &Path,
        transport: Box<dyn Lockstep>,
        placement: impl Placed,
        experts: impl Into<ExpertRoom>,
    ) -> Self {
        Self::divided(model_dir, transport, placement, experts, Attention::Dp)
    }

    /// A rank of a unit with attention tp, with its experts or its slices of all.
    pub(crate) fn tp(
        model_dir: &Path,
        transport: Box<dyn Lockstep>,
        placement: impl Placed,
        experts: ExpertLayout,
        tables: Option<Arc<Tables>>,
    ) -> Self {
        Self::divided(model_dir, transport, placement, experts, AttentionPlan { tables, ..Attention::Tp.into() })
    }

    fn divided(
        model_dir: &Path,
        transport: Box<dyn Lockstep>,
        placement: impl Placed,
        experts: impl Into<ExpertRoom>,
        plan: impl Into<AttentionPlan>,
    ) -> Self {
        let (rank, experts, placement) = (transport.rank(), experts.into(), &placement.into());
        let model = Model::load_divided(model_dir, RankId::new(rank as u16), placement, experts, plan).unwrap();
        Self { rank, model, ep: join(transport, placement, experts.layout) }
    }

    /// A rank that can switch to the hybrid experts of its room.
    pub(crate) fn switchable(
        model_dir: &Path,
        transport: Box<dyn Lockstep>,
        placement: impl Placed,
        room: ExpertRoom,
    ) -> Self {
        let (rank, placement) = (transport.rank(), &placement.into());
        let model = Model::load_divided(model_dir, RankId::new(rank as u16), placement, room, Attention::Dp).unwrap();
        let targets = SwitchTargets { hybrid: room.hybrid, ..SwitchTargets::default() };
        let (memory, observer) = (PrivateMemory::new(rank), Box::new(Unobserved));
        let rows = SwitchableRows::join(&targets, WireRows::f32, transport, memory, observer).unwrap();
        Self { rank, model, ep: ExpertParallel::over(rows, placement, room.layout).unwrap() }
    }

    /// A rank of a unit with attention tp in `groups` groups.
    pub(crate) fn grouped(
        model_dir: &Path,
        transport: Box<dyn Lockstep>,
        placement: &ExpertCopies,
        experts: ExpertLayout,
        groups: usize,
        wire: WireType,
    ) -> Self {
        let (rank, world) = (transport.rank(), transport.world());
        let id = RankId::new(rank as u16);
        let plan = AttentionPlan { group: Some(world / groups), ..Attention::Tp.into() };
        let model = Model::load_divided(model_dir, id, placement, experts, plan).unwrap();
        let observer = Box::new(Unobserved);
        let rows = match wire {
            WireType::F32 => experts.join_grouped(groups, WireRows::f32, transport, PrivateMemory::new(rank), observer),
            WireType::Bf16 => {
                experts.join_grouped(groups, WireRows::bf16, transport, PrivateMemory::new(rank), observer)
            }
        };
        let ep = ExpertParallel::over(rows.unwrap(), placement.clone(), experts).unwrap();
        Self { rank, model, ep: ep.with_attention_groups(groups) }
    }

    pub(crate) fn alone() -> Self {
        Self::new(Box::new(LocalTransport::mesh(1).remove(0)), &contiguous(1))
    }

    pub(crate) fn counted(&self) -> Counters {
        self.ep.counters().clone()
    }

    /// Runs one prompt from an empty cache: returns the logits after its last token, its routes, and its cache.
    pub(crate) fn prefill(&mut self, tokens: &[u32]) -> (Vec<f32>, Vec<u16>, KvCache) {
        let mut kv = self.model.new_sequence();
        let mut items = [StepItem { kv: &mut kv, tokens, wants: Wants::Logits, phase: StepPhase::Prefill }];
        let out = self.model.step(&mut items, &mut self.ep).unwrap();
        let (logits, routes) = (out.logits(0).unwrap().to_vec(), out.routes(0).to_vec());
        (logits, routes, kv)
    }

    /// Continues all prompts together, greedily, in exactly `new_tokens` steps.
    pub(crate) fn greedy(&mut self, prompts: &[&[u32]], new_tokens: usize) -> Vec<Vec<u32>> {
        let mut kvs: Vec<KvCache> = prompts.iter().map(|_| self.model.new_sequence()).collect();
        let mut texts = vec![Vec::new(); prompts.len()];
        for step in 0..new_tokens {
            let phase = if step == 0 { StepPhase::Prefill } else { StepPhase::Decode };
            let parts = kvs.iter_mut().zip(prompts).zip(&texts);
            let mut items: Vec<StepItem<'_>> = parts
                .map(|((kv, prompt), text): (_, &Vec<u32>)| {
                    let tokens = if step == 0 { *prompt } else { &text[step - 1..] };
                    StepItem { kv, tokens, wants: Wants::Logits, phase }
                })
                .collect();
            let out = self.model.step(&mut items, &mut self.ep).unwrap();
            let next: Vec<u32> = (0..prompts.len()).map(|i| argmax(out.logits(i).unwrap())).collect();
            texts.iter_mut().zip(next).for_each(|(text, token)| text.push(token));
        }
        texts
    }
}

/// Runs every rank on its own thread, and returns their results in rank order.
pub(crate) fn on_threads<L: Send, T: Send>(links: Vec<L>, work: impl Fn(L) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = links.into_iter().map(|link| scope.spawn(move || work(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs the ranks of a unit over the given transports.
pub(crate) fn on_ranks<T: Send>(
    transports: Vec<Box<dyn Lockstep>>,
    placement: impl Placed,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    on_ranks_of(&model_dir(), transports, placement, work)
}

/// Runs the ranks of a unit of another model over the given transports.
pub(crate) fn on_ranks_of<T: Send>(
    model_dir: &Path,
    transports: Vec<Box<dyn Lockstep>>,
    placement: impl Placed,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    on_threads(transports, |transport| work(Rank::of(model_dir, transport, placement)))
}

pub(crate) fn local_mesh(world: u16) -> Vec<Box<dyn Lockstep>> {
    LocalTransport::mesh(usize::from(world)).into_iter().map(|t| Box::new(t) as Box<dyn Lockstep>).collect()
}

/// Runs the ranks of a unit with attention tp over the given transports.
pub(crate) fn on_tp_ranks<T: Send>(
    model_dir: &Path,
    transports: Vec<Box<dyn Lockstep>>,
    placement: impl Placed,
    tables: Option<&Arc<Tables>>,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let experts = ExpertLayout::Ep;
    on_threads(transports, |transport| work(Rank::tp(model_dir, transport, placement, experts, tables.cloned())))
}

/// Tables for attention dp without token labels.
pub(crate) fn dp_tables(info: ModelInfo, placement: Placement) -> TablesBuilder {
    let groups = usize::from(placement.groups());
    let share = vec![f16::from_f64(1.0 / groups as f64); info.vocab_size as usize * groups];
    TablesBuilder::dp(info, provenance(), placement, share, vec![0.0; groups])
}

pub(crate) fn provenance() -> Provenance {
    Provenance { source: "test".into(), created: "2026-01-01T00:00:00Z".into() }
}

/// The bundled model's information for tables.
pub(crate) fn model_info() -> ModelInfo {
    config().model_info("tiny-qwen3moe-15m", None)
}

/// Random tables for attention tp: two labels for most tokens and for most pairs of groups, none for the others.
pub(crate) fn tp_tables(config: &ModelConfig, placement: &Placement, seed: u64) -> Tables {
    tp_builder(config, placement.clone(), seed).finish().unwrap()
}

/// Random tables for attention tp with replicas: two labels for most tokens and for most pairs of groups, none for the
/// others.
pub(crate) fn replicated_tp_tables(config: &ModelConfig, replicas: &Replicas, seed: u64) -> Tables {
    let builder = tp_builder(config, contiguous_of(config, replicas.groups()), seed);
    builder.replicas(replicas.clone()).finish().unwrap()
}

fn tp_builder(config: &ModelConfig, placement: Placement, seed: u64) -> TablesBuilder {
    let mut random = fastrand::Rng::with_seed(seed);
    let groups = placement.groups();
    let labelled = usize::from(groups).min(2);
    let mut labels = |rows: usize, unknown: usize, unused: usize| {
        let (mut group, mut prob) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let (first, share) = (random.u16(0..groups), 0.5 + 0.4 * random.f64());
            let known = row >= unused && random.usize(..unknown) > 0;
            for (label, share) in [share, 0.9 - share].into_iter().take(labelled).enumerate() {
                group.push(if known { (first + label as u16) % groups } else { NO_GROUP });
                prob.push(if known { f16::from_f64(share) } else { f16::ZERO });
            }
        }
        (group, prob)
    };
    let pairs = usize::from(groups) * usize::from(groups);
    let (token_group, token_prob) = labels(config.num_moe_layers() * config.vocab_size, 6, 0);
    let (transition_group, transition_prob) = labels(config.num_moe_layers() * pairs, 3, 2 * pairs);
    let parts = TpParts { labels: labelled, token_group, token_prob, transition_group, transition_prob };
    let info = config.model_info("tiny-qwen3moe-15m", None);
    TablesBuilder::tp(info, provenance(), placement, parts, vec![0.0; usize::from(groups)])
}

/// An independent implementation of [`Placement::main_group`].
pub(crate) fn main_group(placement: &Placement, layer: usize, experts: &[u16]) -> GroupId {
    let groups = placement.layer(LayerIdx::new(layer as u16));
    let held = |group: u16| experts.iter().filter(|expert| groups[usize::from(**expert)] == group).count();
    GroupId::new((0..placement.groups()).rev().max_by_key(|&group| held(group)).unwrap())
}

/// Collectives over messages of a link.
pub(crate) fn join(link: Box<dyn Lockstep>, placement: &ExpertCopies, experts: ExpertLayout) -> ExpertParallel {
    let memory = PrivateMemory::new(link.rank());
    let unit = WireRows::f32(experts.join(link, memory, Box::new(Unobserved)).unwrap());
    ExpertParallel::over(unit, placement.clone(), experts).unwrap()
}

/// The layout of a unit.
#[derive(Clone, Copy)]
pub(crate) struct Laid<'a> {
    pub(crate) world: u16,
    pub(crate) attention: Attention,
    pub(crate) placement: &'a Placement,
    pub(crate) experts: ExpertLayout,
}

/// Runs every rank on its own thread; returns results and counts in rank order, and all bytes sent.
pub(crate) fn on_layout<T: Send>(
    model_dir: &Path,
    laid: Laid<'_>,
    work: impl Fn(&mut Rank) -> T + Sync,
) -> (Vec<(T, Counters)>, u64) {
    let Laid { world, attention, placement, experts } = laid;
    let (transports, meters) = metered_mesh(world);
    let ended = on_threads(transports, |transport| {
        let mut rank = match attention {
            Attention::Dp => Rank::with_experts(model_dir, transport, placement, experts),
            Attention::Tp => Rank::tp(model_dir, transport, placement, experts, None),
        };
        // No rank may leave before all have finished.
        (work(&mut rank), rank.counted(), rank)
    });
    let results = ended.into_iter().map(|(result, counted, _)| (result, counted)).collect();
    let sent = meters.iter().map(|[sent, _]| sent.load(Ordering::Relaxed)).sum();
    (results, sent)
}

/// The results of Transformers for one prompt of a fixture.
pub(crate) struct FixtureGolden {
    pub(crate) ids: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    /// `[positions, V]`
    pub(crate) logits: Vec<f32>,
    /// `[L, positions, k]`
    pub(crate) experts: Vec<u16>,
    pub(crate) weights: Vec<f32>,
}

pub(crate) fn fixture_golden(dir: &Path) -> Vec<FixtureGolden> {
    let json: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |prompt: usize, name: &str| -> Vec<[u8; 4]> {
        let view = tensors.tensor(&format!("{prompt}.{name}")).unwrap();
        view.data().as_chunks().0.to_vec()
    };
    let floats = |prompt, name| words(prompt, name).into_iter().map(f32::from_le_bytes).collect();
    let golden = |(i, prompt): (usize, &Value)| FixtureGolden {
        ids: serde_json::from_value(prompt["input_ids"].clone()).unwrap(),
        greedy: serde_json::from_value(prompt["greedy"].clone()).unwrap(),
        logits: floats(i, "logits"),
        experts: words(i, "experts").into_iter().map(|word| i32::from_le_bytes(word) as u16).collect(),
        weights: floats(i, "weights"),
    };
    json["prompts"].as_array().unwrap().iter().enumerate().map(golden).collect()
}

/// The prompts of a fixture and Transformers' continuations.
pub(crate) fn fixture_prompts(dir: &Path) -> Vec<(Vec<u32>, Vec<u32>)> {
    let json: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let list = |prompt: &Value, name: &str| serde_json::from_value(prompt[name].clone()).unwrap();
    let prompts = json["prompts"].as_array().unwrap();
    prompts.iter().map(|prompt| (list(prompt, "input_ids"), list(prompt, "greedy"))).collect()
}

/// A transport that counts what it carries.
struct Metered {
    inner: Box<dyn Lockstep>,
    sent_bytes: Arc<AtomicU64>,
    collectives: Arc<AtomicU64>,
}

impl Lockstep for Metered {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn group_all_to_all(&mut self, exchange: Exchange<'_>) -> Result<(), UnitError> {
        let me = self.rank();
        let to_peers = exchange.peers.iter().zip(exchange.outgoing).filter(|(peer, _)| **peer != me);
        let bytes: usize = to_peers.map(|(_, message)| message.len()).sum();
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.collectives.fetch_add(1, Ordering::Relaxed);
        self.inner.group_all_to_all(exchange)
    }

    fn wait(&mut self) -> Result<Wake, UnitError> {
        self.inner.wait()
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

/// Bytes sent, and the number of collectives.
pub(crate) type Meters = [Arc<AtomicU64>; 2];

/// A mesh of metered ends, with their meters.
pub(crate) fn metered_mesh(world: u16) -> (Vec<Box<dyn Lockstep>>, Vec<Meters>) {
    let meter = |inner| {
        let (sent_bytes, collectives) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let meters = [Arc::clone(&sent_bytes), Arc::clone(&collectives)];
        (Box::new(Metered { inner, sent_bytes, collectives }) as Box<dyn Lockstep>, meters)
    };
    local_mesh(world).into_iter().map(meter).unzip()
}
