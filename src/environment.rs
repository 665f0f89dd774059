//! Environment variables that override keys of the gateway's configuration, for use in containers.
//!
//! `SEMMOE_SERVER__LISTEN=0.0.0.0:8080` sets `listen` in `[server]`: two underscores separate sections and key, and a
//! number is a list index (`SEMMOE_MODELS__0__POLICY`). An unknown variable with this prefix is an error, so typos are
//! never ignored.

use std::ffi::OsString;

use semmoe_gateway::Override;

use crate::error::CliError;

const PREFIX: &str = "SEMMOE_";
/// Variables, or variable prefixes, that other parts of the project read.
const OTHERS: [&str; 11] =
    ["ASSETS", "ADMIN_TOKEN", "RANK_SECRET", "COMMIT", "SGLANG", "KERNEL", "NVCC", "NVRTC", "SHIM", "PYTHON", "TEST"];

/// Collects the overrides among these variables, sorted by name.
///
/// # Errors
/// If a variable with the prefix matches no key, or its value is not UTF-8.
pub(crate) fn overrides(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Vec<Override>, CliError> {
    let mut found = Vec::new();
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let key = &name[PREFIX.len()..];
        let origin = format!("the environment variable {name}");
        if key.contains("__") {
            let value = value.into_string().map_err(|_| CliError::input(format!("{origin} is not UTF-8")))?;
            let path = key.to_ascii_lowercase().split("__").map(str::to_owned).collect();
            found.push(Override { origin, path, value });
        } else if !is_of_others(key) && !is_of_kubernetes(key) {
            return Err(CliError::input(format!(
                "{origin} is unknown; for example, `listen` in [server] is SEMMOE_SERVER__LISTEN, with two underscores"
            )));
        }
    }
    found.sort_by(|one, other| one.origin.cmp(&other.origin));
    Ok(found)
}

fn is_of_others(key: &str) -> bool {
    OTHERS.iter().any(|other| key == *other || key.strip_prefix(other).is_some_and(|rest| rest.starts_with('_')))
}

/// Kubernetes sets service addresses in every pod, such as `SEMMOE_PORT` or `SEMMOE_SERVICE_HOST` for a service called
/// semmoe.
fn is_of_kubernetes(key: &str) -> bool {
    let is_port = |part: &str| part == "PORT" || part.starts_with("PORT_") || part.ends_with("_PORT");
    is_port(key) || key.contains("_PORT_") || key.contains("SERVICE_HOST") || key.contains("SERVICE_PORT")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Vec<Override>, CliError> {
        overrides(variables.iter().map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn keys_are_found_and_others_left_alone() {
        let found = read(&[
            ("SEMMOE_SERVER__LISTEN", "0.0.0.0:80"),
            ("SEMMOE_MODELS__0__POLICY", "round_robin"),
            ("SEMMOE_ASSETS", "/x"),
            ("SEMMOE_SGLANG_TABLES", "x"),
            ("SEMMOE_PORT", "tcp://10.0.0.1:8080"),
            ("SEMMOE_PORT_8080_TCP_ADDR", "10.0.0.1"),
            ("SEMMOE_SERVICE_HOST", "10.0.0.1"),
            ("SEMMOE_ADMIN_SERVICE_PORT_HTTP", "8081"),
            ("PATH", "/bin"),
        ])
        .expect("valid");
        let paths: Vec<String> = found.iter().map(|it| it.path.join(".")).collect();
        assert_eq!(paths, ["models.0.policy", "server.listen"]);
    }

    #[test]
    fn a_misspelt_variable_is_refused() {
        let said = read(&[("SEMMOE_SERVER_LISTEN", "x")]).expect_err("one underscore").to_string();
        assert!(said.contains("SEMMOE_SERVER_LISTEN is unknown") && said.contains("SEMMOE_SERVER__LISTEN"), "{said}");
    }
}
