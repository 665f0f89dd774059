//! Tokenizes a template, removing whitespace around tags as Jinja2 does with `trim_blocks` and `lstrip_blocks`.

use super::text::is_space;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// Text outside tags.
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Int(i128),
    Float(f64),
    Text(String),
    Operator(&'static str),
    End,
}

#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) token: Token,
    pub(crate) line: u32,
}

/// The reason why a source is not a valid template, and the line.
#[derive(Debug, thiserror::Error)]
#[error("{reason} (line {line})")]
pub struct SyntaxError {
    pub(crate) line: u32,
    pub(crate) reason: String,
}

/// All operators, longer ones first.
const OPERATORS: [&str; 27] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";", "!",
];

pub(crate) fn tokens(source: &str) -> Result<Vec<Placed>, SyntaxError> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer { source: &source, at: 0, line: 1, counted: 0, line_starts: true, tokens: Vec::new() };
    lexer.all()?;
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// Bytes already scanned for line ends.
    counted: usize,
    /// Whether the last consumed text ended with a line end.
    line_starts: bool,
    tokens: Vec<Placed>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn push(&mut self, token: Token) {
        let new = &self.source[self.counted..self.at];
        self.line += u32::try_from(memchr::memchr_iter(b'\n', new.as_bytes()).count()).unwrap_or(0);
        self.counted = self.at;
        self.tokens.push(Placed { token, line: self.line });
    }

    fn error<T>(&mut self, reason: impl Into<String>) -> Result<T, SyntaxError> {
        self.push(Token::End);
        Err(SyntaxError { line: self.line, reason: reason.into() })
    }

    fn skip(&mut self, bytes: usize) {
        let end = self.at + bytes;
        self.line_starts = self.source[self.at..end].ends_with('\n');
        self.at = end;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        let space = rest.len() - rest.trim_start_matches(is_space).len();
        if space > 0 {
            self.skip(space);
        }
    }

    fn all(&mut self) -> Result<(), SyntaxError> {
        while !self.rest().is_empty() {
            let rest = self.rest();
            let Some((begin, kind)) = next_tag(rest) else {
                self.at = self.source.len();
                self.push(Token::Data(rest.to_owned()));
                return Ok(());
            };
            let sign = sign(&rest[begin + 2..]);
            self.data(&rest[..begin], sign, kind != b'{');
            self.at += begin;
            self.skip(2 + sign.map_or(0, char::len_utf8));
            match kind {
                b'#' => self.comment()?,
                b'{' => self.tag(Token::VariableBegin, Token::VariableEnd)?,
                _ if self.raw()? => {}
                _ => self.tag(Token::BlockBegin, Token::BlockEnd)?,
            }
        }
        Ok(())
    }

    /// Adds the text before a tag.
    fn data(&mut self, text: &str, sign: Option<char>, is_block: bool) {
        let mut kept = text;
        if sign == Some('-') {
            kept = text.trim_end_matches(is_space);
        } else if sign.is_none() && is_block {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            if (line > 0 || self.line_starts) && text[line..].chars().all(is_space) {
                kept = &text[..line];
            }
        }
        if !kept.is_empty() {
            self.push(Token::Data(kept.to_owned()));
        }
    }

    fn comment(&mut self) -> Result<(), SyntaxError> {
        // Jinja2 accepts an unterminated comment at the very end.
        if self.rest().is_empty() {
            return Ok(());
        }
        let Some(end) = self.rest().find("#}") else { return self.error("unterminated comment") };
        let before = self.rest()[..end].chars().next_back();
        self.skip(end + 2);
        self.after_tag(before);
        Ok(())
    }

    /// Removes whitespace after the end of a tag.
    fn after_tag(&mut self, sign: Option<char>) {
        match sign {
            Some('-') => self.skip_space(),
            Some('+') => {}
            _ if self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
    }

    /// `raw %}...{% endraw %}`
    fn raw(&mut self) -> Result<bool, SyntaxError> {
        let Some(begin) = keyword(self.rest(), "raw") else { return Ok(false) };
        let after = &self.rest()[begin..];
        let trims = after.starts_with("-%}");
        if !trims && !after.starts_with("%}") {
            return Ok(false);
        }
        self.skip(begin + if trims { 3 } else { 2 });
        if trims {
            self.skip_space();
        }
        if self.rest().is_empty() {
            return Ok(true);
        }
        let mut from = 0;
        while let Some(found) = self.rest()[from..].find("{%") {
            let text = &self.rest()[..from + found];
            let sign = sign(&self.rest()[from + found + 2..]);
            let inner = from + found + 2 + sign.map_or(0, char::len_utf8);
            if let Some(name) = keyword(&self.rest()[inner..], "endraw")
                && let Some((length, end)) = block_end(&self.rest()[inner + name..])
            {
                self.data(text, sign, true);
                self.skip(inner + name + length);
                self.after_tag(end);
                return Ok(true);
            }
            from += found + 2;
        }
        self.error("raw without endraw")
    }

    fn tag(&mut self, begin: Token, end: Token) -> Result<(), SyntaxError> {
        let is_block = begin == Token::BlockBegin;
        self.push(begin);
        let mut open: Vec<char> = Vec::new();
        loop {
            if open.is_empty() {
                let rest = self.rest();
                let ended = if is_block {
                    block_end(rest)
                } else if rest.starts_with("-}}") {
                    Some((3, Some('-')))
                } else {
                    rest.starts_with("}}").then_some((2, Some('+')))
                };
                if let Some((length, sign)) = ended {
                    self.skip(length);
                    self.push(end);
                    self.after_tag(sign);
                    return Ok(());
                }
            }
            let Some(next) = self.rest().chars().next() else { return self.error("unterminated tag") };
            if is_space(next) {
                self.skip_space();
            } else if next.is_ascii_digit() {
                self.number()?;
            } else if next.is_alphanumeric() || next == '_' {
                let rest = self.rest();
                let length = rest.find(|char: char| !char.is_alphanumeric() && char != '_').unwrap_or(rest.len());
                self.skip(length);
                self.push(Token::Name(rest[..length].to_owned()));
            } else if next == '\'' || next == '"' {
                self.string(next)?;
            } else {
                self.operator(&mut open)?;
            }
        }
    }

    fn operator(&mut self, open: &mut Vec<char>) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let Some(operator) = OPERATORS.into_iter().find(|operator| rest.starts_with(operator)) else {
            return self.error(format!("{:?} is not allowed here", rest.chars().next().unwrap_or(' ')));
        };
        let closes = match operator {
            "(" => {
                open.push(')');
                None
            }
            "[" => {
                open.push(']');
                None
            }
            "{" => {
                open.push('}');
                None
            }
            ")" | "]" | "}" => operator.chars().next(),
            _ => None,
        };
        if closes.is_some() && open.pop() != closes {
            return self.error(format!("{operator} closes nothing"));
        }
        self.skip(operator.len());
        self.push(Token::Operator(operator));
        Ok(())
    }

    fn number(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let after_dot = self.source[..self.at].ends_with('.');
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
        let mut length = digits(rest);
        let mut is_float = false;
        if !after_dot {
            if rest[length..].starts_with('.') && rest[length + 1..].starts_with(|c: char| c.is_ascii_digit()) {
                length += 1 + digits(&rest[length + 1..]);
                is_float = true;
            }
            if let Some(exponent) = rest[length..].strip_prefix(['e', 'E']) {
                let signed = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
                if signed.starts_with(|c: char| c.is_ascii_digit()) {
                    length += 1 + (exponent.len() - signed.len()) + digits(signed);
                    is_float = true;
                }
            }
        }
        let radix = match rest.get(..2).map(str::to_ascii_lowercase).as_deref() {
            Some("0x") => 16,
            Some("0o") => 8,
            Some("0b") => 2,
            _ => 10,
        };
        let start = if radix == 10 { 0 } else { 2 };
        if radix != 10 {
            let digit = |c: char| c.is_digit(radix) || c == '_';
            length = 2 + rest[2..].len() - rest[2..].trim_start_matches(digit).len();
        }
        let plain = rest[start..length].replace('_', "");
        self.skip(length);
        if is_float {
            let Ok(number) = plain.parse() else { return self.error("not a number") };
            self.push(Token::Float(number));
        } else {
            let Ok(number) = i128::from_str_radix(&plain, radix) else { return self.error("number too large") };
            self.push(Token::Int(number));
        }
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), SyntaxError> {
        let rest = &self.rest()[1..];
        let mut escaped = false;
        let end = rest.bytes().position(|byte| {
            let ends = !escaped && byte == quote as u8;
            escaped = !escaped && byte == b'\\';
            ends
        });
        let Some(end) = end else { return self.error("unterminated string") };
        let text = unescape(&rest[..end]);
        self.skip(end + 2);
        match text {
            Some(text) => self.push(Token::Text(text)),
            None => return self.error("invalid escape in a string"),
        }
        Ok(())
    }
}

