//! Token ids in the spellings that engines accept.

use semmoe_engines::json::ids::{Form, outside};

const SIZE: u32 = 1000;

/// Arbitrary bytes terminate. For a list of ids, three bytes per id and spelling, the verdict on ids outside the
/// vocabulary does not depend on the spelling.
pub fn ids(data: &[u8]) {
    for form in [Form::Ids, Form::IdsOrText] {
        let _ = outside(data, SIZE, form);
    }
    let chosen: Vec<(i16, u8)> = data.chunks_exact(3).map(|id| (i16::from_le_bytes([id[0], id[1]]), id[2])).collect();
    let is_bad = chosen.iter().any(|(id, _)| !(0..SIZE as i16).contains(id));
    let spelt: Vec<String> = chosen.iter().map(|(id, how)| spell(*id, *how)).collect();
    let list = format!("[{}]", spelt.join(", "));
    // With a number in it, it is not a list of texts.
    let mixed = format!("[0,{}]", spelt.join(","));
    for (list, form) in [(&list, Form::Ids), (&format!("[{list}]"), Form::IdsOrText), (&mixed, Form::IdsOrText)] {
        let list = if chosen.is_empty() { "[]" } else { list.as_str() };
        assert_eq!(outside(list.as_bytes(), SIZE, form).is_some(), is_bad, "{list}");
    }
}

fn spell(id: i16, how: u8) -> String {
    let escaped = |text: String| text.bytes().map(|byte| format!("\\u{byte:04x}")).collect::<String>();
    match how % 8 {
        0 => id.to_string(),
        1 => format!("{id}.0"),
        2 => format!("{id}e0"),
        3 => format!("\"{id}\""),
        4 => format!("\" \\t{id:05}\\u00a0\""),
        5 => format!("\"{}\"", escaped(id.to_string())),
        6 => format!("\"{id}.00\""),
        _ => {
            let (sign, digits) = (if id < 0 { "-" } else { "" }, id.unsigned_abs());
            format!("\"{sign}{}_{:02}\"", digits / 100, digits % 100)
        }
    }
}
