//! The worker's steps over the CUDA sources: the GPU's results equal the CPU's.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod client;
mod processes;
mod serving;
mod spread;
mod switch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::Accelerator as _;
use semmoe_tables::Attention::{self, Dp, Tp};
use semmoe_tables::{ExpertCopies, Placement};
use semmoe_worker::ep::{ExpertLayout, ExpertParallel, LocalTransport, StepPhase};
use semmoe_worker::model::{DeviceWork, Draw, KvCache, Model, ModelConfig, Next, StepItem, Wants, likeliest};

use semmoe_worker_shim::{Layout, Rank, Watched, loaded_alone, on_gpus, on_streams};

/// Length of greedy continuations.
const NEW_TOKENS: usize = 6;
/// Longer prompts are split over two steps.
const CUT: usize = 33;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../worker/tests/fixtures").join(name)
}

/// Prompts of several lengths; together with the answers they fill a fixture's context.
fn prompts(vocabulary: usize) -> Vec<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(38);
    [5, 1, 58, 17, 40].into_iter().map(|len| (0..len).map(|_| random.u32(..vocabulary as u32)).collect()).collect()
}

/// Continues prompts greedily, with their first step cut at `cut` tokens; returns the logits after each token.
fn continued(rank: &mut Rank, prompts: &[Vec<u32>], cut: usize) -> Vec<Text> {
    let mut kvs: Vec<KvCache> = prompts.iter().map(|_| rank.model.new_sequence()).collect();
    let mut texts: Vec<Text> = prompts.iter().map(|_| Text::default()).collect();
    let all: Vec<usize> = (0..prompts.len()).collect();
    let parts = |prompt: &[u32]| prompt.len().min(cut);
    let heads: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..parts(prompt)]).collect();
    let ends: Vec<bool> = prompts.iter().map(|prompt| prompt.len() <= cut).collect();
    step(rank, &all, &mut kvs, &heads, &ends, &mut texts);
    let rest: Vec<usize> = all.iter().copied().filter(|&at| !ends[at]).collect();
    let tails: Vec<&[u32]> = rest.iter().map(|&at| &prompts[at][cut..]).collect();
    step(rank, &rest, &mut kvs, &tails, &vec![true; rest.len()], &mut texts);
    for _ in 1..NEW_TOKENS {
        let last: Vec<Vec<u32>> = texts.iter().map(|text| vec![text.tokens[text.tokens.len() - 1]]).collect();
        let last: Vec<&[u32]> = last.iter().map(|token| &token[..]).collect();
        step(rank, &all, &mut kvs, &last, &vec![true; all.len()], &mut texts);
    }
    texts
}

/// The answer of one prompt.
#[derive(Clone, Default, PartialEq, Debug)]
struct Text {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    /// `[tokens, L, k]`
    routes: Vec<u16>,
}

/// One step of some of the sequences.
fn step(rank: &mut Rank, which: &[usize], kvs: &mut [KvCache], tokens: &[&[u32]], ends: &[bool], texts: &mut [Text]) {
    let phase = StepPhase::Prefill;
    let mut given = tokens.iter().zip(ends);
    let mut items = Vec::new();
    for (at, kv) in kvs.iter_mut().enumerate() {
        if which.contains(&at) {
            let (tokens, ends) = given.next().unwrap();
            let wants = if *ends { Wants::Logits } else { Wants::Nothing };
            items.push(StepItem { kv, tokens, wants, phase });
        }
    }
    let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
    for (item, &at) in which.iter().enumerate() {
        texts[at].routes.extend_from_slice(out.routes(item));
        if let Some(logits) = out.logits(item) {
            texts[at].tokens.push(likeliest(logits).unwrap());
            texts[at].logits.push(logits.to_vec());
        }
    }
}

/// The CPU's answers.
fn expected(dir: &Path, prompts: &[Vec<u32>]) -> Vec<Text> {
    let config = ModelConfig::load(dir).unwrap();
    let placement = contiguous(&config, 1);
    let model = Model::load(dir, semmoe_tables::RankId::new(0), &placement).unwrap();
    let ep = ExpertParallel::new(Box::new(LocalTransport::mesh(1).remove(0)), &placement).unwrap();
    continued(&mut Rank { model, ep }, prompts, CUT)
}

fn contiguous(config: &ModelConfig, groups: u16) -> Placement {
    Placement::contiguous(config.num_moe_layers(), config.num_experts as u16, groups).unwrap()
}

