//! Pins requests to one attention-DP rank, depending on engine and route.
//!
//! [`crate::dialect`] lists where each engine reads a pin.
//!
//! A body is never re-serialised: members are removed or inserted, and all other bytes are unchanged. Pins sent by
//! clients are removed (every spelling, including duplicates) unless the caller trusts them.

use ::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::{Bytes, BytesMut};
use semmoe_tables::RankId;

use crate::dialect::{DATA_PARALLEL_RANK, ROUTED_DP_RANK};
use crate::fields::{Field, Treatment, field_of};
use crate::json::{Member, Members, ScanError};
use crate::{Carrier, Dialect, Engine, Route};

/// The pin header that SGLang and vLLM read.
pub const HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Headers with which a client could choose the rank or worker of a request, or the host that an engine fetches keys
/// and values from; see also [`OVERRIDES`]. `x-dp-rank` and `x-worker-instance-id` are Dynamo's. Underscores match
/// hyphens, since proxies and gateway interfaces convert one into the other.
pub const CLIENT_HEADERS: [&str; 9] = [
    "x-data-parallel-rank",
    "x-dp-rank",
    "x-worker-instance-id",
    DATA_PARALLEL_RANK,
    ROUTED_DP_RANK,
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];
/// Prefix of headers that override a field of SGLang's request (from 0.5.23), such as its rank, bootstrap host or
/// request id.
pub const OVERRIDES: &str = "x-override-";
/// Body fields that are pins. [`crate::fields`] lists all removed fields.
const PIN_FIELDS: [&str; 2] = [ROUTED_DP_RANK, DATA_PARALLEL_RANK];

/// The reason why a request cannot be pinned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The engine does not support pins on this route.
    #[error("{engine} does not support pinning requests on {route} to a rank")]
    NoCarrier {
        /// The engine.
        engine: Engine,
        /// The route.
        route: Route,
    },
    /// The body cannot be split into members.
    #[error(transparent)]
    Body(#[from] ScanError),
    /// A trusted client's pin is not a rank.
    #[error("the pin '{0}' is not a valid rank")]
    NotARank(String),
}

/// Removes client pins from headers; returns the number of distinct names removed.
pub fn strip_headers(headers: &mut HeaderMap) -> usize {
    let mut stripped = 0;
    // Usually there are none, and nothing is allocated.
    while let Some(name) = headers.keys().find(|name| is_client_header(name.as_str())).cloned() {
        headers.remove(name);
        stripped += 1;
    }
    stripped
}

fn is_client_header(name: &str) -> bool {
    let hyphens = |byte: u8| if byte == b'_' { b'-' } else { byte };
    let same = |one: &str, other: &str| one.bytes().map(hyphens).eq(other.bytes().map(hyphens));
    // Names are in lower case. Their first letter rules out most of them.
    matches!(name.as_bytes().first(), Some(b'x' | b'd' | b'r' | b'b'))
        && (CLIENT_HEADERS.iter().any(|client| client.len() == name.len() && same(client, name))
            || name.get(..OVERRIDES.len()).is_some_and(|start| same(start, OVERRIDES)))
}

/// A body known to be one JSON object without client pins, and the position at which to insert a pin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stripped {
    body: Bytes,
    /// Offset just after the opening brace.
    open: usize,
    has_members: bool,
}

impl Stripped {
    /// Removes every client pin. Does not copy if there is none.
    ///
    /// # Errors
    /// `ScanError` if the body is not a JSON object.
    pub fn new(body: &Bytes) -> Result<Self, ScanError> {
        Self::seeing(body, None, |_, _| ())
    }

    /// Removes client pins like [`Stripped::new`]. Calls `see` with every member and its field, if it is a listed one,
    /// so that the body is scanned only once; `known` is the position of a value that was already parsed
    /// ([`Members::knowing`]).
    ///
    /// # Errors
    /// The errors of [`Stripped::new`].
    pub fn seeing(
        body: &Bytes,
        known: Option<std::ops::Range<usize>>,
        mut see: impl FnMut(&Member, Option<&'static Field>),
    ) -> Result<Self, ScanError> {
        let mut plan = Plan::default();
        for member in Members::knowing(body, known) {
            let member = member?;
            let field = field_of(&body[member.key.clone()]);
            see(&member, field);
            plan.add(&member, field.is_some_and(|field| field.treatment == Treatment::Removed));
        }
        // The scan succeeded, so there is a brace.
        let open = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        Ok(plan.carry_out(body, open))
    }

    /// Wraps a body of any kind that is relayed unchanged, for routes without pins.
    pub fn opaque(body: &Bytes) -> Self {
        Self { body: body.clone(), open: 0, has_members: false }
    }

    /// The body's bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.body
    }

