//! Errors of recording and building.

use std::path::{Path, PathBuf};

use semmoe_engines::Engine;
use semmoe_engines::http::{HttpError, KeyError};
use semmoe_tables::{ConfigError, FormatError};
use semmoe_text::{PromptLineError, TextError};

use crate::BadRecord;

/// An error of this crate; every message is one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfilerError {
    /// An option cannot be used.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// Such an engine returns no routed experts.
    #[error("{engine} does not report routed experts (sglang, vllm and semmoe do)")]
    Engine {
        /// The engine.
        engine: Engine,
    },
    /// The engine was started without routed experts.
    #[error("the engine was started without --enable-return-routed-experts")]
    NoRoutedExperts,
    /// The engine reports slots of its placement in place of experts.
    #[error(
        "SGLang {version} with --init-expert-location {location} reports physical slots in place of experts: record without a placement, or from 0.5.10 or later"
    )]
    PhysicalIds {
        /// The engine's version.
        version: String,
        /// Its placement, cut to 100 characters.
        location: String,
    },
    /// The routes of one prompt differ with what runs beside it.
    #[error(
        "the routes of one prompt depend on what runs beside it: asked alone and among others, {} of its {} activations differ ({:.1}%), more than rounding explains",
        check.differing, check.activations, 100.0 * check.share()
    )]
    Unsteady {
        /// The comparison.
        check: crate::SelfCheck,
    },
    /// Answers that are good one by one have one route for all tokens.
    #[error("the engine's answers cannot be believed: {reason}; start over with --fresh once they can")]
    OneRoute {
        /// Which tokens.
        reason: String,
    },
    /// The engine does not report the model's shape, nor does the caller.
    #[error("the engine does not report {field}, which a trace needs; give the model's shape")]
    UnknownModel {
        /// The first field that is missing.
        field: &'static str,
    },
    /// The model's `config.json` is of no use.
    #[error("the model's configuration: {0}")]
    Config(#[from] ConfigError),
    /// The tokenizer given is not the one of the engine's model.
    #[error("the tokenizer {} is not the engine's: {cause}", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// The difference.
        cause: String,
    },
    /// The file with the engine's key.
    #[error("cannot use the key in {}: {source}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: KeyError,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The prompts file, or a line of it, cannot be read.
    #[error(transparent)]
    Prompt(#[from] PromptLineError),
    /// The prompts file has no prompt.
    #[error("{} holds no prompt", path.display())]
    NoPrompts {
        /// The file.
        path: PathBuf,
    },
    /// Too many records were missing or wrong.
    #[error("{bad} of {of} {what} were bad, more than {allowed} allowed, and {kept}; the first: {first}")]
    TooManyBad {
        /// The kind of record, in the plural.
        what: &'static str,
        /// Bad ones.
        bad: usize,
        /// Records so far, bad ones included.
        of: usize,
        /// Bad ones that would have been allowed for all records.
        allowed: usize,
        /// The first one.
        first: Box<BadRecord>,
        /// The fate of the good ones.
        kept: String,
    },
    /// A domain that has nothing to weight.
    #[error("the domain {domain} has too few tokens to be weighted like the others")]
    EmptyDomain {
        /// Its name.
        domain: String,
    },
    /// The caller cancelled.
    #[error("cancelled: {kept}")]
    Cancelled {
        /// The fate of the good answers.
        kept: String,
    },
    /// The partial recording beside the trace is of something else.
    #[error("{} is not of this recording: {difference}; remove it, or start over without it", path.display())]
    OtherPartial {
        /// The file.
        path: PathBuf,
        /// The difference.
        difference: String,
    },
    /// Nothing to work on.
    #[error("no {what} was given")]
    NoInput {
        /// Traces or profiles.
        what: &'static str,
    },
    /// The engine could not be reached or did not answer as it should.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A trace or profile is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tokenizer or template is wrong.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Files of others could not be imported.
    #[error(transparent)]
    Import(#[from] crate::import::ImportError),
}

impl ProfilerError {
    /// The error of an attempted `action` on a file.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path: path.clone(), action, source }
    }

    /// Whether the caller's options or files are at fault, and not the engine or the machine.
    pub fn is_input(&self) -> bool {
        match self {
            Self::Import(error) => error.is_input(),
            Self::Io { action, .. } => *action == "read",
            Self::Format(FormatError::Io { source, .. }) => source.kind() == std::io::ErrorKind::NotFound,
            Self::NoRoutedExperts
            | Self::PhysicalIds { .. }
            | Self::Unsteady { .. }
            | Self::OneRoute { .. }
            | Self::TooManyBad { .. }
            | Self::Cancelled { .. }
            | Self::Http(_) => false,
            Self::Option { .. }
            | Self::Engine { .. }
            | Self::UnknownModel { .. }
            | Self::OtherTokenizer { .. }
            | Self::Prompt { .. }
            | Self::NoPrompts { .. }
            | Self::NoInput { .. }
            | Self::KeyFile { .. }
            | Self::EmptyDomain { .. }
            | Self::OtherPartial { .. }
            | Self::Config(_)
            | Self::Text(_) => true,
            Self::Format(_) => true,
        }
    }
}
