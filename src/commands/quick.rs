//! Builds the configuration equivalent to the options of `semmoe serve` without a file.

use std::fmt::Write;
use std::path::Path;

use semmoe_text::tokenizer_file;

use super::server_url;
use crate::args::QuickArgs;
use crate::error::CliError;

/// Returns the text of the equivalent file. Without `--model` it uses the model name that the first engine lists.
pub(super) async fn configuration(args: &QuickArgs) -> Result<String, CliError> {
    let Some(engine) = args.engine else { return Err(CliError::input("serve needs --config or --engine")) };
    let tokenizer = args.tokenizer.as_deref().map(tokenizer_file);
    if let Some(missing) = tokenizer.as_deref().filter(|path| !path.is_file()) {
        return Err(CliError::input(format!(
            "{} does not exist; --tokenizer takes the model's folder or its tokenizer.json",
            missing.display()
        )));
    }
    let name = match &args.model {
        Some(name) => name.clone(),
        None => listed_model(&args.url).await?,
    };
    let policy = match (&args.policy, &args.tables, &tokenizer) {
        (Some(policy), ..) => policy,
        (_, Some(_), _) => "affinity",
        (_, None, Some(_)) => "prefix",
        (_, None, None) => "least_load",
    };
    let mut text = String::new();
    if let Some(listen) = &args.listen {
        key(&mut text, "[server]\nlisten", listen)?;
        text.push('\n');
    }
    key(&mut text, "[[models]]\nname", &name)?;
    if let Some(tokenizer) = &tokenizer {
        key(&mut text, "tokenizer", utf8(tokenizer)?)?;
    }
    key(&mut text, "policy", policy)?;
    for (index, url) in args.url.iter().enumerate() {
        key(&mut text, "\n[[models.backends]]\nname", &format!("{engine}-{}", index + 1))?;
        key(&mut text, "engine", engine.name())?;
        key(&mut text, "url", url)?;
        if let Some(tables) = &args.tables {
            key(&mut text, "tables", utf8(tables)?)?;
        }
    }
    Ok(text)
}

/// Writes a string key. JSON strings are valid TOML, except for one control character that names do not contain.
fn key(text: &mut String, key: &str, value: &str) -> Result<(), CliError> {
    let value = serde_json::to_string(value).map_err(CliError::failed)?;
    writeln!(text, "{key} = {value}").map_err(CliError::failed)
}

fn utf8(path: &Path) -> Result<&str, CliError> {
    path.to_str().ok_or_else(|| CliError::input(format!("the path {} is not UTF-8", path.display())))
}

async fn listed_model(urls: &[String]) -> Result<String, CliError> {
    let Some(url) = urls.first() else { return Err(CliError::input("--engine needs --url")) };
    let listed = semmoe_load::only_model(&server_url(url)?, &Default::default(), None).await;
    listed.map_err(|error| match error.is_input() {
        true => CliError::input(format!("{error}; pass --model NAME")),
        false => CliError::failed(format!("{error}; start the engine first, or pass --model NAME")),
    })
}
