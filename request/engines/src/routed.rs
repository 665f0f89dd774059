//! Routed experts of live requests: which engines report them on request, in which form, and how to remove them from a
//! response if the client did not request them.
//!
//! | engine | `/generate` | chat, completions |
//! |---|---|---|
//! | sglang from 0.5.23, semmoe | field `return_routed_experts`, returned in `meta_info.routed_experts` | the same field, returned in `sglext.routed_experts` |
//! | sglang 0.5.8 to 0.5.22 | as above | not requested |
//! | vllm with its server flag | no such route | in every response except streams, in `routed_experts` of each choice; field `return_token_ids` for the token ids |
//! | all others | not requested | not requested |
//!
//! Streams of the OpenAI routes report routed experts in a separate event, in other places (older versions) or not at
//! all (vLLM), so streams are not sampled. A response is never re-serialised: SGLang's member is cut out, vLLM's values
//! become `null`, as they are without its flag, and all other bytes are unchanged. `sglext` is removed entirely if the
//! rest of it is `null`, since it is then present only because of this request.

use std::ops::Range;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use crate::json::{Elements, Member, Members, ScanError, top_level};
use crate::pin::Stripped;
use crate::{Engine, Route, Version};

/// Body field that requests routed experts.
pub const FIELD: &str = "return_routed_experts";
/// Body field with the index of the first token to report.
pub const START_FIELD: &str = "routed_experts_start_len";

const GENERATE: Version = Version::new(0, 5, 8);
const OPENAI: Version = Version::new(0, 5, 23);
const MEMBER: &str = "routed_experts";
/// Body field that requests token ids from vLLM.
const TOKEN_IDS_FIELD: &str = "return_token_ids";
/// Token id members in vLLM's responses: in each choice; in each choice (completions) or next to the choices (chat).
const TOKEN_IDS: [&str; 2] = ["token_ids", "prompt_token_ids"];

/// Returns whether an engine of this version (`None` if unknown) supports requests for routed experts on this route. It
/// may still not report any: only vLLM's responses show whether its server flag is set.
pub fn can_ask(engine: Engine, version: Option<Version>, route: Route) -> bool {
    let since = match route {
        Route::Generate => GENERATE,
        Route::Chat | Route::Completions => OPENAI,
        _ => return false,
    };
    match engine {
        Engine::Semmoe => true,
        Engine::Sglang => version.is_none_or(|version| version >= since),
        Engine::Vllm => route != Route::Generate,
        Engine::Openai => false,
    }
}

/// The location of routed experts in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In `meta_info` of the response, or of each response in an array: SGLang's `/generate`.
    MetaInfo,
    /// In `sglext` of the response: SGLang's OpenAI routes.
    Sglext,
    /// In each choice: vLLM.
    Choices {
        /// Whether the response also has token ids that the client did not request.
        ids: bool,
    },
}

/// A request for routed experts.
#[derive(Debug, Clone)]
pub struct Asking {
    /// The body to send instead of the client's.
    pub body: Stripped,
    /// The location of the requested data in the response.
    pub place: Place,
}

/// Adds a request for routed experts to a body. Returns `None` if the client itself mentions routed experts, if the
/// body has several prompts, or, on the OpenAI routes, if it requests a stream or several choices. vLLM's `echo`
/// changes its meaning with token ids, so it is excluded too.
pub fn ask(engine: Engine, route: Route, body: &Stripped) -> Option<Asking> {
    let bytes = body.bytes();
    let value = |field| top_level(bytes, field).ok().flatten();
    let is_absent = |field| matches!(top_level(bytes, field), Ok(None));
    // A list of strings or of lists contains a quote or a bracket.
    let is_one = |field| {
        let list = value(field).filter(|value| value.first() == Some(&b'['));
        list.is_none_or(|list| !list.iter().skip(1).any(|byte| matches!(byte, b'[' | b'"')))
    };
    let is_any_of = |field, all: &[&[u8]]| value(field).is_none_or(|value| all.contains(&value));
    let (no, one): ([&[u8]; 2], [&[u8]; 2]) = ([b"false", b"null"], [b"1", b"null"]);
    let is_alone = match route {
        Route::Generate => is_one("input_ids") && value("text").is_none_or(|text| text.first() != Some(&b'[')),
        _ => is_one("prompt") && is_any_of("stream", &no) && is_any_of("n", &one) && is_any_of("best_of", &one),
    };
    if !is_alone {
        return None;
    }
    if engine == Engine::Vllm {
        let ids = is_absent(TOKEN_IDS_FIELD);
        let body = if ids { body.with_member(TOKEN_IDS_FIELD, "true") } else { body.clone() };
        let may_ask = is_absent(PROMPT_START_FIELD) && is_any_of("echo", &no);
        return may_ask.then_some(Asking { body, place: Place::Choices { ids } });
    }
    let place = if route == Route::Generate { Place::MetaInfo } else { Place::Sglext };
    let may_ask = is_absent(FIELD) && is_absent(START_FIELD);
    may_ask.then(|| Asking { body: body.with_member(FIELD, "true"), place })
}

