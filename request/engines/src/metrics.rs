//! Parses the Prometheus text format, in which vLLM, SGLang and semmoe's worker report their metrics, and computes the
//! growth of counters between two scrapes.

use std::collections::BTreeMap;

/// One sample: a line that is not a comment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a str,
    /// The labels: the text between the braces.
    labels: &'a str,
    /// The value, which may be infinite or NaN.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Parses `name{label="value",...} value [timestamp]`. Returns `None` for any other line.
    pub fn parse(line: &'a str) -> Option<Self> {
        let end = line.find(['{', ' ', '\t']).filter(|end| *end > 0)?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(labelled) => {
                let end = end_of_labels(labelled)?;
                (&labelled[..end], &labelled[end + 1..])
            }
            None => ("", rest),
        };
        let mut fields = rest.split_ascii_whitespace();
        let value = fields.next()?.parse().ok()?;
        let timestamp = fields.next().is_none_or(|timestamp| timestamp.parse::<i64>().is_ok());
        (timestamp && fields.next().is_none()).then_some(Self { name, labels, value })
    }

    /// Returns a label's raw value, including escapes.
    pub fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (key, quoted) = rest.split_once("=\"")?;
            let (value, more) = quoted.split_at(end_of_quoted(quoted)?);
            if key.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = &more[1..];
        }
    }
}

/// Returns the position of the closing brace, skipping quoted values.
fn end_of_labels(labels: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        let rest = &labels[at..];
        let next = rest.find(['"', '}'])?;
        if rest[next..].starts_with('}') {
            return Some(at + next);
        }
        let value = at + next + 1;
        at = value + end_of_quoted(&labels[value..])? + 1;
    }
}

/// Returns the position of a value's closing quote.
fn end_of_quoted(value: &str) -> Option<usize> {
    let mut escaped = false;
    value.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

/// A line that is not a sample, or lacks a required label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a metrics sample: {0:?}")]
pub struct NoSample(pub String);

/// The growth of counters between two scrapes. A series that is missing from the earlier scrape counts as having been
/// zero.
#[derive(Clone, Debug)]
pub struct Growth {
    before: String,
    after: String,
}

impl Growth {
    /// Compares two scrapes.
    ///
    /// # Errors
    /// [`NoSample`] for the first line of either scrape that is neither a comment nor a sample with a finite value.
    pub fn between(before: String, after: String) -> Result<Self, NoSample> {
        let lines = before.lines().chain(after.lines()).filter(|line| !line.starts_with('#') && !line.is_empty());
        for line in lines {
            Sample::parse(line).filter(|sample| sample.value.is_finite()).ok_or_else(|| NoSample(line.to_owned()))?;
        }
        Ok(Self { before, after })
    }

    /// Returns the sum over the samples of `name` with these labels, regardless of their other labels.
    ///
    /// # Errors
    /// A line of `name` without one of the labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64, NoSample> {
        Ok(self.samples(name, labels)?.iter().map(|(_, sample)| sample.value).sum())
    }

    /// Returns the sums over the samples of `name` with these labels, keyed by the number in the label `by`.
    ///
    /// # Errors
    /// A line of `name` without one of the labels, or without a number in `by`.
    pub fn by(&self, by: &str, name: &str, labels: &[(&str, &str)]) -> Result<BTreeMap<u16, f64>, NoSample> {
        let mut sums = BTreeMap::new();
        for (line, sample) in self.samples(name, labels)? {
            let number =
                sample.label(by).and_then(|number| number.parse().ok()).ok_or_else(|| NoSample(line.to_owned()))?;
            *sums.entry(number).or_default() += sample.value;
        }
        Ok(sums)
    }

    /// Returns the matching samples of both scrapes with their lines; values of the earlier scrape are negated.
    fn samples(&self, name: &str, labels: &[(&str, &str)]) -> Result<Vec<(&str, Sample<'_>)>, NoSample> {
        let mut found = Vec::new();
        for (page, sign) in [(&self.after, 1.0), (&self.before, -1.0)] {
            let samples = page.lines().filter_map(|line| Some((line, Sample::parse(line)?)));
            for (line, sample) in samples.filter(|(_, sample)| sample.name == name) {
                let mut fits = labels.iter().map(|(label, wanted)| Some(sample.label(label)? == *wanted));
                if fits.try_fold(true, |all, one| Some(all && one?)).ok_or_else(|| NoSample(line.to_owned()))? {
                    found.push((line, Sample { value: sign * sample.value, ..sample }));
                }
            }
        }
        Ok(found)
    }
}

