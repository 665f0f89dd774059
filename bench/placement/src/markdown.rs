//! Tables in Markdown.

use std::io::{self, Write};

/// A heading, the columns' names, and the rows.
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        Table { title: title.into(), columns: columns.iter().map(|&name| name.to_owned()).collect(), rows: Vec::new() }
    }

    pub(crate) fn print(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "\n{}\n", self.title)?;
        writeln!(out, "| {} |", self.columns.join(" | "))?;
        writeln!(out, "|{}", "---|".repeat(self.columns.len()))?;
        for row in &self.rows {
            writeln!(out, "| {} |", row.join(" | "))?;
        }
        out.flush()
    }
}

/// A rate with four digits.
pub(crate) fn rate(value: f64) -> String {
    format!("{value:.4}")
}

/// A load over its mean, with three digits.
pub(crate) fn load(value: f64) -> String {
    format!("{value:.3}")
}
