//! Answers of real engines, as recorded by `tests/engines/record.py`. Tests of several crates include this file.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "for tests, each of which uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use semmoe_engines::Engine;
use serde::Deserialize;
use serde_json::Value;

/// The answers of one engine, in the order of the requests.
#[derive(Debug, Deserialize)]
pub struct Recording {
    pub engine: Engine,
    pub version: String,
    /// The command that started it.
    pub command: String,
    pub exchanges: Vec<Exchange>,
}

#[derive(Debug, Deserialize)]
pub struct Exchange {
    pub name: String,
    pub request: Request,
    pub answer: Answer,
}

#[derive(Debug, Deserialize)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
    #[serde(default)]
    pub body: String,
}

#[derive(Debug, Deserialize)]
pub struct Answer {
    /// 0 if the connection was closed without an answer.
    #[serde(default)]
    pub status: u16,
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    #[serde(default)]
    pub body: String,
}

impl Answer {
    /// The content type without parameters.
    pub fn content_type(&self) -> &str {
        self.headers.get("content-type").map_or("", |value| value.split(';').next().unwrap_or(""))
    }

    pub fn is_stream(&self) -> bool {
        self.content_type() == "text/event-stream"
    }

    /// The JSON documents in the body: one, or one per event except `[DONE]`.
    pub fn documents(&self) -> Vec<Value> {
        if self.is_stream() {
            return events(&self.body).filter(|data| *data != "[DONE]").map(json).collect();
        }
        if self.content_type() == "application/json" { vec![json(&self.body)] } else { Vec::new() }
    }
}

/// The data of each event. All engines send events as one line `data: ...`.
pub fn events(body: &str) -> impl Iterator<Item = &str> {
    let one = |event| str::strip_prefix(event, "data: ").unwrap_or_else(|| panic!("an event without data: {event:?}"));
    body.split("\n\n").filter(|event| !event.is_empty()).map(one)
}

/// The recordings' folder in the repository of the including crate.
fn folder() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("tests/engines/recordings")).find(|folder| folder.is_dir()).unwrap()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

impl Recording {
    /// Reads a recording, for example `sglang-0.5.23`.
    pub fn read(name: &str) -> Self {
        let text = std::fs::read(folder().join(format!("{name}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// The names of all recordings.
    pub fn names() -> Vec<String> {
        let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = files.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned())).collect();
        names.sort();
        names
    }

    pub fn all() -> Vec<Self> {
        Self::names().iter().map(|name| Self::read(name)).collect()
    }

    /// The exchange with this name.
    pub fn get(&self, name: &str) -> &Exchange {
        let found = self.exchanges.iter().find(|exchange| exchange.name == name);
        found.unwrap_or_else(|| panic!("{} {} has no exchange {name:?}", self.engine, self.version))
    }

    /// Whether the engine was started with the flag for routed experts.
    pub fn gives_routes(&self) -> bool {
        self.command.contains("--enable-return-routed-experts")
    }
}
