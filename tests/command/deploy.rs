//! Alerts and dashboard use metrics that the gateway has, by the names it exposes, and every alert has its runbook
//! page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

/// A metric's type, which determines its samples' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The metrics in the gateway's sources by name: those of `metrics!`, `field: Family<Labels, Kind>, "name", "help";`,
/// and those registered directly, `registry.register("name", "help", self.field.clone())`.
fn registered() -> BTreeMap<String, Kind> {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway/src/observe/metrics"), &mut files);
    let mut found = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a source");
        let mut insert = |name: &str, of: &str| {
            let kind = kind(&text, of).unwrap_or_else(|| panic!("{}: which kind is {name}?", file.display()));
            found.insert(format!("semmoe_{name}"), kind);
        };
        let groups = text.split("metrics! {").skip(1).map(|group| group.split("\n}").next().unwrap_or(group));
        for metric in groups.flat_map(|group| group.split("\";")) {
            let mut parts = metric.split('"');
            if let (Some(of), Some(name)) = (parts.next(), parts.next()) {
                // The first one follows its struct's head.
                insert(name, of.rsplit(" {\n").next().unwrap_or(of));
            }
        }
        for call in text.split("registry.register(").skip(1) {
            let call = call.split(");").next().unwrap_or(call);
            // Process metrics have the names of Prometheus' client libraries.
            let Some(name) = call.split('"').nth(1).filter(|name| !name.starts_with("process_")) else { continue };
            let field = call.trim_end().trim_end_matches(',').trim_end().trim_end_matches(".clone()");
            if field.contains("Info::new") {
                insert(&format!("{name}_info"), "Gauge");
                continue;
            }
            let field = field.rsplit([' ', '.']).next().unwrap_or(field);
            let declaration = text.lines().find(|line| line.trim_start().starts_with(&format!("{field}: ")));
            insert(name, declaration.unwrap_or_default());
        }
    }
    found
}

/// The kind in `field: Family<Labels, Counter>,` or `field: Counter = Counter::default(),`, also through a type alias
/// of the file.
fn kind(text: &str, of: &str) -> Option<Kind> {
    let aliases = text.lines().filter_map(|line| line.strip_prefix("type ")?.split_once(" = "));
    let is_word = |name: &str| of.split(|letter: char| !letter.is_alphanumeric()).any(|word| word == name);
    let of = aliases.into_iter().find(|(name, _)| is_word(name)).map_or(of, |(_, of)| of);
    let kinds = [("Histogram", Kind::Histogram), ("Counter", Kind::Counter), ("Gauge", Kind::Gauge)];
    kinds.into_iter().find(|(name, _)| of.contains(name)).map(|(_, kind)| kind)
}

/// Names that begin with `semmoe_` in a text.
fn named(text: &str) -> BTreeSet<String> {
    text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'))
        .filter(|word| word.starts_with("semmoe_"))
        .map(str::to_owned)
        .collect()
}

fn is_a_sample(name: &str, metrics: &BTreeMap<String, Kind>) -> bool {
    metrics.iter().any(|(metric, kind)| match kind {
        Kind::Counter => name.strip_suffix("_total") == Some(metric),
        Kind::Gauge => name == metric,
        Kind::Histogram => ["_bucket", "_sum", "_count"].iter().any(|end| name.strip_suffix(end) == Some(metric)),
    })
}

#[test]
fn alerts_and_board_name_metrics_of_the_gateway() {
    let metrics = registered();
    assert!(metrics.len() > 40, "{metrics:?}");
    assert_eq!(metrics["semmoe_requests"], Kind::Counter);
    assert_eq!(metrics["semmoe_rank_inflight"], Kind::Gauge);
    assert_eq!(metrics["semmoe_queue_seconds"], Kind::Histogram);
    for file in
        ["deploy/prometheus/semmoe.rules.yml", "deploy/prometheus/semmoe.tests.yml", "deploy/grafana/semmoe.json"]
    {
        let named = named(&read(file));
        assert!(named.len() > 3, "{file}: {named:?}");
        for name in named {
            assert!(is_a_sample(&name, &metrics), "{file}: the gateway writes no {name}");
        }
    }
    assert!(!is_a_sample("semmoe_requests", &metrics) && !is_a_sample("semmoe_rank_inflight_total", &metrics));
}

#[test]
fn every_alert_has_a_severity_a_summary_and_a_section() {
    let (rules, page) = (read("deploy/prometheus/semmoe.rules.yml"), read("docs/troubleshooting.md"));
    let sections: BTreeSet<&str> = page.lines().filter_map(|line| line.strip_prefix("## Semmoe")).collect();
    let alerts: Vec<&str> = rules.split("- alert: Semmoe").skip(1).collect();
    for alert in &alerts {
        let name = alert.lines().next().expect("a name");
        assert!(sections.contains(name), "docs/troubleshooting.md has no section Semmoe{name}");
        let link = format!("runbook_url: docs/troubleshooting.md#semmoe{}", name.to_ascii_lowercase());
        for needed in [link.as_str(), "summary: ", "severity: "] {
            assert!(alert.contains(needed), "Semmoe{name} lacks {needed:?}");
        }
    }
    assert_eq!(alerts.len(), sections.len(), "{sections:?}");
}