/// A response without its routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// The remaining content, byte for byte.
    pub rest: Bytes,
    /// Whether the response had routed experts rather than only `null`.
    pub found: bool,
}

/// Removes routed experts, and token ids that only we requested, from one JSON response: an object or (for `/generate`
/// with several prompts) an array of objects. Returns `None` if there is nothing to remove.
///
/// # Errors
/// If the response is neither an object nor an array of objects.
pub fn cut(place: Place, answer: &[u8]) -> Result<Option<Cut>, ScanError> {
    let mut cuts = Cuts::default();
    match place {
        Place::Choices { ids } => cuts.choices(answer, ids)?,
        Place::MetaInfo if answer.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') => {
            for element in Elements::new(answer) {
                cuts.answer(answer, element?, "meta_info")?;
            }
        }
        Place::MetaInfo => cuts.answer(answer, 0..answer.len(), "meta_info")?,
        Place::Sglext => cuts.answer(answer, 0..answer.len(), SGLEXT)?,
    }
    Ok((!cuts.edits.is_empty()).then(|| cuts.carry_out(answer)))
}

/// Body field with which a vLLM client requests routed experts starting at a given token.
pub const PROMPT_START_FIELD: &str = "routed_experts_prompt_start";

static TOLD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"routed_experts\":\""));

/// Returns whether a piece of a response has routed experts. Text cannot imitate them: its quotes are escaped.
pub fn has_routed_experts(piece: &[u8]) -> bool {
    TOLD.find(piece).is_some()
}

/// The member of SGLang's OpenAI responses for non-standard data.
const SGLEXT: &str = "sglext";

/// A range of a response, and its replacement.
struct Edit {
    range: Range<usize>,
    by: &'static str,
}

/// The edits to a response.
#[derive(Default)]
struct Cuts {
    edits: Vec<Edit>,
    found: bool,
}

impl Cuts {
    /// Adds edits for one SGLang response, in its member `holder`.
    fn answer(&mut self, answer: &[u8], within: Range<usize>, holder: &str) -> Result<(), ScanError> {
        let mut inner = Vec::new();
        self.members(answer, within, |member| {
            let is_holder = member.is(answer, holder) && answer[member.value.start] == b'{';
            let is_gone = is_holder && holder == SGLEXT && says_nothing_else(&answer[member.value.clone()])?;
            if is_holder {
                inner.push((member.value.clone(), is_gone));
            }
            Ok(is_gone)
        })?;
        for (value, is_gone) in inner {
            let mut found = false;
            let before = self.edits.len();
            self.members(answer, value, |member| {
                let is_it = member.is(answer, MEMBER);
                found |= is_it && &answer[member.value.clone()] != b"null";
                Ok(is_it)
            })?;
            if is_gone {
                self.edits.truncate(before);
            }
            self.found |= found;
        }
        Ok(())
    }

