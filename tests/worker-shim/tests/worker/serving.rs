//! The worker's whole loop over the CUDA sources: HTTP requests to tokens.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::unit::{LocalRank, Room};
use semmoe_kernels_cuda::{GpuError, Launch};
use semmoe_kernels_shim::{Shim, ShimStream};
use semmoe_tables::Attention;
use semmoe_worker::{DeviceChoice, EngineLimits, GpuProvider, KvBudget, WorkerConfig, WorkerError, WorkerEvent, run};

use super::client::Client;
use super::switch::long_fixture;
use semmoe_worker_shim::{ShimUnit, Watched, shim};

struct ShimGpu {
    shim: &'static Shim,
    unit: Mutex<Option<ShimUnit>>,
    /// Once set, rank 1's GPU fails with this error.
    failure: Arc<OnceLock<&'static str>>,
}

impl GpuProvider for ShimGpu {
    fn free_bytes(&self) -> Result<u64, GpuError> {
        Ok(1 << 30)
    }

    fn rank(&self, rank: usize, room: Room) -> Result<LocalRank, GpuError> {
        let mut unit = self.unit.lock().unwrap_or_else(PoisonError::into_inner);
        let failure = Arc::clone(&self.failure);
        let on_launch = move |_: &ShimStream, _: &Launch| match failure.get() {
            Some(cause) if rank == 1 => Err((*cause).into()),
            _ => Ok(()),
        };
        let unit = unit.get_or_insert_with(|| ShimUnit::new(self.shim, room));
        Ok(unit.local_with(rank, |stream| Watched::new(stream, on_launch)))
    }
}

/// A serving unit, all of it in this process.
pub(super) struct Unit {
    pub(super) client: Client,
    shutdown: semmoe_worker::Shutdown,
    process: JoinHandle<Result<(), WorkerError>>,
    failure: Arc<OnceLock<&'static str>>,
}

impl Unit {
    pub(super) fn start(gpu: Option<&'static Shim>, world: u16, attention: Attention) -> Self {
        Self::start_with(gpu, world, |config| config.attention = attention)
    }

    pub(super) fn start_with(gpu: Option<&'static Shim>, world: u16, adjust: impl FnOnce(&mut WorkerConfig)) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m");
        let mut config = WorkerConfig::new(model, 0, world, ([127, 0, 0, 1], 0).into());
        let (sender, events) = mpsc::channel();
        config.announce = Arc::new(move |event| sender.send(*event).unwrap_or(()));
        config.listen = Some(([127, 0, 0, 1], 0).into());
        config.handle_signals = false;
        config.limits =
            EngineLimits { running: 4, step_tokens: 64, kv: KvBudget::Tokens(1024), ..EngineLimits::default() };
        let failure: Arc<OnceLock<&'static str>> = Arc::default();
        if let Some(shim) = gpu {
            config.device = DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: world };
            config.gpu = Some(Arc::new(ShimGpu { shim, unit: Mutex::default(), failure: Arc::clone(&failure) }));
        }
        adjust(&mut config);
        let shutdown = config.shutdown.clone();
        let process = std::thread::spawn(move || run(config));
        let http = loop {
            match events.recv().expect("the unit starts") {
                WorkerEvent::Ready { http: Some(http), .. } => break http,
                _ => continue,
            }
        };
        Self { client: Client(http), shutdown, process, failure }
    }

    pub(super) fn stop(self) {
        self.shutdown.request();
        self.process.join().unwrap().unwrap();
    }
}

/// The last one fills more than one page, and more than one step.
pub(super) fn prompts() -> [String; 3] {
    ["[5, 9, 200, 31]".to_owned(), "[77]".to_owned(), format!("{:?}", (1..=90).collect::<Vec<u32>>())]
}

pub(super) const GREEDY: &str = r#""temperature": 0"#;
/// Drawn from candidates of the GPU, the last one by logits that were read back: there are more candidates than places.
const SAMPLED: [&str; 4] = [
    r#""temperature": 0.7, "top_p": 0.6, "sampling_seed": 7"#,
    r#""temperature": 0.9, "top_p": 0.8, "top_k": 20, "sampling_seed": 7"#,
    r#""temperature": 1.0, "top_p": 1.0, "sampling_seed": 7"#,
    r#""temperature": 1.0, "top_k": 200, "sampling_seed": 7"#,
];

