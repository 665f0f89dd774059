//! Cuts a long text at positions that do not affect its ids, so that encoding can be stopped between slices.
//!
//! A text is cut after a line end between a non-whitespace character and a letter or digit. The split rules of
//! byte-level tokenizers end a piece there regardless of the text that follows, and no merge crosses pieces. A test at
//! load time, on texts constructed for it, checks whether a tokenizer behaves this way; otherwise its texts are never
//! cut.

use tokenizers::AddedToken;

use crate::self_check;

/// Slice size in the self-check, as small as possible.
const SHORTEST: usize = 1;

/// The ids that a tokenizer adds before and after a prompt.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Around {
    pub(crate) before: Vec<u32>,
    pub(crate) after: Vec<u32>,
}

impl Around {
    /// Tests `oracle` and finds the ids that it adds; `None` if its texts must not be cut.
    pub(crate) fn new(oracle: &tokenizers::Tokenizer) -> Option<Self> {
        if oracle.get_added_tokens_decoder().values().any(reaches_over_a_cut) {
            return None;
        }
        let ids = |text: &str, special| Some(oracle.encode_fast(text, special).ok()?.get_ids().to_vec());
        let (plain, with) = (ids("a", false)?, ids("a", true)?);
        let at = with.windows(plain.len().max(1)).position(|window| window == plain)?;
        let around = Self { before: with[..at].to_vec(), after: with[at + plain.len()..].to_vec() };
        let texts = self_check::texts(oracle);
        let seams: Vec<String> = texts.windows(2).map(|pair| format!("{}x\ny{}", pair[0], pair[1])).collect();
        for text in texts.iter().chain(&seams) {
            let mut cut = Vec::new();
            for slice in slices(text, SHORTEST) {
                cut.extend(ids(slice, false)?);
            }
            if cut != ids(text, false)? {
                return None;
            }
        }
        Some(around)
    }
}

/// Returns whether an added token absorbs the line end before it, or contains one.
fn reaches_over_a_cut(token: &AddedToken) -> bool {
    let first = token.content.chars().next();
    token.content.contains('\n') || (token.lstrip && first.is_none_or(char::is_alphanumeric))
}

/// Iterates over the slices of `text` in order. Each is the shortest slice of at least `least_bytes` that ends at a
/// cut; the last one is the remainder.
pub(crate) fn slices(text: &str, least_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let at = first_cut(text, least_bytes);
        rest = at.map(|at| &text[at..]);
        Some(&text[..at.unwrap_or(text.len())])
    })
}

/// Returns the first cut at or after `from`.
fn first_cut(text: &str, from: usize) -> Option<usize> {
    let mut at = from.max(1);
    loop {
        let line_end = at - 1 + text.as_bytes().get(at - 1..)?.iter().position(|byte| *byte == b'\n')?;
        at = line_end + 2;
        let before = text[..line_end].chars().next_back();
        let after = text[line_end + 1..].chars().next();
        if before.is_some_and(|before| !before.is_whitespace()) && after.is_some_and(char::is_alphanumeric) {
            return Some(line_end + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(text: &str, least: usize) -> Vec<&str> {
        slices(text, least).collect()
    }

    #[test]
    fn cuts_stand_behind_single_line_ends() {
        assert_eq!(cut("a\nb\n\nc\nd", 1), ["a\n", "b\n\nc\n", "d"]);
        assert_eq!(cut("a\r\nb\n c\n-d .\ne", 1), ["a\r\nb\n c\n-d .\n", "e"]);
        assert_eq!(cut("\na\n", 1), ["\na\n"]);
        assert_eq!(cut("中\n文", 1), ["中\n", "文"]);
        assert_eq!(cut("a\nb\nc\nd", 3), ["a\nb\n", "c\nd"]);
        assert_eq!(cut("a\nb\nc\nd", 4), ["a\nb\n", "c\nd"]);
        assert_eq!(cut("a\nb", 9), ["a\nb"]);
        assert_eq!(cut("", 1), [""]);
    }

    proptest! {
        #[test]
        fn slices_are_the_text(text in "[a中 \n\r/]{0,60}", least in 0usize..20) {
            let cut: Vec<&str> = slices(&text, least).collect();
            prop_assert_eq!(cut.concat(), text.as_str());
            prop_assert!(cut.iter().rev().skip(1).all(|slice| slice.len() >= least));
        }
    }
}
