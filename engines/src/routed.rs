//! Routed experts of requests in flight: who is asked for them and how, and how they are cut out of an answer that a client
//! did not ask them for.
//!
//! | engine | `/generate` | chat, completions |
//! |---|---|---|
//! | sglang from 0.5.8, semmoe | field `return_routed_experts`, answered in `meta_info.routed_experts` | not asked |
//! | all others | not asked | not asked |
//!
//! The OpenAI routes answer without the generated ids unless these are asked for too, and in streams in an event of their
//! own, so that they are left alone. An answer is never written anew: the member is cut out, all other bytes stay.

use bytes::{Bytes, BytesMut};

use std::ops::Range;

use crate::json::{Elements, Member, Members, ScanError, top_level};
use crate::pin::Stripped;
use crate::{Engine, Route, Version};

/// The body field that asks.
pub const FIELD: &str = "return_routed_experts";
/// The body field that says from which token on.
pub const START_FIELD: &str = "routed_experts_start_len";

const SINCE: Version = Version::new(0, 5, 8);
/// Where an object of the answer holds them.
const PATH: [&str; 2] = ["meta_info", "routed_experts"];

/// Whether an engine of this version (`None`: it does not tell) can be asked on this route. It may still refuse.
pub fn can_ask(engine: Engine, version: Option<Version>, route: Route) -> bool {
    let knows = match engine {
        Engine::Semmoe => true,
        Engine::Sglang => version.is_none_or(|version| version >= SINCE),
        Engine::Vllm | Engine::Openai => false,
    };
    knows && route == Route::Generate
}

/// The body with the question in it; `None` where the client's own words about routed experts, whatever they say, or
/// several prompts are in it already.
pub fn ask(body: &Stripped) -> Option<Stripped> {
    let bytes = body.bytes();
    let is_absent = |field| matches!(top_level(bytes, field), Ok(None));
    let first = |field| top_level(bytes, field).ok().flatten().and_then(|value| value.first().copied());
    let one_text = first("text").is_none_or(|byte| byte != b'[');
    let one_list = match top_level(bytes, "input_ids") {
        Ok(Some(ids)) => !ids.iter().skip(1).any(|byte| *byte == b'['),
        _ => true,
    };
    (is_absent(FIELD) && is_absent(START_FIELD) && one_text && one_list).then(|| body.with_member(FIELD, "true"))
}

/// An answer without its routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Everything else, byte for byte.
    pub rest: Bytes,
    /// Whether what was cut out held anything but `null`.
    pub told: bool,
}

/// Cuts the routed experts out of one JSON answer of `/generate`, an object or for several prompts an array of them;
/// `None` where it has none.
///
/// # Errors
/// When it is neither.
pub fn cut(answer: &[u8]) -> Result<Option<Cut>, ScanError> {
    let mut cuts = Cuts::default();
    if answer.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        for element in Elements::new(answer) {
            cuts.object(answer, element?, &PATH)?;
        }
    } else {
        cuts.object(answer, 0..answer.len(), &PATH)?;
    }
    Ok((!cuts.ranges.is_empty()).then(|| cuts.carry_out(answer)))
}

/// Stretches to leave out, ascending.
#[derive(Default)]
struct Cuts {
    ranges: Vec<Range<usize>>,
    told: bool,
}

impl Cuts {
    /// Adds what is at `path` of the object in `within`, members of the same name included.
    fn object(&mut self, answer: &[u8], within: Range<usize>, path: &[&str]) -> Result<(), ScanError> {
        let [name, deeper @ ..] = path else { return Ok(()) };
        let object = &answer[within.clone()];
        let mut kept_before = false;
        let mut since_kept: Option<Range<usize>> = None;
        for member in Members::new(object) {
            let member = shifted(member?, within.start);
            if !member.is(answer, name) {
                self.close(since_kept.take(), kept_before, true);
                kept_before = true;
            } else if deeper.is_empty() {
                self.told |= &answer[member.value.clone()] != b"null";
                let start = since_kept.map_or(member.segment.start, |cut| cut.start);
                since_kept = Some(start..member.segment.end);
            } else {
                kept_before = true;
                if answer[member.value.start] == b'{' {
                    self.object(answer, member.value, deeper)?;
                }
            }
        }
        self.close(since_kept, kept_before, false);
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
            (Engine::Sglang, Some("0.5.23"), Route::Chat, false),
            (Engine::Vllm, Some("0.33.0"), Route::Generate, false),
            (Engine::Openai, None, Route::Generate, false),
        ] {
            assert_eq!(can_ask(engine, version.and_then(Version::parse), route), can, "{engine} {version:?} {route}");
        }
    }

    #[test]
    fn who_asked_already_is_not_asked_for() {
        let asked = |body: &'static str| {
            let stripped = Stripped::new(&Bytes::from_static(body.as_bytes())).unwrap();
            ask(&stripped).map(|body| String::from_utf8(body.bytes().to_vec()).unwrap())
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
            assert_eq!(asked(body).as_deref(), expected, "{body}");
        }
    }

    fn cut_text(answer: &str) -> Option<(String, bool)> {
        let cut = cut(answer.as_bytes()).unwrap()?;
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
            assert!(cut(answer.as_bytes()).is_err(), "{answer}");
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
            let cut = cut(whole.as_bytes()).unwrap().unwrap();
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
            let _ = cut(bytes.as_bytes());
        }
    }
}
