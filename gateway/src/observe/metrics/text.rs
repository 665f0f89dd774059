//! The two text formats: OpenMetrics, which Prometheus requests by `Accept`, and the older format, which every scraper
//! understands.

use std::fmt::Write;

/// The text format for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextFormat {
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Prometheus,
}

impl TextFormat {
    /// Returns the format that an `Accept` header prefers; the older one if the header is absent or has no preference.
    pub(crate) fn accepted(accept: &str) -> Self {
        let weight = |wanted: &str| {
            let kinds = accept.split(',').filter_map(|range| {
                let mut parts = range.split(';').map(str::trim);
                let kind = parts.next()?;
                let quality =
                    parts.find_map(|part| part.strip_prefix("q=")).map_or(Some(1.0), |q| q.parse::<f64>().ok());
                quality.filter(|_| kind.eq_ignore_ascii_case(wanted))
            });
            kinds.fold(0.0, f64::max)
        };
        let open = weight("application/openmetrics-text");
        if open > 0.0 && open >= weight("text/plain") { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts OpenMetrics to the older format, which names counters and infos after their samples, and has neither
/// exemplars nor an end marker.
pub(super) fn older(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut help = None;
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), about) => help = Some((name, about.unwrap_or(""))),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    _ => ("", kind),
                };
                // Writing into a String cannot fail.
                if let Some((_, about)) = help.take().filter(|(of, _)| *of == name) {
                    let _ = writeln!(text, "# HELP {name}{suffix} {about}");
                }
                let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
            }
            (Some("#"), ..) => {}
            _ => {
                // Drop the exemplar. A label cannot look like one, because its quotes are escaped.
                text.push_str(line.split_once(" # {trace_id=\"").map_or(line, |(sample, _)| sample));
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_that_are_accepted() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, expected) in [
            (prometheus, TextFormat::OpenMetrics),
            ("application/openmetrics-text", TextFormat::OpenMetrics),
            ("text/plain, application/OpenMetrics-Text; q=1.0", TextFormat::OpenMetrics),
            ("text/plain;version=0.0.4;q=0.7,application/openmetrics-text;q=0.5", TextFormat::Prometheus),
            ("application/openmetrics-text;q=0", TextFormat::Prometheus),
            ("application/openmetrics-text;q=x", TextFormat::Prometheus),
            ("*/*", TextFormat::Prometheus),
            ("text/html", TextFormat::Prometheus),
            ("", TextFormat::Prometheus),
        ] {
            assert_eq!(TextFormat::accepted(accept), expected, "{accept}");
        }
    }

    #[test]
    fn the_older_format_declares_what_it_shows() {
        let open = "# HELP a_b Bs, all.\n# TYPE a_b counter\na_b_total{c=\"# TYPE\"} 1\n# HELP d A build.\n# TYPE d info\n\
                    d_info{v=\"1\"} 1\n# HELP e_seconds Es.\n# TYPE e_seconds histogram\n# UNIT e_seconds seconds\n\
                    e_seconds_bucket{le=\"+Inf\"} 0 # {trace_id=\"0f\"} 0.5\n# EOF\n";
        let expected = "# HELP a_b_total Bs, all.\n# TYPE a_b_total counter\na_b_total{c=\"# TYPE\"} 1\n# HELP d_info A build.\n\
                        # TYPE d_info gauge\nd_info{v=\"1\"} 1\n# HELP e_seconds Es.\n# TYPE e_seconds histogram\n\
                        e_seconds_bucket{le=\"+Inf\"} 0\n";
        assert_eq!(older(open), expected);
    }
}
