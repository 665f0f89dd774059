//! Errors from recording traces and building profiles.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use semmoe_engines::Engine;
use semmoe_engines::http::{HttpError, KeyError};
use semmoe_tables::{ConfigError, FormatError};
use semmoe_text::{PromptLineError, TextError};

use crate::BadRecord;

/// This crate's error type; every message is a single sentence.
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
    /// This kind of engine cannot return routed experts.
    #[error("{0} does not report routed experts (sglang, vllm and semmoe do)")]
    Engine(Engine),
    /// The engine was started without the option that makes it report routed experts.
    #[error("the engine was started without --enable-return-routed-experts")]
    NoRoutedExperts,
    /// The engine reports physical slots instead of experts.
    #[error(
        "SGLang {version} with --init-expert-location {location} reports physical slots instead of experts: record without a placement, or with 0.5.10 or later"
    )]
    PhysicalIds {
        /// The engine's version.
        version: String,
        /// Its placement, truncated to 100 characters.
        location: String,
    },
    /// A prompt's routes depend on concurrent requests.
    #[error(
        "the routes of one prompt depend on concurrent requests: {} of its {} activations differ ({:.1}%) when it is sent with others, more than rounding explains",
        .0.differing, .0.activations, 100.0 * .0.share()
    )]
    Unsteady(crate::SelfCheck),
    /// Each response is plausible by itself, but all tokens have the same route.
    #[error(
        "the engine's responses cannot be trusted: every {0} has the same experts in every layer, which is implausible; \
         fix the engine, then start over with --fresh"
    )]
    OneRoute(&'static str),
    /// Neither the engine nor the caller provides the model's shape.
    #[error("the engine does not report {0}, which a trace requires; pass the model's shape")]
    UnknownModel(&'static str),
    /// The model's `config.json` is unusable.
    #[error("the model's configuration: {0}")]
    Config(#[from] ConfigError),
    /// The given tokenizer differs from that of the engine's model.
    #[error("the tokenizer {} is not the engine's: {found}, but {expected}", path.display())]
    OtherTokenizer {
        /// The file.
        path: PathBuf,
        /// A property of the tokenizer.
        found: String,
        /// The corresponding property of the engine's tokenizer.
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
    #[error("{} contains no prompt", .0.display())]
    NoPrompts(PathBuf),
    /// Too many records were missing or invalid.
    #[error("{bad} of {of} {what} were bad, more than the {allowed} allowed, and {kept}; the first: {first}")]
    TooManyBad {
        /// The kind of record, as a plural noun.
        what: &'static str,
        /// Number of bad records.
        bad: usize,
        /// Number of records so far, including bad ones.
        of: usize,
        /// Number of bad records allowed in the whole input.
        allowed: usize,
        /// The first bad record.
        first: Box<BadRecord>,
        /// A clause that says whether the good records were kept.
        kept: String,
    },
    /// A domain has no tokens to weight.
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
    /// No input was given.
    #[error("no {0} was given")]
    NoInput(&'static str),
    /// The engine could not be reached, or its response was invalid.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A trace or profile is invalid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tokenizer or template is invalid.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Files from another tool could not be imported.
    #[error(transparent)]
    Import(#[from] crate::import::ImportError),
}

impl ProfilerError {
    /// Creates the error for a failed `action` on a file.
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

/// Rejects a fraction that is not in [0, 1].
pub(crate) fn check_share(option: &'static str, share: f64) -> Result<(), ProfilerError> {
    check((0.0..=1.0).contains(&share), option, share, "a fraction between 0 and 1")
}

/// Rejects an option's value unless it is `good`.
pub(crate) fn check(
    good: bool,
    option: &'static str,
    found: impl Display,
    expected: &'static str,
) -> Result<(), ProfilerError> {
    if good { Ok(()) } else { Err(ProfilerError::Option { option, found: found.to_string(), expected }) }
}
