//! The worker's whole loop over the CUDA sources: HTTP requests to tokens.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::unit::{Room, UnitRank};
use semmoe_kernels_shim::Shim;
use semmoe_tables::Attention;
use semmoe_worker::{DeviceChoice, EngineLimits, GpuProvider, KvBudget, WorkerConfig, WorkerError, WorkerEvent, run};

use semmoe_worker_shim::{ShimUnit, shim};

struct ShimGpu {
    shim: &'static Shim,
    unit: Mutex<Option<ShimUnit>>,
}

impl GpuProvider for ShimGpu {
    fn free_bytes(&self) -> Result<u64, String> {
        Ok(1 << 30)
    }

    fn rank(&self, rank: usize, room: Room) -> Result<UnitRank, String> {
        let mut unit = self.unit.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(unit.get_or_insert_with(|| ShimUnit::new(self.shim, room)).rank(rank))
    }
}

/// A unit that serves, all of it in this process.
struct Unit {
    http: SocketAddr,
    shutdown: semmoe_worker::Shutdown,
    process: JoinHandle<Result<(), WorkerError>>,
}

impl Unit {
    fn start(gpu: Option<&'static Shim>, world: u16, attention: Attention) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m");
        let mut config = WorkerConfig::new(model, 0, world, ([127, 0, 0, 1], 0).into());
        let (sender, events) = mpsc::channel();
        config.announce = Arc::new(move |event| sender.send(*event).unwrap_or(()));
        config.listen = Some(([127, 0, 0, 1], 0).into());
        config.handle_signals = false;
        config.attention = attention;
        config.limits =
            EngineLimits { running: 4, step_tokens: 64, kv: KvBudget::Tokens(1024), ..EngineLimits::default() };
        if let Some(shim) = gpu {
            config.device = DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: world };
            config.gpu = Some(Arc::new(ShimGpu { shim, unit: Mutex::default() }));
        }
        let shutdown = config.shutdown.clone();
        let process = std::thread::spawn(move || run(config));
        let http = loop {
            match events.recv().expect("the unit comes up") {
                WorkerEvent::Ready { http: Some(http), .. } => break http,
                _ => continue,
            }
        };
        Self { http, shutdown, process }
    }

    /// Status and body of an answer.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.http).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n");
        let length = body.len();
        write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    /// The tokens that follow each prompt, all asked for at once.
    fn continued(&self, prompts: &[String], sampling: &str) -> Vec<String> {
        std::thread::scope(|scope| {
            let ask = |prompt: &String| {
                let params = format!(r#"{{"max_new_tokens": 4, {sampling}}}"#);
                let body = format!(r#"{{"input_ids": {prompt}, "sampling_params": {params}}}"#);
                scope.spawn(move || {
                    let (status, answer) = self.ask("POST", "/generate", &body);
                    assert_eq!(status, 200, "{answer}");
                    let from = answer.find("\"output_ids\"").expect("an answer names its tokens");
                    answer[from..].split_once(']').unwrap().0.to_owned()
                })
            };
            let asked: Vec<_> = prompts.iter().map(ask).collect();
            asked.into_iter().map(|answer| answer.join().unwrap()).collect()
        })
    }

    fn stop(self) {
        self.shutdown.request();
        self.process.join().unwrap().unwrap();
    }
}

/// The last one fills more than one page, and more than one step.
fn prompts() -> [String; 3] {
    ["[5, 9, 200, 31]".to_owned(), "[77]".to_owned(), format!("{:?}", (1..=90).collect::<Vec<u32>>())]
}

/// Chosen on the GPU, and on the host by logits that were read back.
const GREEDY: &str = r#""temperature": 0"#;
const SAMPLED: &str = r#""temperature": 0.8, "top_p": 0.9, "sampling_seed": 7"#;

#[test]
fn a_unit_on_gpus_answers_as_one_on_cpus() {
    let Some(shim) = shim() else { return };
    let cpu = Unit::start(None, 1, Attention::Dp);
    let expected = cpu.continued(&prompts(), GREEDY);
    let sampled = cpu.continued(&prompts()[..2], SAMPLED);
    cpu.stop();
    for (attention, other) in [(Attention::Dp, "dp-tp"), (Attention::Tp, "tp")] {
        let gpu = Unit::start(Some(shim), 2, attention);
        assert_eq!(gpu.continued(&prompts(), GREEDY), expected, "attention {attention}");
        assert_eq!(gpu.continued(&prompts()[..2], SAMPLED), sampled, "attention {attention}");
        assert_eq!(gpu.continued(&prompts()[2..], GREEDY), expected[2..], "from pages that were computed before");
        let (_, metrics) = gpu.ask("GET", "/metrics", "");
        let counted = |name: &str| {
            let of = metrics.lines().filter_map(|line| line.strip_prefix(name)?.split_once(' ')?.1.parse::<f64>().ok());
            of.sum::<f64>()
        };
        assert!(counted("semmoe_gpu_launches_total{") > 1000.0, "{metrics}");
        assert!(counted("semmoe_cached_prompt_tokens_total{") >= 64.0 || attention == Attention::Dp, "{metrics}");
        let (status, refusal) = gpu.ask("POST", "/switch", &format!(r#"{{"to": "{other}"}}"#));
        assert!(status >= 400 && refusal.contains("cannot be had on a GPU"), "{status}: {refusal}");
        assert_eq!(gpu.ask("POST", "/flush_cache", "").0, 200);
        assert_eq!(gpu.continued(&prompts()[..1], GREEDY), expected[..1], "after the cache was flushed");
        gpu.stop();
    }
}