    /// Adds edits for one vLLM response.
    fn choices(&mut self, answer: &[u8], ids: bool) -> Result<(), ScanError> {
        let lists = self.found(answer, 0..answer.len(), "choices", ids)?;
        for list in lists.into_iter().filter(|list| answer[list.start] == b'[') {
            for choice in Elements::new(&answer[list.clone()]) {
                let choice = choice?;
                let choice = choice.start + list.start..choice.end + list.start;
                if answer[choice.start] == b'{' {
                    for routes in self.found(answer, choice, MEMBER, ids)? {
                        self.found |= self.null(answer, routes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the values of `name` in an object. Sets its token ids to `null` if the client did not request them.
    fn found(
        &mut self,
        answer: &[u8],
        within: Range<usize>,
        name: &str,
        ids: bool,
    ) -> Result<Vec<Range<usize>>, ScanError> {
        let mut found = Vec::new();
        for member in members_in(answer, within) {
            let member = member?;
            if member.is(answer, name) {
                found.push(member.value);
            } else if ids && TOKEN_IDS.iter().any(|name| member.is(answer, name)) {
                self.null(answer, member.value);
            }
        }
        Ok(found)
    }

    /// Replaces a value by `null`; returns false if it already is `null`.
    fn null(&mut self, answer: &[u8], value: Range<usize>) -> bool {
        let is_something = &answer[value.clone()] != b"null";
        if is_something {
            self.edits.push(Edit { range: value, by: "null" });
        }
        is_something
    }

    /// Adds edits that remove the members of an object selected by `goes`, each run of them with one comma.
    fn members(
        &mut self,
        answer: &[u8],
        within: Range<usize>,
        mut goes: impl FnMut(&Member) -> Result<bool, ScanError>,
    ) -> Result<(), ScanError> {
        let mut kept_before = false;
        let mut run: Option<Range<usize>> = None;
        for member in members_in(answer, within) {
            let member = member?;
            if goes(&member)? {
                let start = run.map_or(member.segment.start, |run| run.start);
                run = Some(start..member.segment.end);
            } else {
                self.close(run.take(), kept_before, true);
                kept_before = true;
            }
        }
        self.close(run, kept_before, false);
        Ok(())
    }

    /// Removes a run of members with the comma before it or, for the first run, the one after it.
    fn close(&mut self, run: Option<Range<usize>>, kept_before: bool, kept_behind: bool) {
        let Some(Range { start, end }) = run else { return };
        let range = if kept_before {
            start - 1..end
        } else if kept_behind {
            start..end + 1
        } else {
            start..end
        };
        self.edits.push(Edit { range, by: "" });
    }

    fn carry_out(mut self, answer: &[u8]) -> Cut {
        self.edits.sort_by_key(|edit| edit.range.start);
        let left_out: usize = self.edits.iter().map(|edit| edit.range.len()).sum();
        let kept_and_new = answer.len().saturating_sub(left_out) + 4 * self.edits.len();
        let mut rest = BytesMut::with_capacity(kept_and_new);
        let mut from = 0;
        for Edit { range, by } in &self.edits {
            rest.extend_from_slice(&answer[from..range.start]);
            rest.extend_from_slice(by.as_bytes());
            from = range.end;
        }
        rest.extend_from_slice(&answer[from..]);
        Cut { rest: rest.freeze(), found: self.found }
    }
}

/// Returns whether an object has routed experts and otherwise only `null`.
fn says_nothing_else(object: &[u8]) -> Result<bool, ScanError> {
    let mut has_it = false;
    for member in Members::new(object) {
        let member = member?;
        let is_it = member.is(object, MEMBER);
        has_it |= is_it;
        if !is_it && &object[member.value] != b"null" {
            return Ok(false);
        }
    }
    Ok(has_it)
}

/// Iterates over the members of an object within a response.
fn members_in(answer: &[u8], within: Range<usize>) -> impl Iterator<Item = Result<Member, ScanError>> {
    let start = within.start;
    Members::new(&answer[within]).map(move |member| member.map(|member| shifted(member, start)))
}

/// Shifts the ranges of a member by the start of its object.
fn shifted(member: Member, by: usize) -> Member {
    let shift = |range: Range<usize>| range.start + by..range.end + by;
    Member { segment: shift(member.segment), key: shift(member.key), value: shift(member.value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::any_json_object;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn engines_that_can_be_asked() {
        for (engine, version, route, can) in [
            (Engine::Sglang, Some("0.5.8"), Route::Generate, true),
            (Engine::Sglang, Some("0.5.7"), Route::Generate, false),
            (Engine::Sglang, None, Route::Generate, true),
            (Engine::Semmoe, Some("0.1.0"), Route::Generate, true),
            (Engine::Sglang, Some("0.5.23"), Route::Chat, true),
            (Engine::Sglang, Some("0.5.22"), Route::Completions, false),
            (Engine::Semmoe, None, Route::Completions, true),
            (Engine::Sglang, None, Route::Responses, false),
            (Engine::Vllm, Some("0.30.0"), Route::Generate, false),
            (Engine::Vllm, Some("0.30.0"), Route::Chat, true),
            (Engine::Vllm, None, Route::Completions, true),
            (Engine::Vllm, None, Route::Messages, false),
            (Engine::Openai, None, Route::Generate, false),
        ] {
            assert_eq!(can_ask(engine, version.and_then(Version::parse), route), can, "{engine} {version:?} {route}");
        }
    }

    #[test]
    fn who_asked_already_is_not_asked_for() {
        let asked = |route, body: &'static str| {
            let stripped = Stripped::new(&Bytes::from_static(body.as_bytes())).unwrap();
            ask(Engine::Sglang, route, &stripped).map(|asking| String::from_utf8(asking.body.bytes().to_vec()).unwrap())
        };
        for (body, expected) in [
            (r#"{"text":"a"}"#, Some(r#"{"return_routed_experts":true,"text":"a"}"#)),
            (r#" { "input_ids" : [1,2] }"#, Some(r#" {"return_routed_experts":true, "input_ids" : [1,2] }"#)),
            ("{}", Some(r#"{"return_routed_experts":true}"#)),
            (r#"{"text":"[","routed_dp_rank":4}"#, Some(r#"{"return_routed_experts":true,"text":"["}"#)),
            (r#"{"text":"a","return_routed_experts":true}"#, None),
            (r#"{"text":"a","return_routed_experts":false}"#, None),
            (r#"{"text":"a","return_routed\u005fexperts":null}"#, None),
            (r#"{"text":"a","routed_experts_start_len":3}"#, None),
            (r#"{"text":["a"]}"#, None),
            (r#"{"input_ids":[[1]]}"#, None),
            (r#"{"input_ids":[ [1] ]}"#, None),
        ] {
            assert_eq!(asked(Route::Generate, body).as_deref(), expected, "{body}");
        }
        for (body, is_asked) in [
            (r#"{"messages":[{"role":"user","content":"a"}]}"#, true),
            (r#"{"prompt":"[\"","stream":false,"n":1}"#, true),
            (r#"{"prompt":[1,2],"stream":null,"n":null}"#, true),
            (r#"{"prompt":["a"]}"#, false),
            (r#"{"prompt":[[1]]}"#, false),
            (r#"{"prompt":"a","stream":true}"#, false),
            (r#"{"prompt":"a","n":2}"#, false),
            (r#"{"prompt":"a","best_of":2}"#, false),
            (r#"{"prompt":"a","return_routed_experts":true}"#, false),
        ] {
            assert_eq!(asked(Route::Chat, body).is_some(), is_asked, "{body}");
        }
    }

    fn cut_text(answer: &str) -> Option<(String, bool)> {
        let cut = cut(Place::MetaInfo, answer.as_bytes()).unwrap()?;
        Some((String::from_utf8(cut.rest.to_vec()).unwrap(), cut.found))
    }

    #[test]
    fn commas_and_white_space() {
        for (answer, rest, found) in [
            (r#"{"meta_info":{"routed_experts":"x"}}"#, r#"{"meta_info":{}}"#, true),
            (r#"{"meta_info":{"routed_experts":"x","id":1}}"#, r#"{"meta_info":{"id":1}}"#, true),
            (r#"{"meta_info":{"id":1,"routed_experts":"x"}}"#, r#"{"meta_info":{"id":1}}"#, true),
            (r#"{"meta_info":{"a":1,"routed_experts":"x","b":2}}"#, r#"{"meta_info":{"a":1,"b":2}}"#, true),
            (r#"{"meta_info":{"routed_experts":null,"b":2}}"#, r#"{"meta_info":{"b":2}}"#, false),
            (
                "{ \"meta_info\" : { \"a\" : 1 , \"routed_experts\" : \"x\" , \"b\" : 2 } }\n",
                "{ \"meta_info\" : { \"a\" : 1 , \"b\" : 2 } }\n",
                true,
            ),
            (
                r#"{"meta_info":{"routed_experts":1,"routed\u005fexperts":null,"a":1,"routed_experts":2}}"#,
                r#"{"meta_info":{"a":1}}"#,
                true,
            ),
            (r#"[{"meta_info":{"routed_experts":"x"}},{"a":1}]"#, r#"[{"meta_info":{}},{"a":1}]"#, true),
        ] {
            assert_eq!(cut_text(answer), Some((rest.to_owned(), found)), "{answer}");
        }
        for answer in [
            "{}",
            "[]",
            r#"{"routed_experts":"x"}"#,
            r#"{"meta_info":["routed_experts"]}"#,
            r#"{"meta_info":null}"#,
            r#"{"text":"\"meta_info\":{\"routed_experts\":1}","a":{"meta_info":{"routed_experts":1}}}"#,
        ] {
            assert_eq!(cut_text(answer), None, "{answer}");
        }
        for answer in ["", "x", "{", r#"{"meta_info":{"routed_experts":"x"}"#, "[1]", r#""meta_info""#, "[{},]"] {
            assert!(cut(Place::MetaInfo, answer.as_bytes()).is_err(), "{answer}");
        }
    }

    #[test]
    fn nothing_stays_of_what_is_there_for_the_question_alone() {
        for (answer, rest, found) in [
            (r#"{"id":1,"sglext":{"routed_experts":"x"}}"#, r#"{"id":1}"#, true),
            (r#"{"sglext":{"input_ids":null,"routed_experts":"x"},"id":1}"#, r#"{"id":1}"#, true),
            (
                r#"{"id":1,"sglext":{"routed_experts":"x","input_ids":[1]}}"#,
                r#"{"id":1,"sglext":{"input_ids":[1]}}"#,
                true,
            ),
            (r#"{"id":1,"sglext":{"routed_experts":null},"a":2}"#, r#"{"id":1,"a":2}"#, false),
        ] {
            let cut = cut(Place::Sglext, answer.as_bytes()).unwrap().unwrap();
            assert_eq!((std::str::from_utf8(&cut.rest).unwrap(), cut.found), (rest, found), "{answer}");
        }
        for answer in [r#"{"sglext":null}"#, r#"{"sglext":{}}"#, r#"{"meta_info":{"routed_experts":"x"}}"#] {
            assert_eq!(cut(Place::Sglext, answer.as_bytes()), Ok(None), "{answer}");
        }
    }

    #[test]
    fn vllm_is_asked_for_token_ids() {
        let asked = |body: &'static str| {
            let stripped = Stripped::new(&Bytes::from_static(body.as_bytes())).unwrap();
            let asking = ask(Engine::Vllm, Route::Chat, &stripped)?;
            Some((String::from_utf8(asking.body.bytes().to_vec()).unwrap(), asking.place))
        };
        for (body, sent, ids) in [
            (r#"{"prompt":"a"}"#, r#"{"return_token_ids":true,"prompt":"a"}"#, true),
            (r#"{"prompt":[1,2],"echo":false}"#, r#"{"return_token_ids":true,"prompt":[1,2],"echo":false}"#, true),
            // The client's own setting for token ids takes precedence, and it gets what it requested.
            (r#"{"prompt":"a","return_token_ids":true}"#, r#"{"prompt":"a","return_token_ids":true}"#, false),
            (r#"{"return_token_ids":null}"#, r#"{"return_token_ids":null}"#, false),
        ] {
            assert_eq!(asked(body), Some((sent.to_owned(), Place::Choices { ids })), "{body}");
        }
        for body in [
            r#"{"prompt":"a","routed_experts_prompt_start":0}"#,
            r#"{"prompt":"a","echo":true}"#,
            r#"{"prompt":"a","stream":true}"#,
            r#"{"prompt":"a","n":2}"#,
            r#"{"prompt":["a"]}"#,
        ] {
            assert_eq!(asked(body), None, "{body}");
        }
    }

    /// The answer format of vLLM 0.30, with two choices.
    #[test]
    fn choices_lose_what_the_client_did_not_ask_for() {
        let answer = r#"{"id":"a","choices":[{"index":0,"text":"\"routed_experts\":\"","token_ids":[3, 4],"routed_experts":"AA"},{"routed_experts":"AA","prompt_token_ids":[1],"index":1}],"usage":{"routed_experts":1},"prompt_token_ids":[1]}"#;
        assert!(has_routed_experts(answer.as_bytes()));
        for (ids, rest) in [
            (
                true,
                r#"{"id":"a","choices":[{"index":0,"text":"\"routed_experts\":\"","token_ids":null,"routed_experts":null},{"routed_experts":null,"prompt_token_ids":null,"index":1}],"usage":{"routed_experts":1},"prompt_token_ids":null}"#,
            ),
            (
                false,
                r#"{"id":"a","choices":[{"index":0,"text":"\"routed_experts\":\"","token_ids":[3, 4],"routed_experts":null},{"routed_experts":null,"prompt_token_ids":[1],"index":1}],"usage":{"routed_experts":1},"prompt_token_ids":[1]}"#,
            ),
        ] {
            let cut = cut(Place::Choices { ids }, answer.as_bytes()).unwrap().unwrap();
            assert_eq!((std::str::from_utf8(&cut.rest).unwrap(), cut.found), (rest, true));
            assert!(!has_routed_experts(rest.as_bytes()));
        }
        // Without the flag, only token ids.
        let answer = br#"{"choices":[{"token_ids":[1],"routed_experts":null}]}"#;
        let rest = Bytes::from_static(br#"{"choices":[{"token_ids":null,"routed_experts":null}]}"#);
        assert_eq!(cut(Place::Choices { ids: true }, answer), Ok(Some(Cut { rest, found: false })));
        for answer in [
            "{}",
            r#"{"choices":[]}"#,
            r#"{"choices":[{"text":"a"}]}"#,
            r#"{"choices":[{"routed_experts":null,"token_ids":null}],"prompt_token_ids":null}"#,
            r#"{"choices":null}"#,
            r#"{"choices":[1]}"#,
        ] {
            assert_eq!(cut(Place::Choices { ids: true }, answer.as_bytes()), Ok(None), "{answer}");
        }
        for answer in ["", "[]", r#"{"choices":[{]}"#, r#"{"choices":["#] {
            assert!(cut(Place::Choices { ids: true }, answer.as_bytes()).is_err(), "{answer}");
        }
    }

    /// `value` as text, with the experts inserted before member `at` of `meta_info`.
    fn with_experts(answer: &Value, meta: &Value, experts: &[Value], at: usize, space: &str) -> (String, String) {
        let join = |members: Vec<String>| format!("{{{space}{}{space}}}", members.join(&format!("{space},{space}")));
        let member = |(key, value): (&String, &Value)| format!("{}{space}:{space}{value}", json!(key));
        let clean: Vec<String> = meta.as_object().unwrap().iter().map(member).collect();
        let mut full = clean.clone();
        for value in experts {
            full.insert(at.min(full.len()), format!("\"routed_experts\"{space}:{space}{value}"));
        }
        let around = |meta: String| {
            let mut members: Vec<String> = answer.as_object().unwrap().iter().map(member).collect();
            members.insert(at.min(members.len()), format!("\"meta_info\":{meta}"));
            join(members)
        };
        (around(join(clean)), around(join(full)))
    }

    proptest! {
        /// Wherever the member is: the rest parses to the answer without it, and consists of one or two ranges of the
        /// original bytes.
        #[test]
        fn only_the_member_goes(
            answer in any_json_object(), meta in any_json_object(), experts in proptest::collection::vec(any_json_object(), 1..3),
            at in 0usize..6, pretty in any::<bool>(), batch in any::<bool>()
        ) {
            prop_assume!(answer.get("meta_info").is_none() && meta.get("routed_experts").is_none());
            let (clean, full) = with_experts(&answer, &meta, &experts, at, if pretty { " \n" } else { "" });
            let whole = if batch { format!("[{full}, {full}]") } else { full.clone() };
            let cut = cut(Place::MetaInfo, whole.as_bytes()).unwrap().unwrap();
            let rest = std::str::from_utf8(&cut.rest).unwrap();
            let expected: Value = serde_json::from_str(&clean).unwrap();
            let expected = if batch { json!([expected, expected]) } else { expected };
            prop_assert_eq!(serde_json::from_str::<Value>(rest).unwrap(), expected);
            prop_assert!(cut.found);
            if !batch {
                let same = rest.bytes().zip(full.bytes()).take_while(|(a, b)| a == b).count();
                prop_assert!(full.ends_with(&rest[same..]), "{} {}", full, rest);
            }
        }

        #[test]
        fn any_bytes_end_without_panic(bytes in "[{}\\[\\],:\" a]{0,12}(\"meta_info\":)?[{}\\[\\],:\" a]{0,12}(\"routed_experts\":)?[{}\\[\\],:\"1 ]{0,12}") {
            let _ = cut(Place::MetaInfo, bytes.as_bytes());
            let _ = cut(Place::Sglext, bytes.replace("meta_info", "sglext").as_bytes());
            let _ = cut(Place::Choices { ids: true }, bytes.replace("meta_info", "choices").as_bytes());
        }
    }
}
