//! The page around the images.

use std::fmt::Write;
use std::path::Path;

use super::draw::palette;
use super::escape;
use crate::{ProfilerError, Verdict};

/// A page. It escapes everything except section titles, section bodies and fact names.
#[derive(Debug, Default)]
pub struct Sheet {
    /// The page's title.
    pub title: String,
    /// Names and values of the facts at the top.
    pub facts: Vec<(&'static str, String)>,
    /// The verdict on the figures.
    pub verdict: Option<Verdict>,
    /// Ids of the selectable layers, and the index of the layer shown first.
    pub layers: Option<(Vec<u16>, usize)>,
    /// Title and markup of each section.
    pub sections: Vec<(&'static str, String)>,
}

impl Sheet {
    /// Renders the complete file.
    pub fn render(&self) -> String {
        let title = escape(&self.title);
        let facts: String =
            self.facts.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(value))).collect();
        let facts = if facts.is_empty() { facts } else { format!("<dl>{facts}</dl>") };
        let verdict = self.verdict.as_ref().map(verdict).unwrap_or_default();
        let sections =
            self.sections.iter().map(|(title, body)| format!("<section><h2>{title}</h2>\n{body}</section>\n"));
        let (rules, chooser) = self.layers.as_ref().map(|(ids, shown)| chooser(ids, *shown)).unwrap_or_default();
        format!(
            "{HEAD}<style>\n{STYLE}{}\n@media (prefers-color-scheme: dark) {{ {} }}\n{rules}</style>\n<title>{title}</title>\n<h1>{title}</h1>\n\
             {verdict}{facts}\n{chooser}{}",
            palette(false),
            palette(true),
            sections.collect::<String>()
        )
    }

    /// Writes the page.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ProfilerError> {
        Ok(semmoe_tables::write_atomically(path, |out| out.write_all(self.render().as_bytes()))?)
    }
}

/// Writes a page that contains only sections.
///
/// # Errors
/// If the file cannot be written.
pub fn write_sections(path: &Path, title: &str, sections: &[(&'static str, String)]) -> Result<(), ProfilerError> {
    Sheet { title: title.to_owned(), sections: sections.to_vec(), ..Sheet::default() }.write(path)
}

fn verdict(Verdict { grade, text, next }: &Verdict) -> String {
    let name = grade.name();
    format!(
        "<aside class=\"verdict {name}\" aria-label=\"Verdict\"><p><strong>Verdict: {name}.</strong> {}</p><p>Next: <code>{}</code></p></aside>\n",
        escape(text),
        escape(next)
    )
}

/// Renders one image per layer; the selector shows one at a time.
pub(super) fn of_layers(ids: &[u16], picture: impl Fn(usize) -> String) -> String {
    ids.iter().enumerate().map(|(at, id)| format!("<div class=\"of l{id}\">{}</div>\n", picture(at))).collect()
}

/// Returns the style and markup of the layer selector: a radio group, which works without scripts and with a keyboard.
fn chooser(ids: &[u16], shown: usize) -> (String, String) {
    let (mut rules, mut buttons) = (String::new(), String::new());
    for (at, id) in ids.iter().enumerate() {
        let checked = if at == shown { " checked" } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(rules, ":root:has(#l{id}:checked) .of.l{id}{{display:block}}");
        let _ = write!(
            buttons,
            "<label><input type=\"radio\" name=\"layer\" id=\"l{id}\" autocomplete=\"off\"{checked}>{id}</label> "
        );
    }
    (rules, format!("<fieldset class=\"layers\"><legend>Layer of the maps</legend>{buttons}</fieldset>\n"))
}

const HEAD: &str = r#"<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"#;

const STYLE: &str = r#":root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --page: #fff; --stripe: #f4f4f4; --edge: #ccc;
  --good: #1a7f37; --fair: #8a5a00; --poor: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a8adb5; --page: #181a1e; --stripe: #22252a; --edge: #444;
  --good: #5bc46f; --fair: #e0a83a; --poor: #ff8a80; } }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); background: var(--page); max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; border-bottom: 1px solid var(--edge); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: .1rem .55rem; text-align: right; }
th { font-weight: 600; } th[colspan] { text-align: center; } thead th { border-bottom: 1px solid var(--soft); } tbody tr:nth-child(even) { background: var(--stripe); }
.wide { overflow-x: auto; } .none { color: var(--soft); font-style: italic; } figure { margin: .6rem 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); } svg text.token { font: 9px ui-monospace, "DejaVu Sans Mono", monospace; }
.grid { stroke: var(--edge); } .axis { stroke: var(--ink); } .tip { fill: transparent; } .tip:hover { stroke: var(--ink); }
p { max-width: 52rem; } code { overflow-wrap: anywhere; }
.verdict { border: 1px solid var(--edge); border-left: .4rem solid var(--soft); border-radius: .3rem; padding: .2rem 1rem; margin: 1rem 0; }
.verdict.good { border-left-color: var(--good); } .verdict.fair { border-left-color: var(--fair); } .verdict.poor { border-left-color: var(--poor); }
.good strong { color: var(--good); } .fair strong { color: var(--fair); } .poor strong { color: var(--poor); }
.layers { position: sticky; top: 0; background: var(--page); border: 1px solid var(--edge); margin: 1rem 0; padding: .1rem .8rem; } .layers label { white-space: nowrap; margin-right: .5rem; }
.of { display: none; }
"#;