    /// Returns the body with `name` as its only `model`, placed first; all other bytes are unchanged. Does not copy if
    /// that is already the case.
    ///
    /// # Errors
    /// If the body is not a JSON object.
    pub fn with_model(&self, name: &str) -> Result<Self, ScanError> {
        const MODEL: &str = "model";
        let (mut plan, mut same) = (Plan::default(), false);
        let value = serde_json::Value::from(name).to_string();
        for member in Members::new(&self.body) {
            let member = member?;
            let named = member.is(&self.body, MODEL);
            same |= named && self.body[member.value.clone()] == *value.as_bytes();
            plan.add(&member, named);
        }
        if same && plan.cut == 1 {
            return Ok(self.clone());
        }
        Ok(plan.carry_out(&self.body, self.open).with_member(MODEL, &value))
    }

    /// Returns the body with one more member at the front, whose `value` is JSON; all other bytes are unchanged. The
    /// caller ensures that the body has no member of that name.
    pub(crate) fn with_member(&self, field: &str, value: &str) -> Self {
        let comma = if self.has_members { "," } else { "" };
        let member = format!("\"{field}\":{value}{comma}");
        let mut out = BytesMut::with_capacity(self.body.len() + member.len());
        out.extend_from_slice(&self.body[..self.open]);
        out.extend_from_slice(member.as_bytes());
        out.extend_from_slice(&self.body[self.open..]);
        Self { body: out.freeze(), open: self.open, has_members: true }
    }
}

/// Pins a request: sets the header, or returns a body with the field inserted. Neither contains client pins. With a URL
/// per rank, nothing is added.
///
/// # Errors
/// [`PinError::NoCarrier`] if the engine reads no pin on this route.
pub fn apply(
    dialect: &Dialect,
    route: Route,
    rank: RankId,
    headers: &mut HeaderMap,
    body: &Stripped,
) -> Result<Bytes, PinError> {
    let carrier = dialect.carrier(route).ok_or(PinError::NoCarrier { engine: dialect.engine(), route })?;
    strip_headers(headers);
    match carrier {
        Carrier::Field(field) => Ok(body.with_member(field, &dialect.wire_rank(rank).to_string()).body),
        Carrier::Header => {
            headers.insert(HEADER, HeaderValue::from(dialect.wire_rank(rank)));
            Ok(body.bytes().clone())
        }
        Carrier::Url => Ok(body.bytes().clone()),
    }
}

/// Returns the pin that a client sent, if the engine's newest version would read its carrier on this route; for
/// configurations that trust clients. The header takes precedence over the body, as in SGLang. Ranks are numbered from
/// 0 here, regardless of the engine's numbering.
///
/// # Errors
/// [`PinError`] if the pin is not a rank, or the body is not a JSON object.
pub fn client_pin(engine: Engine, route: Route, headers: &HeaderMap, body: &[u8]) -> Result<Option<RankId>, PinError> {
    let by_header = match Dialect::of(engine, None).carrier(route) {
        None => return Ok(None),
        Some(carrier) => headers.get(HEADER).filter(|_| carrier == Carrier::Header).map(HeaderValue::as_bytes),
    };
    let sent = match by_header {
        Some(value) => Some(value),
        None if engine.speaks_sglang() => body_pin(body)?,
        None => None,
    };
    sent.map(parse_rank).transpose()
}

