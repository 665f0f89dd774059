//! Chats as engines prepare them for their templates: data by engine and version, read from the engines' sources and
//! compared with real ones by `tests/engines/prompts.py`.

mod contents;
mod messages;
#[cfg(test)]
mod tests;
mod tools;
mod variables;

pub(crate) use tools::functions;
pub(crate) use variables::{Prepared, has_tools, prepare, template};

/// How an engine prepares a chat for its template.
#[derive(Debug, PartialEq, Eq)]
pub struct Preparation {
    /// The text between the text parts of a message where the template takes texts.
    pub(crate) separator: &'static str,
    pub(crate) contents: Contents,
    pub(crate) fields: Fields,
    pub(crate) arguments: Arguments,
    pub(crate) tools: Tools,
    /// With `tool_choice` "none" the template gets no tools, with a named one that tool alone.
    pub(crate) tool_choice: bool,
    pub(crate) effort: Effort,
    pub(crate) options: Options,
    pub(crate) ending: Ending,
    /// A template that names no developer gets its messages as system ones, all in one at the beginning.
    pub(crate) developer_is_system: bool,
    /// A first line of system messages that begins so is left out.
    pub(crate) cut_line: Option<&'static str>,
    /// Where a template that fails is tried again with the functions of the tools alone.
    pub(crate) tries_functions: bool,
    /// Of several templates the first one is always used, whatever it is named.
    pub(crate) first_template: bool,
}

/// When a template gets the contents of messages as lists of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Never.
    Texts,
    /// All of them, where the template goes through the content of messages. (vLLM)
    AllLists,
    /// Those that are lists in the request, where it does, or where it names pictures, sounds or films. (SGLang)
    GivenLists,
}

/// The members of messages that a template gets, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fields {
    /// All, as they stand there.
    Given,
    Vllm,
    Sglang,
}

/// The arguments of earlier tool calls, which are JSON in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// A text that is no JSON stays one.
    AnyJson,
    /// Others than objects become empty ones.
    ObjectOrEmpty,
    /// Others than objects are refused.
    Object,
}

/// The members of tools that a template gets, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tools {
    Given,
    /// Name, description, parameters; the latter two are null where they are missing.
    Vllm,
    /// In the client's order, then what is missing as null; each tool has `defer_loading`.
    Sglang,
}

/// The variables that `reasoning_effort` sets beside the variable of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Nothing, not even that.
    Ignored,
    /// `enable_thinking`; `reasoning_effort` of the request goes before that of its variables.
    Vllm,
    /// `thinking` and `enable_thinking`, with `reasoning` as another spelling; the request's variables go before it.
    Sglang,
}

/// Further fields of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Options {
    /// `add_generation_prompt`.
    Own,
    /// `add_generation_prompt`, `continue_final_message`, `documents`, `add_special_tokens`, `chat_template`. Variables
    /// that are null or "auto" are left out.
    Vllm,
    /// `continue_final_message`, `input_ids`; a template stands among the variables.
    Sglang,
}

/// A chat that ends with the assistant's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Is rendered so; one to be continued ends where the message ends, as in Transformers.
    Given,
    /// The message becomes the user's; one to be continued is taken out, and its ids put behind the prompt.
    Sglang,
}

/// semmoe's worker, and servers of unknown kind.
const OWN: Preparation = Preparation {
    separator: " ",
    contents: Contents::Texts,
    fields: Fields::Given,
    arguments: Arguments::AnyJson,
    tools: Tools::Given,
    tool_choice: false,
    effort: Effort::Ignored,
    options: Options::Own,
    ending: Ending::Given,
    developer_is_system: false,
    cut_line: None,
    tries_functions: false,
    first_template: false,
};

const VLLM: Preparation = Preparation {
    separator: "\n",
    contents: Contents::AllLists,
    fields: Fields::Vllm,
    arguments: Arguments::ObjectOrEmpty,
    tools: Tools::Vllm,
    effort: Effort::Vllm,
    options: Options::Vllm,
    developer_is_system: true,
    ..OWN
};

const SGLANG: Preparation = Preparation {
    contents: Contents::GivenLists,
    fields: Fields::Sglang,
    arguments: Arguments::Object,
    tools: Tools::Sglang,
    tool_choice: true,
    effort: Effort::Sglang,
    options: Options::Sglang,
    ending: Ending::Sglang,
    tries_functions: true,
    first_template: true,
    ..OWN
};

/// By engine and the version since when, later ones first.
static TABLE: [(&str, [u32; 3], Preparation); 3] = [
    ("vllm", [0, 32, 0], Preparation { cut_line: Some("x-anthropic-billing-header"), ..VLLM }),
    // Read in 0.30.0.
    ("vllm", [0, 0, 0], VLLM),
    // Read in 0.5.23.
    ("sglang", [0, 0, 0], SGLANG),
];

impl Preparation {
    /// That of an engine by its name in configurations; without a version that of the newest one.
    pub fn of(engine: &str, version: Option<[u32; 3]>) -> &'static Self {
        Self::row(Self::row_of(engine, version))
    }

    /// The row in the table for [`Preparation::of`].
    pub fn row_of(engine: &str, version: Option<[u32; 3]>) -> usize {
        let is = |(name, since, _): &(&str, [u32; 3], Self)| {
            *name == engine && version.is_none_or(|version| *since <= version)
        };
        TABLE.iter().position(is).unwrap_or(TABLE.len())
    }

    /// The row of the table; that of semmoe's worker where there is none.
    pub fn row(row: usize) -> &'static Self {
        TABLE.get(row).map_or(Self::OWN, |(.., preparation)| preparation)
    }

    /// Whether a completion's text gets no special tokens.
    pub(crate) fn is_bare(&self, body: &serde_json::Value) -> bool {
        let special = body.as_object().map(|body| variables::flag(body, "add_special_tokens", true));
        self.options == Options::Vllm && matches!(special, Some(Ok(false)))
    }

    /// Whether a chat may bring its prompt as ids.
    pub(crate) fn reads_ids(&self) -> bool {
        self.options == Options::Sglang
    }

    /// That of semmoe's worker.
    pub const OWN: &'static Self = &OWN;
}

/// Messages as semmoe's worker gives them to its template.
///
/// # Errors
/// Messages of another form.
pub(crate) fn own_messages(messages: &serde_json::Value) -> Result<serde_json::Value, crate::TextError> {
    let traits = crate::jinja::Traits::default();
    messages::messages(Preparation::OWN, messages, &traits, false).map(serde_json::Value::Array)
}

/// The options of an engine that change what its template gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatOptions {
    /// Variables of templates where the request does not set them: `--default-chat-template-kwargs`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Whether a request may bring its template: `--trust-request-chat-template`.
    pub trusts_templates: bool,
    /// Whether the template gets lists of parts; absent: as the engine finds out: `--chat-template-content-format`.
    pub lists: Option<bool>,
    /// Whether `tool_choice` "none" leaves tools out where the engine does not anyway:
    /// `--exclude-tools-when-tool-choice-none`.
    pub no_tools_for_none: bool,
}
