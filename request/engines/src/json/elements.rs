//! The elements of a JSON array, as byte ranges.

use std::ops::Range;

use super::{Members, ScanError, State};

/// Iterates over the elements of an array, without surrounding whitespace; stops after the first error.
#[derive(Debug)]
pub struct Elements<'a> {
    scanner: Members<'a>,
}

impl<'a> Elements<'a> {
    /// Iterates over the elements of `body`, which must be one array with optional surrounding whitespace.
    pub fn new(body: &'a [u8]) -> Self {
        Self { scanner: Members::new(body) }
    }

    fn step(&mut self) -> Result<Option<Range<usize>>, ScanError> {
        let scanner = &mut self.scanner;
        match scanner.state {
            State::End => return Ok(None),
            State::Start => {
                scanner.space();
                scanner.expect(b'[', "'['")?;
                scanner.space();
                if scanner.peek() == Some(b']') {
                    return scanner.close().map(|_| None);
                }
            }
            State::Between => {
                if scanner.peek() == Some(b']') {
                    return scanner.close().map(|_| None);
                }
                scanner.expect(b',', "',' or ']'")?;
                scanner.space();
            }
        }
        scanner.state = State::Between;
        let value = scanner.value()?;
        scanner.space();
        Ok(Some(value))
    }
}

impl Iterator for Elements<'_> {
    type Item = Result<Range<usize>, ScanError>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step();
        self.scanner.ended_by(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn elements_of_arrays() {
        for (body, elements) in [
            ("[]", vec![]),
            (" [ ] ", vec![]),
            ("[1]", vec!["1"]),
            (r#" [ {"a":[1,"]"]} , "x,y" ,null] "#, vec![r#"{"a":[1,"]"]}"#, r#""x,y""#, "null"]),
        ] {
            let found: Result<Vec<&str>, ScanError> =
                Elements::new(body.as_bytes()).map(|range| range.map(|range| &body[range])).collect();
            assert_eq!(found, Ok(elements), "{body}");
        }
        for body in ["", "{}", "[", "[1", "[1,]", "[,]", "[1 2]", "[1]]", "[1] x"] {
            assert!(Elements::new(body.as_bytes()).any(|element| element.is_err()), "{body}");
        }
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json(values in proptest::collection::vec(super::super::tests::any_json_object(), 0..4)) {
            let text = serde_json::to_string_pretty(&values).unwrap();
            let found: Vec<serde_json::Value> = Elements::new(text.as_bytes())
                .map(|range| serde_json::from_str(&text[range.unwrap()]).unwrap())
                .collect();
            prop_assert_eq!(found, values);
        }
    }
}
