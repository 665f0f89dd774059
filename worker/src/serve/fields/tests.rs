use serde_json::json;

use super::table::ROWS;
use super::*;

/// The places as worker/FIELDS.md names them.
const PLACES: [(u8, &str); 6] = [
    (CHAT, "chat"),
    (COMPLETIONS, "completions"),
    (GENERATE, "generate"),
    (PARAMS, "sampling_params"),
    (TOKENIZE, "tokenize"),
    (STREAM, "stream_options"),
];

/// The table as in worker/FIELDS.md, one line per accepted value and place.
fn document() -> String {
    let taken = |usage: Use| match usage {
        Use::Honoured => "as asked".to_owned(),
        Use::NoEffect => "any, without effect".to_owned(),
        Use::Unless(harmless) => format!("`{harmless}`"),
    };
    let places = |places: u8| {
        let named = PLACES.iter().filter(|(place, _)| place & places != 0).map(|(_, name)| *name);
        named.collect::<Vec<_>>().join(", ")
    };
    let mut lines: Vec<(String, String, Vec<String>)> = Vec::new();
    for row in ROWS {
        let (taken, places) = (taken(row.usage), places(row.places));
        let names = row.names.iter().map(|name| format!("`{name}`"));
        match lines.iter_mut().find(|line| (&line.0, &line.1) == (&taken, &places)) {
            Some((.., all)) => all.extend(names),
            None => lines.push((taken, places, names.collect())),
        }
    }
    let order: Vec<String> = lines.iter().map(|line| line.0.clone()).collect();
    lines.sort_by_key(|line| order.iter().position(|taken| *taken == line.0));
    let lines = lines.iter().map(|(taken, places, names)| format!("| {taken} | {places} | {} |\n", names.join(", ")));
    "| taken | in requests of | fields |\n| --- | --- | --- |\n".to_owned() + &lines.collect::<String>()
}

#[test]
fn the_table_stands_in_the_document() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/FIELDS.md");
    let text = std::fs::read_to_string(path).expect("worker/FIELDS.md");
    assert!(text.contains(&document()), "worker/FIELDS.md should have:\n\n{}", document());
}

#[test]
fn no_field_is_in_the_table_twice() {
    let all: Vec<_> = ROWS.iter().flat_map(|row| row.names.iter().map(|name| (*name, row.places))).collect();
    for (index, (name, places)) in all.iter().enumerate() {
        let again = all[..index].iter().find(|(other, others)| other == name && others & places != 0);
        assert!(again.is_none(), "{name}");
    }
}

#[test]
fn content_that_is_no_text_is_refused_by_name() {
    let reported = |content: Value| {
        let body = json!({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": content}]});
        check_contents(&body).err().map(|error| error.json()["error"]["message"].as_str().unwrap_or("").to_owned())
    };
    for content in [json!("a"), json!(null), json!([]), json!([{"type": "text", "text": "a"}, "b"])] {
        assert_eq!(reported(content), None);
    }
    let long = "x".repeat(100);
    for (part, found) in [
        (json!({"type": "image_url", "image_url": {"url": "data:,"}}), "is image_url,"),
        (json!({"type": "input_audio", "input_audio": {}}), "is input_audio,"),
        (json!({"type": "refusal", "refusal": "no"}), "is refusal,"),
        (json!({"type": "image_url", "text": "a picture"}), "is image_url,"),
        (json!({"type": "text"}), "is text without a text,"),
        (json!({"type": long}), "xxx...,"),
        (json!({"text": "a"}), "is without a type,"),
        (json!(7), "is without a type,"),
    ] {
        let message = reported(json!([{"type": "text", "text": "a"}, part])).unwrap_or_default();
        assert!(message.starts_with("messages[1].content[1] is ") && message.contains(found), "{message}");
    }
}
