//! Experts that do not fit in memory and are read from the checkpoint ahead of their layer: bitwise equal results,
//! within the given memory.

use crate::common;
use crate::support;
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::common::{FIXTURES, Rank, contiguous_of, fixture, fixture_prompts, local_mesh, on_threads};
use crate::support::{Unit, refused};
use semmoe_tables::{Attention, ExpertCopies, RankId};
use semmoe_worker::WorkerError;
use semmoe_worker::ep::ExpertLayout;
use semmoe_worker::model::{ExpertFetches, ExpertMemory, ExpertRoom, Model, ModelConfig, ModelError};
use serde_json::json;

/// The minimum memory for streaming on rank 0.
fn least(dir: &Path, copies: &ExpertCopies, layout: ExpertLayout) -> u64 {
    let room = ExpertRoom { memory: Some(ExpertMemory::Bytes(1)), ..layout.into() };
    let model = Model::load_divided(dir, RankId::new(0), copies, room, Attention::Dp);
    let Err(error) = model else { panic!("experts in one byte") };
    let ModelError::ExpertBudget { limit: 1, least } = error else { panic!("{error}") };
    least
}

/// The answers of a rank: greedy tokens of its prompts, then the logits of each prompt alone.
type Answers = (Vec<Vec<u32>>, Vec<Vec<f32>>);
/// A prompt of a fixture, and its golden answer.
type Prompt = (Vec<u32>, Vec<u32>);

/// Every rank with its share of the prompts, on threads.
fn answers(
    dir: &Path,
    copies: &ExpertCopies,
    (world, room): (u16, ExpertRoom),
    (prompts, steps): (&[Prompt], usize),
) -> Vec<(Answers, Option<ExpertFetches>)> {
    let links = local_mesh(world);
    let world = usize::from(world);
    let work = |link| {
        let mut rank = Rank::with_experts(dir, link, copies, room);
        let own: Vec<&[u32]> = prompts.iter().skip(rank.rank).step_by(world).map(|(ids, _)| &ids[..]).collect();
        let texts = rank.greedy(&own, steps);
        // Every rank takes part in as many steps as the one with the most prompts.
        let alone = |index: usize| own.get(index).copied().unwrap_or(own[0]);
        let logits = (0..prompts.len().div_ceil(world)).map(|index| rank.prefill(alone(index)).0).collect();
        ((texts, logits), rank.model.expert_fetches(), rank)
    };
    on_threads(links, work).into_iter().map(|(answers, fetches, _)| (answers, fetches)).collect()
}

