//! The first hour: serving without a file, from the environment, under a supervisor; and the mistakes that users make
//! in it. Each gets one line that says how to fix it and the right exit code, and nothing is written or served.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use semmoe_engines::http::{AnswerLimits, HttpClient};

use crate::support::{describe, model_dir, repository, run, semmoe};

/// Files for the mistakes, and a gateway without backends.
pub(crate) struct Desk {
    folder: tempfile::TempDir,
    gateway: Child,
    /// The data plane's URL, `http://127.0.0.1:PORT`.
    url: String,
}

impl Desk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut gateway = semmoe(&["serve", "--engine", "openai", "--url", "http://127.0.0.1:1"])
            .args(["--model", "m", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut line = String::new();
        BufReader::new(gateway.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let url = line.trim().strip_prefix("ready: ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        let desk = Self { folder, gateway, url };
        let tables = crate::support::solved_tables(desk.folder.path());
        std::fs::rename(tables, desk.path("m.tables")).expect("renamed");
        std::fs::rename(desk.path("p.profile.safetensors"), desk.path("p.profile")).expect("renamed");
        std::fs::write(desk.path("prompts.jsonl"), "{\"prompt\": \"One two three\"}\n").expect("written");
        for (name, server) in [
            ("key.toml", "lisen = \"127.0.0.1:0\""),
            ("address.toml", "listen = \"localhost:8080\""),
            ("token.toml", "admin_token_sha256 = \"my-token\""),
            ("open.toml", "admin = \"0.0.0.0:8081\""),
            ("environment.toml", "admin = \"127.0.0.1:0\""),
            ("taken.toml", &format!("listen = {:?}", desk.url.trim_start_matches("http://"))),
        ] {
            let text = format!(
                "[server]\n{server}\n[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n\
                 [[models.backends]]\nname = \"a\"\nengine = \"openai\"\nurl = \"http://127.0.0.1:1\"\n"
            );
            std::fs::write(desk.path(name), text).expect("written");
        }
        desk
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces `@name` by a file here, and `$MODEL`, `$TRACE` and `$GATEWAY` by what they name.
    pub(crate) fn words(&self, command: &str) -> Vec<String> {
        let text = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
        let word = |word: &str| match word.strip_prefix('@') {
            Some(name) => text(self.path(name)),
            None => word
                .replace("$MODEL", &text(model_dir()))
                .replace("$TRACE", &text(repository("tests/data/reference.trace.safetensors")))
                .replace("$GATEWAY", &self.url),
        };
        command.split_whitespace().map(word).collect()
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = self.gateway.kill();
        let _ = self.gateway.wait();
    }
}

/// A command, its exit code, and words of the line that says how to fix it.
const MISTAKES: [(&str, i32, &str); 25] = [
    ("serve", 2, "<--config <FILE>|--engine <ENGINE>>"),
    ("serve --engine sglang", 2, "--url <URL>"),
    ("serve --engine sglang --url 127.0.0.1:30000", 2, "must start with http://"),
    ("serve --engine sglang --url http://127.0.0.1:1", 1, "start the engine first, or pass --model NAME"),
    ("serve --engine sglang --url http://127.0.0.1:1 --model m --tokenizer /nowhere", 2, "takes the model's folder"),
    ("serve --engine sglang --url http://127.0.0.1:1 --model m --tables @m.tables", 2, "--tokenizer <PATH>"),
    ("serve --engine sglang --url http://127.0.0.1:1 --model m --policy affinty", 2, "expected one of: affinity"),
    ("serve --engine sglang --url http://127.0.0.1:1 --model m --policy affinity", 2, "tokenizer: must be set"),
    (
        "--log off serve --engine sglang --url http://127.0.0.1:1 --model m --tokenizer $MODEL --tables $TRACE --check",
        2,
        "`semmoe solve` writes tables",
    ),
    ("serve --config @m.tables", 2, "expected a TOML file"),
    ("serve --config @key.toml", 2, "expected one of `listen`"),
    ("serve --config @address.toml", 2, "an address like 127.0.0.1:8080"),
    ("serve --config @token.toml", 2, "sha256sum"),
    ("serve --config @open.toml", 2, "server.admin_token_sha256 must be set"),
    ("--log off serve --config @taken.toml", 1, "choose another address"),
    ("up --model Qwen/Qwen3-30B-A3B", 2, "pass a checkpoint directory"),
    ("up --ranks 3 --port 0 --data @data", 2, "divides the 32 experts: 1, 2, 4, 8, 16, 32"),
    (
        "profile record --engine sglang --url $GATEWAY --prompts @prompts.jsonl --out @r",
        1,
        "the URL of the engine behind it",
    ),
    ("profile build @p.profile --out @o", 2, "`semmoe profile record` writes traces"),
    ("solve --profile $TRACE --groups 4 --out @o", 2, "`semmoe profile build` makes profiles"),
    ("solve --profile @p.profile --groups 5 --out @o", 2, "--pad"),
    ("solve --profile @p.profile --groups 4 --objective ranks --out @o", 2, "pass one with --trace"),
    ("evaluate --tables @m.tables", 2, "<--trace <FILE>|--profile <FILE>>"),
    ("evaluate --tables @m.tables --profile $TRACE", 2, "pass a trace with --trace"),
    ("load --url $GATEWAY --prompts @prompts.jsonl --concurrency 1", 2, "--requests N or --duration"),
];

#[test]
fn mistakes_of_the_first_hour_name_the_way_out() {
    let desk = Desk::new();
    for (command, code, way_out) in MISTAKES {
        let words = desk.words(command);
        let output = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{command}: {}", describe(&output));
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(way_out)).collect();
        assert!(!lines.is_empty(), "{command}: no line names {way_out:?}: {said}");
        // Errors that clap does not report are a single line, apart from progress lines.
        let ours: Vec<&str> = said.lines().filter(|line| !line.ends_with(" ...")).collect();
        assert!(said.starts_with("error: ") || ours.len() == 1, "{command}: {said}");
        assert!(!desk.path("o").exists() && !desk.path("r").exists(), "{command} wrote something");
    }
}

#[test]
fn variables_of_the_environment_are_keys_or_refused() {
    let serve = |variable: &str| {
        let args = ["serve", "--engine", "openai", "--url", "http://127.0.0.1:1", "--model", "m", "--check"];
        let mut command = semmoe(&args);
        if let Some((name, value)) = variable.split_once('=') {
            command.env(name, value);
        }
        command.output().expect("starts")
    };
    let done = serve("SEMMOE_SERVER__LISTEN=127.0.0.1:4321");
    assert!(done.status.success(), "{}", describe(&done));
    assert!(String::from_utf8_lossy(&done.stdout).contains("requests at 127.0.0.1:4321"), "{}", describe(&done));
    for (variable, named) in [
        ("SEMMOE_SERVER_LISTEN=127.0.0.1:1", "SEMMOE_SERVER__LISTEN, with two underscores"),
        ("SEMMOE_SERVER__LISTN=127.0.0.1:1", "expected one of `listen`"),
        ("SEMMOE_LIMITS__STREAMS=many", "expected u32"),
    ] {
        let done = serve(variable);
        assert_eq!(done.status.code(), Some(2), "{variable}: {}", describe(&done));
        assert!(String::from_utf8_lossy(&done.stderr).contains(named), "{variable}: {}", describe(&done));
    }
}

/// Values from the environment survive a reload of the file.
#[test]
fn a_reload_keeps_what_the_environment_says() {
    let desk = Desk::new();
    let mut child =
        semmoe(&["--log", "off", "serve", "--config", desk.path("environment.toml").to_str().expect("UTF-8")])
            .env("SEMMOE_SERVER__LISTEN", "127.0.0.1:0")
            .env("SEMMOE_MODELS__0__NAME", "of-the-environment")
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let admin: Vec<String> = lines.take(2).map(|line| line.expect("a line")).collect();
    let admin = admin[1].strip_prefix("admin: ").unwrap_or_else(|| panic!("{admin:?}")).parse().expect("a URL");
    let file = std::fs::read_to_string(desk.path("environment.toml")).expect("written before");
    std::fs::write(desk.path("environment.toml"), file.replace("\"a\"", "\"b\"")).expect("written");
    crate::support::signal("-HUP", child.id());
    let config = tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        for _ in 0..600 {
            let answer = HttpClient::default().get_json(&admin, "/admin/config", &AnswerLimits::default()).await;
            let config: serde_json::Value = answer.expect("an answer");
            if !config["last_reload"].is_null() {
                return config;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        panic!("no reload");
    });
    let _ = child.kill();
    let _ = child.wait();
    let model = &config["settings"]["models"][0];
    assert_eq!(
        (&model["name"], &model["backends"][0]["name"]),
        (&"of-the-environment".into(), &"b".into()),
        "{config}"
    );
}

/// The output of `--print-config` is a file with the same meaning.
#[test]
fn a_printed_configuration_is_one() {
    let folder = tempfile::tempdir().expect("a folder");
    // A base URL as OpenAI's clients spell it.
    let quick = ["serve", "--engine", "sglang", "--url", "http://127.0.0.1:1/v1", "--url", "http://127.0.0.1:2"];
    let printed = semmoe(&quick)
        .args(["--model", "a \"model\"", "--listen", "127.0.0.1:0", "--print-config", "--tokenizer"])
        .arg(model_dir())
        .output()
        .expect("starts");
    assert!(printed.status.success(), "{}", describe(&printed));
    let file = folder.path().join("semmoe.toml");
    std::fs::write(&file, &printed.stdout).expect("written");
    let checked = || {
        let checked = semmoe(&["serve", "--check", "--config"]).arg(&file).output().expect("starts");
        assert!(checked.status.success(), "{}", describe(&checked));
        String::from_utf8(checked.stdout).expect("UTF-8")
    };
    let said = checked();
    for part in ["a \"model\"", "policy prefix", "sglang-1", "http://127.0.0.1:2"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    assert!(!said.contains("/v1"), "{said}");
    // A file may also name the tokenizer by its directory.
    let text = std::fs::read_to_string(&file).expect("readable");
    let by_directory = text.replace("/tokenizer.json\"", "\"");
    assert_ne!(text, by_directory);
    std::fs::write(&file, by_directory).expect("written");
    assert_eq!(checked(), said);
}

/// systemd's protocol: a datagram when the gateway is ready, and one when it starts to stop.
#[test]
fn a_supervisor_is_notified_of_ready_and_stopping() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a time-out");
    let mut child = semmoe(&["serve", "--engine", "openai", "--url", "http://127.0.0.1:1", "--model", "m"])
        .args(["--listen", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", &path)
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    let heard = || {
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer).expect("a datagram");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert_eq!(heard(), "READY=1");
    crate::support::signal("-INT", child.id());
    assert_eq!(heard(), "STOPPING=1");
    assert!(child.wait().expect("a child of ours").success());
}
