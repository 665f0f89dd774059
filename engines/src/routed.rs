//! Routed experts of requests in flight: who is asked for them and how, and how they are cut out of an answer that a client
//! did not ask them for.
//!
//! | engine | `/generate` | chat, completions |
//! |---|---|---|
//! | sglang from 0.5.23, semmoe | field `return_routed_experts`, answered in `meta_info.routed_experts` | the same field, answered in `sglext.routed_experts` |
//! | sglang 0.5.8 to 0.5.22 | the same | not asked |
//! | all others | not asked | not asked |
//!
//! Streams of the OpenAI routes tell them in an event of their own, and older versions in other places: they are left
//! alone. An answer is never written anew: the member is cut out, all other bytes stay. Of `sglext` nothing stays where the
//! rest of it says nothing, as it is there for the question alone.

use std::ops::Range;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use crate::json::{Elements, Member, Members, ScanError, top_level};
use crate::pin::Stripped;
use crate::{Engine, Route, Version};

/// The body field that asks.
pub const FIELD: &str = "return_routed_experts";
/// The body field that says from which token on.
pub const START_FIELD: &str = "routed_experts_start_len";

const GENERATE: Version = Version::new(0, 5, 8);
const OPENAI: Version = Version::new(0, 5, 23);
const MEMBER: &str = "routed_experts";

/// Whether an engine of this version (`None`: it does not tell) can be asked on this route. It may still refuse.
pub fn can_ask(engine: Engine, version: Option<Version>, route: Route) -> bool {
    let since = match route {
        Route::Generate => GENERATE,
        Route::Chat | Route::Completions => OPENAI,
        Route::Responses | Route::Embeddings | Route::Tokenize | Route::Messages | Route::Detokenize | Route::Extra => {
            return false;
        }
    };
    match engine {
        Engine::Semmoe => true,
        Engine::Sglang => version.is_none_or(|version| version >= since),
        Engine::Vllm | Engine::Openai => false,
    }
}

/// The body with the question in it; `None` where the client's own words about routed experts, whatever they say, or
/// several prompts are in it already, and on the OpenAI routes where a stream or several answers are wanted.
pub fn ask(route: Route, body: &Stripped) -> Option<Stripped> {
    let bytes = body.bytes();
    let value = |field| top_level(bytes, field).ok().flatten();
    let is_absent = |field| matches!(top_level(bytes, field), Ok(None));
    // A list of texts or of lists has a quote or a bracket inside.
    let is_one = |field| {
        let list = value(field).filter(|value| value.first() == Some(&b'['));
        list.is_none_or(|list| !list.iter().skip(1).any(|byte| matches!(byte, b'[' | b'"')))
    };
    let is_any_of = |field, all: &[&[u8]]| value(field).is_none_or(|value| all.contains(&value));
    let is_alone = match route {
        Route::Generate => is_one("input_ids") && value("text").is_none_or(|text| text.first() != Some(&b'[')),
        _ => {
            let one: [&[u8]; 2] = [b"1", b"null"];
            is_one("prompt")
                && is_any_of("stream", &[b"false", b"null"])
                && is_any_of("n", &one)
                && is_any_of("best_of", &one)
        }
    };
    (is_absent(FIELD) && is_absent(START_FIELD) && is_alone).then(|| body.with_member(FIELD, "true"))
}

/// An answer without its routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Everything else, byte for byte.
    pub rest: Bytes,
    /// Whether what was cut out held anything but `null`.
    pub told: bool,
}

/// Cuts the routed experts out of one JSON answer, an object or (of `/generate` with several prompts) an array of them;
/// `None` where it has none.
///
/// # Errors
/// When it is neither.
pub fn cut(route: Route, answer: &[u8]) -> Result<Option<Cut>, ScanError> {
    let mut cuts = Cuts { holder: if route == Route::Generate { "meta_info" } else { "sglext" }, ..Cuts::default() };
    if answer.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        for element in Elements::new(answer) {
            cuts.answer(answer, element?)?;
        }
    } else {
        cuts.answer(answer, 0..answer.len())?;
    }
    Ok((!cuts.ranges.is_empty()).then(|| cuts.carry_out(answer)))
}

