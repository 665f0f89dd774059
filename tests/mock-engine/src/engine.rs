//! An engine's state.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use semmoe_tables::{CheckpointConfig, ModelInfo};
use semmoe_text::{ChatTemplate, Tokenizer};
use serde_json::Value;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{Notify, Semaphore};

use crate::dialect::Dialect;
use crate::fault::Fault;

/// The answer to a chat on a route that returns its token ids, or a status.
pub type Render = Box<dyn Fn(&str, &Value) -> Result<Value, u16> + Send>;

/// How texts become tokens.
#[derive(Debug)]
pub enum Texts {
    /// One token per byte.
    Bytes,
    /// The model's tokenizer and chat template.
    Model(Arc<Tokenizer>, Option<Box<ChatTemplate>>),
    /// Bodies are ignored, and every route answers with its path (see `canned`).
    Unread,
}

/// An engine's settings; tests change them while it runs.
#[derive(Clone, Debug)]
pub struct Settings {
    pub version: String,
    pub model_path: String,
    /// Attention-DP ranks in the server information; loads and metrics may show others.
    pub ranks: u16,
    pub ranks_in_loads: Option<u16>,
    /// The actual number of ranks; 0 ignores pins.
    pub real_ranks: Option<u16>,
    /// The first rank's number in metrics and pins.
    pub first_rank: u16,
    pub first_pin: u16,
    pub ignores_pins: bool,
    /// Routes on which pins are read, instead of the dialect's.
    pub pinned_routes: Option<Vec<&'static str>>,
    /// Start options: routed experts, and SGLang's `--init-expert-location`.
    pub gives_routes: bool,
    pub init_expert_location: String,
    /// Server information instead of the dialect's.
    pub info: Option<Value>,
    /// Limit for the tokens of a prompt and its answer; 0 does not report any.
    pub context: u64,
    /// The model in its list; see [`Engine::lists`]. Without one, and with a context limit, it lists its own.
    pub lists: Option<String>,
    /// Required of every request; and required only for the list of models.
    pub authorization: Option<String>,
    pub models_authorization: Option<String>,
    pub health: u16,
    /// Duration of the health route, which runs the model as SGLang's does.
    pub health_time: Duration,
    /// Accepts connections for probes and never answers.
    pub mute: bool,
    /// The scheduler hangs: only `/ping` is answered, the rest once it resumes.
    pub hung: bool,
    pub has_ping: bool,
    /// The fault of requests without `x-mock`, in that header's format.
    pub behaviour: String,
    /// By a prompt's first token.
    pub faults: HashMap<u32, Fault>,
    /// Answers this many more requests, and then everything with 503.
    pub lives_for: u64,
    /// After the first request, this many of a prompt's first tokens are routed to other experts.
    pub unsteady_tokens: usize,
    /// Tokens generated if a request sets no limit.
    pub usual_tokens: Option<u64>,
    /// Size of the pieces in which streams are sent.
    pub piece_bytes: usize,
    /// Time per generated token; if set, streams are sent event by event.
    pub token_time: Duration,
    /// Whether requests last until the loads have been queried twice (at most a second), so that these include them.
    pub lingers: bool,
}

/// A received request.
#[derive(Debug)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Seen {
    /// The rank in the pin header.
    pub fn header_pin(&self) -> Option<u16> {
        self.headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap().parse().unwrap())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// A completed request.
#[derive(Clone, Debug)]
pub struct Ran {
    pub body: Value,
    pub prompt: Vec<u32>,
    /// Counted from 0 for the engine's first rank.
    pub rank: u16,
    /// The pin that was read, if any.
    pub pin: Option<u16>,
}

/// The load of a rank, and its monotonic counters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) running: u64,
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) one_token_prompts: u64,
    pub(crate) one_token_answers: u64,
}

pub struct Engine {
    pub dialect: Dialect,
    pub model: ModelInfo,
    pub texts: Texts,
    /// A prompt with [`Fault::Hang`] arrived.
    pub hanging: Notify,
    pub(crate) released: Notify,
    /// Each event of a held stream takes one permit.
    pub(crate) events: Arc<Semaphore>,
    /// Bytes of an endless answer that were sent.
    pub(crate) flooded: Arc<AtomicUsize>,
    pub(crate) rendering: Mutex<Option<Render>>,
    pub(crate) gone: UnboundedSender<()>,
    pub(crate) listeners: Mutex<Option<(UnboundedReceiver<Seen>, UnboundedReceiver<()>)>>,
    pub(crate) seen: UnboundedSender<Seen>,
    settings: Mutex<Settings>,
    ran: Mutex<Vec<Ran>>,
    loads: Mutex<Vec<Load>>,
    loads_asked: Notify,
    turn: AtomicUsize,
}

impl fmt::Debug for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Engine").field("dialect", &self.dialect).finish_non_exhaustive()
    }
}