#[test]
fn every_family_gives_the_same_bits_as_from_memory() {
    let layouts = [(1, 1, "ep"), (2, 2, "ep"), (2, 2, "tp"), (1, 2, "hybrid:1x2"), (2, 2, "hybrid:2x1:2")];
    for name in FIXTURES {
        let (dir, config) = (fixture(name), ModelConfig::load(&fixture(name)).unwrap());
        let prompts = fixture_prompts(&dir);
        let steps = prompts.iter().map(|(_, greedy)| greedy.len()).min().unwrap();
        for (groups, world, layout) in layouts {
            let copies = ExpertCopies::from(&contiguous_of(&config, groups));
            let room = ExpertRoom::from(layout.parse::<ExpertLayout>().unwrap());
            let resident = answers(&dir, &copies, (world, room), (&prompts, steps));
            let memory = Some(ExpertMemory::Resident(1));
            let streamed = answers(&dir, &copies, (world, ExpertRoom { memory, ..room }), (&prompts, steps));
            for (rank, (resident, streamed)) in resident.iter().zip(&streamed).enumerate() {
                assert_eq!(resident.0, streamed.0, "{name}, {layout}, rank {rank}");
                assert!(resident.1.is_none() && streamed.1.unwrap().bytes > 0);
                let own = prompts.iter().skip(rank).step_by(world.into());
                for (text, (_, golden)) in streamed.0.0.iter().zip(own) {
                    assert_eq!(text[..], golden[..steps], "{name}, {layout}, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn memory_is_what_was_given_and_bytes_are_those_of_what_did_not_fit() {
    let (dir, config) = (support::model_dir(), common::config());
    let copies = ExpertCopies::from(&contiguous_of(&config, 1));
    // bf16 in memory and in the file; 7 layers of 32 experts.
    let expert = 3 * 2 * (config.hidden * config.expert_width) as u64;
    let (layers, experts) = (config.num_moe_layers() as u64, config.num_experts as u64);
    let prompts: Vec<_> = common::golden().into_iter().take(2).map(|golden| (golden.ids, golden.greedy)).collect();
    let resident = answers(&dir, &copies, (1, ExpertLayout::Ep.into()), (&prompts, 4));
    let steps = 4 + prompts.len() as u64;
    // Reading takes the room of one expert.
    for stay in [0, 1, 20, experts] {
        let streamed = experts - stay;
        let reading = u64::from(streamed > 0);
        let memory = (layers * stay + 2 * streamed + reading) * expert;
        // One byte less than one more expert in each of the other layers has no effect.
        for given in [memory, memory + (layers - 2) * expert - 1] {
            let room = ExpertRoom { memory: Some(ExpertMemory::Bytes(given)), ..ExpertLayout::Ep.into() };
            let found = answers(&dir, &copies, (1, room), (&prompts, 4));
            assert_eq!(found[0].0, resident[0].0);
            let fetches = found[0].1.unwrap();
            assert_eq!(fetches.memory_bytes, memory, "{stay} of {experts} stay in {given} bytes");
            // Up to two layers were prefetched for a step that never ran.
            let (layer, read) = (streamed * expert, fetches.bytes);
            let wanted = steps * layers * layer;
            assert!((wanted..=wanted + 2 * layer).contains(&read), "{read} bytes, of {wanted}");
            assert!(layer == 0 || read.is_multiple_of(layer));
            assert!(fetches.hidden() <= 1.0);
        }
    }
    assert_eq!(least(&dir, &copies, ExpertLayout::Ep), (2 * experts + 1) * expert);
}

/// A modifiable copy of the bundled model.
fn copied_model(folder: &Path) -> PathBuf {
    let dir = folder.join("tiny-qwen3moe-15m");
    fs::create_dir(&dir).unwrap();
    for entry in fs::read_dir(support::model_dir()).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
        }
    }
    dir
}

const MEMORY: u64 = 10 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_streams_its_experts_and_says_what_that_costs() {
    // One rank streams, the other does not, and domains make both hold all.
    let unit = Unit::start_with(2, |config| {
        config.domains = 2.into();
        config.expert_memory = (config.rank == 0).then_some(MEMORY);
    });
    unit.serves_golden().await;
    let metrics = unit.metrics().await;
    let memory = metrics.sum("semmoe_expert_memory_bytes", &[("rank", "0")]);
    assert!((MEMORY / 2..=MEMORY).contains(&memory), "{memory}");
    assert!(metrics.sum("semmoe_expert_fetch_bytes_total", &[("rank", "0")]) > 0);
    for family in
        ["semmoe_expert_fetch_seconds_total", "semmoe_expert_wait_seconds_total", "semmoe_expert_fetch_hidden_ratio"]
    {
        assert!(metrics.0.contains(&format!("\n{family}{{rank=\"0\"}} ")), "{family}");
    }
    assert!(!metrics.0.contains("semmoe_expert_memory_bytes{rank=\"1\"}"));
    assert_eq!(unit.get("/server_info").await["layouts"], json!(["ep"]));
    let (status, _, answer) = unit.ask("/switch", &json!({ "to": "dp-tp" })).await;
    assert_eq!(status, 400, "{answer}");
    unit.end();
}

/// The first steps can still run from prefetched experts.
async fn ends_with(change: impl Fn(&Path)) -> (String, Vec<Result<(), WorkerError>>) {
    let folder = tempfile::tempdir().unwrap();
    let dir = copied_model(folder.path());
    let unit = Unit::start_with(2, |config| {
        config.model_dir.clone_from(&dir);
        config.expert_memory = (config.rank == 1).then_some(MEMORY / 2);
        config.exit_after_loss = Some(Duration::from_secs(1));
    });
    let prompt = &support::golden()[0]["input_ids"];
    unit.ok("/generate", &support::greedy(prompt, 2)).await;
    let (status, _, answer) = unit.ask("/switch", &json!({ "to": "dp-tp" })).await;
    assert_eq!(status, 422, "{answer}");
    assert!(answer.to_string().contains("streamed experts (--expert-memory) cannot be switched"), "{answer}");
    change(&dir.join("model.safetensors"));
    let (status, _, answer) = unit.ask("/generate", &support::greedy(prompt, 16)).await;
    assert_eq!(status, 503, "{answer}");
    (answer.to_string(), unit.stop(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_under_the_worker_ends_the_unit_with_the_cause() {
    let shrink = |path: &Path| File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
    let touch = |path: &Path| {
        let later = FileTimes::new().set_modified(SystemTime::now() + Duration::from_secs(5));
        File::options().write(true).open(path).unwrap().set_times(later).unwrap();
    };
    type Change = fn(&Path);
    for (detail, change) in [("it has 4096 bytes instead of", shrink as Change), ("it was written to", touch)] {
        let (answer, outcomes) = ends_with(change).await;
        for said in [answer].into_iter().chain(outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string())) {
            assert!(said.contains("rank 1 was lost"), "{said}");
            assert!(said.contains("while experts were being streamed from it") && said.contains(detail), "{said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_removed_is_still_read() {
    let folder = tempfile::tempdir().unwrap();
    let dir = copied_model(folder.path());
    let unit = Unit::start_with(1, |config| {
        config.model_dir.clone_from(&dir);
        config.expert_memory = Some(MEMORY);
    });
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    let golden = &support::golden()[0];
    let answer = unit.ok("/generate", &support::greedy(&golden["input_ids"], 16)).await;
    assert_eq!(answer["output_ids"], golden["greedy_16"]);
    unit.end();
}

#[test]
fn what_cannot_be_streamed_is_refused_in_a_sentence() {
    let config = common::config();
    // 16 experts in each of two buffers, and one to read.
    let least = (2 * 16 + 1) * 3 * 2 * config.hidden * config.expert_width;
    let limit = least as u64 - 1;
    assert_eq!(
        refused(2, |config| config.expert_memory = Some(limit)),
        format!(
            "this rank's experts need at least {least} bytes of memory, including two layers of streamed experts, but \
             --expert-memory is {limit}"
        )
    );
    let streamed = "streamed experts (--expert-memory) cannot be switched while the unit is running";
    assert_eq!(
        refused(2, |config| (config.expert_memory, config.expert_slots) = (Some(MEMORY), Some(20))),
        format!("--expert-slots are only useful for switches, but {streamed}")
    );
    assert_eq!(
        refused(2, |config| (config.expert_memory, config.both_attentions) = (Some(MEMORY), true)),
        format!("two attentions are only useful for switches, but {streamed}")
    );
}
