//! The configuration that the options of `semmoe serve` mean where there is no file.

use std::fmt::Write;
use std::path::Path;

use clap::ValueEnum;
use semmoe_engines::http::{AnswerLimits, BaseUrl, HttpClient};
use serde::Deserialize;

use crate::args::{QuickArgs, ServeEngine};
use crate::error::CliError;

/// What an engine lists on `/v1/models`.
#[derive(Deserialize)]
struct Models {
    data: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    id: String,
}

/// The text of the file that says the same. Without `--model` the first engine is asked for its name.
pub(super) async fn configuration(args: &QuickArgs) -> Result<String, CliError> {
    let Some(engine) = args.engine else { return Err(CliError::input("serve needs --config or --engine")) };
    let tokenizer = args.tokenizer.as_deref().map(|path| match path.is_dir() {
        true => path.join("tokenizer.json"),
        false => path.to_owned(),
    });
    if let Some(missing) = tokenizer.as_deref().filter(|path| !path.is_file()) {
        return Err(CliError::input(format!(
            "there is no {}; --tokenizer takes the model's folder or its tokenizer.json",
            missing.display()
        )));
    }
    let name = match &args.model {
        Some(name) => name.clone(),
        None => only_model(&args.url).await?,
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
        let engine = engine_name(engine);
        key(&mut text, "\n[[models.backends]]\nname", &format!("{engine}-{}", index + 1))?;
        key(&mut text, "engine", &engine)?;
        key(&mut text, "url", url)?;
        if let Some(tables) = &args.tables {
            key(&mut text, "tables", utf8(tables)?)?;
        }
    }
    Ok(text)
}

fn engine_name(engine: ServeEngine) -> String {
    engine.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A JSON string is a TOML string, but for one control character that names do not have.
fn key(text: &mut String, key: &str, value: &str) -> Result<(), CliError> {
    let value = serde_json::to_string(value).map_err(CliError::failed)?;
    writeln!(text, "{key} = {value}").map_err(CliError::failed)
}

fn utf8(path: &Path) -> Result<&str, CliError> {
    path.to_str().ok_or_else(|| CliError::input(format!("the path {} is not UTF-8", path.display())))
}

async fn only_model(urls: &[String]) -> Result<String, CliError> {
    let Some(url) = urls.first() else { return Err(CliError::input("--engine needs --url")) };
    let url: BaseUrl = url.parse().map_err(CliError::input)?;
    let asked = HttpClient::default().get_json::<Models>(&url, "/v1/models", &AnswerLimits::default()).await;
    let models = asked.map_err(|error| {
        CliError::failed(format!("the engine was asked for its model: {error}; start it first, or give --model NAME"))
    })?;
    match <[Listed; 1]>::try_from(models.data) {
        Ok([model]) => Ok(model.id),
        Err(models) => Err(CliError::input(format!("{url} lists {} models; give --model NAME", models.len()))),
    }
}
