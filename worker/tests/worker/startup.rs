//! How a unit forms, fails to, and ends.

use crate::common::{self, dp_tables, model_info, provenance};
use crate::support;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support::{
    EXPERTS, LAYERS, TOP_K, Unit, config, failure, golden, greedy, loopback, model_dir, refused, refused_unit,
};
use half::f16;
use semmoe_tables::{Attention, ModelInfo, Placement, Replicas, Tables, TablesBuilder, TpParts};
use semmoe_worker::{ExpertLayout, TransportChoice, WireType, WorkerConfig, WorkerError, WorkerEvent, run};
use serde_json::{Value, json};

/// How long rank 0 waits for ranks that do not arrive.
const LIMITS: [Duration; 3] = [Duration::from_millis(600), Duration::from_secs(6), Duration::from_secs(61)];

/// Starts rank 0 of a unit; returns the address for registrations.
fn host(world: u16, adjust: impl Fn(&mut WorkerConfig)) -> (SocketAddr, JoinHandle<Result<(), WorkerError>>) {
    let (sender, events) = mpsc::channel();
    let mut config = config(0, world, loopback());
    config.announce = Arc::new(move |event| sender.send(*event).unwrap());
    adjust(&mut config);
    let thread = std::thread::spawn(move || run(config));
    let WorkerEvent::Bound { rendezvous } = events.recv().unwrap() else { panic!("not bound first") };
    (rendezvous, thread)
}

/// A model directory with the bundled files, some of them replaced or, if empty, left out.
fn model_copy(parent: &Path, name: &str, replaced: &[(&str, &str)]) -> PathBuf {
    let dir = parent.join(name);
    std::fs::create_dir(&dir).unwrap();
    for file in
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    {
        match replaced.iter().find(|(replaced, _)| *replaced == file) {
            None => std::os::unix::fs::symlink(model_dir().canonicalize().unwrap().join(file), dir.join(file)).unwrap(),
            Some((_, "")) => {}
            Some((_, content)) => std::fs::write(dir.join(file), content).unwrap(),
        }
    }
    dir
}

/// Tables with a placement that gives every group every G-th expert.
fn tables(path: &Path, model: &str, groups: u16) -> String {
    let layer: Vec<u16> = (0..EXPERTS).map(|expert| expert % groups).collect();
    let placement = Placement::new(groups, vec![layer; LAYERS]).unwrap();
    let digest = placement.digest();
    dp_tables(ModelInfo { model: model.into(), ..model_info() }, placement).write(path).unwrap();
    digest
}

/// Contiguous experts, and on every rank also the first `extra` of the next rank.
fn replicas(groups: u16, extra: u16) -> Replicas {
    let each = EXPERTS / groups;
    let held = |group: u16| {
        let next = (group + 1) % groups * each;
        let mut held: Vec<i32> = (group * each..(group + 1) * each).chain(next..next + extra).map(i32::from).collect();
        held.sort_unstable();
        held
    };
    let layer: Vec<i32> = (0..groups).flat_map(held).collect();
    Replicas::new(&model_info(), groups, layer.len(), layer.repeat(LAYERS)).unwrap()
}

/// Tables with [`replicas`].
fn replica_tables(path: &Path, groups: u16, extra: u16, attention: Attention) -> Tables {
    let info = model_info();
    let placement = Placement::contiguous(LAYERS, EXPERTS, groups).unwrap();
    let builder = match attention {
        Attention::Dp => dp_tables(info, placement),
        Attention::Tp => {
            let (rows, pairs) = (LAYERS * 10_240, LAYERS * usize::from(groups * groups));
            let parts = TpParts {
                labels: 1,
                token_group: vec![0; rows],
                token_prob: vec![f16::ONE; rows],
                transition_group: vec![0; pairs],
                transition_prob: vec![f16::ONE; pairs],
            };
            TablesBuilder::tp(info, provenance(), placement, parts, vec![0.0; usize::from(groups)])
        }
    };
    builder.replicas(replicas(groups, extra)).write(path).unwrap();
    Tables::open(path).unwrap()
}