/// Returns the largest count divided by the mean; `None` if all counts are zero.
pub fn max_over_mean(counts: &BTreeMap<u16, f64>) -> Option<f64> {
    let sum: f64 = counts.values().sum();
    (sum > 0.0).then(|| counts.values().copied().fold(0.0, f64::max) * counts.len() as f64 / sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_sample_has_a_name_labels_and_a_value() {
        let sample =
            Sample::parse(r#"vllm:running{model_name="a,engine=\"9\"}{",engine="3", by="x"} 2.5 1700000000"#).unwrap();
        assert_eq!((sample.name, sample.value), ("vllm:running", 2.5));
        assert_eq!((sample.label("engine"), sample.label("by"), sample.label("rank")), (Some("3"), Some("x"), None));
        assert_eq!(sample.label("model_name"), Some(r#"a,engine=\"9\"}{"#));
        let bare = Sample::parse("semmoe_unit_up\t1").unwrap();
        assert_eq!((bare.name, bare.value, bare.label("rank")), ("semmoe_unit_up", 1.0, None));
        assert!(Sample::parse("x{} +Inf").unwrap().value.is_infinite());
    }

    #[test]
    fn what_is_no_sample_is_none() {
        for line in [
            "",
            "# HELP x y",
            "x",
            "x y",
            "{rank=\"0\"} 1",
            "x{rank=\"0\" 1",
            "x{rank=\"0} 1",
            "x 1 y",
            "x 1 2 3",
            " 1",
        ] {
            assert_eq!(Sample::parse(line), None, "{line}");
        }
    }

    #[test]
    fn growth_is_summed_over_the_labels_that_are_left_open() {
        let page = |counts: [u64; 3]| {
            let [a, b, c] = counts;
            format!(
                "# HELP x y\n\na{{rank=\"0\",at=\"x\"}} {a}\na{{rank=\"1\",at=\"x\"}} {b}\na{{rank=\"1\",at=\"y\"}} {c}\nab 7\n"
            )
        };
        let growth = Growth::between(page([1, 2, 3]), page([2, 4, 8])).unwrap();
        assert_eq!((growth.sum("a", &[]), growth.sum("a", &[("at", "x")])), (Ok(8.0), Ok(3.0)));
        assert_eq!(growth.by("rank", "a", &[]), Ok(BTreeMap::from([(0, 1.0), (1, 7.0)])));
        assert_eq!(growth.by("rank", "b", &[]), Ok(BTreeMap::new()));
        assert_eq!(max_over_mean(&growth.by("rank", "a", &[]).unwrap()), Some(1.75));
        assert_eq!(max_over_mean(&BTreeMap::from([(0, 0.0)])), None);
        let whole = Growth::between(String::new(), page([2, 4, 8])).unwrap();
        assert_eq!(whole.sum("a", &[]), Ok(14.0));
        // A selected label must be present.
        let line = |line: &str| NoSample(line.to_owned());
        assert_eq!(
            (whole.by("at", "a", &[("at", "y")]), whole.sum("ab", &[("at", "x")])),
            (Err(line("a{rank=\"1\",at=\"y\"} 8")), Err(line("ab 7")))
        );
        for line in ["a", "a x", "a NaN"] {
            assert_eq!(
                Growth::between(format!("b 1\n{line}\n"), String::new()).unwrap_err(),
                NoSample(line.to_owned())
            );
        }
    }

    proptest! {
        #[test]
        fn no_line_panics(line in "[a-c{}=\",. 0-9\\\\é]{0,40}", label in "[a-c]{0,2}") {
            let _ = Sample::parse(&line).and_then(|sample| sample.label(&label).map(str::len));
        }

        /// Every label is found whatever the values contain, and none inside another's value.
        #[test]
        fn labels_are_found(values in prop::collection::vec("[ab,={}\"\\\\ é]{0,8}", 1..5), value in 0_u32..100) {
            let escaped: Vec<String> = values.iter().map(|value| value.replace('\\', r"\\").replace('"', r#"\""#)).collect();
            let labels: Vec<String> = escaped.iter().enumerate().map(|(i, value)| format!("l{i}=\"{value}\"")).collect();
            let line = format!("a{{{}}} {value}", labels.join(","));
            let sample = Sample::parse(&line).unwrap();
            prop_assert_eq!(sample.value, f64::from(value));
            for (i, value) in escaped.iter().enumerate() {
                prop_assert_eq!(sample.label(&format!("l{i}")), Some(value.as_str()));
            }
        }
    }
}