fn next_tag(rest: &str) -> Option<(usize, u8)> {
    let bytes = rest.as_bytes();
    memchr::memchr_iter(b'{', bytes).find_map(|at| match bytes.get(at + 1) {
        Some(kind @ (b'{' | b'%' | b'#')) => Some((at, *kind)),
        _ => None,
    })
}

fn sign(text: &str) -> Option<char> {
    text.chars().next().filter(|sign| matches!(sign, '-' | '+'))
}

/// Returns the length of `word` and the whitespace around it, if the text starts with it.
fn keyword(text: &str, word: &str) -> Option<usize> {
    let after = text.trim_start_matches(is_space).strip_prefix(word)?.trim_start_matches(is_space);
    Some(text.len() - after.len())
}

/// Returns the length of `%}` including its sign, and the sign.
fn block_end(text: &str) -> Option<(usize, Option<char>)> {
    let sign = sign(text);
    let length = sign.map_or(0, char::len_utf8);
    text[length..].starts_with("%}").then_some((length + 2, sign))
}

/// Resolves Python's string escapes; an unknown escape is left unchanged.
fn unescape(raw: &str) -> Option<String> {
    let mut text = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        let escape = rest[at + 1..].chars().next()?;
        rest = &rest[at + 1 + escape.len_utf8()..];
        let digits = match escape {
            'n' => {
                text.push('\n');
                continue;
            }
            't' => {
                text.push('\t');
                continue;
            }
            'r' => {
                text.push('\r');
                continue;
            }
            'a' => {
                text.push('\u{7}');
                continue;
            }
            'b' => {
                text.push('\u{8}');
                continue;
            }
            'f' => {
                text.push('\u{c}');
                continue;
            }
            'v' => {
                text.push('\u{b}');
                continue;
            }
            '\\' | '\'' | '"' => {
                text.push(escape);
                continue;
            }
            '\n' => continue,
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => {
                let after = &rest.as_bytes()[..rest.len().min(2)];
                let more = after.iter().take_while(|byte| matches!(byte, b'0'..=b'7')).count();
                let octal = format!("{escape}{}", &rest[..more]);
                text.push(char::from_u32(u32::from_str_radix(&octal, 8).ok()?)?);
                rest = &rest[more..];
                continue;
            }
            'N' => return None,
            other => {
                text.push('\\');
                text.push(other);
                continue;
            }
        };
        let (code, after) = rest.split_at_checked(digits)?;
        text.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
        rest = after;
    }
    text.push_str(rest);
    Some(text)
}
