//! Self-contained HTML pages with images: no scripts, no external resources, readable in any browser, in light and dark
//! mode.
//!
//! This module renders the page for a study ([`render`]); other pages are [`Sheet`]s with the same layout and images.
//! Text from files (model names, tokens, topics) is untrusted and must be passed through [`escape`].
//!
//! | module | contents |
//! |---|---|
//! | `text` | escaping |
//! | `draw` | SVG: cells, axes, legends, tooltips, colour-blind-safe colours |
//! | `sheet` | the page around the images: style, facts, verdict, layer selector |
//! | `bars` | bar charts |
//! | `groups` | group loads, before and after |
//! | `heat` | heat maps of tokens and experts |
//! | `loads` | expert loads by layer |
//! | `next` | a layer's experts, given the experts of the previous layer |
//! | `topics` | two-dimensional map of requests |
//! | `rate` | local activation rate against the number of groups |

mod bars;
mod draw;
mod groups;
mod heat;
mod loads;
mod next;
mod rate;
mod sheet;
mod text;
mod topics;

use std::path::Path;

use semmoe_tables::{ModelInfo, Tables, Trace};

use crate::error::check;
use crate::show::{Study, map};
use crate::{ProfilerError, Verdict};
pub use bars::{Bar, Mark, bars};
pub use draw::{Axes, Cells, KINDS, Scale, Svg};
pub use groups::{GroupLoads, group_loads};
pub use rate::{RateKind, RatePoint};
pub use sheet::{Sheet, write_sections};
pub use text::escape;

/// Maximum number of cells in the images of all layers together. If not all layers fit, evenly spaced layers are drawn.
const MAX_CELLS: usize = 1 << 20;

/// Optional contents of the page, in addition to the study.
#[derive(Debug, Default)]
pub struct Page<'a> {
    /// If given, heat maps are sorted by the placement's groups, and group loads are drawn.
    pub tables: Option<&'a Tables>,
    /// Token texts by id; empty to show ids.
    pub token_texts: Vec<String>,
    /// A trace, and the topic of each of its requests.
    pub topics: Option<(&'a Trace, &'a [String])>,
    /// Local activation rates by number of groups.
    pub rates: Vec<RatePoint>,
    /// Index of the MoE layer that the maps show first; the middle layer by default.
    pub layer: Option<usize>,
    /// The verdict on the figures.
    pub verdict: Option<Verdict>,
}

/// Writes the page.
///
/// # Errors
/// If the topics do not match the trace, the layer does not exist, or the file cannot be written.
pub fn write_page(path: &Path, study: &Study, page: &Page<'_>) -> Result<(), ProfilerError> {
    let text = render(study, page)?;
    Ok(semmoe_tables::write_atomically(path, |out| out.write_all(text.as_bytes()))?)
}

/// Renders the page.
///
/// # Errors
/// If the topics do not match the trace, or the layer does not exist.
pub fn render(study: &Study, page: &Page<'_>) -> Result<String, ProfilerError> {
    let layers = study.rows.layers();
    let layer = page.layer.unwrap_or(layers / 2);
    check(layer < layers, "layer", layer, "the index of an MoE layer in the file")?;
    let missing = |what: &str| format!("<p class=\"none\">Not drawn: {what}</p>");
    let topics = match page.topics {
        Some((trace, topics)) => topics::picture(&map::requests(trace, topics)?),
        None => missing(
            "requests and topics are required. Pass a trace, and <code>--topics</code> with one JSON line per request.",
        ),
    };
    let rates = match page.rates.is_empty() {
        false => rate::picture(&page.rates),
        true => missing("pass <code>--groups 2,4,8</code> to solve for each, or <code>--tables</code>."),
    };
    let groups = page.tables.map_or_else(
        || missing("give <code>--tables</code>."),
        |tables| {
            let loads: Vec<Vec<u64>> = (0..layers).map(|layer| study.rows.loads(layer)).collect();
            group_loads(&GroupLoads::new(&study.summary.model, tables, &loads))
        },
    );
    let drawn = drawn_layers(study, layer);
    let ids: Vec<u16> = drawn.iter().map(|at| study.rows.layer_ids[*at]).collect();
    let chosen = drawn.iter().position(|at| *at == layer).unwrap_or(0);
    let experts = study.rows.experts;
    let each = |picture: &dyn Fn(usize) -> String, rows: usize| match experts * rows > MAX_CELLS {
        true => missing(&format!("{experts} experts are too many for a map.")),
        false => sheet::of_layers(&ids, |at| picture(drawn[at])),
    };
    let sections = vec![
        ("Predicting experts from tokens", table(study)),
        ("Tokens and experts", each(&|layer| heat::picture(study, page, layer), heat::TOKENS)),
        ("Expert load", loads::picture(study)),
        ("Group load, before and after", groups),
        ("From layer to layer", each(&|layer| next::picture(study, layer), study.rows.experts) + &next::table(study)),
        ("Requests by topic", topics),
        ("Local activation rate by number of groups", rates),
    ];
    let sheet = Sheet {
        title: format!("Routing of {}", study.summary.model.model),
        facts: facts(study, &study.summary.model),
        verdict: page.verdict.clone(),
        layers: Some((ids, chosen)),
        sections,
    };
    Ok(sheet.render())
}

