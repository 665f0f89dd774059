//! `semmoe template check`: renders chats with a chat template and compares the results with Jinja2.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use semmoe_engines::{Engine, Version};
use semmoe_text::{
    Budget, ChatOptions, ChatTemplate, Given, Limits, Preparation, Prompt, Route, Tokenizer, prompt_ids, tokenizer_file,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{print_result, read_text};
use crate::args::{TemplateCheckArgs, TemplateCommand};
use crate::error::CliError;

/// Built-in chats that cover all shapes, one request body per line.
const CHATS: &str = include_str!("template/chats.jsonl");
/// Python script that runs Jinja2 as configured by Transformers.
const REFERENCE: &str = include_str!("../../tests/templates/reference.py");
const MAX_CHATS_BYTES: u64 = 64 << 20;
/// The fixed time for both renderers: 2024-02-29 13:05:09.
const NOW: i64 = 1_709_211_909;
/// Time limit for the Python process, as Jinja2 has none.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Report {
    features: Vec<String>,
    /// Whether the texts were compared with Jinja2's.
    compared: bool,
    differ: usize,
    chats: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    chat: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// Jinja2's text or error, if it differs from ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    jinja2: Option<String>,
}

pub(crate) fn run(command: &TemplateCommand) -> Result<(), CliError> {
    let TemplateCommand::Check(args) = command;
    let file = tokenizer_file(&args.tokenizer);
    let input = |error: semmoe_text::TextError| CliError::input(error.to_string());
    // Jinja2 runs with a fixed clock; an engine uses the current time.
    let clock: fn() -> i64 = if args.engine.is_some() { semmoe_engines::unix_seconds } else { || NOW };
    let template = ChatTemplate::beside(&file, clock).map_err(input)?.with_options(options(args)?);
    let tokenizer = Tokenizer::from_file(&file).map_err(input)?;
    let chats = chats(args)?;
    let preparation = args.engine.as_deref().map_or(Ok(Preparation::OWN), preparation)?;
    // Chats that the engine rejects are not compared.
    let requests: Vec<Value> = chats.iter().map(|chat| request(&template, preparation, chat)).collect();
    let theirs = if args.engine.is_none() { reference(&requests) } else { None };
    let mut outcomes = Vec::new();
    for (at, (chat, request)) in chats.iter().zip(&requests).enumerate() {
        let theirs = theirs.as_ref().and_then(|all| all.get(at)).filter(|_| !request.is_null());
        let jinja2 = theirs.and_then(|theirs| difference(&template, request, theirs));
        let route = if chat["messages"].is_array() { Route::Chat } else { Route::Completions };
        let prompt = Prompt::read(preparation, route, chat);
        let ids = prompt.and_then(|prompt| prompt_ids(&prompt, &tokenizer, Some(&template), Limits::default()));
        let chat = chat["name"].as_str().unwrap_or("chat").to_owned();
        outcomes.push(match ids.map(|prompts| prompts.concat()) {
            Ok(ids) => Outcome { chat, tokens: Some(ids.len()), ids: args.ids.then_some(ids), refused: None, jinja2 },
            Err(error) => Outcome { chat, tokens: None, ids: None, refused: Some(error.to_string()), jinja2 },
        });
    }
    let differ = outcomes.iter().filter(|outcome| outcome.jinja2.is_some()).count();
    let report = Report { features: template.features(), compared: theirs.is_some(), differ, chats: outcomes };
    print_result(args.output, "template check", &report, || described(&report))?;
    match differ {
        0 => Ok(()),
        differ => Err(CliError::failed(format!("Jinja2 renders {differ} chats differently"))),
    }
}

fn chats(args: &TemplateCheckArgs) -> Result<Vec<Value>, CliError> {
    let text = match &args.chats {
        Some(path) => read_text(path, "chats", MAX_CHATS_BYTES)?,
        None => CHATS.to_owned(),
    };
    let mut chats = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        match serde_json::from_str::<Value>(line) {
            Ok(chat) if chat["messages"].is_array() || chat["prompt"].is_string() => chats.push(chat),
            Ok(_) => return Err(CliError::input(format!("line {} of the chats has no messages or prompt", at + 1))),
            Err(error) => return Err(CliError::input(format!("line {} of the chats is not JSON: {error}", at + 1))),
        }
    }
    Ok(chats)
}