#[test]
fn a_unit_on_gpus_answers_as_one_on_cpus() {
    let Some(shim) = shim() else { return };
    let cpu = Unit::start(None, 1, Attention::Dp);
    let expected = cpu.client.continued(&prompts(), GREEDY);
    let sampled = SAMPLED.map(|sampling| cpu.client.continued(&prompts()[..1], sampling));
    cpu.stop();
    for (attention, other) in [(Attention::Dp, "tp"), (Attention::Tp, "ep")] {
        let gpu = Unit::start(Some(shim), 2, attention);
        assert_eq!(gpu.client.continued(&prompts(), GREEDY), expected, "attention {attention}");
        let mut logit_rows = Vec::new();
        for (sampling, expected) in SAMPLED.into_iter().zip(&sampled) {
            assert_eq!(gpu.client.continued(&prompts()[..1], sampling), *expected, "attention {attention}, {sampling}");
            logit_rows.push(gpu.client.counted("semmoe_gpu_logit_rows_total{"));
        }
        assert_eq!(logit_rows, [0.0, 0.0, 0.0, 4.0], "of 4 tokens each");
        assert_eq!(
            gpu.client.continued(&prompts()[2..], GREEDY),
            expected[2..],
            "from pages that were computed before"
        );
        let (_, metrics) = gpu.client.ask("GET", "/metrics", "");
        assert!(gpu.client.counted("semmoe_gpu_launches_total{") > 1000.0, "{metrics}");
        assert!(
            gpu.client.counted("semmoe_cached_prompt_tokens_total{") >= 64.0 || attention == Attention::Dp,
            "{metrics}"
        );
        let (status, refusal) = gpu.client.ask("POST", "/switch", &format!(r#"{{"to": "{other}"}}"#));
        assert!(status == 400 && refusal.contains("cannot be switched to"), "{status}: {refusal}");
        assert_eq!(gpu.client.ask("POST", "/flush_cache", "").0, 200);
        assert_eq!(gpu.client.continued(&prompts()[..1], GREEDY), expected[..1], "after the cache was flushed");
        gpu.stop();
    }
}

/// A fixture that can be served: it has a tokenizer of single letters.
pub(super) fn served_fixture() -> tempfile::TempDir {
    let dir = long_fixture("qwen3-moe");
    let letters = ('!'..='~').chain(['\u{120}']).enumerate();
    let letters: Vec<String> = letters.map(|(id, letter)| format!("{:?}:{id}", letter.to_string())).collect();
    let letters = letters.join(",");
    let flags = r#""single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true"#;
    let bytes = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
    let model = r#""dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null"#;
    let tokenizer = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"normalizer":null,"post_processor":null,
            "added_tokens":[{{"id":95,"content":"<|endoftext|>",{flags}}}],"pre_tokenizer":{bytes},"decoder":{bytes},
            "model":{{"type":"BPE",{model},"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
                "vocab":{{{letters}}},"merges":[]}}}}"#
    );
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    dir
}

/// Switching back and forth during a request gives the tokens of a unit that does not switch.
#[test]
fn a_unit_on_gpus_switches_in_mid_request() {
    const TOKENS: usize = 150;
    let Some(shim) = shim() else { return };
    let dir = served_fixture();
    let prompt = [format!("{:?}", (0..70).collect::<Vec<u32>>())];
    let greedy = format!(r#"{GREEDY}, "ignore_eos": true"#);
    let of = |gpu, world| {
        Unit::start_with(gpu, world, |config| {
            config.model_dir = dir.path().to_owned();
            config.both_attentions = world > 1;
        })
    };
    let cpu = of(None, 1);
    let expected = cpu.client.continued_by(TOKENS, &prompt, &greedy);
    cpu.stop();
    let gpu = of(Some(shim), 2);
    assert_eq!(gpu.client.continued_through_switches(TOKENS, &prompt, &greedy), expected);
    let (status, refusal) = gpu.client.ask("POST", "/switch", r#"{"to": "ep", "kv_step_bytes": 1000}"#);
    assert!(status >= 400 && refusal.contains("(kv_step_bytes) is not supported on a GPU"), "{status}: {refusal}");
    assert_eq!(gpu.client.continued_by(TOKENS, &prompt, &greedy), expected, "after a switch that was refused");
    gpu.stop();
}

/// A GPU failure stops a unit with the driver's error, just as a lost rank does.
#[test]
fn a_gpu_that_fails_ends_the_unit_with_its_cause() {
    const CAUSE: &str = "the CUDA driver refused: uncorrectable ECC error encountered";
    let Some(shim) = shim() else { return };
    let gpu = Unit::start(Some(shim), 2, Attention::Dp);
    gpu.client.continued(&prompts()[..1], GREEDY);
    gpu.failure.set(CAUSE).unwrap();
    let body = r#"{"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}"#;
    let (status, answer) = gpu.client.ask("POST", "/generate", body);
    assert!(status >= 500 && answer.contains("rank 1") && answer.contains(CAUSE), "{status}: {answer}");
    let ended = gpu.process.join().unwrap().unwrap_err().to_string();
    assert!(ended.contains("rank 1") && ended.contains(CAUSE), "{ended}");
}
