//! Time to score a prompt on one thread: token ids and the sum of T's rows.
//!
//! Prompts are cut or joined to about 1,000 tokens. Each is seen for the first time and timed alone: the whole score,
//! the sum in it, and the oracle's ids. Turns of 100 prompts alternate, so both encoders run under the same conditions
//! and neither uses the other's caches. Then texts of one word by length, the worst case of a request. Set
//! `FASTOKENS_BPE_THREADS=1` for one thread on long texts too.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use semmoe_text::{Scorer, Tokenizer};

use crate::measure::Outcome;

/// About 1,000 tokens of English.
const PROMPT_BYTES: usize = 4400;
/// Most prompts timed.
const MAX_PROMPTS: usize = 4000;
/// Prompts that one library encodes before the other takes its turn.
const TURN: usize = 100;

/// Prompts against tables of `ranks` ranks, then texts of one word.
pub(crate) fn run(tokenizer: &Path, ranks: u16, files: &[PathBuf]) -> Outcome<()> {
    let tokenizer = Tokenizer::from_file(tokenizer)?;
    let scorer = random_table(tokenizer.vocab_size(), ranks);
    let mut prompts = Vec::new();
    for path in files {
        prompts.extend(thousand_token_prompts(&std::fs::read_to_string(path)?)?);
    }
    prompts.truncate(MAX_PROMPTS);
    let (mut whole, mut sums, mut oracle) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bytes, mut tokens) = (0, 0);
    for turn in prompts.chunks(TURN) {
        let mut encoded = Vec::new();
        for prompt in turn {
            let begin = Instant::now();
            let ids = tokenizer.encode(prompt)?;
            let summing = Instant::now();
            let score = scorer.score(&ids);
            sums.push(summing.elapsed());
            whole.push(begin.elapsed());
            bytes += prompt.len();
            tokens += score.tokens as usize;
            encoded.push(ids);
        }
        for (prompt, ids) in turn.iter().zip(encoded) {
            let begin = Instant::now();
            let expected = tokenizer.encode_by_oracle(prompt, false)?;
            oracle.push(begin.elapsed());
            if ids != expected {
                return Err(format!("the encoders differ on {prompt:?}").into());
            }
        }
    }
    let count = prompts.len().max(1);
    println!("{} prompts, {} tokens and {} bytes each", prompts.len(), tokens / count, bytes / count);
    let total = |times: &[Duration]| times.iter().sum::<Duration>().as_secs_f64();
    println!("ratio to the oracle's ids: {:.1}", total(&oracle) / total(&whole));
    for (what, times) in [("whole score", &mut whole), ("sum alone", &mut sums), ("oracle's ids", &mut oracle)] {
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
        println!("{what}: median {:.1} us, p99 {:.1} us", at(0.5), at(0.99));
    }
    one_word(&tokenizer)
}

/// T with random shares.
fn random_table(vocab_size: u32, ranks: u16) -> Scorer {
    let mut random = fastrand::Rng::with_seed(1);
    let shares = (0..vocab_size as usize * usize::from(ranks)).map(|_| half::f16::from_f64(random.f64()));
    Scorer::from_rows(ranks, &shares.collect::<Vec<_>>())
}

/// Consecutive prompts joined, or long ones cut, to about 1,000 tokens.
fn thousand_token_prompts(lines: &str) -> Outcome<Vec<String>> {
    let (mut prompts, mut text) = (Vec::new(), String::new());
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line)?;
        text.push_str(line["prompt"].as_str().unwrap_or_default());
        text.push('\n');
        if text.len() >= PROMPT_BYTES {
            let cut = text.floor_char_boundary(PROMPT_BYTES);
            prompts.push(text[..cut].to_owned());
            text.clear();
        }
    }
    Ok(prompts)
}

fn one_word(tokenizer: &Tokenizer) -> Outcome<()> {
    let mut random = fastrand::Rng::with_seed(2);
    for bytes in [1 << 10, 8 << 10, 64 << 10, 1 << 20] {
        let words = [
            ("random letters", (0..bytes).map(|_| random.lowercase()).collect::<String>()),
            ("one letter", "a".repeat(bytes)),
            ("one Chinese letter", "中".repeat(bytes / 3)),
            ("spaces", " ".repeat(bytes)),
            ("signs", "=".repeat(bytes)),
            ("digits", "7".repeat(bytes)),
        ];
        for (what, word) in words {
            let begin = Instant::now();
            let ids = tokenizer.encode(&word)?.len();
            println!("{bytes} bytes of {what}: {ids} ids, {:.2} ms", begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    println!("texts encoded by the oracle: {}", tokenizer.left_to_oracle());
    Ok(())
}
