//! An implementation of Jinja2 as configured by Transformers for chat templates: an immutable sandbox with
//! `trim_blocks`, `lstrip_blocks`, loop controls and `generation` tags, whose values behave like Python's.
//!
//! A source is parsed once by [`lexer`], [`parser`] and [`expressions`] into the syntax tree of [`ast`], which [`run`]
//! and [`eval`] evaluate for each chat. Text is borrowed from the template and the chat until it is written. Steps,
//! bytes and nesting depth are limited.

mod arguments;
mod ast;
mod calls;
mod eval;
mod expressions;
mod failure;
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

pub(crate) use ast::Template;
use ast::{CALLER, KWARGS, LOOP, VARARGS, WELL_KNOWN};
pub use failure::Budget;
pub(crate) use failure::Failure;
use failure::{Fallible, MAX_DEPTH, MAX_VALUE_DEPTH, refused};
pub use lexer::SyntaxError;
pub(crate) use run::Input;
pub(crate) use traits::Traits;
pub(crate) use value::{List, Map, Value};

impl Template {
    pub(crate) fn parse(source: &str) -> Result<Self, SyntaxError> {
        let (nodes, names) = parser::parse(source)?;
        Ok(Self { nodes, names, source: source.to_owned() })
    }

    /// Returns the tags, filters, tests, methods and functions used, by name.
    pub(crate) fn features(&self) -> Vec<String> {
        lexer::tokens(&self.source).map_or_else(|_| Vec::new(), |tokens| features::of(&tokens))
    }

    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Renders a chat.
    ///
    /// # Errors
    /// If the template rejects the chat, or a limit is exceeded.
    pub(crate) fn render<'v>(&'v self, input: &'v Input<'v>, budget: Budget) -> Result<String, Failure> {
        run::render(self, input, budget)
    }
}