/// Cuts the routed experts out of the choices of one answer of vLLM, which sends them with every answer that is no stream
/// when it is started with its flag; `None` where it has none.
///
/// # Errors
/// When the answer is no JSON object.
pub fn cut_choices(answer: &[u8]) -> Result<Option<Cut>, ScanError> {
    let (mut cuts, mut choices) = (Cuts::default(), None);
    for member in Members::new(answer) {
        let member = member?;
        if member.is(answer, "choices") && answer[member.value.start] == b'[' {
            choices = Some(member.value);
        }
    }
    let Some(choices) = choices else { return Ok(None) };
    for choice in Elements::new(&answer[choices.clone()]) {
        let choice = choice?;
        let choice = choice.start + choices.start..choice.end + choices.start;
        if answer[choice.start] != b'{' {
            continue;
        }
        let mut told = false;
        cuts.members(answer, choice, |member| {
            let is_it = member.is(answer, MEMBER);
            told |= is_it && &answer[member.value.clone()] != b"null";
            Ok(is_it)
        })?;
        cuts.told |= told;
    }
    Ok((!cuts.ranges.is_empty()).then(|| cuts.carry_out(answer)))
}

/// The body field by which a client of vLLM asks for routed experts from a token on.
pub const PROMPT_START_FIELD: &str = "routed_experts_prompt_start";

static TOLD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"routed_experts\":\""));

/// Whether a piece of an answer tells routed experts. Text cannot pretend to, as quotes in it are escaped.
pub fn tells(piece: &[u8]) -> bool {
    TOLD.find(piece).is_some()
}

/// Stretches to leave out, ascending.
#[derive(Default)]
struct Cuts {
    /// The object that the member is in.
    holder: &'static str,
    ranges: Vec<Range<usize>>,
    told: bool,
}

impl Cuts {
    /// Adds what is in one answer.
    fn answer(&mut self, answer: &[u8], within: Range<usize>) -> Result<(), ScanError> {
        let mut inner = Vec::new();
        let (holder, prunes) = (self.holder, self.holder == "sglext");
        self.members(answer, within, |member| {
            let is_holder = member.is(answer, holder) && answer[member.value.start] == b'{';
            if is_holder && prunes && says_nothing_else(&answer[member.value.clone()])? {
                inner.push((member.value.clone(), true));
                return Ok(true);
            }
            if is_holder {
                inner.push((member.value.clone(), false));
            }
            Ok(false)
        })?;
        for (value, is_gone) in inner {
            let mut told = false;
            let before = self.ranges.len();
            self.members(answer, value, |member| {
                let is_it = member.is(answer, MEMBER);
                told |= is_it && &answer[member.value.clone()] != b"null";
                Ok(is_it)
            })?;
            if is_gone {
                self.ranges.truncate(before);
            }
            self.told |= told;
        }
        self.ranges.sort_by_key(|range| range.start);
        Ok(())
    }

