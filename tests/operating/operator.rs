//! The operator: runs the document's commands, with this test's folder, addresses and model in place of the document's.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use semmoe_engines::http::HttpClient;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::engine::{Fleet, Kind};
use crate::support::{describe, json_of, model_dir, repository, semmoe, signal};

const PATIENCE: Duration = Duration::from_secs(120);
/// Polling interval; the gateway needs the CPU, too.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);

/// The response to a `curl`.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) status: u16,
    headers: HeaderMap,
    body: String,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// `error.code`
    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or("").to_owned()
    }
}

/// How engine restarts relate to the gateway's probes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restarts {
    /// The document's own configuration.
    Plain,
    /// A restart falls between two probes, which are ten minutes apart.
    Quick,
    /// The gateway has noticed that the engine is gone.
    Slow,
}

impl Restarts {
    /// The health section added to the document's configuration.
    fn health(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Quick => "\n[health]\ninterval_seconds = 600\n",
            Self::Slow => "\n[health]\ninterval_seconds = 0.2\n",
        }
    }
}

pub(crate) struct Operator {
    folder: TempDir,
    runtime: Runtime,
    http: HttpClient,
    pub(crate) engine: Fleet,
    restarts: Restarts,
    /// The gateway's process, data and admin URL.
    gateway: Option<(Child, String, String)>,
    printed: String,
    asked: u64,
}

