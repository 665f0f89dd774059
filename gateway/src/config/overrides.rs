//! Overrides of individual keys in the configuration file, so that a container can change its configuration without
//! rewriting the file.

use std::fmt;

use semmoe_engines::SharedError;
use toml::{Table, Value};

use super::error::in_one_line;
use super::{ConfigError, RawConfig};

/// One value that overrides the file's.
#[derive(Clone, PartialEq, Eq)]
pub struct Override {
    /// Origin of the value, as shown in errors.
    pub origin: String,
    /// The key, one part per section; a number is an index into a list.
    pub path: Vec<String>,
    /// A TOML value; anything that is not valid TOML is used as a string.
    pub value: String,
}

// Hides the value, which may be a digest of a secret.
impl fmt::Debug for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Override").field("origin", &self.origin).field("path", &self.path).finish_non_exhaustive()
    }
}

impl Override {
    /// Returns the value as TOML, if it parses, and as plain text: `12e4` may be a number or a name.
    fn readings(&self) -> Vec<Value> {
        let typed = toml::from_str::<Table>(&format!("value = {}", self.value)).ok();
        let typed = typed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
        typed.into_iter().chain([Value::String(self.value.clone())]).collect()
    }
}

/// Applies every override. Like `document`, the result deserializes.
pub(super) fn apply(mut document: Table, overrides: &[Override]) -> Result<Table, ConfigError> {
    for it in overrides {
        let mut refused = None;
        let taken = it.readings().into_iter().find_map(|value| {
            let mut next = document.clone();
            let cause = match place(&mut next, &it.path, value) {
                Ok(()) => match next.clone().try_into::<RawConfig>() {
                    Ok(_) => return Some(next),
                    Err(error) => in_one_line(&error).into(),
                },
                Err(cause) => cause,
            };
            refused.get_or_insert(cause);
            None
        });
        document = taken.ok_or_else(|| {
            let source = refused.unwrap_or_else(|| "".into());
            ConfigError::Override { origin: it.origin.clone(), key: it.path.join("."), source }
        })?;
    }
    Ok(document)
}

fn place(table: &mut Table, path: &[String], value: Value) -> Result<(), SharedError> {
    let (key, rest) = path.split_first().ok_or("names a section, expected a key in it")?;
    if rest.is_empty() {
        table.insert(key.clone(), value);
        return Ok(());
    }
    match table.entry(key.clone()).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(section) => place(section, rest, value),
        Value::Array(list) => {
            let (at, rest) = rest.split_first().ok_or("names a list, expected an index into it")?;
            let length = list.len();
            let entry = at.parse().ok().and_then(|at: usize| list.get_mut(at)).and_then(Value::as_table_mut);
            let entry = entry.ok_or_else(|| format!("`{key}` has {length} entries, so there is no `{key}.{at}`"))?;
            place(entry, rest, value)
        }
        _ => Err(format!("`{key}` is a key, not a section").into()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    const FILE: &str = "[server]\nlisten = \"127.0.0.1:1\"\n[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n\
                        [[models.backends]]\nname = \"a\"\nengine = \"openai\"\nurl = \"http://127.0.0.1:1\"\n";

    fn with(overrides: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let overrides = overrides.iter().map(|(path, value)| Override {
            origin: "the variable X".to_owned(),
            path: path.split('.').map(str::to_owned).collect(),
            value: (*value).to_owned(),
        });
        Config::from_toml_with(FILE, Path::new(""), overrides.collect())
    }

    #[test]
    fn values_replace_those_of_the_file_and_fill_gaps() {
        let config = with(&[
            ("server.listen", "127.0.0.1:9"),
            ("limits.streams", "7"),
            ("models.0.name", "12e4"),
            ("models.0.backends.0.url", "http://127.0.0.1:2"),
            ("log.format", "json"),
            ("retry.statuses", "[503]"),
        ])
        .expect("valid");
        assert_eq!(config.server.listen.port(), 9);
        assert_eq!(config.limits.streams, 7);
        assert_eq!(config.models[0].name, "12e4");
        assert_eq!(config.models[0].backends[0].urls[0].to_string(), "http://127.0.0.1:2");
        // The document shows the effective value.
        assert_eq!(config.source.document["server"]["listen"], "127.0.0.1:9");
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_origin() {
        for (path, value, named) in [
            ("server.listn", "x", "listn"),
            ("servers.listen", "x", "servers"),
            ("limits.streams", "many", "expected u32"),
            ("models.1.name", "x", "no `models.1`"),
            ("models.0", "x", "names a section"),
            ("models", "x", "expected a sequence"),
            ("server.listen.port", "1", "not a section"),
        ] {
            let said = with(&[(path, value)]).expect_err(path).to_string();
            assert!(said.contains("the variable X") && said.contains(named), "{path}: {said}");
        }
        // Checked like a value of the file.
        assert!(with(&[("server.listen", "x")]).expect_err("no address").to_string().contains("server.listen"));
    }
}
