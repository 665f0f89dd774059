//! Displays a configuration as written in its file, with secrets redacted.

use serde_json::Value;

/// Shown in place of a secret.
const HIDDEN: &str = "(set)";

/// Converts the document to JSON with secrets redacted; `Null` for values that JSON cannot represent.
pub(super) fn document(document: toml::Table) -> Value {
    let mut document = serde_json::to_value(document).unwrap_or(Value::Null);
    hide(&mut document, false);
    document
}

fn hide(value: &mut Value, secret: bool) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                hide(value, secret || is_secret(key));
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| hide(value, secret)),
        Value::Null => {}
        Value::String(_) | Value::Number(_) | Value::Bool(_) => {
            if secret {
                *value = Value::String(HIDDEN.to_owned());
            }
        }
    }
}

/// Whether a key's value is secret. Digests of secrets count as secrets, because short secrets can be guessed; paths of
/// secret files do not.
fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    let last = key.rsplit('_').next().unwrap_or(&key);
    ["sha256", "hash", "key", "token", "secret", "password", "headers"].contains(&last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_and_nothing_else() {
        let text = "[server]\nlisten = \"a\"\nadmin_token_sha256 = \"s1\"\n[[auth.keys]]\nname = \"n\"\nsha256 = \"s2\"\n\
                    [otlp]\nheaders = { authorization = \"s3\" }\n[tls]\nkey_file = \"k.pem\"\n\
                    [[models]]\ntokenizer = \"t\"\napi_key = \"s4\"\naliases = [\"x\"]\n[sampling]\ntrace_tokens = 5\n";
        let shown = document(toml::from_str(text).expect("TOML")).to_string();
        for secret in ["s1", "s2", "s3", "s4"] {
            assert!(!shown.contains(&format!("\"{secret}\"")), "{shown}");
        }
        for plain in ["\"a\"", "\"n\"", "\"k.pem\"", "\"t\"", "\"x\"", "5"] {
            assert!(shown.contains(plain), "{plain} in {shown}");
        }
    }
}
