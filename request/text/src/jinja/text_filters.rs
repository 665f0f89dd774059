//! Filters on text.

use super::arguments::Given;
use super::methods::Ends;
use super::run::Run;
use super::text::{capitalize, escape, is_space, lines};
use super::value::{Kind, Text};
use super::{Fallible, List, Value, refused};

/// Value and arguments of a filter that is not a text filter, returned unused.
type Left<'v> = (Value<'v>, Given<'v>);

impl<'v> Run<'v> {
    /// Applies a text filter. The inner error returns value and arguments if `name` is not a text filter.
    pub(super) fn text_filter(
        &mut self,
        name: &str,
        of: Value<'v>,
        arguments: Given<'v>,
    ) -> Fallible<Result<Value<'v>, Left<'v>>> {
        if let Value::Text(text) = &of {
            self.steps(text.len() / 64)?;
        }
        Ok(Ok(match name {
            "trim" => {
                let text = self.text_of(&of)?;
                self.strip(&text, arguments, Ends { start: true, end: true })?
            }
            "upper" | "lower" | "capitalize" | "title" | "e" | "escape" | "forceescape" | "safe" | "striptags"
            | "wordcount" => {
                arguments.none()?;
                let text = self.text_of(&of)?;
                self.changed(name, &text)?
            }
            "replace" => {
                let [old, new, count] = arguments.bind(["old", "new", "count"])?;
                let (old, new) = (self.text_of(&old.required("old")?)?, self.text_of(&new.required("new")?)?);
                let text = self.text_of(&of)?;
                // The filter ignores whether the text is markup.
                self.replace(&text.markup(false), &[Value::Text(old), Value::Text(new)], count.given())?
            }
            "join" => {
                let [separator, attribute] = arguments.bind(["d", "attribute"])?;
                let separator = separator.any().unwrap_or_else(|| Value::text(""));
                let separator = self.text_of(&separator)?;
                self.join(&of, &separator, attribute.given())?
            }
            "format" => self.format_filter(&of, arguments)?,
            "indent" => self.indent(&of, arguments)?,
            "center" => {
                let [width] = arguments.bind(["width"])?;
                let width = width.whole(80)?;
                let text = self.text_of(&of)?;
                self.method(&Value::Text(text), "center", Given::of(vec![Value::Int(width)]))?
            }
            "truncate" => self.truncate(&of, arguments)?,
            "urlencode" => self.url_encode(&of, arguments)?,
            "filesizeformat" => file_size(&of, arguments)?,
            "pprint" => {
                arguments.none()?;
                let mut out = String::new();
                self.repr(&of, &mut out)?;
                if out.len() > 80 {
                    return refused("pprint output of more than one line is not supported");
                }
                Value::text(out)
            }
            _ => return Ok(Err((of, arguments))),
        }))
    }

    fn changed(&mut self, name: &str, text: &Text<'v>) -> Fallible<Value<'v>> {
        // Escaping may need six bytes per byte.
        self.room(text.len() * 2)?;
        Ok(match name {
            "upper" => Value::Text(Text::from(text.to_uppercase()).markup(text.is_markup)),
            "lower" => Value::Text(Text::from(text.to_lowercase()).markup(text.is_markup)),
            "capitalize" => Value::Text(Text::from(capitalize(text)).markup(text.is_markup)),
            "title" => Value::text(title(text)),
            "safe" => Value::Text(text.clone().markup(true)),
            "e" | "escape" if text.is_markup => Value::Text(text.clone()),
            "striptags" => Value::text(without_tags(text)),
            "wordcount" => {
                let is_word = |char: char| char.is_alphanumeric() || char == '_';
                Value::int(text.split(|char| !is_word(char)).filter(|word| !word.is_empty()).count())
            }
            _ => {
                let escaped = escape(text);
                self.room(escaped.len())?;
                Value::Text(Text::from(escaped).markup(true))
            }
        })
    }

    fn join(&mut self, of: &Value<'v>, separator: &str, attribute: Option<Value<'v>>) -> Fallible<Value<'v>> {
        let mut items = self.items(of)?;
        if let Some(attribute) = attribute {
            self.room_for_items(items.len())?;
            let attributes: Fallible<_> = items.iter().map(|item| self.attribute_path(&item, &attribute)).collect();
            items = List::own(Kind::List, attributes?);
        }
        self.joined(&items, separator).map(Value::text)
    }

    /// Joins printed items with a separator.
    pub(super) fn joined(&mut self, items: &List<'v>, separator: &str) -> Fallible<String> {
        let mut joined = String::new();
        for (at, item) in items.iter().enumerate() {
            let text = self.printed(&item)?;
            self.room(text.len() + separator.len() + 1)?;
            if at > 0 {
                joined.push_str(separator);
            }
            joined.push_str(&text);
        }
        Ok(joined)
    }

