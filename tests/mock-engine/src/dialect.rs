//! A table of the differences between engines and versions.

use semmoe_engines::Engine;

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";
pub const MESSAGES: &str = "/v1/messages";
pub const GENERATE: &str = "/generate";

const NEW: &[&str] = &["routed_dp_rank"];
const OLD: &[&str] = &["data_parallel_rank"];
const BOTH: &[&str] = &["routed_dp_rank", "data_parallel_rank"];

/// Where answers carry token ids and routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extras {
    /// `.npy` in the choice; a chat's prompt ids beside the choices, a completion's in the choice.
    Npy,
    /// `sglext` of the answer; prompt ids beside `meta_info`. A chat's ids are in `sglext`, the output's as a list for
    /// each choice; a completion's are in the choice.
    Sglext,
    /// `sglext` for routed experts alone; ids in the choice of a chat only, and only those of the prompt.
    PromptOfChats,
    /// `sgl_ext` of the choice; prompt ids inside `meta_info`.
    SglExt,
}

/// One engine version.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dialect {
    pub engine: Engine,
    pub version: &'static str,
    /// Routes of its server information.
    pub info: &'static [&'static str],
    pub has_loads: bool,
    /// Routes on which the pin header is read.
    pub header_on: &'static [&'static str],
    /// Body members that pin, by route; the first one present wins.
    pub fields_on: &'static [(&'static str, &'static [&'static str])],
    pub extras: Extras,
}

pub const SGLANG_0_5_23: Dialect = Dialect {
    engine: Engine::Sglang,
    version: "0.5.23",
    info: &["/server_info", "/get_server_info"],
    has_loads: true,
    header_on: &[CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE],
    fields_on: &[(CHAT, BOTH), (COMPLETIONS, BOTH), (RESPONSES, BOTH), (GENERATE, BOTH)],
    extras: Extras::Sglext,
};
pub const SGLANG_0_5_16: Dialect = Dialect {
    version: "0.5.16",
    header_on: &[CHAT, COMPLETIONS],
    fields_on: &[(CHAT, BOTH), (COMPLETIONS, BOTH), (GENERATE, NEW)],
    extras: Extras::PromptOfChats,
    ..SGLANG_0_5_23
};
pub const SGLANG_0_5_10: Dialect =
    Dialect { version: "0.5.10", info: &["/get_server_info"], extras: Extras::SglExt, ..SGLANG_0_5_16 };
pub const SGLANG_0_5_8: Dialect = Dialect {
    version: "0.5.8",
    header_on: &[],
    fields_on: &[(CHAT, OLD), (COMPLETIONS, OLD), (GENERATE, OLD)],
    ..SGLANG_0_5_10
};
pub const SGLANG_0_4_7: Dialect =
    Dialect { version: "0.4.7", has_loads: false, fields_on: &[(GENERATE, OLD)], ..SGLANG_0_5_8 };
pub const VLLM_0_32: Dialect = Dialect {
    engine: Engine::Vllm,
    version: "0.32.0",
    info: &[],
    has_loads: false,
    header_on: &[CHAT, COMPLETIONS, MESSAGES],
    fields_on: &[],
    extras: Extras::Npy,
};
pub const VLLM_0_30: Dialect = Dialect { version: "0.30.0", ..VLLM_0_32 };
/// semmoe's worker: like SGLang, but it reports its model's shape and has no legacy names.
pub const SEMMOE: Dialect = Dialect {
    engine: Engine::Semmoe,
    version: "0.1.0",
    info: &["/server_info"],
    fields_on: &[(GENERATE, NEW)],
    ..SGLANG_0_5_23
};

impl Dialect {
    pub fn is_vllm(&self) -> bool {
        self.engine == Engine::Vllm
    }

    /// The body members that pin on a route.
    pub fn fields(&self, route: &str) -> &'static [&'static str] {
        self.fields_on.iter().find(|(on, _)| *on == route).map(|(_, fields)| *fields).unwrap_or_default()
    }

    pub fn reads_pins_on(&self, route: &str) -> bool {
        self.header_on.contains(&route) || !self.fields(route).is_empty()
    }
}
