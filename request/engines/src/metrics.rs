//! Lines of the Prometheus text format, in which vLLM, SGLang and semmoe's worker report their metrics.

/// One sample: a line that is not a comment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a str,
    /// The text between the braces.
    labels: &'a str,
    /// May be infinite or NaN, as in the format.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Parses `name{label="value",...} value [timestamp]`. `None` for every other line.
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

    /// A label's raw value, including escapes.
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

/// Position of the closing brace, past all quoted values.
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

/// Position of a value's closing quote.
fn end_of_quoted(value: &str) -> Option<usize> {
    let mut escaped = false;
    value.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
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
