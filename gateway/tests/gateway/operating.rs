//! The operators' pages are accurate: configurations are accepted; metrics, codes, routes and messages exist.

use std::collections::BTreeSet;
use std::path::Path;

use semmoe_gateway::Config;

use crate::support::{Client, Fixture, canned, reloadable};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn page(name: &str) -> String {
    std::fs::read_to_string(format!("{ROOT}/docs/{name}.md")).unwrap()
}

/// Fenced blocks in one language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// All words with this prefix.
fn words<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let parts = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || "_/.".contains(letter)));
    parts.filter(|word| word.starts_with(prefix)).map(|word| word.trim_end_matches('.')).collect()
}

#[test]
fn configurations_are_accepted() {
    let text = ["operating", "api", "engines", "switching", "deploy"].map(page).concat();
    let all = blocks(&text, "toml");
    let whole: Vec<&&str> = all.iter().filter(|block| block.starts_with("# semmoe.toml")).collect();
    assert_eq!(whole.len(), 3);
    for block in whole {
        Config::from_toml(block, Path::new("")).unwrap_or_else(|error| panic!("{error} in\n{block}"));
    }
    let model = "[[models]]\nname = \"m\"\npolicy = \"least_load\"\n[[models.backends]]\nname = \"b\"\nengine = \"vllm\"\n\
                 url = \"http://b\"\nranks = 1\n";
    let sections: Vec<&&str> = all.iter().filter(|block| block.starts_with('[') && !block.contains("[[")).collect();
    assert!(sections.len() >= 6);
    for section in sections {
        Config::from_toml(&format!("{section}{model}"), Path::new(""))
            .unwrap_or_else(|error| panic!("{error} in\n{section}"));
    }
}

#[tokio::test]
async fn metrics_and_routes_are_there() {
    let pages = ["operating", "api", "troubleshooting", "engines", "routing", "security", "deploy", "switching"];
    let text = pages.map(page).concat();
    let (mock, fixture) = (canned(2), Fixture::new(2));
    let gateway = reloadable(&mock, &fixture, "").await;
    let client = Client::admin(&gateway);
    // A family without a sample is not exposed, so look for its name in the sources.
    let metrics = sources(Path::new(&format!("{ROOT}/gateway/src")));
    for name in words(&text, "semmoe_") {
        let family = name.trim_start_matches("semmoe_").trim_end_matches("_total").trim_end_matches("_info");
        assert!(metrics.contains(&format!("\"{family}\"")), "the document names {name}, which is no metric");
    }
    let routes = client.get("/").await.json()["routes"].as_object().unwrap().clone();
    for path in words(&text, "/admin/") {
        let known = routes.keys().any(|route| {
            let route = route.split(' ').nth(1).unwrap();
            let same = |(part, found): (&str, &str)| part == found || part == "{name}";
            route.split('/').count() == path.split('/').count() && route.split('/').zip(path.split('/')).all(same)
        });
        assert!(known, "the document names {path}, which is no route");
    }
}

/// The table of messages equals the messages in the sources.
#[test]
fn codes_and_messages_are_those_of_the_sources() {
    let text = page("troubleshooting");
    let (_, table) = text.split_once("## What messages want you to do").unwrap();
    let table = table.split("\n## ").next().unwrap();
    let sources =
        sources(Path::new(&format!("{ROOT}/gateway/src"))) + &sources(Path::new(&format!("{ROOT}/tables/src")));
    let cells = table.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.split('|').nth(1));
    let mut checked = 0;
    for cell in cells.skip(2) {
        let codes = cell.split('`').skip(1).step_by(2).filter(|code| code.contains('_') && !code.contains('.'));
        let messages = cell.split('"').skip(1).step_by(2).flat_map(|message| message.split("..."));
        let messages = messages.map(|message| message.trim().trim_matches(',').trim()).filter(|part| !part.is_empty());
        for part in codes.chain(messages) {
            assert!(sources.contains(part), "{part:?} is in no source");
            checked += 1;
        }
    }
    assert!(checked > 20, "{checked}");
}

fn sources(folder: &Path) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.push_str(&sources(&path));
        } else {
            all.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
    all
}
