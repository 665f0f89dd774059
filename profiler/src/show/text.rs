//! Formats a study as a table for terminals.

use std::fmt;

use super::{LayerTable, NextLayer, Study};

type Figure = fn(&LayerTable, Option<&NextLayer>) -> String;

/// A column: its heading lines (subject, name, good value, poor value) and its figure.
struct Column {
    subject: &'static str,
    name: &'static str,
    good: &'static str,
    poor: String,
    figure: Figure,
}

fn three(value: f64) -> String {
    format!("{value:.3}")
}

/// Returns the columns from left to right; a subject is printed above its first column.
fn columns(chance: f64) -> Vec<Column> {
    let column =
        |subject, name, good, poor: &str, figure: Figure| Column { subject, name, good, poor: poor.to_owned(), figure };
    let by_chance = three(chance);
    vec![
        column("predicted (F1)", "p25", "", "", |layer, _| three(layer.f1.p25)),
        column("", "p50", "", "", |layer, _| three(layer.f1.p50)),
        column("", "p75", "", "", |layer, _| three(layer.f1.p75)),
        column("", "mean", "1", &by_chance, |layer, _| layer.f1_mean.map_or("-".into(), three)),
        column("hottest top-k", "p25", "", "", |layer, _| three(layer.cumulative_hotness.p25)),
        column("", "p50", "1", &by_chance, |layer, _| three(layer.cumulative_hotness.p50)),
        column("", "p75", "", "", |layer, _| three(layer.cumulative_hotness.p75)),
        column("hottest other", "p50", "0", "as top-k", |layer, _| three(layer.hottest_other.p50)),
        column("kurtosis", "p50", "high", "3", |layer, _| format!("{:.1}", layer.kurtosis.p50)),
        column("load", "max/mean", "1", "> 2", |layer, _| format!("{:.2}", layer.load_max_over_mean)),
        column("", "skew", "0", "> 1", |layer, _| format!("{:.2}", layer.load_skewness)),
        column("next layer", "share", "1", "chance", |_, next| next.map_or("-".into(), |next| three(next.share))),
        column("", "chance", "", "", |_, next| next.map_or("-".into(), |next| three(next.by_chance))),
    ]
}

impl fmt::Display for Study {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.summary)?;
        writeln!(f, "How well each token's k hottest experts predict those that it activates; quartiles over tokens.")?;
        writeln!(f, "Predicted: {}.", self.held_out.describe())?;
        writeln!(f, "Known tokens: {:.1}% of the traffic.", self.coverage_of_traffic * 100.0)?;
        if let Some(why) = self.next_left_out() {
            writeln!(f, "Next layer: {why}.")?;
        }
        writeln!(f)?;
        let columns = columns(self.by_chance());
        let line = |f: &mut fmt::Formatter<'_>, name: &str, cell: &dyn Fn(&Column) -> String| {
            write!(f, "{name:<6}")?;
            columns.iter().try_for_each(|column| write!(f, " {:>8}", cell(column)))
        };
        // A subject can be wider than a column: it starts at its first column's name and extends over the next columns.
        let mut subjects = String::from("      ");
        for (at, column) in columns.iter().enumerate().filter(|(_, column)| !column.subject.is_empty()) {
            let from = 6 + 9 * (at + 1) - column.name.len();
            subjects.push_str(&" ".repeat(from.saturating_sub(subjects.len()).max(1)));
            subjects.push_str(column.subject);
        }
        writeln!(f, "{subjects}")?;
        line(f, "layer", &|column| column.name.to_owned())?;
        writeln!(f)?;
        line(f, "good", &|column| column.good.to_owned())?;
        writeln!(f)?;
        line(f, "poor", &|column| column.poor.clone())?;
        for (at, layer) in self.layers.iter().enumerate() {
            writeln!(f)?;
            line(f, &format!("{:>5}", layer.layer_id), &|column| (column.figure)(layer, self.next.get(at)))?;
        }
        Ok(())
    }
}