/// The largest difference of two texts' logits relative to the largest logit, up to the first token that differs.
fn furthest(found: &[Text], expected: &[Text]) -> f32 {
    let mut most: f32 = 0.0;
    for (found, expected) in found.iter().zip(expected) {
        let same = found.tokens.iter().zip(&expected.tokens).take_while(|(a, b)| a == b).count();
        for (found, expected) in found.logits.iter().zip(&expected.logits).take(same + 1) {
            let scale = expected.iter().fold(1.0f32, |most, logit| most.max(logit.abs()));
            most = found.iter().zip(expected).fold(most, |most, (a, b)| {
                let difference = (a - b).abs() / scale;
                if difference.is_nan() { f32::INFINITY } else { most.max(difference) }
            });
        }
    }
    most
}

fn holds(family: &str, layout: Layout) {
    let dir = fixture(family);
    let config = ModelConfig::load(&dir).unwrap();
    let prompts = prompts(config.vocab_size);
    let expected = expected(&dir, &prompts);
    let placement: ExpertCopies = (&contiguous(&config, layout.world as u16)).into();
    let Some(found) = on_gpus(&dir, &placement, &layout, |mut rank| {
        let (me, world) = (usize::from(rank.ep.rank().get()), layout.world);
        let mine: Vec<usize> = match layout.attention {
            Attention::Dp => (me..prompts.len()).step_by(world).collect(),
            Attention::Tp => (0..prompts.len()).collect(),
        };
        let own: Vec<Vec<u32>> = mine.iter().map(|&at| prompts[at].clone()).collect();
        (mine, continued(&mut rank, &own, CUT))
    }) else {
        return;
    };
    for (mine, texts) in found {
        let expected: Vec<Text> = mine.iter().map(|&at| expected[at].clone()).collect();
        let furthest = furthest(&texts, &expected);
        // In bf16 a near tie of the router may select another expert.
        let limit = if layout.dtype == Dtype::F32 { 1e-4 } else { 0.15 };
        assert!(furthest < limit, "{family}, {layout:?}: logits differ by {furthest}");
        if layout.dtype == Dtype::F32 {
            for (found, expected) in texts.iter().zip(&expected) {
                assert_eq!(found.tokens, expected.tokens, "{family}, {layout:?}");
            }
        }
    }
}

const FAMILIES: [&str; 4] = ["qwen3-moe", "mixtral", "olmoe", "qwen2-moe"];

#[test]
fn one_gpu_computes_what_the_cpu_computes() {
    for family in FAMILIES {
        holds(family, Layout::new(1, Attention::Dp, ExpertLayout::Ep, Dtype::F32));
    }
}

#[test]
fn ranks_with_attention_dp_do() {
    for (world, experts) in [(2, ExpertLayout::Ep), (2, ExpertLayout::Tp), (4, ExpertLayout::Ep)] {
        holds("qwen3-moe", Layout::new(world, Attention::Dp, experts, Dtype::F32));
    }
    holds("mixtral", Layout::new(2, Attention::Dp, ExpertLayout::Ep, Dtype::F32));
}

#[test]
fn ranks_with_attention_tp_do() {
    for (world, experts) in [(2, ExpertLayout::Ep), (2, ExpertLayout::Tp), (4, ExpertLayout::Ep)] {
        holds("qwen3-moe", Layout::new(world, Attention::Tp, experts, Dtype::F32));
    }
    holds("olmoe", Layout::new(2, Attention::Tp, ExpertLayout::Ep, Dtype::F32));
}

#[test]
fn in_bf16_logits_are_near() {
    holds("qwen3-moe", Layout::new(1, Attention::Dp, ExpertLayout::Ep, Dtype::Bf16));
    holds("mixtral", Layout::new(2, Attention::Tp, ExpertLayout::Ep, Dtype::Bf16));
}

#[test]
fn the_likeliest_alone_is_the_same_token() {
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    let layout = Layout::new(1, Attention::Dp, ExpertLayout::Ep, Dtype::F32);
    let placement: ExpertCopies = (&contiguous(&config, 1)).into();
    on_gpus(&dir, &placement, &layout, |mut rank| {
        let both = [Wants::Logits, Wants::Likeliest].map(|wants| {
            let mut kv = rank.model.new_sequence();
            let tokens = [3, 1, 4, 1, 5];
            let mut items = [StepItem { kv: &mut kv, tokens: &tokens, wants, phase: StepPhase::Prefill }];
            match rank.model.step(&mut items, &mut rank.ep).unwrap().next(0).unwrap() {
                Next::Logits(logits) => (wants, likeliest(logits)),
                Next::Token(token) => (Wants::Likeliest, token),
            }
        });
        assert_eq!(both[0].1, both[1].1);
        assert_eq!(both.map(|(wants, _)| wants), [Wants::Logits, Wants::Likeliest]);
    });
}

