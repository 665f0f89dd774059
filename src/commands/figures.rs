//! Formats all figures in a result as lines of text, under the names used in its JSON.

use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;

use crate::error::CliError;

/// One line for each non-null figure: `policies.affinity.request_lar  0.4060`.
pub(crate) fn lines(result: &impl Serialize) -> Result<String, CliError> {
    let mut text = String::new();
    add("", &serde_json::to_value(result).map_err(CliError::failed)?, &mut text);
    Ok(text)
}

fn add(name: &str, value: &Value, text: &mut String) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                add(&name, value, text);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (at, item) in items.iter().enumerate() {
                add(&format!("{name}[{at}]"), item, text);
            }
        }
        // Writing to a String cannot fail.
        figure => {
            let _ = writeln!(text, "{name:<44} {}", shown(figure));
        }
    }
}

fn shown(figure: &Value) -> String {
    match figure {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.4}", number.as_f64().unwrap_or(f64::NAN)),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_line_with_its_path() {
        let result = serde_json::json!({
            "lar": 0.25, "tokens": 7, "none": null, "layers": [0.5, null], "by": {"a": {"rate": 1.0}}, "bins": [{"n": 1}],
        });
        let text = lines(&result).expect("text");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let expected: [&[&str]; 5] = [
            &["lar", "0.2500"],
            &["tokens", "7"],
            &["layers", "0.5000", "-"],
            &["by.a.rate", "1.0000"],
            &["bins[0].n", "1"],
        ];
        assert_eq!(lines, expected);
    }
}