/// A copy of tables with the first slots of the first layer overwritten.
fn with_slots(tables: &Path, name: &str, slots: &[i32]) -> PathBuf {
    let mut bytes = std::fs::read(tables).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = 8 + header + json["physical_to_logical"]["data_offsets"][0].as_u64().unwrap() as usize;
    for (slot, expert) in slots.iter().enumerate() {
        bytes[at + 4 * slot..][..4].copy_from_slice(&expert.to_le_bytes());
    }
    let path = tables.with_file_name(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A checkpoint of the same model after more training: names, sizes and shapes are equal.
fn trained_on(folder: &Path) -> PathBuf {
    let dir = folder.join("c");
    std::fs::create_dir(&dir).unwrap();
    let copy = model_copy(&dir, "tiny-qwen3moe-15m", &[("model.safetensors", "")]);
    let mut weights = std::fs::read(model_dir().join("model.safetensors")).unwrap();
    let middle = weights.len() / 2;
    weights[middle..].iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(copy.join("model.safetensors"), weights).unwrap();
    copy
}

#[test]
fn ranks_with_other_arguments_are_refused_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tables.safetensors");
    tables(&file, "tiny-qwen3moe-15m", 2);
    let other = model_copy(folder.path(), "other-model", &[]);
    let retrained = {
        let json = std::fs::read_to_string(model_dir().join("config.json")).unwrap();
        let dir = folder.path().join("b");
        std::fs::create_dir(&dir).unwrap();
        model_copy(&dir, "tiny-qwen3moe-15m", &[("config.json", &json.replace("10000.0", "20000.0"))])
    };
    let trained_on = trained_on(folder.path());
    type Adjust<'a> = Box<dyn Fn(&mut WorkerConfig) + 'a>;
    let cases: Vec<(Adjust<'_>, &str)> = vec![
        (Box::new(|config| config.model_dir = trained_on.clone()), "rank 1 has a checkpoint with digest"),
        (Box::new(|config| config.world = 4), "rank 1 was started for a world of 4, rank 0 2"),
        (Box::new(|config| config.tables = Some(file.clone())), "rank 1 has a placement with digest"),
        (Box::new(|config| config.experts = ExpertLayout::Tp), "rank 1 was started with experts tp, rank 0 ep"),
        (
            Box::new(|config| config.transport = TransportChoice::Tcp),
            "rank 1 was started with transport tcp, rank 0 auto",
        ),
        (Box::new(|config| config.wire = WireType::Bf16), "rank 1 sends rows as bf16, rank 0 f32"),
        (Box::new(|config| config.model_dir = other.clone()), "rank 1 runs a different model than rank 0"),
        (Box::new(|config| config.model_dir = retrained.clone()), "rank 1 has a checkpoint with digest"),
    ];
    let unit = |adjust: &dyn Fn(&mut WorkerConfig), expected: &str| {
        for (message, code) in refused_unit(2, adjust) {
            assert!(message.contains(expected) && !message.contains('\n'), "{expected}: {message}");
            assert_eq!(code, 2);
        }
    };
    let on_rank_1 = |config: &mut WorkerConfig, adjust: &Adjust<'_>| {
        if config.rank == 1 {
            adjust(config)
        }
    };
    for (adjust, expected) in &cases {
        unit(&|config| on_rank_1(config, adjust), expected);
    }
    let tp = folder.path().join("tp.tables.safetensors");
    let placement = common::shuffled(2, 3);
    common::tp_tables(&common::config(), &placement, 1).write(&tp).unwrap();
    let same_placement = folder.path().join("dp.tables.safetensors");
    dp_tables(model_info(), placement).write(&same_placement).unwrap();
    let with_tp_tables: Vec<(Adjust<'_>, &str)> = vec![
        (Box::new(|config| config.shuffle = false), "rank 1 shuffles rows by nothing, rank 0 tables "),
        (
            Box::new(|config| {
                (config.attention, config.tables) = (Attention::Dp, Some(same_placement.clone()));
            }),
            "rank 1 was started with attention dp, rank 0 tp",
        ),
    ];
    for (adjust, expected) in &with_tp_tables {
        unit(
            &|config| {
                (config.attention, config.tables) = (Attention::Tp, Some(tp.clone()));
                on_rank_1(config, adjust);
            },
            expected,
        );
    }
}