/// The work of the last rank's GPU in a step of as many sequences, with one token each, and the bytes that it was sent,
/// those of collectives included.
fn work_of_a_step(layout: &Layout, sequences: usize, wants: Wants) -> Option<(DeviceWork, u64)> {
    let dir = fixture("qwen3-moe");
    let placement: ExpertCopies = (&contiguous(&ModelConfig::load(&dir).unwrap(), layout.world as u16)).into();
    let sent: Vec<Arc<AtomicU64>> = (0..layout.world).map(|_| Arc::default()).collect();
    let counted = |rank: usize, stream| {
        let mut watched = Watched::new(stream, |_, _| Ok(()));
        watched.written = Arc::clone(&sent[rank]);
        watched
    };
    let work = on_streams(&dir, &placement, layout, counted, |mut rank| {
        let sent = &sent[usize::from(rank.ep.rank().get())];
        let mut kvs: Vec<KvCache> = (0..sequences).map(|_| rank.model.new_sequence()).collect();
        let mut step = |tokens: &[u32], wants| {
            let phase = StepPhase::Decode;
            let mut items: Vec<_> = kvs.iter_mut().map(|kv| StepItem { kv, tokens, wants, phase }).collect();
            let out = rank.model.step(&mut items, &mut rank.ep).unwrap();
            let chosen = (0..sequences).all(|item| matches!(out.next(item), Some(Next::Token(Some(_)))));
            assert!(chosen || wants == Wants::Nothing, "{wants:?}");
            rank.model.device_work().unwrap()
        };
        let before = step(&[3, 1, 4], Wants::Nothing);
        sent.store(0, Ordering::Relaxed);
        let after = step(&[5], wants);
        let work = DeviceWork {
            launches: after.launches - before.launches,
            synchronisations: after.synchronisations - before.synchronisations,
            waited: after.waited - before.waited,
            written: after.written - before.written,
            read: after.read - before.read,
            logit_rows: after.logit_rows - before.logit_rows,
        };
        (work, sent.load(Ordering::Relaxed))
    })?;
    work.last().copied()
}

/// Beside logits: what the rows are, and what became of them. The GPU plans which rows travel, so a unit of several
/// ranks needs no more, except that with attention tp the host says where each rank's rows begin, and with tables which
/// rows they are.
#[test]
fn few_bytes_go_to_a_gpu_and_back() {
    let config = ModelConfig::load(&fixture("qwen3-moe")).unwrap();
    let (layers, chosen) = (config.num_moe_layers() as u64, config.top_k as u64);
    let draw = Draw { temperature: 0.7, top_p: 0.5, top_k: 0, number: 0.3 };
    for sequences in [1, 5] {
        let rows = sequences as u64;
        for (wants, asked, answered) in [(Wants::Likeliest, 0, 4), (Wants::Drawn(draw), 8, 24 + 8 * 128)] {
            for (world, attention) in [(1, Dp), (2, Dp), (4, Dp), (1, Tp), (2, Tp), (4, Tp)] {
                let layout = Layout::new(world, attention, ExpertLayout::Ep, Dtype::F32);
                let Some((work, sent)) = work_of_a_step(&layout, sequences, wants) else { return };
                let own = if attention == Tp { rows / world as u64 } else { rows };
                // The token, its position, page and sequence, four pages of the sequence, and the row whose logits
                // count.
                assert_eq!(work.written, rows * (4 + 12 + 16 + 4 + asked), "{layout:?}, {wants:?}");
                assert_eq!(work.read, own * 2 * layers * chosen + rows * answered, "{layout:?}, {wants:?}");
                let offsets = if attention == Tp { 4 * (world as u64 + 1) } else { 0 };
                assert_eq!(sent, work.written + offsets, "{layout:?}, {wants:?}");
                assert!(sent / rows <= 64 && work.logit_rows == 0, "{work:?}");
                assert_eq!(work.synchronisations, 1 + u64::from(own > 0), "tokens and experts, {layout:?}");
            }
        }
    }
}

