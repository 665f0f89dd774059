//! `semmoe template check`: a chat template tried on chats, and compared with Jinja2.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use semmoe_text::{Budget, ChatTemplate, Given, Tokenizer, tokenizer_file};
use serde::Serialize;
use serde_json::{Value, json};

use super::{print_result, read_text};
use crate::args::{TemplateCheckArgs, TemplateCommand};
use crate::error::CliError;

/// Chats of all shapes, a request's body a line.
const CHATS: &str = include_str!("template/chats.jsonl");
/// Jinja2 as Transformers sets it up.
const REFERENCE: &str = include_str!("../../tests/templates/reference.py");
const MAX_CHATS_BYTES: u64 = 64 << 20;
/// The clock of both: 2024-02-29 13:05:09.
const NOW: i64 = 1_709_211_909;
/// Jinja2 has no limit of its own.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Report {
    features: Vec<String>,
    /// Whether texts were compared with Jinja2's.
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
    refused: Option<String>,
    /// Jinja2's text or error, where it is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    jinja2: Option<String>,
}

pub(crate) fn run(command: &TemplateCommand) -> Result<(), CliError> {
    let TemplateCommand::Check(args) = command;
    let file = tokenizer_file(&args.tokenizer);
    let input = |error: semmoe_text::TextError| CliError::input(error.to_string());
    let template = ChatTemplate::beside(&file, || NOW).map_err(input)?;
    let tokenizer = Tokenizer::from_file(&file).map_err(input)?;
    let chats = chats(args)?;
    let requests: Vec<Value> = chats.iter().map(|chat| request(&template, chat)).collect::<Result<_, _>>()?;
    let theirs = reference(&requests);
    let mut outcomes = Vec::new();
    for (at, (chat, request)) in chats.iter().zip(&requests).enumerate() {
        outcomes.push(outcome(&template, &tokenizer, chat, request, theirs.as_ref().and_then(|all| all.get(at)))?);
    }
    let differ = outcomes.iter().filter(|outcome| outcome.jinja2.is_some()).count();
    let report = Report { features: template.features(), compared: theirs.is_some(), differ, chats: outcomes };
    print_result(args.output, "template check", &report, || described(&report))?;
    match differ {
        0 => Ok(()),
        differ => Err(CliError::failed(format!("{differ} chats are rendered otherwise by Jinja2"))),
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
            Ok(chat) if chat["messages"].is_array() => chats.push(chat),
            Ok(_) => return Err(CliError::input(format!("line {} of the chats has no list of messages", at + 1))),
            Err(error) => return Err(CliError::input(format!("line {} of the chats is not JSON: {error}", at + 1))),
        }
    }
    Ok(chats)
}

/// A chat as both renderers get it: after what engines do before a template.
fn request(template: &ChatTemplate, chat: &Value) -> Result<Value, CliError> {
    let messages = ChatTemplate::prepared(&chat["messages"]).map_err(|error| CliError::input(error.to_string()))?;
    let has_tools = chat["tools"].as_array().is_some_and(|tools| !tools.is_empty());
    Ok(json!({
        "template": template.source(has_tools),
        "special": template.special_tokens(),
        "messages": messages,
        "tools": chat["tools"],
        "variables": if chat["chat_template_kwargs"].is_object() { chat["chat_template_kwargs"].clone() } else { json!({}) },
        "add_generation_prompt": chat["add_generation_prompt"] != false,
    }))
}

fn outcome(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: &Value,
    request: &Value,
    theirs: Option<&Value>,
) -> Result<Outcome, CliError> {
    let given = Given {
        tools: Some(&request["tools"]),
        add_generation_prompt: request["add_generation_prompt"] == true,
        variables: request["variables"].as_object(),
    };
    let rendered = template.render_as_given(&request["messages"], given, Budget::default());
    let is_equal = match (&rendered, theirs) {
        (_, None) => true,
        (Ok(text), Some(theirs)) => theirs["text"] == **text,
        (Err(_), Some(theirs)) => theirs["error"].is_string(),
    };
    let jinja2 = theirs.filter(|_| !is_equal).map(|theirs| {
        let text = theirs["text"].as_str().or(theirs["error"].as_str());
        text.unwrap_or_default().to_owned()
    });
    let name = chat["name"].as_str().map_or_else(|| "chat".to_owned(), str::to_owned);
    let (tokens, refused) = match rendered {
        Ok(text) => {
            let ids = tokenizer.encode(&text).map_err(|error| CliError::failed(error.to_string()))?;
            (Some(ids.len()), None)
        }
        Err(error) => (None, Some(error.to_string())),
    };
    Ok(Outcome { chat: name, tokens, refused, jinja2 })
}

/// Jinja2's answers; `None` where there is no Python with it, or it does not end.
fn reference(requests: &[Value]) -> Option<Vec<Value>> {
    let mut python = Command::new("python3")
        .args(["-c", REFERENCE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let (mut input, mut output) = (python.stdin.take()?, python.stdout.take()?);
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    // Python without jinja2 reads nothing.
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
    for Outcome { chat, tokens, refused, jinja2 } in &report.chats {
        let _ = match (tokens, refused) {
            (Some(tokens), _) => writeln!(text, "{chat}: {tokens} tokens"),
            (None, refused) => writeln!(text, "{chat}: refused: {}", refused.as_deref().unwrap_or_default()),
        };
        if let Some(jinja2) = jinja2 {
            let _ = writeln!(text, "  Jinja2 differs: {jinja2:?}");
        }
    }
    let _ = writeln!(text, "uses: {}", report.features.join(", "));
    let compared =
        if report.compared { "compared with Jinja2" } else { "not compared: python3 with jinja2 is not there" };
    let _ = writeln!(text, "{} chats, {compared}, {} differ", report.chats.len(), report.differ);
    text
}