#[test]
fn ranks_that_do_not_come_are_named_and_strangers_do_no_harm() {
    // Retries with more time if rank 2 itself was too slow.
    for limit in LIMITS {
        let (rendezvous, host) = host(4, |config| config.rendezvous_timeout = limit);
        let mut stranger = TcpStream::connect(rendezvous).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _silent = TcpStream::connect(rendezvous).unwrap();
        let outcomes = [failure(run(config(2, 4, rendezvous))), failure(host.join().unwrap())];
        if limit == LIMITS[LIMITS.len() - 1] || !outcomes[1].0.contains('2') {
            let expected = format!("ranks 1 and 3 did not register within {} s", limit.as_secs_f64());
            assert_eq!(outcomes.map(|(message, _)| message), [&expected[..]; 2]);
            return;
        }
    }
}

#[test]
fn a_rank_that_finds_nobody_says_so() {
    let closed = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let mut alone = config(1, 2, closed);
    alone.rendezvous_timeout = Duration::from_millis(200);
    let (message, code) = failure(run(alone));
    assert!(message.contains("rank 0 could not be reached") && message.contains(&closed.to_string()), "{message}");
    assert_eq!(code, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_at_the_rendezvous_do_not_stop_it() {
    let (sender, events) = mpsc::channel();
    let mut first = config(0, 2, loopback());
    let shutdown = first.shutdown.clone();
    first.announce = Arc::new(move |event| sender.send(*event).unwrap());
    let host = std::thread::spawn(move || run(first));
    let WorkerEvent::Bound { rendezvous } = events.recv().unwrap() else { panic!("not bound first") };
    // More than the limit on pending ones, some with part of a frame.
    let crowd = (0..300_u16).map(|number| {
        let mut stranger = TcpStream::connect(rendezvous).unwrap();
        stranger.write_all(&[9, 0, 0, 0, b'{'][..usize::from(number % 6).min(5)]).unwrap();
        stranger
    });
    let _silent: Vec<TcpStream> = crowd.collect();
    let mut liar = TcpStream::connect(rendezvous).unwrap();
    liar.write_all(&[0xff; 64]).unwrap();
    let member = std::thread::spawn(move || run(config(1, 2, rendezvous)));
    assert!(matches!(events.recv().unwrap(), WorkerEvent::Ready { rank: 0, http: Some(_), .. }));
    shutdown.request();
    assert!(host.join().unwrap().is_ok() && member.join().unwrap().is_ok());
}

#[test]
fn wrong_input_is_reported_before_anything_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(format!("{name}.tables.safetensors"));
    let (small, foreign, dp, tp) = (path("small"), path("foreign"), path("dp"), path("tp"));
    tables(&small, "tiny-qwen3moe-15m", 4);
    tables(&foreign, "another-model", 2);
    tables(&dp, "tiny-qwen3moe-15m", 2);
    common::tp_tables(&common::config(), &common::shuffled(2, 3), 1).write(&tp).unwrap();
    let template = json!({"chat_template": "{% if %}"}).to_string();
    let model = std::fs::read_to_string(model_dir().join("config.json")).unwrap();
    let smaller = model.replace("\"vocab_size\": 10240", "\"vocab_size\": 10000");
    let copy = |name: &str, file, content: &str| {
        let dir = model_copy(folder.path(), name, &[(file, content)]);
        move |config: &mut WorkerConfig| config.model_dir = dir.clone()
    };
    type Adjust<'a> = Box<dyn Fn(&mut WorkerConfig) + 'a>;
    let cases: Vec<(Adjust<'_>, &str)> = vec![
        (Box::new(|config| config.model_dir = "/no/such/model".into()), "/no/such/model"),
        (Box::new(copy("a", "config.json", "")), "config.json"),
        (Box::new(copy("b", "tokenizer.json", "")), "tokenizer.json"),
        (Box::new(copy("c", "tokenizer.json", "{}")), "not a usable tokenizer"),
        (Box::new(copy("d", "config.json", &smaller)), "its 10240 token ids exceed the model's 10000"),
        (Box::new(copy("g", "generation_config.json", "{\"eos_token_id\": [20000]}")), "it has no token 20000"),
        (Box::new(copy("e", "tokenizer_config.json", &template)), "cannot parse the chat template"),
        (Box::new(copy("f", "generation_config.json", "{\"eos_token_id\": \"x\"}")), "eos_token_id must be"),
        (Box::new(|config| config.tables = Some("/no/such/tables".into())), "/no/such/tables"),
        (Box::new(|config| config.tables = Some(foreign.clone())), "another-model"),
        (Box::new(|config| config.tables = Some(small.clone())), "are for 4 groups, but this unit has 2 ranks"),
        (
            Box::new(|config| (config.experts, config.tables) = (ExpertLayout::Tp, Some("/not/even/read".into()))),
            "the tables in /not/even/read would have no effect, because with experts tp",
        ),
        (Box::new(|config| (config.world, config.rank) = (2, 2)), "rank is 2, expected below the world size 2"),
        (Box::new(|config| config.listen = None), "rank 0 needs an address"),
        (Box::new(|config| config.world = 5), "1, 2, 4, 8, 16, 32"),
        (Box::new(|config| config.tables = Some(tp.clone())), "are for attention tp, but this unit runs attention dp"),
        (
            Box::new(|config| (config.attention, config.tables) = (Attention::Tp, Some(dp.clone()))),
            "are for attention dp, but this unit runs attention tp",
        ),
        (
            Box::new(|config| (config.attention, config.world) = (Attention::Tp, 8)),
            "4 query heads and 2 key-value heads over 8 ranks, expected one of 1, 2, 4",
        ),
        (
            Box::new(|config| {
                (config.attention, config.world, config.tables) = (Attention::Tp, 4, Some(tp.clone()));
            }),
            "are for 2 groups, but this unit has 4 ranks",
        ),
    ];
    for (adjust, expected) in cases {
        let message = refused(2, adjust);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let taken = TcpListener::bind(loopback()).unwrap();
    let address = taken.local_addr().unwrap();
    let mut wrong = config(0, 1, loopback());
    wrong.listen = Some(address);
    assert!(failure(run(wrong)).0.contains(&format!("cannot serve HTTP on {address}")));
    assert!(failure(run(config(0, 1, address))).0.contains(&format!("cannot listen on {address}")));
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_give_the_placement_and_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tables.safetensors");
    let digest = tables(&path, "tiny-qwen3moe-15m", 2);
    let unit = Unit::start_with(2, |config| config.tables = Some(path.clone()));
    assert_eq!(unit.get("/server_info").await["placement_digest"], digest);
    let prompt = &golden()[0];
    assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
    unit.stop(0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_with_replicas_run_and_are_reported_apart_from_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tables.safetensors");
    let mut digests = Vec::new();
    // Restarts one unit with another E each time.
    for (extra, attention) in [(0, Attention::Dp), (3, Attention::Dp), (5, Attention::Dp)] {
        let tables = replica_tables(&path, 2, extra, attention);
        let unit = Unit::start_with(2, |config| config.tables = Some(path.clone()));
        let info = unit.get("/server_info").await;
        assert_eq!(info["placement_digest"], tables.placement_digest());
        assert_eq!(info["ep_num_redundant_experts"], 2 * extra);
        let prompt = &golden()[0];
        assert_eq!(unit.ok("/generate", &greedy(&prompt["input_ids"], 16)).await["output_ids"], prompt["greedy_16"]);
        let metrics = unit.metrics().await;
        let [local, remote] =
            ["local", "remote"].map(|place| metrics.sum("semmoe_activations_total", &[("where", place)]));
        let tokens = metrics.sum("semmoe_tokens_total", &[]);
        assert_eq!(local + remote, tokens * (LAYERS * TOP_K) as u64, "{extra} more on each rank");
        digests.push(tables.placement_digest().to_owned());
        unit.stop(0);
    }
    digests.dedup();
    assert_eq!(digests.len(), 3, "each E has a digest of its own");
}

#[test]
fn replicas_that_do_not_fit_are_refused_before_anything_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let [good, four, tp] = ["good", "four", "tp"].map(file);
    replica_tables(&good, 2, 3, Attention::Dp);
    replica_tables(&four, 4, 2, Attention::Dp);
    replica_tables(&tp, 2, 3, Attention::Tp);
    let twice = with_slots(&good, "twice", &[0, 1, 1]);
    let beyond = with_slots(&good, "beyond", &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32]);
    let nowhere = with_slots(&good, "nowhere", &[0, 1, 2, 3, -1]);
    let moved = with_slots(&good, "moved", &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19]);
    type Adjust = fn(&mut WorkerConfig);
    let plain: Adjust = |_| {};
    let cases: [(&Path, Adjust, &str); 7] = [
        (&four, plain, "are for 4 groups, but this unit has 2 ranks"),
        (&twice, plain, "holds 1 at layer 0, slot 2, expected more than 1, the previous expert in its group"),
        (&beyond, plain, "holds 32 at layer 0, slot 18, expected -1, or experts below 32"),
        (&nowhere, plain, "holds no slot for expert 4 at layer 0, expected at least one"),
        (&moved, plain, "the digest of the placement in the file"),
        (&good, |config| config.experts = ExpertLayout::Tp, "would have no effect, because with experts tp"),
        (&tp, |config| config.attention = Attention::Tp, "replicate experts, which attention tp does not support"),
    ];
    for (path, adjust, expected) in cases {
        let message = refused(2, |config| {
            config.tables = Some(path.to_owned());
            adjust(config);
        });
        let named = message.contains(&path.display().to_string());
        assert!(named && message.contains(expected), "{expected}: {message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_asked_to_stop_all_leave_and_running_requests_end() {
    for asked in [0, 1] {
        let unit = Unit::start(2);
        let body = greedy(&json!([557, 1712, 298]), 60);
        let (client, request) = (unit.client.clone(), unit.post("/generate", body.to_string().as_bytes()));
        let running = tokio::spawn(async move { client.send(request).await });
        while unit.metrics().await.sum("semmoe_requests_in_flight", &[]) == 0 {
            tokio::task::yield_now().await;
        }
        let outcomes = tokio::task::spawn_blocking(move || unit.stop(asked)).await.unwrap();
        assert!(outcomes.iter().all(Result::is_ok), "asked {asked}: {outcomes:?}");
        assert_eq!(running.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_outlast_the_grace_are_ended() {
    let unit = Unit::start_with(2, |config| config.grace = Duration::ZERO);
    let mut body = greedy(&json!([557, 1712, 298]), 2000);
    body["stream"] = json!(true);
    let response = unit.client.send(unit.post("/generate", body.to_string().as_bytes())).await.unwrap();
    let reading = tokio::spawn(http_body_util::BodyExt::collect(response.into_body()));
    let outcomes = tokio::task::spawn_blocking(move || unit.stop(0)).await.unwrap();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let text = reading.await.unwrap().unwrap().to_bytes();
    let events = support::events(std::str::from_utf8(&text).unwrap());
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
}
