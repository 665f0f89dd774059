//! Compares the fast encoder with the oracle, and times both.
//!
//! Takes the field `prompt` of a prompts file, and the turns of `messages` as ChatML. Encodes each text whole and in
//! the shortest slices. Prints the first differences, and fails if there are any.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use semmoe_text::Tokenizer;

use crate::measure::Outcome;

struct Comparison {
    tokenizer: Tokenizer,
    texts: u64,
    bytes: usize,
    fast: Duration,
    oracle: Duration,
    differences: u64,
}

impl Comparison {
    fn add(&mut self, text: &str) -> Outcome<()> {
        let begin = Instant::now();
        let ids = self.tokenizer.encode_in_slices(text, true, usize::MAX, &mut || true)?;
        self.fast += begin.elapsed();
        let begin = Instant::now();
        let expected = self.tokenizer.encode_by_oracle(text, true)?;
        self.oracle += begin.elapsed();
        self.texts += 1;
        self.bytes += text.len();
        for (how, ids) in [("whole", ids), ("in slices", self.tokenizer.encode_in_slices(text, true, 1, &mut || true)?)]
        {
            if ids != expected {
                self.differences += 1;
                if self.differences <= 10 {
                    println!("difference on {text:?}, {how}: {ids:?}, oracle {expected:?}");
                }
            }
        }
        Ok(())
    }

    fn report(&mut self, what: &str) {
        let rate = |time: Duration| self.bytes as f64 / time.as_secs_f64().max(1e-9) / 1e6;
        println!(
            "{what}: {} texts, {} bytes, fast {:.1} MB/s, oracle {:.2} MB/s, ratio {:.1}, {} differences",
            self.texts,
            self.bytes,
            rate(self.fast),
            rate(self.oracle),
            self.oracle.as_secs_f64() / self.fast.as_secs_f64().max(1e-9),
            self.differences
        );
        (self.texts, self.bytes, self.fast, self.oracle) = Default::default();
    }
}

/// Every prompt of the files, every code point alone and in context, and `count` random texts.
pub(crate) fn run(tokenizer: &Path, count: u64, prompts: &[PathBuf]) -> Outcome<()> {
    let tokenizer = Tokenizer::from_file(tokenizer)?;
    if let Err(reason) = tokenizer.is_fast() {
        return Err(format!("the fast encoder does not support this tokenizer: {reason}").into());
    }
    println!("{}", if tokenizer.cuts_long_texts() { "long texts are cut" } else { "texts are never cut" });
    let zero = Duration::ZERO;
    let mut comparison = Comparison { tokenizer, texts: 0, bytes: 0, fast: zero, oracle: zero, differences: 0 };
    for path in prompts {
        for line in std::fs::read_to_string(path)?.lines() {
            comparison.add(&prompt(&serde_json::from_str(line)?))?;
        }
        comparison.report(&path.display().to_string());
    }
    for code_point in '\0'..=char::MAX {
        comparison.add(&code_point.to_string())?;
        comparison
            .add(&format!("a{code_point}b {code_point}{code_point} 1{code_point}2 '{code_point}\n{code_point}"))?;
    }
    comparison.report("code points");
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..count {
        comparison.add(&random_text(&mut random))?;
    }
    comparison.report("random");
    println!("texts encoded by the oracle: {}", comparison.tokenizer.left_to_oracle());
    if comparison.differences > 0 { Err("the encoders differ".into()) } else { Ok(()) }
}

/// The text on one line of a prompts file.
fn prompt(line: &serde_json::Value) -> String {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    match line["messages"].as_array() {
        Some(turns) => turns
            .iter()
            .map(|turn| format!("<|im_start|>{}\n{}<|im_end|>\n", text(&turn["role"]), text(&turn["content"])))
            .collect(),
        None => text(&line["prompt"]),
    }
}

fn random_text(random: &mut fastrand::Rng) -> String {
    let mut text = String::new();
    for _ in 0..random.usize(1..24) {
        match random.u8(0..7) {
            0 => text.extend((0..random.usize(1..6)).map(|_| random.char(' '..='~'))),
            1 => text.extend((0..random.usize(1..9)).map(|_| random.lowercase())),
            2 => text.extend(std::iter::repeat_n(
                [' ', '\n', '\r', '\t', '\u{a0}', '\u{3000}', '0', '7', 'A', '\''][random.usize(..10)],
                random.usize(1..10),
            )),
            3 => text.push(random.char('\0'..='\u{2fff}')),
            4 => text.push(random.char('\0'..=char::MAX)),
            5 => text.push(random.char('\u{4e00}'..='\u{9fff}')),
            _ => text.push_str(
                [" the", "'s", "'\u{17f}", "don't", "<|im_end|>", "<|", "e\u{301}", "3.14", "한국", "ไทย", "//", " _"]
                    [random.usize(..12)],
            ),
        }
    }
    text
}