/// Returns the layers whose maps are drawn, in order, including `wanted`.
fn drawn_layers(study: &Study, wanted: usize) -> Vec<usize> {
    let (layers, experts) = (study.rows.layers(), study.rows.experts);
    let fit = (MAX_CELLS / (experts * (experts + heat::TOKENS))).clamp(1, layers);
    let mut drawn: Vec<usize> = (0..fit).map(|at| at * layers / fit).filter(|at| *at != wanted).collect();
    drawn.truncate(fit - 1);
    drawn.push(wanted);
    drawn.sort_unstable();
    drawn
}

fn facts(study: &Study, model: &ModelInfo) -> Vec<(&'static str, String)> {
    let summary = &study.summary;
    let shape = format!("{} MoE layers, {} experts, top-{}", model.layers(), model.num_experts, model.top_k);
    let distinct = format!("{} of {} ({:.1}%)", summary.distinct_tokens, model.vocab_size, summary.coverage * 100.0);
    let source = format!("{} ({})", summary.provenance.source, summary.provenance.created);
    let requests =
        summary.requests.map_or("unknown: a profile has only token counts".to_owned(), |count| count.to_string());
    vec![
        ("file", format!("a {}, digest {}", summary.kind, summary.digest)),
        ("shape", shape),
        ("source", source),
        ("requests", requests),
        ("tokens with a route", summary.routed_tokens.to_string()),
        ("token ids seen", distinct),
        ("known tokens", format!("{:.1}% of the traffic", study.coverage_of_traffic * 100.0)),
    ]
}

/// Renders the paper's Table 1 and related figures.
fn table(study: &Study) -> String {
    let row = |layer: &crate::show::LayerTable| {
        let quartiles = [&layer.f1, &layer.cumulative_hotness, &layer.hottest_other];
        let cells: String =
            quartiles.iter().flat_map(|q| [q.p25, q.p50, q.p75]).map(|value| format!("<td>{value:.3}</td>")).collect();
        let mean = layer.f1_mean.map_or_else(|| "-".to_owned(), |mean| format!("{mean:.3}"));
        let kurtosis = format!(
            "<td>{:.1}</td><td>{:.1}</td><td>{:.1}</td>",
            layer.kurtosis.p25, layer.kurtosis.p50, layer.kurtosis.p75
        );
        format!("<tr><th>{}</th>{cells}{kurtosis}<td>{mean}</td></tr>\n", layer.layer_id)
    };
    let rows: String = study.layers.iter().map(row).collect();
    let quartiles = "<th>p25</th><th>p50</th><th>p75</th>".repeat(4);
    format!(
        "<p>How well each token's k hottest experts predict those that it activates; quartiles over tokens, {}. Hotness is the share of \
         a token's activations. High kurtosis means that a few experts receive them all (a normal distribution has 3).</p>\n\
         <div class=\"wide\"><table><thead><tr><th rowspan=\"2\">layer</th><th colspan=\"3\">F1</th><th colspan=\"3\">cumulative hotness, top-k\
         </th><th colspan=\"3\">hottest other expert</th><th colspan=\"3\">kurtosis</th><th rowspan=\"2\">F1, mean over occurrences</th></tr>\
         <tr>{quartiles}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n",
        study.held_out.describe()
    )
}
