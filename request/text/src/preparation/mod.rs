//! Prepares chats for templates like the engines do, by engine and version. The rules are taken from the engines'
//! sources and compared with real engines by `tests/engines/prompts.py`.

mod contents;
mod messages;
mod table;
#[cfg(test)]
mod tests;
mod tools;
mod variables;

pub(crate) use table::{Arguments, Contents, Effort, Ending, Fields, Options, Tools};
pub use table::{ChatOptions, Preparation};
pub(crate) use tools::functions;
pub(crate) use variables::{Prepared, has_tools, prepare, template};

/// Messages as semmoe's worker passes them to its template.
///
/// # Errors
/// If the messages have another form.
pub(crate) fn own_messages(messages: &serde_json::Value) -> Result<serde_json::Value, crate::TextError> {
    let traits = crate::jinja::Traits::default();
    messages::messages(Preparation::OWN, messages, &traits, false).map(serde_json::Value::Array)
}
