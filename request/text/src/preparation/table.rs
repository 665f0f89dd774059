//! A table of how engines prepare chats, by engine and version.

/// How an engine prepares a chat for its template.
#[derive(Debug, PartialEq, Eq)]
pub struct Preparation {
    /// Separator of the text parts of a message, if the template expects strings.
    pub(crate) separator: &'static str,
    pub(crate) contents: Contents,
    pub(crate) fields: Fields,
    pub(crate) arguments: Arguments,
    pub(crate) tools: Tools,
    /// Whether `tool_choice` selects tools: with "none" the template receives no tools, with a named tool only that
    /// one.
    pub(crate) tool_choice: bool,
    pub(crate) effort: Effort,
    pub(crate) options: Options,
    pub(crate) ending: Ending,
    /// Whether developer messages become one system message at the beginning if the template does not mention
    /// developers.
    pub(crate) developer_is_system: bool,
    /// The first line of a system message is removed if it has this prefix.
    pub(crate) cut_line: Option<&'static str>,
    /// Whether failed rendering is retried with only the functions of the tools.
    pub(crate) tries_functions: bool,
    /// Whether the first of several templates is always used, regardless of its name.
    pub(crate) first_template: bool,
}

/// When a template receives the contents of messages as lists of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// Content is never converted to lists.
    Texts,
    /// All contents are lists if the template iterates over the content of messages (vLLM).
    AllLists,
    /// Contents that are lists in the request stay lists if the template iterates over them or mentions images, audio
    /// or video (SGLang).
    GivenLists,
}

/// The members of messages that a template receives, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fields {
    /// All of them, unchanged.
    Given,
    Vllm,
    Sglang,
}

/// How to parse the arguments of earlier tool calls, which are JSON in a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// A string that is not JSON is passed unchanged.
    AnyJson,
    /// Anything but an object becomes an empty object.
    ObjectOrEmpty,
    /// Anything but an object is rejected.
    Object,
}

/// The members of tools that a template receives, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tools {
    Given,
    /// Name, description and parameters; the latter two are null if missing.
    Vllm,
    /// The client's order, followed by missing members as null; each tool has `defer_loading`.
    Sglang,
}

/// The variables that `reasoning_effort` sets in addition to the one of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// No variables, not even `reasoning_effort`.
    Ignored,
    /// `enable_thinking`; the request's `reasoning_effort` takes precedence over its variables.
    Vllm,
    /// `thinking` and `enable_thinking`, also spelled `reasoning`; the request's variables take precedence.
    Sglang,
}

/// Other request fields that the engine supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Options {
    /// `add_generation_prompt`.
    Own,
    /// `add_generation_prompt`, `continue_final_message`, `documents`, `add_special_tokens`, `chat_template`. Variables
    /// that are null or "auto" are dropped.
    Vllm,
    /// `continue_final_message`, `input_ids`; a template is passed as a variable.
    Sglang,
}

/// How to handle a chat that ends with an assistant message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Renders the message unchanged; if it is to be continued, the prompt ends where the message ends, as in
    /// Transformers.
    Given,
    /// Converts the message to a user message; if it is to be continued, it is removed and its ids are appended to the
    /// prompt.
    Sglang,
}

/// The preparation of semmoe's worker, which also applies to servers of unknown kind.
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

/// Preparations by engine and minimum version, later versions first.
static TABLE: [(&str, [u32; 3], Preparation); 3] = [
    ("vllm", [0, 32, 0], Preparation { cut_line: Some("x-anthropic-billing-header"), ..VLLM }),
    // Based on 0.30.0.
    ("vllm", [0, 0, 0], VLLM),
    // Based on 0.5.23.
    ("sglang", [0, 0, 0], SGLANG),
];

impl Preparation {
    /// Returns the preparation for an engine, named as in configuration files; without a version, the one for the
    /// newest version.
    pub fn of(engine: &str, version: Option<[u32; 3]>) -> &'static Self {
        Self::row(Self::row_of(engine, version))
    }

    /// Returns the table index of the row that [`Preparation::of`] selects.
    pub fn row_of(engine: &str, version: Option<[u32; 3]>) -> usize {
        let is = |(name, since, _): &(&str, [u32; 3], Self)| {
            *name == engine && version.is_none_or(|version| *since <= version)
        };
        TABLE.iter().position(is).unwrap_or(TABLE.len())
    }

    /// Returns a row of the table, or the preparation of semmoe's worker if there is no such row.
    pub fn row(row: usize) -> &'static Self {
        TABLE.get(row).map_or(Self::OWN, |(.., preparation)| preparation)
    }

    /// Returns whether a chat may provide its prompt as ids.
    pub(crate) fn reads_ids(&self) -> bool {
        self.options == Options::Sglang
    }

    /// The preparation of semmoe's worker.
    pub const OWN: &'static Self = &OWN;
}

/// Engine options that affect the template's input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatOptions {
    /// Default template variables, which requests override: `--default-chat-template-kwargs`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Whether a request may provide its own template: `--trust-request-chat-template`.
    pub trusts_templates: bool,
    /// Whether the template receives lists of parts; `None` if the engine detects it: `--chat-template-content-format`.
    pub lists: Option<bool>,
    /// Whether `tool_choice` "none" omits tools even if the engine would not otherwise do so:
    /// `--exclude-tools-when-tool-choice-none`.
    pub no_tools_for_none: bool,
}