impl Engine {
    pub fn new(dialect: Dialect, model: ModelInfo, texts: Texts) -> Self {
        let ((seen, seen_listener), (gone, gone_listener)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let settings = Settings {
            version: dialect.version.to_owned(),
            model_path: format!("/models/{}", model.model),
            ranks: 1,
            ranks_in_loads: None,
            real_ranks: None,
            first_rank: 0,
            first_pin: 0,
            ignores_pins: false,
            pinned_routes: None,
            gives_routes: true,
            init_expert_location: "trivial".to_owned(),
            info: None,
            context: 4096,
            lists: Some(model.model.clone()),
            authorization: None,
            models_authorization: None,
            health: 200,
            health_time: Duration::ZERO,
            mute: false,
            hung: false,
            has_ping: true,
            behaviour: String::new(),
            faults: HashMap::new(),
            lives_for: u64::MAX,
            unsteady_tokens: 0,
            usual_tokens: None,
            piece_bytes: usize::MAX,
            token_time: Duration::ZERO,
            lingers: false,
        };
        Self {
            dialect,
            model,
            texts,
            hanging: Notify::new(),
            released: Notify::new(),
            events: Arc::new(Semaphore::new(0)),
            flooded: Arc::default(),
            rendering: Mutex::default(),
            gone,
            listeners: Mutex::new(Some((seen_listener, gone_listener))),
            seen,
            settings: Mutex::new(settings),
            ran: Mutex::default(),
            loads: Mutex::default(),
            loads_asked: Notify::new(),
            turn: AtomicUsize::new(0),
        }
    }

    /// An engine that serves the checkpoint in `folder` under this name.
    ///
    /// # Errors
    /// Names the unreadable file, and the cause.
    pub fn of(dialect: Dialect, name: &str, folder: &Path) -> Result<Self, Box<dyn Error>> {
        let shape = CheckpointConfig::open(folder)?.model_info()?;
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
        let template = ChatTemplate::beside(&folder.join("tokenizer.json"), || 0).ok();
        let texts = Texts::Model(Arc::new(tokenizer), template.map(Box::new));
        Ok(Self::new(dialect, ModelInfo { model: name.to_owned(), ..shape }, texts))
    }

    /// Disables the log of requests, for long runs.
    #[must_use]
    pub fn forgetful(self) -> Self {
        self.listeners.lock().unwrap().take();
        self
    }

    /// Changes its settings.
    #[must_use]
    pub fn with(self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings());
        self
    }

    /// The guard must not be held across an await.
    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap()
    }

    /// The requests completed since the last call, faulty ones included.
    pub fn ran(&self) -> Vec<Ran> {
        std::mem::take(&mut self.ran.lock().unwrap())
    }

    /// The number of prompts so far that began with this token.
    pub fn attempts(&self, first: u32) -> usize {
        self.ran.lock().unwrap().iter().filter(|ran| ran.prompt.first() == Some(&first)).count()
    }

    pub(crate) fn has_run_before(&self) -> bool {
        self.ran.lock().unwrap().len() > 1
    }

    /// Loads of all ranks that it reports.
    pub(crate) fn loads(&self) -> MutexGuard<'_, Vec<Load>> {
        let ranks = usize::from(self.settings().ranks);
        let mut loads = self.loads.lock().unwrap();
        let length = loads.len().max(ranks);
        loads.resize(length, Load::default());
        loads
    }

    /// Lingering requests finish after two calls.
    pub(crate) fn loads_were_asked_for(&self) {
        self.loads_asked.notify_waiters();
    }

    /// Occupies a rank with a request until the guard is dropped.
    pub(crate) async fn occupy(&self, rank: u16) -> Running<'_> {
        if let Some(load) = self.loads().get_mut(usize::from(rank)) {
            load.running += 1;
        }
        let running = Running { engine: self, rank };
        let lingers = self.settings().lingers;
        // Twice: the client that queried first must still see the request when it compares with its own count.
        for _ in 0..if lingers { 2 } else { 0 } {
            let _ = tokio::time::timeout(Duration::from_millis(500), self.loads_asked.notified()).await;
        }
        running
    }

    /// The pinned rank if it exists, otherwise the next one.
    pub(crate) fn rank(&self, pin: Option<u16>) -> u16 {
        let settings = self.settings();
        let ranks = settings.real_ranks.unwrap_or(settings.ranks).max(1);
        match pin {
            Some(pin) => pin - settings.first_pin,
            None => (self.turn.fetch_add(1, Ordering::SeqCst) % usize::from(ranks)) as u16,
        }
    }

    pub(crate) fn log(&self, ran: Ran) {
        self.ran.lock().unwrap().push(ran);
    }
}

/// A request that occupies a rank.
pub(crate) struct Running<'a> {
    engine: &'a Engine,
    rank: u16,
}

impl Running<'_> {
    /// `completes`: the prompt is a completion, to which no template adds tokens.
    pub(crate) fn count(&self, prompt_tokens: usize, output_tokens: usize, completes: bool) {
        let mut loads = self.engine.loads();
        let Some(load) = loads.get_mut(usize::from(self.rank)) else { return };
        load.requests += 1;
        load.prompt_tokens += prompt_tokens as u64;
        load.output_tokens += output_tokens as u64;
        load.one_token_prompts += u64::from(prompt_tokens == 1 && completes);
        load.one_token_answers += u64::from(output_tokens == 1);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(load) = self.engine.loads().get_mut(usize::from(self.rank)) {
            load.running -= 1;
        }
    }
}
