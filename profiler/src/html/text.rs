//! Escaping of untrusted texts.

/// Escapes text for the page: markup as entities, and characters that are invisible or change the text direction as
/// numbers.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' => escaped.push_str("\\n"),
            '\t' => escaped.push_str("\\t"),
            other if hidden(other) => escaped.push_str(&format!("\\u{{{:x}}}", u32::from(other))),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Whether this is a control character, a direction mark, or a character that browsers do not display.
fn hidden(character: char) -> bool {
    character.is_control()
        || matches!(u32::from(character), 0xad | 0x61c | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f | 0xfeff | 0xfff0..=0xffff | 0xe0000..=0xe0fff)
}

/// Escapes and truncates a token, and makes its spaces visible.
pub(super) fn token(text: &str) -> String {
    const SHOWN: usize = 18;
    let mut shown: String = text.chars().take(SHOWN).map(|c| if c == ' ' { '\u{2423}' } else { c }).collect();
    if text.chars().count() > SHOWN {
        shown.push('\u{2026}');
    }
    escape(&shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_text_becomes_markup() {
        assert_eq!(
            escape("<script>\"a\" & 'b'</script>"),
            "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/script&gt;"
        );
        assert_eq!(escape("a\u{202e}b\0c\n\u{feff}"), "a\\u{202e}b\\u{0}c\\n\\u{feff}");
        assert_eq!(escape("é 中"), "é 中");
        assert_eq!(token(" a<b "), "\u{2423}a&lt;b\u{2423}");
        assert_eq!(token(&"<".repeat(30)), format!("{}\u{2026}", "&lt;".repeat(18)));
    }
}
