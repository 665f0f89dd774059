//! A configuration file to be changed while a gateway uses it.

use std::path::PathBuf;

use semmoe_gateway::{Config, Gateway, Running};
use tempfile::TempDir;

use super::{Answer, Client};

pub(crate) struct File {
    folder: TempDir,
}

impl File {
    /// With `server` in `[server]` beside two free ports, followed by `rest`.
    pub(crate) fn new(server: &str, rest: &str) -> Self {
        let file = Self { folder: tempfile::tempdir().unwrap() };
        file.write(server, rest);
        file
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("semmoe.toml")
    }

    pub(crate) fn write(&self, server: &str, rest: &str) {
        self.write_raw(&format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{server}\n[health]\n\
             interval_seconds = 0.02\nunhealthy_after = 1\n{rest}"
        ));
    }

    pub(crate) fn write_raw(&self, text: &str) {
        std::fs::write(self.path(), text).unwrap();
    }

    pub(crate) async fn start(&self) -> Running {
        Gateway::start(Config::load(&self.path()).unwrap()).await.unwrap()
    }
}

/// `POST /admin/reload`.
pub(crate) async fn reload(gateway: &Running) -> Answer {
    Client::admin(gateway).post("/admin/reload", "").await
}

/// A model with round robin over SGLang backends: name, URL, ranks.
pub(crate) fn model(name: &str, more: &str, backends: &[(&str, &str, u16)]) -> String {
    let mut text = format!("[[models]]\nname = \"{name}\"\npolicy = \"round_robin\"\n{more}");
    for (name, url, ranks) in backends {
        text.push_str(&format!(
            "[[models.backends]]\nname = \"{name}\"\nengine = \"sglang\"\nurl = \"{url}\"\nranks = {ranks}\n"
        ));
    }
    text
}