/// Algorithm 3 splits the rows of each layer anew, by the experts of the two layers before.
#[test]
fn tables_send_an_order_of_rows_and_read_choices_in_each_layer() {
    let config = ModelConfig::load(&fixture("qwen3-moe")).unwrap();
    let (layers, chosen, rows, world) = (config.num_moe_layers() as u64, config.top_k as u64, 8, 2);
    let tables = Some(Arc::new(spread::tables(&config, world)));
    let layout = Layout { tables, ..Layout::new(world.into(), Tp, ExpertLayout::Ep, Dtype::F32) };
    let Some((work, sent)) = work_of_a_step(&layout, rows, Wants::Likeliest) else { return };
    assert_eq!(work.synchronisations, 1 + layers, "choices by layer, then tokens");
    let (rows, world) = (rows as u64, u64::from(world));
    assert_eq!(work.written, rows * (4 + 12 + 16 + 4));
    assert!(sent - work.written <= layers * 4 * (rows + world + 1), "an order and offsets in each layer: {sent}");
    assert_eq!(work.read, layers * rows / world * 2 * chosen + rows * 4);
    assert!(sent / rows <= 64, "{sent}");
}

#[test]
fn what_does_not_fit_a_gpu_is_refused_before_anything_runs() {
    let refused = |family: &str, memory: u64| {
        let dir = fixture(family);
        let placement = contiguous(&ModelConfig::load(&dir).unwrap(), 1);
        Some(loaded_alone(&dir, &(&placement).into(), memory)?.map(drop).unwrap_err().to_string())
    };
    let Some(latent) = refused("deepseek-v2-lite", 1 << 30) else { return };
    assert_eq!(latent, "latent attention (MLA) is not supported on a GPU (--device cuda)");
    // Whichever of weights, pages or rows is allocated first.
    for memory in [0, 100_000, 400_000] {
        let short = refused("qwen3-moe", memory).unwrap();
        assert!(short.starts_with("the GPU failed: ") && short.contains("do not fit"), "{memory}: {short}");
    }
}

/// A GPU waits for all of its kernels before it allocates, and one of them may be waiting for this rank. Steps and
/// switches therefore never allocate (all tests here run on such a GPU), and an allocation fails at once.
#[test]
fn memory_taken_inside_a_step_ends_it() {
    let dir = fixture("mixtral");
    let placement: ExpertCopies = (&contiguous(&ModelConfig::load(&dir).unwrap(), 2)).into();
    let layout = Layout::new(2, Attention::Dp, ExpertLayout::Ep, Dtype::F32);
    let takes_memory = |rank: usize, stream| {
        let met = AtomicBool::new(false);
        Watched::new(stream, move |stream, launch| {
            let takes = rank == 1 && met.load(Ordering::Relaxed);
            met.fetch_or(launch.is_collective(), Ordering::Relaxed);
            if takes { stream.allocate(16).map(drop) } else { Ok(()) }
        })
    };
    on_streams(&dir, &placement, &layout, takes_memory, |mut rank| {
        let mut kv = rank.model.new_sequence();
        let mut items = [StepItem { kv: &mut kv, tokens: &[3, 1], wants: Wants::Logits, phase: StepPhase::Prefill }];
        let cause = rank.model.step(&mut items, &mut rank.ep).map(drop).unwrap_err().to_string();
        if rank.ep.rank().get() == 1 {
            let expected = "16 bytes were allocated after the first collective";
            assert!(cause.contains("rank 1") && cause.contains(expected), "{cause}");
        }
    });
}

/// A kernel that gave up waiting also fails its own GPU; the lost rank is the one it waited for.
#[test]
fn a_kernel_that_waits_too_long_names_the_rank_it_waited_for() {
    /// Rank 0 waited for rank 1 to begin call 7.
    const LATE: u64 = 1 << 56 | 1 << 40 | 7;
    let dir = fixture("mixtral");
    let placement: ExpertCopies = (&contiguous(&ModelConfig::load(&dir).unwrap(), 1)).into();
    let layout = Layout::new(1, Attention::Dp, ExpertLayout::Ep, Dtype::F32);
    let stops = |_, stream| {
        let stream = Watched::new(stream, |_, _| Err("the driver refuses everything".into()));
        stream.report.store(LATE, Ordering::Relaxed);
        stream
    };
    on_streams(&dir, &placement, &layout, stops, |mut rank| {
        let mut kv = rank.model.new_sequence();
        let mut items = [StepItem { kv: &mut kv, tokens: &[3, 1], wants: Wants::Logits, phase: StepPhase::Prefill }];
        let cause = rank.model.step(&mut items, &mut rank.ep).map(drop).unwrap_err().to_string();
        assert!(cause.contains("rank 0 timed out waiting for rank 1 to start call 7"), "{cause}");
    });
}
