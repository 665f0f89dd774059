//! The part of JSON Schema needed to check answers against the admin plane's document. Unknown keywords fail the check.

use serde_json::{Map, Value};

/// Annotations of a schema, not constraints on a value.
const REMARKS: [&str; 4] = ["description", "title", "format", "default"];

/// Panics, naming the place, if `value` does not match `schema`, or has a field that the schema does not name.
pub(crate) fn check(document: &Value, schema: &Value, value: &Value, at: &str) {
    if let Err(why) = fits(document, schema, value, at) {
        panic!("{why}");
    }
}

fn fits(document: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let Value::Object(rules) = schema else {
        return if schema == &Value::Bool(true) { Ok(()) } else { Err(format!("{at}: schema {schema}")) };
    };
    for (rule, wanted) in rules {
        let good = match rule.as_str() {
            "$ref" => {
                let place = wanted.as_str().unwrap().strip_prefix('#').unwrap();
                let referred = document.pointer(place).ok_or_else(|| format!("{at}: no {wanted}"))?;
                fits(document, referred, value, at)?;
                true
            }
            "type" => match wanted {
                Value::Array(types) => types.iter().any(|wanted| is(wanted, value)),
                wanted => is(wanted, value),
            },
            "anyOf" | "oneOf" => {
                let schemas = wanted.as_array().unwrap();
                schemas.iter().any(|schema| fits(document, schema, value, at).is_ok())
            }
            "enum" => wanted.as_array().unwrap().contains(value),
            "const" => wanted == value,
            "minimum" => value.as_f64().is_none_or(|value| value >= wanted.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|value| value <= wanted.as_f64().unwrap()),
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    fits(document, wanted, item, &format!("{at}[{index}]"))?;
                }
                true
            }
            "required" => {
                let names = wanted.as_array().unwrap().iter().map(|name| name.as_str().unwrap());
                value.as_object().is_none_or(|fields| names.into_iter().all(|name| fields.contains_key(name)))
            }
            "properties" => fields(document, rules, value, at).map(|()| true)?,
            "additionalProperties" => true,
            remark if REMARKS.contains(&remark) => true,
            unknown => return Err(format!("{at}: this test does not know `{unknown}`")),
        };
        if !good {
            return Err(format!("{at}: {value} is not {rule} {wanted}"));
        }
    }
    Ok(())
}

/// Every field is named, and matches its schema.
fn fields(document: &Value, rules: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
    let named = rules["properties"].as_object().unwrap();
    for (name, value) in value.as_object().into_iter().flatten() {
        let schema = named.get(name).ok_or_else(|| format!("{at}.{name} is in the answer and not in the document"))?;
        fits(document, schema, value, &format!("{at}.{name}"))?;
    }
    Ok(())
}

fn is(wanted: &Value, value: &Value) -> bool {
    match wanted.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("type {other}"),
    }
}
