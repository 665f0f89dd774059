use super::*;
use proptest::prelude::*;

fn keys_and_values(body: &str) -> Result<Vec<(&str, &str)>, ScanError> {
    Members::new(body.as_bytes()).map(|member| member.map(|m| (&body[m.key], &body[m.value]))).collect()
}

#[test]
fn members_of_good_objects() {
    for (body, members) in [
        ("{}", vec![]),
        (" { } \n", vec![]),
        (r#"{"a":1}"#, vec![("a", "1")]),
        (r#" { "a" : [1,{"b":"]}"}] , "" : "x\"y\\" }"#, vec![("a", r#"[1,{"b":"]}"}]"#), ("", r#""x\"y\\""#)]),
        (r#"{"a":null,"a":-1.5e+3,"b":NaN}"#, vec![("a", "null"), ("a", "-1.5e+3"), ("b", "NaN")]),
    ] {
        assert_eq!(keys_and_values(body), Ok(members), "{body}");
    }
}

#[test]
fn bad_bodies() {
    for body in [
        "",
        " ",
        "[]",
        "1",
        "\"a\"",
        "{",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1",
        "{\"a\":1,}",
        "{,}",
        "{\"a\":1}}",
        "{\"a\":1} x",
        "{a:1}",
        "{\"a\":[}",
        "{\"a\":[1}]}",
        "{\"a\":\"x}",
        "{\"a\\",
        "{\"a\":\"\\",
        "\u{feff}{}",
        "{\"a\":1 \"b\":2}",
        "{\"a\":1 2}",
        "{\"a\":'x'}",
    ] {
        assert!(keys_and_values(body).is_err(), "{body}");
    }
    // UTF-16, which Python's parser accepts.
    let wide: Vec<u8> = "{\"routed_dp_rank\":1}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(Members::new(&wide).any(|member| member.is_err()));
}

#[test]
fn depth_is_limited() {
    let nest = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    assert!(keys_and_values(&nest(MAX_DEPTH)).is_ok());
    assert!(matches!(keys_and_values(&nest(MAX_DEPTH + 1)), Err(ScanError::TooDeep { .. })));
    assert!(matches!(
        keys_and_values(&format!("{{\"a\":{}", "{\"a\":".repeat(100_000))),
        Err(ScanError::TooDeep { .. })
    ));
}

#[test]
fn keys_compare_with_escapes_resolved() {
    for (key, same) in [
        ("routed_dp_rank", true),
        (r"routed\u005fdp_rank", true),
        (r"routed\u005Fdp_ran\u006b", true),
        (r"routed\u00dfdp_rank", false),
        (r"routed\u+05fdp_rank", false),
        (r"routed_dp_rank\u0000", false),
        (r"routed_dp_ran\", false),
        (r"routed_dp_ran\u006", false),
        ("routed_dp_ran", false),
        ("Routed_dp_rank", false),
    ] {
        assert_eq!(key_is(key.as_bytes(), b"routed_dp_rank"), same, "{key}");
    }
    assert!(key_is(br"\/\n", b"/\n"));
    assert_eq!(top_level(br#"{"m\u006fdel":"a","model":"b"}"#, "model"), Ok(Some(&br#""b""#[..])));
}

proptest! {
    /// The scanner accepts every object that serde_json accepts, and splits it into the same members.
    #[test]
    fn agrees_with_serde_json(body in any_json_object(), indent in any::<bool>()) {
        let text = if indent { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) }.unwrap();
        let members: Vec<Member> = Members::new(text.as_bytes()).collect::<Result<_, _>>().unwrap();
        let object = body.as_object().unwrap();
        prop_assert_eq!(members.len(), object.len());
        for member in members {
            let key: String = serde_json::from_str(&format!("\"{}\"", &text[member.key])).unwrap();
            let value: serde_json::Value = serde_json::from_str(&text[member.value]).unwrap();
            prop_assert_eq!(&object[&key], &value);
        }
    }

    /// Skipping a value that was parsed before changes nothing.
    #[test]
    fn known_values_are_passed_over(body in any_json_object(), at in any::<prop::sample::Index>()) {
        let text = body.to_string();
        let members: Vec<Member> = Members::new(text.as_bytes()).collect::<Result<_, _>>().unwrap();
        if !members.is_empty() {
            let known = members[at.index(members.len())].value.clone();
            prop_assert_eq!(Members::knowing(text.as_bytes(), Some(known)).collect::<Result<Vec<_>, _>>().unwrap(), members);
        }
    }

    #[test]
    fn any_bytes_end_without_panic(body in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = Members::new(&body).count();
        let _ = Members::knowing(&body, Some(1..70)).count();
    }

    #[test]
    fn damaged_objects_end_without_panic(body in any_json_object(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = serde_json::to_vec(&body).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let scanned = Members::new(&bytes).collect::<Result<Vec<_>, _>>();
        if serde_json::from_slice::<serde_json::Value>(&bytes).is_ok_and(|value| value.is_object()) {
            prop_assert!(scanned.is_ok());
        }
    }
}

/// Objects with nesting, odd keys and strings.
pub(crate) fn any_json_object() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        "[\"\\\\{}\\[\\],: a]{0,8}".prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[\"\\\\{}a]{0,4}", inner, 0..4)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    });
    proptest::collection::btree_map("[\"\\\\{},:a-z_]{0,6}", value, 0..6)
        .prop_map(|m| Value::Object(m.into_iter().collect()))
}
