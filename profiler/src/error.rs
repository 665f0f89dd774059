//! Errors of recording and building.

use std::fmt::Display;
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
    /// An option has an invalid value.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value of the option.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// This kind of engine returns no routed experts.
    #[error("{0} does not report routed experts (sglang, vllm and semmoe do)")]
    Engine(Engine),
    /// The engine was started without routed experts.
    #[error("the engine was started without --enable-return-routed-experts")]
    NoRoutedExperts,
    /// The engine reports physical slots instead of experts.
    #[error(
        "SGLang {version} with --init-expert-location {location} reports physical slots in place of experts: record without a placement, or from 0.5.10 or later"
    )]
    PhysicalIds {
        /// The engine's version.
        version: String,
        /// Its placement, truncated to 100 characters.
        location: String,
    },
    /// The routes of a prompt depend on what runs concurrently.
    #[error(
        "the routes of one prompt depend on what runs concurrently: sent alone and among others, {} of its {} activations differ ({:.1}%), more than rounding explains",
        .0.differing, .0.activations, 100.0 * .0.share()
    )]
    Unsteady(crate::SelfCheck),
    /// Each answer is plausible, but all tokens have one route.
    #[error(
        "the engine's answers cannot be trusted: every {0} has the same experts in every layer, which no router would choose; \
         fix the engine, then start over with --fresh"
    )]
    OneRoute(&'static str),
    /// Neither the engine nor the caller provides the model's shape.
    #[error("the engine does not report {0}, which a trace needs; give the model's shape")]
    UnknownModel(&'static str),
    /// The model's `config.json` is unusable.
    #[error("the model's configuration: {0}")]
    Config(#[from] ConfigError),
    /// The given tokenizer is not that of the engine's model.
    #[error("the tokenizer {} is not the engine's: {found}, and {expected}", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// A property of the tokenizer.
        found: String,
        /// The engine's corresponding one.
        expected: String,
    },
    /// The engine's key file is unusable.
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
    /// The prompts file, or one of its lines, cannot be read.
    #[error(transparent)]
    Prompt(#[from] PromptLineError),
    /// The prompts file contains no prompt.
    #[error("{} holds no prompt", .0.display())]
    NoPrompts(PathBuf),
    /// Too many records were missing or invalid.
    #[error("{bad} of {of} {what} were bad, more than {allowed} allowed, and {kept}; the first: {first}")]
    TooManyBad {
        /// The kind of record, in the plural.
        what: &'static str,
        /// Number of bad records.
        bad: usize,
        /// Number of records so far, including bad ones.
        of: usize,
        /// Number of bad records that would have been allowed among all.
        allowed: usize,
        /// The first bad record.
        first: Box<BadRecord>,
        /// The fate of the good ones.
        kept: String,
    },
    /// A domain without tokens to weight.
    #[error("the domain {0} has too few tokens to be weighted like the others")]
    EmptyDomain(String),
    /// The caller cancelled.
    #[error("cancelled: {0}")]
    Cancelled(String),
    /// The partial recording next to the trace belongs to another recording.
    #[error("{} belongs to another recording: {difference}; remove it, or start over without it", path.display())]
    OtherPartial {
        /// The file.
        path: PathBuf,
        /// The difference.
        difference: String,
    },
    /// There is no input.
    #[error("no {0} was given")]
    NoInput(&'static str),
    /// The engine could not be reached or did not answer properly.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A trace or profile is invalid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tokenizer or template is invalid.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Foreign files could not be imported.
    #[error(transparent)]
    Import(#[from] crate::import::ImportError),
}

impl ProfilerError {
    /// The error for a failed `action` on a file.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path: path.clone(), action, source }
    }

    /// Whether the caller's options or files are at fault, rather than the engine or the machine.
    pub fn is_input(&self) -> bool {
        match self {
            Self::Import(error) => error.is_input(),
            Self::Io { action, .. } => *action == "read",
            Self::Format(FormatError::Io { source, .. }) => source.kind() == std::io::ErrorKind::NotFound,
            Self::NoRoutedExperts
            | Self::PhysicalIds { .. }
            | Self::Unsteady(_)
            | Self::OneRoute(_)
            | Self::TooManyBad { .. }
            | Self::Cancelled(_)
            | Self::Http(_) => false,
            _ => true,
        }
    }
}

/// Rejects a share that is not within 0..1.
pub(crate) fn check_share(option: &'static str, share: f64) -> Result<(), ProfilerError> {
    check((0.0..=1.0).contains(&share), option, share, "a share between 0 and 1")
}

/// Rejects the value of an option unless it is `good`.
pub(crate) fn check(
    good: bool,
    option: &'static str,
    found: impl Display,
    expected: &'static str,
) -> Result<(), ProfilerError> {
    if good { Ok(()) } else { Err(ProfilerError::Option { option, found: found.to_string(), expected }) }
}