impl Drop for Operator {
    fn drop(&mut self) {
        if let Some((mut child, ..)) = self.gateway.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Operator {
    /// With `prompts` prompts of the operator's own traffic.
    pub(crate) fn new(kind: Kind, restarts: Restarts, prompts: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("tables")).expect("a folder");
        std::os::unix::fs::symlink(model_dir(), folder.path().join("model")).expect("a link");
        for (from, to) in [("profile", "prompts"), ("heldout", "other")] {
            let all = std::fs::read_to_string(repository(&format!("assets/prompts/{from}.jsonl"))).expect("prompts");
            let some = all.lines().take(prompts).collect::<Vec<_>>().join("\n");
            std::fs::write(folder.path().join(format!("{to}.jsonl")), some).expect("written");
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        Self {
            folder,
            runtime,
            http: HttpClient::default(),
            engine: Fleet::new(kind),
            restarts,
            gateway: None,
            printed: String::new(),
            asked: 0,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the document's names by this test's.
    fn here(&self, text: &str) -> String {
        let folder = self.folder.path().display();
        let mut names = vec![
            ("/etc/semmoe/tables".to_owned(), format!("{folder}/tables")),
            ("/models/qwen3/".to_owned(), format!("{folder}/model/")),
            ("MODEL_DIR".to_owned(), format!("{folder}/model")),
            ("http://pod-a:30000".to_owned(), format!("http://{}", self.engine.address)),
            ("http://pod-a:8000".to_owned(), format!("http://{}", self.engine.address)),
            ("listen = \"0.0.0.0:8080\"".to_owned(), "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"".to_owned()),
            ("metrics = \"0.0.0.0:9090\"".to_owned(), "metrics = \"127.0.0.1:0\"".to_owned()),
        ];
        if self.engine.kind == Kind::Ranks {
            names.push(("engine = \"sglang\"".to_owned(), "engine = \"semmoe\"".to_owned()));
            names.push(("--engine sglang".to_owned(), "--engine semmoe".to_owned()));
        }
        if let Some((_, data, admin)) = &self.gateway {
            names.push(("http://127.0.0.1:8080".to_owned(), data.clone()));
            names.push(("http://127.0.0.1:8081".to_owned(), admin.clone()));
        }
        names.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    }

    /// The path of tables, as text.
    pub(crate) fn tables(&self, name: &str) -> String {
        self.here(&format!("/etc/semmoe/tables/{name}.tables.safetensors"))
    }

    /// Copies tables to the commands' working folder.
    pub(crate) fn has_tables_at_hand(&self, name: &str) {
        std::fs::copy(self.tables(name), self.path(&format!("{name}.tables.safetensors"))).expect("a copy");
    }

    /// Writes the configuration, and reloads a running gateway.
    pub(crate) fn configure(&mut self, toml: &str) {
        self.write(toml);
        if self.gateway.is_some() {
            let answer = self.admin_post("/admin/reload");
            assert_eq!(answer["needs_restart"], json!([]), "{answer}");
        }
    }

    pub(crate) fn write(&self, toml: &str) {
        std::fs::write(self.path("semmoe.toml"), self.here(toml) + self.restarts.health()).expect("written");
    }

    pub(crate) fn serve(&mut self) {
        self.shell("semmoe serve --config semmoe.toml --check && semmoe serve --config semmoe.toml");
    }

    /// Runs the commands of a block; returns the responses to its `curl` lines.
    pub(crate) fn shell(&mut self, block: &str) -> Vec<Asked> {
        let mut asked = Vec::new();
        for line in block.replace("\\\n", " ").lines() {
            for command in line.split(" #").next().unwrap_or(line).split("&&") {
                // After the gateway has started, replacements include its addresses.
                let words = words(&self.here(command));
                match words.first().map(String::as_str) {
                    None => {}
                    Some("curl") => asked.push(self.curl(&words[1..])),
                    Some("semmoe") if words[1] == "serve" && !words.contains(&"--check".to_owned()) => {
                        self.start(&words)
                    }
                    Some("semmoe") => self.run(&words[1..]),
                    Some("python") => self.start_engine(&words, self.path("model")),
                    Some("vllm") => {
                        let model =
                            if words[2].starts_with('/') { PathBuf::from(&words[2]) } else { self.path("model") };
                        self.start_engine(&words, model);
                    }
                    Some(_) => panic!("the test cannot run {command:?}"),
                }
            }
        }
        asked
    }

    /// Starts the engine, replacing the running one.
    fn start_engine(&mut self, words: &[String], model: PathBuf) {
        if self.restarts == Restarts::Slow && self.gateway.is_some() {
            self.engine.stop();
            self.until("/admin/backends", |answer| answer.json()["backends"][0]["healthy"] == false);
        }
        // The only expert map that the document exports.
        let placed = self.tables("qwen3");
        self.engine.start(words, &model, placed.into());
    }

    fn run(&mut self, words: &[String]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = semmoe(&words).current_dir(self.folder.path()).output().expect("it starts");
        assert!(output.status.success(), "{words:?}: {}", describe(&output));
        self.printed = String::from_utf8(output.stdout).expect("text");
    }

    /// Runs a command that prints JSON.
    pub(crate) fn semmoe(&self, words: &[&str]) -> Value {
        json_of(&semmoe(words).current_dir(self.folder.path()).output().expect("it starts"))
    }

    /// The output of the last command.
    pub(crate) fn printed(&self) -> &str {
        &self.printed
    }

    fn start(&mut self, words: &[String]) {
        let words: Vec<&str> = words[1..].iter().map(String::as_str).collect();
        let mut command = semmoe(&words);
        let mut child = command.current_dir(self.folder.path()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let mut after = |prefix: &str| {
            let line = lines.next().unwrap_or_default();
            line.strip_prefix(prefix).unwrap_or_else(|| panic!("{line:?}, expected {prefix}")).to_owned()
        };
        let urls = (after("ready: "), after("admin: "));
        self.gateway = Some((child, urls.0, urls.1));
        self.until("/readyz", |answer| answer.status == 200);
    }

    /// Sends the request that `curl` would.
    fn curl(&self, words: &[String]) -> Asked {
        let (mut method, mut body, mut url) = (None, Vec::new(), "");
        let mut headers = vec![("content-type".to_owned(), "application/x-www-form-urlencoded".to_owned())];
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().expect("a value").as_str();
            match word.as_str() {
                "-s" | "-si" => {}
                "-X" => method = Some(value().to_owned()),
                "-d" => body = value().as_bytes().to_vec(),
                "--data-binary" => body = std::fs::read(self.path(value().trim_start_matches('@'))).expect("a file"),
                "-H" => {
                    let (name, value) = value().split_once(':').expect("a header");
                    headers[0] = (name.to_owned(), value.trim().to_owned());
                }
                word if word.starts_with('-') => panic!("{word} of curl is not known here"),
                word => url = word,
            }
        }
        let posts = method.as_deref().map_or(!body.is_empty(), |method| method == "POST");
        if body.is_empty() {
            headers.clear();
        }
        let answer = self.send(if posts { Method::POST } else { Method::GET }, url, &headers, body);
        assert!((200..300).contains(&answer.status), "{url}: {answer:?}");
        answer
    }

    fn send(&self, method: Method, url: &str, headers: &[(String, String)], body: Vec<u8>) -> Asked {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        self.runtime.block_on(async {
            let (head, body) = self.http.send(request).await.expect("an answer").into_parts();
            let body = body.collect().await.expect("a whole answer").to_bytes();
            let body = String::from_utf8(body.to_vec()).expect("text");
            Asked { status: head.status.as_u16(), headers: head.headers, body }
        })
    }

    fn url(&self, plane: &str, path: &str) -> String {
        let (_, data, admin) = self.gateway.as_ref().expect("the gateway runs");
        format!("{}{path}", if plane == "data" { data } else { admin })
    }

    pub(crate) fn admin(&self, path: &str) -> Value {
        self.send(Method::GET, &self.url("admin", path), &[], Vec::new()).json()
    }

    pub(crate) fn admin_post(&self, path: &str) -> Value {
        let answer = self.send(Method::POST, &self.url("admin", path), &[], Vec::new());
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.json()
    }

    pub(crate) fn metrics(&self) -> String {
        self.send(Method::GET, &self.url("admin", "/metrics"), &[], Vec::new()).body
    }

    /// Loads the backend's tables by path; returns the response, successful or not.
    pub(crate) fn load_tables(&self, path: &str) -> Asked {
        let command = json!({ "backend": "pod-a", "path": path }).to_string();
        self.send(Method::POST, &self.url("admin", "/admin/tables"), &[], command.into_bytes())
    }

    /// Sends clients' requests one at a time, each with another prompt; all must succeed.
    pub(crate) fn ask(&mut self, requests: u64) -> Vec<Asked> {
        let prompts = std::fs::read_to_string(self.path("other.jsonl")).expect("prompts");
        let prompts = prompts.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["prompt"].take());
        // Some are chats.
        let prompts: Vec<Value> = prompts.filter(Value::is_string).collect();
        self.until("/readyz", |answer| answer.status == 200);
        let from = self.asked;
        self.asked += requests;
        let ask = |number: u64| {
            let prompt = &prompts[number as usize % prompts.len()];
            let body = json!({ "model": "Qwen/Qwen3-30B-A3B", "prompt": prompt, "max_tokens": 4 });
            let headers = [("content-type".to_owned(), "application/json".to_owned())];
            let answer =
                self.send(Method::POST, &self.url("data", "/v1/completions"), &headers, body.to_string().into());
            assert_eq!(answer.status, 200, "{answer:?}");
            answer
        };
        (from..from + requests).map(ask).collect()
    }

    /// Sends clients' requests in portions that fit the gateway's queue of 16 samples: each portion waits until all
    /// previous requests have been sampled and counted, so none is dropped, however slow the machine is.
    pub(crate) fn ask_sampled(&mut self, requests: u64) -> Vec<Asked> {
        const PORTION: u64 = 8;
        let (before, mut answers) = (self.samples(), Vec::new());
        while answers.len() as u64 != requests {
            answers.extend(self.ask(PORTION.min(requests - answers.len() as u64)));
            let wanted = before + answers.len() as u64;
            self.until("/metrics", |answer| samples(&answer.body) == wanted);
        }
        answers
    }

    /// Samples whose outcome the gateway has counted.
    fn samples(&self) -> u64 {
        samples(&self.metrics())
    }

    /// Polls the admin plane until `wanted` accepts the response.
    fn until(&self, path: &str, wanted: impl Fn(&Asked) -> bool) -> Asked {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.send(Method::GET, &self.url("admin", path), &[], Vec::new());
            if wanted(&answer) {
                return answer;
            }
            assert!(Instant::now() < end, "{path}: {answer:?}");
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }

    /// Sends lingering requests until the gateway has seen in the loads that pins are honoured.
    pub(crate) fn until_pins_are_honoured(&mut self) {
        self.engine.linger(true);
        let end = Instant::now() + PATIENCE;
        while self.admin("/admin/backends")["backends"][0]["pins"]["state"] != "honoured" {
            self.ask(1);
            assert!(Instant::now() < end, "{}", self.admin("/admin/backends"));
        }
        self.engine.linger(false);
    }

    /// The live figures that samples give for the backend.
    pub(crate) fn live(&self) -> Value {
        self.admin("/admin/live")["backends"][0].clone()
    }

    /// SIGTERM stops the gateway, with exit code 0.
    pub(crate) fn leave(mut self) {
        let (mut child, ..) = self.gateway.take().expect("the gateway runs");
        signal("-INT", child.id());
        let status = child.wait().expect("a child of ours");
        assert!(status.success(), "{status}");
    }
}

/// The sum over all outcomes.
fn samples(metrics: &str) -> u64 {
    let values = metrics.lines().filter(|line| line.starts_with("semmoe_sampled_requests_total{"));
    values.map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<u64>().expect("a count")).sum()
}

/// Splits like a shell: at spaces, except in quotes.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in command.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}
