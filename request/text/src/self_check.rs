//! The texts on which a fast encoder must match the oracle before it is trusted. They cover everything that tokenizers
//! are known to differ on.
//!
//! A self-check of a few milliseconds cannot prove equality; it detects a tokenizer with rules that the fast library
//! does not implement. `semmoe-bench-parts differential` tests large volumes.

/// Number of random strings, generated from a fixed seed.
const RANDOM_TEXTS: usize = 300;

/// Maximum number of added tokens to test; some vocabularies have tens of thousands.
const MAX_ADDED_TOKENS: usize = 400;

/// Pieces at whose boundaries tokenizers' split rules, normalizers and merges differ.
const PIECES: [&str; 64] = [
    "the",
    " the",
    "The",
    " don't",
    "'s",
    "'S",
    "'\u{17f}",
    "'ll",
    " I'VE",
    "aaaaaaaaaaaa",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "\u{feff}",
    "\u{0}",
    "\u{7f}",
    "1",
    "12",
    "1234567",
    "3.14",
    "½",
    "Ⅷ",
    "٣",
    "中文字",
    "日本語",
    "カタカナ",
    "한국어",
    "ไทยคำ",
    "اللغة",
    "हिन्दी",
    "Ελλ",
    "Кир",
    "e\u{301}",
    "é",
    "Å",
    "\u{212b}",
    "ﬁ",
    "ß",
    "🙂",
    "👨\u{200d}👩",
    "\u{fe0f}",
    "🇩🇪",
    "_",
    "--",
    "...",
    "//",
    "/*",
    "{}();",
    "<|",
    "|>",
    "<|im_start|>",
    "CamelCase",
    "snake_case",
    "HTTPServer",
    "https://a.b/c?d=e",
    "\u{10ffff}",
];

/// Returns the texts for a tokenizer, deterministically.
pub(crate) fn texts(oracle: &tokenizers::Tokenizer) -> Vec<String> {
    let mut added: Vec<String> = oracle.get_added_vocabulary().get_vocab().keys().cloned().collect();
    added.sort_unstable();
    let stride = added.len().div_ceil(MAX_ADDED_TOKENS).max(1);
    let added: Vec<String> = added.into_iter().step_by(stride).collect();

    let mut texts = vec![String::new(), "a".repeat(3000), " ".repeat(300), "中".repeat(700), "0".repeat(200)];
    texts.extend(PIECES.iter().map(|piece| format!("{piece}x {piece}{piece} {piece}\n{piece}")));
    texts.extend(added.iter().map(|token| format!("{token}a {token} {token}{token}\n{token} ")));
    let mut random = fastrand::Rng::with_seed(0x5eed);
    texts.extend((0..RANDOM_TEXTS).map(|_| mixture(&mut random, &added)));
    texts
}

fn mixture(random: &mut fastrand::Rng, added: &[String]) -> String {
    let mut text = String::new();
    for _ in 0..random.usize(1..24) {
        match random.u8(0..8) {
            0..4 => text.push_str(PIECES[random.usize(..PIECES.len())]),
            4 => text.extend((0..random.usize(1..6)).map(|_| random.alphanumeric())),
            5 => text.push(random.char('!'..='~')),
            6 => text.push(random.char('\u{80}'..='\u{ffff}')),
            _ if added.is_empty() => text.push(' '),
            _ => text.push_str(&added[random.usize(..added.len())]),
        }
    }
    text
}
