//! The request bodies of a run, built in advance so that they cost no time during the run.

use bytes::Bytes;
use semmoe_text::{LineForm, PromptLines};

use crate::{LoadError, LoadOptions};

/// Maximum size of all bodies, in bytes.
const MAX_BODIES_BYTES: usize = 1 << 30;

/// Bodies, sent in rotation.
#[derive(Clone, Debug)]
pub(crate) struct Jobs {
    pub(crate) bodies: Vec<Bytes>,
    /// Number of prompts in the file that the route does not support.
    pub(crate) left_out: usize,
}

impl Jobs {
    /// Reads prompts: a `.txt` file contains one per line; any other file is JSON Lines.
    pub(crate) fn read(options: &LoadOptions) -> Result<Self, LoadError> {
        let path = &options.prompts;
        let plain = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt"));
        let lines = PromptLines::open(path, if plain { LineForm::Plain } else { LineForm::Json })?;
        let mut jobs = Self { bodies: Vec::new(), left_out: 0 };
        let mut bytes = 0usize;
        for line in lines {
            let (_, prompt) = line?;
            let Some(body) = options.body(prompt) else {
                jobs.left_out += 1;
                continue;
            };
            let body = Bytes::from(serde_json::Value::Object(body).to_string());
            bytes = bytes.saturating_add(body.len());
            if bytes > MAX_BODIES_BYTES {
                return Err(LoadError::TooManyPrompts { path: path.clone(), limit: MAX_BODIES_BYTES });
            }
            jobs.bodies.push(body);
        }
        if jobs.bodies.is_empty() {
            let (path, route) = (path.clone(), options.api.path());
            return Err(LoadError::NoPrompts { path, route, left_out: jobs.left_out });
        }
        Ok(jobs)
    }

    /// Returns the body of a request; requests are numbered from 0.
    pub(crate) fn body(&self, request: u64) -> Bytes {
        self.bodies[(request % self.bodies.len() as u64) as usize].clone()
    }
}