/// Templates inside requests are rendered too, because the operator supplies the chats.
fn options(args: &TemplateCheckArgs) -> Result<ChatOptions, CliError> {
    let variables = match &args.default_chat_template_kwargs {
        Some(text) => serde_json::from_str(text)
            .map_err(|error| CliError::input(format!("--default-chat-template-kwargs: {error}")))?,
        None => serde_json::Map::new(),
    };
    Ok(ChatOptions { variables, trusts_templates: true, ..ChatOptions::default() })
}

/// Parses `vllm`, or `vllm@0.30.0`.
fn preparation(engine: &str) -> Result<&'static Preparation, CliError> {
    let (name, version) = engine.split_once('@').map_or((engine, None), |(name, version)| (name, Some(version)));
    let engine: Engine = name.parse().map_err(|error| CliError::input(format!("--engine: {error}")))?;
    let numbers = version.map(|text| {
        let version = Version::parse(text).map(Version::numbers);
        version.ok_or_else(|| CliError::input(format!("--engine: '{text}' is not a version such as 0.32.0")))
    });
    Ok(Preparation::of(engine.name(), numbers.transpose()?))
}

/// Prepares a chat as the engine does, for both renderers; null if the engine rejects it.
fn request(template: &ChatTemplate, preparation: &Preparation, chat: &Value) -> Value {
    let body = chat.as_object().cloned().unwrap_or_default();
    template.prepared(preparation, &body).unwrap_or_default()
}

/// Jinja2's text or error, if it differs from ours.
fn difference(template: &ChatTemplate, request: &Value, theirs: &Value) -> Option<String> {
    let given = Given {
        tools: Some(&request["tools"]),
        add_generation_prompt: request["add_generation_prompt"] == true,
        variables: request["variables"].as_object(),
    };
    let is_equal = match template.render_as_given(&request["messages"], given, Budget::default()) {
        Ok(text) => theirs["text"] == *text,
        Err(_) => theirs["error"].is_string(),
    };
    let text = theirs["text"].as_str().or(theirs["error"].as_str()).filter(|_| !is_equal);
    text.map(str::to_owned)
}

/// Renders the requests with Jinja2; `None` if no Python with Jinja2 is installed, or if it times out.
fn reference(requests: &[Value]) -> Option<Vec<Value>> {
    let mut python = Command::new("python3")
        .args(["-c", REFERENCE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let skipped = json!({"messages": []});
    let (mut input, mut output) = (python.stdin.take()?, python.stdout.take()?);
    let lines: String =
        requests.iter().map(|request| format!("{}\n", if request.is_null() { &skipped } else { request })).collect();
    // Writes on a thread, because Python without jinja2 never reads its input.
    let writing = std::thread::spawn(move || input.write_all(lines.as_bytes()).is_ok());
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).map(|_| text)
    });
    let begin = Instant::now();
    let ended = loop {
        match python.try_wait() {
            Ok(Some(status)) => break status.success(),
            Ok(None) if begin.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = python.kill();
                let _ = python.wait();
                break false;
            }
        }
    };
    let (written, text) = (writing.join().ok()?, reading.join().ok()?.ok()?);
    let answers: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>().ok()?;
    (ended && written && answers.len() == requests.len()).then_some(answers)
}

fn described(report: &Report) -> String {
    let mut text = String::new();
    for Outcome { chat, tokens, refused, jinja2, .. } in &report.chats {
        let _ = match (tokens, refused) {
            (Some(tokens), _) => writeln!(text, "{chat}: {tokens} tokens"),
            (None, refused) => writeln!(text, "{chat}: refused: {}", refused.as_deref().unwrap_or_default()),
        };
        if let Some(jinja2) = jinja2 {
            let _ = writeln!(text, "  Jinja2 differs: {jinja2:?}");
        }
    }
    let _ = writeln!(text, "uses: {}", report.features.join(", "));
    let compared = if report.compared { "compared with Jinja2" } else { "not compared with Jinja2" };
    let _ = writeln!(text, "{} chats, {compared}, {} differ", report.chats.len(), report.differ);
    text
}
