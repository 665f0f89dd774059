//! Renders chats for tests/templates: reads requests as JSON lines from standard input, writes one answer per line.
//!
//! A request has any of `template` and `special` (kept for later requests), `messages`, `tools`, `variables`,
//! `add_generation_prompt`, and `plain`, which selects the path for plain chats. The answer is `text`, or `error` and
//! its `kind`. The clock is fixed at 2024-02-29 13:05:09.

use std::error::Error;
use std::io::{BufRead as _, Write as _};

use semmoe_text::{Budget, ChatTemplate, Given, PlainChat, TextError};
use serde_json::{Value, json};

const NOW: i64 = 1_709_211_909;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut template = Err(TextError::NoTemplate);
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        if let Some(source) = request["template"].as_str() {
            template = ChatTemplate::from_source(source, &request["special"], || NOW);
        }
        let rendered = template.as_ref().map_err(|error| ("syntax", error.to_string())).and_then(|template| {
            render(template, &request).map_err(|error| {
                let kind = if matches!(error, TextError::TemplateRender { .. }) { "refused" } else { "limit" };
                (kind, error.to_string())
            })
        });
        let answer = match rendered {
            Ok(text) => json!({"text": text}),
            Err((kind, error)) => json!({"error": error, "kind": kind}),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn render(template: &ChatTemplate, request: &Value) -> Result<String, TextError> {
    if request["plain"] == true {
        let body = json!({"messages": request["messages"]}).to_string();
        if let Some((chat, _)) = PlainChat::quickly(&body) {
            return template.render_plain(&chat, Budget::default());
        }
    }
    let given = Given {
        tools: request.get("tools"),
        add_generation_prompt: request["add_generation_prompt"] != false,
        variables: request["variables"].as_object(),
    };
    template.render_as_given(&request["messages"], given, Budget::default())
}