    fn indent(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [width, first, blank] = arguments.bind(["width", "first", "blank"])?;
        let indent = match width.any() {
            Some(Value::Text(indent)) => indent.to_string(),
            width => {
                let width = width.map_or(Ok(4), |width| width.whole("width"))?;
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                self.room(width)?;
                " ".repeat(width)
            }
        };
        let Value::Text(text) = of else { return refused(format!("indent of {}", of.type_name())) };
        let (first, blank) = (first.truth(false), blank.truth(false));
        // Append a line end so that a trailing one in the text is preserved.
        let whole = format!("{}\n", &**text);
        let all = lines(&whole, false);
        self.room(text.len().saturating_add(all.len().saturating_mul(indent.len() + 1)))?;
        let mut out = String::new();
        for (at, line) in all.iter().enumerate() {
            if at > 0 {
                out.push('\n');
            }
            if (at == 0 && first) || (at > 0 && (blank || !line.is_empty())) {
                out.push_str(&indent);
            }
            out.push_str(line);
        }
        Ok(Value::Text(Text::from(out).markup(text.is_markup)))
    }

    fn truncate(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [length, kill_words, end, leeway] = arguments.bind(["length", "killwords", "end", "leeway"])?;
        let (length, leeway) = (length.whole(255)?, leeway.given().map_or(Ok(5), |leeway| leeway.whole("leeway"))?);
        let end = end.text("...")?;
        let end_length = end.chars().count() as i128;
        if length < end_length || leeway < 0 {
            return refused(format!("truncate expects a length of at least {end_length}"));
        }
        if self.length(of)?.whole("a length")? <= length + leeway {
            return Ok(of.clone());
        }
        let Value::Text(text) = of else { return refused(format!("truncate of {}", of.type_name())) };
        let count = usize::try_from(length - end_length).unwrap_or(0);
        let cut: String = text.chars().take(count).collect();
        let cut =
            if kill_words.truth(false) { &*cut } else { cut.rsplit_once(' ').map_or(&*cut, |(before, _)| before) };
        self.made(format!("{cut}{}", &*end))
    }

    fn url_encode(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        arguments.none()?;
        let pairs = match of {
            Value::Map(map) => super::methods::pairs(map.entries()),
            Value::List(list) => list.iter().collect(),
            other => {
                let text = self.text_of(other)?;
                self.room(text.len().saturating_mul(3))?;
                return Ok(Value::text(quoted(&text, "/")));
            }
        };
        let mut out = String::new();
        for (at, pair) in pairs.iter().enumerate() {
            let pair = self.pair(pair)?;
            let (key, value) = (self.text_of(&pair.key)?, self.text_of(&pair.value)?);
            self.room((key.len() + value.len()).saturating_mul(3) + 2)?;
            if at > 0 {
                out.push('&');
            }
            out.push_str(&quoted(&key, "").replace("%20", "+"));
            out.push('=');
            out.push_str(&quoted(&value, "").replace("%20", "+"));
        }
        Ok(Value::text(out))
    }
}

fn quoted(text: &str, safe: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let char = char::from(byte);
        if char.is_ascii_alphanumeric() || "_.-~".contains(char) || (char.is_ascii() && safe.contains(char)) {
            out.push(char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Implements the filter `title`, in which, unlike in the method, words end at a hyphen, whitespace or an opening
/// bracket.
fn title(text: &str) -> String {
    let ends_word = |char: char| is_space(char) || matches!(char, '-' | '(' | '{' | '[' | '<');
    let upper_first = |word: &str| {
        let mut chars = word.chars();
        chars.next().into_iter().flat_map(char::to_uppercase).collect::<String>() + &chars.as_str().to_lowercase()
    };
    text.split_inclusive(ends_word).map(upper_first).collect()
}

/// Returns the text without the two marks and everything between them.
fn without(text: &str, begin: &str, end: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(start) = rest.find(begin) {
        let Some(length) = rest[start..].find(end) else { break };
        kept.push_str(&rest[..start]);
        rest = &rest[start + length + end.len()..];
    }
    kept + rest
}

fn without_tags(text: &str) -> String {
    let rest = without(&without(text, "<!--", "-->"), "<", ">");
    let words: Vec<&str> = rest.split(is_space).filter(|word| !word.is_empty()).collect();
    let unescaped =
        words.join(" ").replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'").replace("&#34;", "\"");
    unescaped.replace("&quot;", "\"").replace("&amp;", "&")
}

fn file_size<'v>(of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
    let [binary] = arguments.bind(["binary"])?;
    let is_binary = binary.truth(false);
    let Some(bytes) = super::operators::Number::of(of).map(super::operators::Number::float) else {
        return refused("filesizeformat takes a number");
    };
    let (base, units) = if is_binary {
        (1024.0, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"])
    } else {
        (1000.0, ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"])
    };
    if bytes == 1.0 {
        return Ok(Value::text("1 Byte"));
    }
    if bytes < base {
        return Ok(Value::text(format!("{} Bytes", bytes.trunc())));
    }
    let mut size = bytes;
    let mut unit = "";
    for name in units {
        size /= base;
        unit = name;
        if size < base {
            break;
        }
    }
    Ok(Value::text(format!("{size:.1} {unit}")))
}
