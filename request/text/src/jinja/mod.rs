//! Jinja2 as configured by Transformers for chat templates: an immutable sandbox with `trim_blocks`, `lstrip_blocks`,
//! loop controls and `generation` tags, and values that behave like Python's.
//!
//! A source is parsed once by [`lexer`], [`parser`] and [`expressions`] into the tree of [`ast`], which [`run`] and
//! [`eval`] walk for each chat. Text is borrowed from the template and the chat until it is written. The cost of a
//! template is limited: steps, bytes, and nesting depth.

mod arguments;
mod ast;
mod calls;
mod eval;
mod expressions;
mod features;
mod filters;
mod formats;
mod lexer;
mod list_filters;
mod methods;
mod operators;
mod output;
mod parser;
mod run;
mod strftime;
mod tests;
mod text;
mod text_filters;
mod traits;
mod value;

use ast::{Name, Node};
use serde_json::{Map as Object, Value as Json};
pub(crate) use traits::Traits;
pub(crate) use value::{List, Map, Value};

/// Names with a meaning in the language, by number.
const WELL_KNOWN: [&str; 4] = ["loop", "caller", "varargs", "kwargs"];
const LOOP: Name = 0;
const CALLER: Name = 1;
const VARARGS: Name = 2;
const KWARGS: Name = 3;

/// Maximum depth of nested calls, expressions and statements.
const MAX_DEPTH: u32 = 250;
/// Maximum nesting of lists made by a template.
const MAX_VALUE_DEPTH: u32 = 100;

/// Limits on one rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Expressions, statements, items of lists, and parts of texts.
    pub steps: u64,
    /// Bytes of all texts and lists created.
    pub bytes: usize,
}

impl Budget {
    /// A few milliseconds, for renderings that block others.
    pub const BRIEF: Self = Self { steps: 50_000, bytes: 2 << 20 };
}

impl Default for Budget {
    /// About a second, and a hundred times the prompt of a long chat.
    fn default() -> Self {
        Self { steps: 20_000_000, bytes: 256 << 20 }
    }
}

/// Why a template did not render a chat.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Jinja2 raises an error as well.
    Refused(String),
    /// Rendering exceeds the budget.
    TooMuch { what: &'static str, limit: u64 },
}

type Fallible<T> = Result<T, Failure>;

fn refused<T>(reason: impl Into<String>) -> Fallible<T> {
    Err(Failure::Refused(reason.into()))
}

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Template {
    nodes: Vec<Node>,
    names: Vec<String>,
    source: String,
}

/// The inputs of a rendering.
#[derive(Debug)]
pub(crate) struct Input<'v> {
    pub(crate) messages: Value<'v>,
    pub(crate) tools: Value<'v>,
    pub(crate) documents: Value<'v>,
    pub(crate) add_generation_prompt: Value<'v>,
    /// Variables of the request, which take precedence over those of `special`.
    pub(crate) variables: Option<&'v Object<String, Json>>,
    pub(crate) special: &'v Object<String, Json>,
    /// Seconds since 1970, read by `strftime_now`.
    pub(crate) clock: fn() -> i64,
    /// Offset east of Greenwich.
    pub(crate) zone_seconds: i32,
}

impl Template {
    /// # Errors
    /// The error and its line.
    pub(crate) fn parse(source: &str) -> Result<Self, String> {
        let at_line = |error: lexer::SyntaxError| format!("{} (line {})", error.reason, error.line);
        let (nodes, names) = parser::parse(source).map_err(at_line)?;
        Ok(Self { nodes, names, source: source.to_owned() })
    }

    /// Tags, filters, tests, methods and functions by name.
    pub(crate) fn features(&self) -> Vec<String> {
        lexer::tokens(&self.source).map_or_else(|_| Vec::new(), |tokens| features::of(&tokens))
    }

    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// # Errors
    /// The template's own rejection, or an exceeded limit.
    pub(crate) fn render<'v>(&'v self, input: &'v Input<'v>, budget: Budget) -> Result<String, Failure> {
        run::render(self, input, budget)
    }
}