/// Returns the last value of the first of [`PIN_FIELDS`] that is present and not null.
fn body_pin(body: &[u8]) -> Result<Option<&[u8]>, ScanError> {
    for field in PIN_FIELDS {
        if let Some(value) = crate::json::top_level(body, field)?.filter(|value| *value != b"null") {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn parse_rank(value: &[u8]) -> Result<RankId, PinError> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .map(RankId::new)
        .ok_or_else(|| PinError::NotARank(String::from_utf8_lossy(&value[..value.len().min(32)]).into_owned()))
}

/// The ranges of a body to keep. Adjacent ranges are merged, including the comma between them.
#[derive(Default)]
struct Plan {
    kept: Vec<std::ops::Range<usize>>,
    cut: usize,
    /// End of the last member's segment, i.e. the position of the closing brace.
    end: Option<usize>,
}

impl Plan {
    fn add(&mut self, member: &Member, cut: bool) {
        let segment = member.segment.clone();
        self.end = Some(segment.end);
        if cut {
            self.cut += 1;
        } else if let Some(run) = self.kept.last_mut().filter(|run| run.end + 1 == segment.start) {
            run.end = segment.end;
        } else {
            self.kept.push(segment);
        }
    }

    /// Returns the body without the removed parts; does not copy if there are none. If no member is left, only the
    /// braces remain.
    fn carry_out(&self, body: &Bytes, open: usize) -> Stripped {
        let has_members = !self.kept.is_empty();
        if self.cut == 0 {
            return Stripped { body: body.clone(), open, has_members };
        }
        let mut out = BytesMut::with_capacity(body.len());
        out.extend_from_slice(&body[..open]);
        for (index, run) in self.kept.iter().enumerate() {
            if index > 0 {
                out.extend_from_slice(b",");
            }
            out.extend_from_slice(&body[run.clone()]);
        }
        out.extend_from_slice(&body[self.end.unwrap_or(open)..]);
        Stripped { body: out.freeze(), open, has_members }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::any_json_object;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn newest(engine: Engine) -> Dialect {
        Dialect::of(engine, None)
    }

    fn spliced(body: &str) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let body = Stripped::new(&body).unwrap();
        let pinned =
            apply(&newest(Engine::Sglang), Route::Generate, RankId::new(3), &mut HeaderMap::new(), &body).unwrap();
        String::from_utf8(pinned.to_vec()).unwrap()
    }

    fn stripped(body: &str) -> String {
        String::from_utf8(Stripped::new(&Bytes::copy_from_slice(body.as_bytes())).unwrap().bytes().to_vec()).unwrap()
    }

    #[test]
    fn splices_and_leaves_all_other_bytes() {
        for (body, expected) in [
            ("{}", r#"{"routed_dp_rank":3}"#),
            (" {\n} ", " {\"routed_dp_rank\":3\n} "),
            (r#"{"text":"a"}"#, r#"{"routed_dp_rank":3,"text":"a"}"#),
            (" { \"text\" :\t\"a\" ,\n\"n\":1.0e0 }\n", " {\"routed_dp_rank\":3, \"text\" :\t\"a\" ,\n\"n\":1.0e0 }\n"),
            (r#"{"a":1,"a":2}"#, r#"{"routed_dp_rank":3,"a":1,"a":2}"#),
            (r#"{"routed_dp_rank":7}"#, r#"{"routed_dp_rank":3}"#),
            (r#"{"text":"a", "routed_dp_rank":7}"#, r#"{"routed_dp_rank":3,"text":"a"}"#),
            (r#"{"routed\u005fdp_rank":7,"text":"a"}"#, r#"{"routed_dp_rank":3,"text":"a"}"#),
            (r#"{"x":{"routed_dp_rank":7}}"#, r#"{"routed_dp_rank":3,"x":{"routed_dp_rank":7}}"#),
        ] {
            assert_eq!(spliced(body), expected, "{body}");
        }
    }

    #[test]
    fn a_model_gets_another_name_and_all_else_stays() {
        for (body, expected) in [
            (r#"{"model":"a","prompt":"x"}"#, r#"{"model":"b","prompt":"x"}"#),
            (r#"{ "prompt" : 1.0e0 , "model" : "a" }"#, r#"{"model":"b", "prompt" : 1.0e0 }"#),
            (r#"{"model":"a","n":1,"mode\u006c":null,"model":"c"}"#, r#"{"model":"b","n":1}"#),
            ("{}", r#"{"model":"b"}"#),
            (r#"{"x":{"model":"a"}}"#, r#"{"model":"b","x":{"model":"a"}}"#),
        ] {
            let body = Stripped::new(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
            assert_eq!(body.with_model("b").unwrap().bytes(), expected);
            // A pin can still be inserted.
            let pinned = body.with_model("b").unwrap().with_member("routed_dp_rank", "3").body;
            assert_eq!(pinned, expected.replacen('{', "{\"routed_dp_rank\":3,", 1));
        }
        let same = Stripped::new(&Bytes::from_static(b"{\"n\":1,\"model\":\"b\"}")).unwrap();
        assert_eq!(same.with_model("b").unwrap().bytes().as_ptr(), same.bytes().as_ptr());
        let quoted = same.with_model("a\"\\").unwrap();
        assert_eq!(quoted.bytes(), r#"{"model":"a\"\\","n":1}"#);
        assert!(Stripped::opaque(&Bytes::from_static(b"no JSON")).with_model("b").is_err());
    }

    #[test]
    fn strips_every_spelling_and_every_copy() {
        for (body, expected) in [
            (r#"{"routed_dp_rank":1}"#, "{}"),
            (r#"{"routed_dp_rank":1,"a":2}"#, r#"{"a":2}"#),
            (r#"{"a":2, "data_parallel_rank" : [1,{"x":","}] }"#, r#"{"a":2}"#),
            (
                r#"{"a":1,"routed_dp_rank":1,"b":2,"routed_dp_rank":1,"data_parallel_rank":1,"c":3}"#,
                r#"{"a":1,"b":2,"c":3}"#,
            ),
            (r#"{"routed_dp_rank":1,"routed_dp_ran\u006B":2}"#, "{}"),
            (r#"{"Routed_dp_rank":1}"#, r#"{"Routed_dp_rank":1}"#),
        ] {
            assert_eq!(stripped(body), expected, "{body}");
        }
        let body = Bytes::from_static(b"{\"a\":1}");
        assert_eq!(Stripped::new(&body).unwrap().bytes().as_ptr(), body.as_ptr(), "an untouched body is not copied");
    }

    #[test]
    fn strips_every_spelling_of_a_header() {
        for name in [
            "x-data-parallel-rank",
            "x_data_parallel_rank",
            "x-data_parallel-rank",
            "data_parallel_rank",
            "routed-dp-rank",
            "disagg_prefill_dp_rank",
            "bootstrap_host",
            "bootstrap-port",
            "bootstrap_room",
            "x-dp-rank",
            "x_worker_instance_id",
            "x-override-routed-dp-rank",
            "x_override_rid",
            "x-override-bootstrap-host",
        ] {
            let mut headers = HeaderMap::new();
            headers.append(name, HeaderValue::from_static("1"));
            headers.append(name, HeaderValue::from_static("2"));
            headers.append("x-request-id", HeaderValue::from_static("a"));
            headers.append("x-overrides", HeaderValue::from_static("a"));
            assert_eq!((strip_headers(&mut headers), headers.len()), (1, 2), "{name}");
        }
    }

    #[test]
    fn strips_what_routers_set_between_prefill_and_decode() {
        for (body, expected) in [
            (r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":1,"a":1,"bootstrap_room":[1,2]}"#, r#"{"a":1}"#),
            (r#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1"},"a":1}"#, r#"{"a":1}"#),
            (r#"{"\u0062ootstrap_host":"10.0.0.1","disagg_prefill_dp_rank":1}"#, "{}"),
        ] {
            assert_eq!(stripped(body), expected, "{body}");
        }
    }

    #[test]
    fn headers_carry_the_pin_on_openai_routes() {
        let body = Stripped::new(&Bytes::from_static(br#"{"model":"m","routed_dp_rank":9}"#)).unwrap();
        for engine in [Engine::Sglang, Engine::Semmoe, Engine::Vllm] {
            for route in [Route::Chat, Route::Completions, Route::Responses] {
                let mut headers = HeaderMap::new();
                headers.append(HEADER, HeaderValue::from_static("8"));
                headers.append(HEADER, HeaderValue::from_static("9"));
                headers.append("x-dp-rank", HeaderValue::from_static("9"));
                headers.append("x-override-routed-dp-rank", HeaderValue::from_static("9"));
                headers.append("x-worker-instance-id", HeaderValue::from_static("9"));
                let sent = apply(&newest(engine), route, RankId::new(2), &mut headers, &body).unwrap();
                assert_eq!(sent, br#"{"model":"m"}"#[..]);
                assert_eq!(headers.len(), 1);
                assert_eq!(headers[HEADER], "2");
            }
        }
    }

    #[test]
    fn older_engines_get_the_older_field_once() {
        let old = Dialect::of(Engine::Sglang, crate::Version::parse("0.5.9"));
        let body = Bytes::from_static(br#"{"data_parallel_rank":7,"a":1,"routed_dp_rank":7}"#);
        let body = Stripped::new(&body).unwrap();
        for route in [Route::Chat, Route::Completions, Route::Generate] {
            let mut headers = HeaderMap::new();
            let sent = apply(&old, route, RankId::new(2), &mut headers, &body).unwrap();
            assert_eq!((&sent[..], headers.len()), (&br#"{"data_parallel_rank":2,"a":1}"#[..], 0));
        }
    }

    #[test]
    fn no_carrier_no_pin() {
        let empty = Stripped::new(&Bytes::from_static(b"{}")).unwrap();
        for (engine, route) in
            [(Engine::Openai, Route::Chat), (Engine::Vllm, Route::Generate), (Engine::Sglang, Route::Embeddings)]
        {
            let error = apply(&newest(engine), route, RankId::new(0), &mut HeaderMap::new(), &empty);
            assert_eq!(error, Err(PinError::NoCarrier { engine, route }));
        }
        assert!(Stripped::new(&Bytes::from_static(b"[1]")).is_err());
    }

    #[test]
    fn trusted_client_pins_are_read() {
        let mut headers = HeaderMap::new();
        let body = br#"{"routed_dp_rank":null,"data_parallel_rank":4}"#;
        assert_eq!(client_pin(Engine::Sglang, Route::Generate, &headers, body), Ok(Some(RankId::new(4))));
        assert_eq!(client_pin(Engine::Vllm, Route::Chat, &headers, body), Ok(None));
        headers.insert(HEADER, HeaderValue::from_static("5"));
        assert_eq!(client_pin(Engine::Sglang, Route::Generate, &headers, body), Ok(Some(RankId::new(4))));
        assert_eq!(client_pin(Engine::Sglang, Route::Chat, &headers, body), Ok(Some(RankId::new(5))));
        headers.insert(HEADER, HeaderValue::from_static("-1"));
        assert!(client_pin(Engine::Vllm, Route::Chat, &headers, body).is_err());
        assert_eq!(client_pin(Engine::Openai, Route::Chat, &headers, body), Ok(None));
    }

    proptest! {
        /// The result parses to the same value plus the pin and minus what clients sent.
        #[test]
        fn splice_agrees_with_serde_json(
            object in any_json_object(), pins in proptest::collection::vec((0usize..2, any::<prop::sample::Index>()), 0..3),
            pretty in any::<bool>(), rank in any::<u16>()
        ) {
            let mut members: Vec<(String, Value)> = object.as_object().unwrap().clone().into_iter().collect();
            for (which, at) in pins {
                let at = at.index(members.len() + 1);
                members.insert(at, (PIN_FIELDS[which].to_owned(), json!([1, {"a": "}"}])));
            }
            let space = if pretty { " \n" } else { "" };
            let text = members
                .iter()
                .map(|(key, value)| format!("{space}{}{space}:{space}{value}{space}", json!(key)))
                .collect::<Vec<_>>()
                .join(",");
            let body = Bytes::from(format!("{space}{{{text}}}{space}"));
            let stripped = Stripped::new(&body).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Value>(stripped.bytes()).unwrap(), object.clone());
            let pinned = apply(&newest(Engine::Semmoe), Route::Generate, RankId::new(rank), &mut HeaderMap::new(), &stripped).unwrap();
            let mut expected = object;
            expected[ROUTED_DP_RANK] = json!(rank);
            prop_assert_eq!(serde_json::from_slice::<Value>(&pinned).unwrap(), expected);
            let keys = Members::new(&pinned).filter(|member| member.as_ref().is_ok_and(|m| m.is(&pinned, ROUTED_DP_RANK))).count();
            prop_assert_eq!(keys, 1);
        }

        #[test]
        fn any_bytes_are_refused_or_rewritten(body in proptest::collection::vec(any::<u8>(), 0..48)) {
            let _ = Stripped::new(&Bytes::from(body));
        }
    }
}
