//! One self-contained page with pictures of a study: no scripts, nothing loaded from elsewhere, readable in any browser.
//!
//! Texts of files (names of models, tokens, topics) are untrusted: every one goes through `text::escape`.
//!
//! | module | what |
//! |---|---|
//! | `text` | escaping |
//! | `draw` | SVG: cells, axes, legends, colours that colour-blind people tell apart |
//! | `heat` | tokens and experts |
//! | `loads` | loads of experts, layer by layer |
//! | `next` | experts of a layer given those of the one before |
//! | `topics` | requests in two dimensions |
//! | `rate` | local activation rate against groups |

mod draw;
mod heat;
mod loads;
mod next;
mod rate;
mod text;
mod topics;

use std::path::Path;

use semmoe_tables::{ModelInfo, Placement, Trace};

use crate::ProfilerError;
use crate::show::{Study, map};
pub use draw::{KINDS, Svg};
pub use rate::RatePoint;
pub use text::escape;

/// What the page shows beside the study.
#[derive(Debug, Default)]
pub struct Page<'a> {
    /// Where experts lie: the heat map is then in the order of its groups.
    pub placement: Option<&'a Placement>,
    /// The text of every token, by id; ids where there are none.
    pub token_texts: Vec<String>,
    /// The trace and the topic of each of its requests.
    pub topics: Option<(&'a Trace, &'a [String])>,
    /// Local activation rates by groups.
    pub rates: Vec<RatePoint>,
    /// Which MoE layer the maps show, among those of the file; the middle one by default.
    pub layer: Option<usize>,
}

/// Writes the page.
///
/// # Errors
/// When the topics do not fit the trace, the layer is not there, or the file cannot be written.
pub fn write_page(path: &Path, study: &Study, page: &Page<'_>) -> Result<(), ProfilerError> {
    crate::write_whole(path, render(study, page)?.as_bytes())
}

/// The page itself.
///
/// # Errors
/// When the topics do not fit the trace, or the layer is not there.
pub fn render(study: &Study, page: &Page<'_>) -> Result<String, ProfilerError> {
    let layers = study.rows.layers();
    let layer = page.layer.unwrap_or(layers / 2);
    if layer >= layers {
        let found = layer.to_string();
        return Err(ProfilerError::Option { option: "layer", found, expected: "the index of a MoE layer of the file" });
    }
    let topics = match page.topics {
        Some((trace, topics)) => {
            let map = map::requests(trace, topics)?;
            topics::picture(&map)
        }
        None => "<p class=\"none\">Not drawn: requests and their topics are needed. Give a trace, and <code>--topics</code> with one \
                 JSON line for each of its requests.</p>"
            .into(),
    };
    let rates = match page.rates.is_empty() {
        false => rate::picture(&page.rates),
        true => "<p class=\"none\">Not drawn: give <code>--groups 2,4,8</code> to solve for each, or <code>--tables</code>.</p>".into(),
    };
    let sections = [
        ("Prediction of experts by tokens", table(study)),
        ("Tokens and experts", heat::picture(study, page, layer)),
        ("Load of experts", loads::picture(study)),
        ("From layer to layer", next::picture(study, layer)),
        ("Requests by topic", topics),
        ("Local activations against groups", rates),
    ];
    Ok(document(&format!("Routing of {}", study.summary.model.model), &facts(study, &study.summary.model), &sections))
}

/// Writes a page of the same form about anything else: a title, which is escaped, and sections of markup.
///
/// # Errors
/// When the file cannot be written.
pub fn write_sections(path: &Path, title: &str, sections: &[(&str, String)]) -> Result<(), ProfilerError> {
    crate::write_whole(path, document(title, "", sections).as_bytes())
}

fn document(title: &str, facts: &str, sections: &[(&str, String)]) -> String {
    let body: String =
        sections.iter().map(|(title, body)| format!("<section><h2>{title}</h2>\n{body}</section>\n")).collect();
    let title = escape(title);
    format!("{HEAD}<title>{title}</title>\n<h1>{title}</h1>\n{facts}\n{body}")
}

const HEAD: &str = r#"<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; border-bottom: 1px solid #ccc; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: .1rem .55rem; text-align: right; }
th { font-weight: 600; } th[colspan] { text-align: center; } thead th { border-bottom: 1px solid #888; } tbody tr:nth-child(even) { background: #f4f4f4; }
.wide { overflow-x: auto; } .none { color: #666; font-style: italic; } figure { margin: .6rem 0; } svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: #1a1a1a; } svg text.token { font: 9px ui-monospace, "DejaVu Sans Mono", monospace; }
p { max-width: 52rem; }
</style>
"#;

fn facts(study: &Study, model: &ModelInfo) -> String {
    let summary = &study.summary;
    let shape = format!("{} layers with experts, {} experts, top-{}", model.layers(), model.num_experts, model.top_k);
    let distinct = format!("{} of {} ({:.1}%)", summary.distinct_tokens, model.vocab_size, summary.coverage * 100.0);
    let source = format!("{} ({})", summary.provenance.source, summary.provenance.created);
    let requests =
        summary.requests.map_or("unknown: a profile has counts of tokens only".to_owned(), |count| count.to_string());
    let rows = [
        ("file", format!("a {}, digest {}", summary.kind, summary.digest)),
        ("shape", shape),
        ("source", source),
        ("requests", requests),
        ("tokens with a route", summary.routed_tokens.to_string()),
        ("token ids seen", distinct),
        ("tokens with evidence", format!("{:.1}% of the traffic", study.coverage_of_traffic * 100.0)),
    ];
    let rows: String = rows.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(value))).collect();
    format!("<dl>{rows}</dl>")
}

/// The paper's Table 1, and what goes with it.
fn table(study: &Study) -> String {
    let row = |layer: &crate::show::LayerTable| {
        let quartiles = [&layer.f1, &layer.cumulative_hotness, &layer.hottest_other];
        let cells: String =
            quartiles.iter().flat_map(|q| [q.p25, q.p50, q.p75]).map(|value| format!("<td>{value:.3}</td>")).collect();
        let kurtosis = format!(
            "<td>{:.1}</td><td>{:.1}</td><td>{:.1}</td>",
            layer.kurtosis.p25, layer.kurtosis.p50, layer.kurtosis.p75
        );
        format!("<tr><th>{}</th>{cells}{kurtosis}<td>{:.3}</td></tr>\n", layer.layer_id, layer.f1_mean)
    };
    let rows: String = study.layers.iter().map(row).collect();
    let quartiles = "<th>p25</th><th>p50</th><th>p75</th>".repeat(4);
    format!(
        "<p>Each token's hottest top-k experts as the prediction of those it activates; quartiles over tokens, {}. Hotness is the share of \
         a token's activations. High kurtosis means that few experts have them all (3: a normal distribution).</p>\n\
         <div class=\"wide\"><table><thead><tr><th rowspan=\"2\">layer</th><th colspan=\"3\">F1</th><th colspan=\"3\">cumulative hotness, top-k\
         </th><th colspan=\"3\">hottest other expert</th><th colspan=\"3\">kurtosis</th><th rowspan=\"2\">F1, mean over occurrences</th></tr>\
         <tr>{quartiles}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n",
        study.held_out.describe()
    )
}