    /// Adds the members of an object that `goes` wants out, each run of them with one comma.
    fn members(
        &mut self,
        answer: &[u8],
        within: Range<usize>,
        mut goes: impl FnMut(&Member) -> Result<bool, ScanError>,
    ) -> Result<(), ScanError> {
        let mut kept_before = false;
        let mut run: Option<Range<usize>> = None;
        for member in Members::new(&answer[within.clone()]) {
            let member = shifted(member?, within.start);
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

    /// A run of members goes with the comma before it, or, being the first, with the one behind it.
    fn close(&mut self, run: Option<Range<usize>>, kept_before: bool, kept_behind: bool) {
        let Some(Range { start, end }) = run else { return };
        self.ranges.push(if kept_before {
            start - 1..end
        } else if kept_behind {
            start..end + 1
        } else {
            start..end
        });
    }

    fn carry_out(self, answer: &[u8]) -> Cut {
        let left_out: usize = self.ranges.iter().map(Range::len).sum();
        let mut rest = BytesMut::with_capacity(answer.len().saturating_sub(left_out));
        let mut from = 0;
        for range in &self.ranges {
            rest.extend_from_slice(&answer[from..range.start]);
            from = range.end;
        }
        rest.extend_from_slice(&answer[from..]);
        Cut { rest: rest.freeze(), told: self.told }
    }
}

/// Whether an object has routed experts and otherwise nothing but `null`.
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

/// A member of an object that starts at `by`.
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
            (Engine::Vllm, Some("0.33.0"), Route::Generate, false),
            (Engine::Openai, None, Route::Generate, false),
        ] {
            assert_eq!(can_ask(engine, version.and_then(Version::parse), route), can, "{engine} {version:?} {route}");
        }
    }

    #[test]
    fn who_asked_already_is_not_asked_for() {
        let asked = |route, body: &'static str| {
            let stripped = Stripped::new(&Bytes::from_static(body.as_bytes())).unwrap();
            ask(route, &stripped).map(|body| String::from_utf8(body.bytes().to_vec()).unwrap())
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
        let cut = cut(Route::Generate, answer.as_bytes()).unwrap()?;
        Some((String::from_utf8(cut.rest.to_vec()).unwrap(), cut.told))
    }

    #[test]
    fn commas_and_white_space() {
        for (answer, rest, told) in [
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
            assert_eq!(cut_text(answer), Some((rest.to_owned(), told)), "{answer}");
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
            assert!(cut(Route::Generate, answer.as_bytes()).is_err(), "{answer}");
        }
    }

    #[test]
    fn nothing_stays_of_what_is_there_for_the_question_alone() {
        for (answer, rest, told) in [
            (r#"{"id":1,"sglext":{"routed_experts":"x"}}"#, r#"{"id":1}"#, true),
            (r#"{"sglext":{"input_ids":null,"routed_experts":"x"},"id":1}"#, r#"{"id":1}"#, true),
            (
                r#"{"id":1,"sglext":{"routed_experts":"x","input_ids":[1]}}"#,
                r#"{"id":1,"sglext":{"input_ids":[1]}}"#,
                true,
            ),
            (r#"{"id":1,"sglext":{"routed_experts":null},"a":2}"#, r#"{"id":1,"a":2}"#, false),
        ] {
            let cut = cut(Route::Chat, answer.as_bytes()).unwrap().unwrap();
            assert_eq!((std::str::from_utf8(&cut.rest).unwrap(), cut.told), (rest, told), "{answer}");
        }
        for answer in [r#"{"sglext":null}"#, r#"{"sglext":{}}"#, r#"{"meta_info":{"routed_experts":"x"}}"#] {
            assert_eq!(cut(Route::Completions, answer.as_bytes()), Ok(None), "{answer}");
        }
    }

    /// The shape of vLLM 0.30, with two choices.
    #[test]
    fn choices_lose_what_the_client_did_not_ask_for() {
        let answer = r#"{"id":"a","choices":[{"index":0,"text":"\"routed_experts\":\"","token_ids":null,"routed_experts":"AA"},{"routed_experts":"AA","index":1}],"usage":{"routed_experts":1}}"#;
        assert!(tells(answer.as_bytes()));
        let cut = cut_choices(answer.as_bytes()).unwrap().unwrap();
        let rest = r#"{"id":"a","choices":[{"index":0,"text":"\"routed_experts\":\"","token_ids":null},{"index":1}],"usage":{"routed_experts":1}}"#;
        assert_eq!((std::str::from_utf8(&cut.rest).unwrap(), cut.told), (rest, true));
        assert!(!tells(rest.as_bytes()));
        for answer in
            ["{}", r#"{"choices":[]}"#, r#"{"choices":[{"text":"a"}]}"#, r#"{"choices":null}"#, r#"{"choices":[1]}"#]
        {
            assert_eq!(cut_choices(answer.as_bytes()), Ok(None), "{answer}");
        }
        for answer in ["", "[]", r#"{"choices":[{]}"#, r#"{"choices":["#] {
            assert!(cut_choices(answer.as_bytes()).is_err(), "{answer}");
        }
    }

    /// `value` as text, with the experts put in before member `at` of `meta_info`.
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
        /// Wherever the member stands: what is left parses to the answer without it, and every byte that is left stood in
        /// the answer, in one or two stretches.
        #[test]
        fn only_the_member_goes(
            answer in any_json_object(), meta in any_json_object(), experts in proptest::collection::vec(any_json_object(), 1..3),
            at in 0usize..6, pretty in any::<bool>(), batch in any::<bool>()
        ) {
            prop_assume!(answer.get("meta_info").is_none() && meta.get("routed_experts").is_none());
            let (clean, full) = with_experts(&answer, &meta, &experts, at, if pretty { " \n" } else { "" });
            let whole = if batch { format!("[{full}, {full}]") } else { full.clone() };
            let cut = cut(Route::Generate, whole.as_bytes()).unwrap().unwrap();
            let rest = std::str::from_utf8(&cut.rest).unwrap();
            let expected: Value = serde_json::from_str(&clean).unwrap();
            let expected = if batch { json!([expected, expected]) } else { expected };
            prop_assert_eq!(serde_json::from_str::<Value>(rest).unwrap(), expected);
            prop_assert!(cut.told);
            if !batch {
                let same = rest.bytes().zip(full.bytes()).take_while(|(a, b)| a == b).count();
                prop_assert!(full.ends_with(&rest[same..]), "{} {}", full, rest);
            }
        }

        #[test]
        fn any_bytes_end_without_panic(bytes in "[{}\\[\\],:\" a]{0,12}(\"meta_info\":)?[{}\\[\\],:\" a]{0,12}(\"routed_experts\":)?[{}\\[\\],:\"1 ]{0,12}") {
            let _ = cut(Route::Generate, bytes.as_bytes());
            let _ = cut(Route::Chat, bytes.replace("meta_info", "sglext").as_bytes());
        }
    }
}
