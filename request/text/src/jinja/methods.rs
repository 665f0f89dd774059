//! The methods of Python types that are available in an immutable sandbox.

use super::arguments::Given;
use super::run::Run;
use super::text::{capitalize, escape, is_line_end, is_space, lines};
use super::value::{Entry, Kind, Loop, Text};
use super::{Fallible, List, Map, Value, refused};

const OF_TEXT: [&str; 45] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
    "encode",
];
const OF_MAP: [&str; 5] = ["items", "keys", "values", "get", "copy"];
const OF_LIST: [&str; 3] = ["index", "count", "copy"];
const OF_NUMBER: [&str; 2] = ["is_integer", "bit_length"];
/// Attributes of `loop`.
pub(super) const LOOP_ITEMS: [&str; 13] = [
    "first",
    "last",
    "index",
    "index0",
    "revindex",
    "revindex0",
    "length",
    "depth",
    "depth0",
    "previtem",
    "nextitem",
    "cycle",
    "changed",
];

/// Returns whether a value has a method of this name.
pub(super) fn has(of: &Value<'_>, name: &str) -> bool {
    match of {
        Value::Text(_) => OF_TEXT.contains(&name),
        Value::Map(_) => OF_MAP.contains(&name),
        Value::List(list) => match list.kind {
            Kind::List => OF_LIST.contains(&name),
            Kind::Tuple | Kind::Range => OF_LIST[..2].contains(&name),
            _ => false,
        },
        Value::Float(_) | Value::Int(_) | Value::Bool(_) => OF_NUMBER.contains(&name),
        _ => false,
    }
}

/// Returns the name if it is a method of any type.
pub(super) fn known(name: &str) -> Option<&'static str> {
    OF_TEXT.into_iter().chain(OF_MAP).chain(OF_LIST).chain(OF_NUMBER).find(|known| *known == name)
}

/// A window of a string.
struct Window<'v> {
    /// Number of characters before the window.
    before: i128,
    text: Text<'v>,
}

impl<'v> Run<'v> {
    pub(super) fn method(&mut self, of: &Value<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        match of {
            Value::Text(text) => self.text_method(text, name, arguments),
            Value::Map(map) => self.map_method(map, name, arguments),
            Value::List(list) => self.list_method(list, name, arguments),
            Value::Loop(each) => self.loop_method(each, name, arguments),
            Value::Float(number) if name == "is_integer" => Ok(Value::Bool(number.fract() == 0.0)),
            Value::Int(_) | Value::Bool(_) if name == "is_integer" => Ok(Value::Bool(true)),
            other => refused(format!("{} has no method {name}", other.type_name())),
        }
    }

    fn map_method(&mut self, map: &Map<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        if name == "get" {
            let [key, default] = arguments.bind(["key", "default"])?;
            let key = key.required("key")?;
            self.steps(map.len() / 16)?;
            self.hashable(&key)?;
            let found = match &key {
                Value::Text(key) => map.get_text(key),
                other => match self.item(&Value::Map(map.clone()), other)? {
                    Value::Undefined => None,
                    found => Some(found),
                },
            };
            return Ok(found.unwrap_or_else(|| default.any().unwrap_or(Value::None)));
        }
        arguments.none()?;
        self.room_for_items(map.len().saturating_mul(2))?;
        let entries = map.entries();
        let (kind, items) = match name {
            "keys" => (Kind::Keys, entries.into_iter().map(|entry| entry.key).collect()),
            "values" => (Kind::Values, entries.into_iter().map(|entry| entry.value).collect()),
            "items" => (Kind::Items, pairs(entries)),
            _ => return Ok(Value::Map(map.clone())),
        };
        Ok(Value::List(List::own(kind, items)))
    }

    fn list_method(&mut self, list: &List<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        if name == "copy" {
            arguments.none()?;
            return Ok(Value::List(list.clone()));
        }
        let [value] = arguments.bind(["value"])?;
        let value = value.required("value")?;
        let mut count = 0;
        for (at, item) in list.iter().enumerate() {
            if self.equal(&item, &value)? {
                if name == "index" {
                    return Ok(Value::int(at));
                }
                count += 1;
            }
        }
        if name == "index" { refused("the value is not in the list") } else { Ok(Value::Int(count)) }
    }

    fn loop_method(&mut self, each: &Loop<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let values = arguments.values;
        if name == "cycle" {
            let at = each.index.get().checked_rem(values.len());
            return at.map_or_else(|| refused("no items for cycling given"), |at| Ok(values[at].clone()));
        }
        let mut now = String::new();
        self.repr(&Value::tuple(values), &mut now)?;
        let is_new = each.seen.borrow().as_ref() != Some(&now);
        each.seen.replace(Some(now));
        Ok(Value::Bool(is_new))
    }

    fn text_method(&mut self, text: &Text<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        self.steps(1 + text.len() / 64)?;
        match name {
            "strip" | "lstrip" | "rstrip" => {
                self.strip(text, arguments, Ends { start: name != "rstrip", end: name != "lstrip" })
            }
            "startswith" | "endswith" => self.begins(text, name == "endswith", arguments),
            "split" | "rsplit" => self.split(text, name == "rsplit", arguments),
            "replace" => {
                let [old, new, count] = arguments.bind(["old", "new", "count"])?;
                let of = [old.required("old")?, new.required("new")?];
                self.replace(text, &of, count.given())
            }
            "join" => {
                let [items] = arguments.bind(["iterable"])?;
                let items = items.required("iterable")?;
                self.join_strict(text, &items)
            }
            "format" | "format_map" => self.format(text, arguments),
            "find" | "index" | "rfind" | "rindex" | "count" => self.find(text, name, arguments),
            "partition" | "rpartition" | "splitlines" | "removeprefix" | "removesuffix" => {
                self.cut(text, name, arguments)
            }
            "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => self.padded(text, name, arguments),
            "encode" => refused("bytes are not supported"),
            _ => {
                arguments.none()?;
                match changed(text, name) {
                    Some(changed) => {
                        self.room(changed.len())?;
                        Ok(Value::Text(Text::from(changed).markup(text.is_markup)))
                    }
                    None => Ok(Value::Bool(is(text, name))),
                }
            }
        }
    }

    pub(super) fn strip(&mut self, text: &Text<'v>, arguments: Given<'v>, ends: Ends) -> Fallible<Value<'v>> {
        let [chars] = arguments.bind(["chars"])?;
        let chars = match chars.given() {
            None => None,
            Some(Value::Text(chars)) => Some(chars),
            Some(other) => return refused(format!("expected a string to strip, not {}", other.type_name())),
        };
        self.steps(text.len().saturating_mul(chars.as_ref().map_or(1, |chars| chars.len())) / 64)?;
        let chars = chars.as_deref();
        let goes = |char: char| chars.map_or_else(|| is_space(char), |chars| chars.contains(char));
        let from = if ends.start { text.len() - text.trim_start_matches(goes).len() } else { 0 };
        let left = if ends.end { text[from..].trim_end_matches(goes).len() } else { text.len() - from };
        self.room(text.cost_of(left))?;
        Ok(Value::Text(text.part(from..from + left)))
    }

    fn begins(&mut self, text: &Text<'v>, at_end: bool, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [with, start, end] = arguments.bind(["prefix", "start", "end"])?;
        let with = with.required("prefix")?;
        let Some(Window { text, .. }) = self.window(text, start.given(), end.given())? else {
            return Ok(Value::Bool(false));
        };
        let begins = |with: &Value<'v>| match with {
            Value::Text(with) => Ok(if at_end { text.ends_with(&**with) } else { text.starts_with(&**with) }),
            other => refused(format!("expected a string or a tuple of strings, not {}", other.type_name())),
        };
        match &with {
            Value::List(list) if list.kind == Kind::Tuple => {
                self.steps(list.len())?;
                for with in list.iter() {
                    if begins(&with)? {
                        return Ok(Value::Bool(true));
                    }
                }
                Ok(Value::Bool(false))
            }
            with => begins(with).map(Value::Bool),
        }
    }

    /// Returns the part between two indices, and the number of characters before it. Past the end there is no part, not
    /// even an empty one.
    fn window(
        &mut self,
        text: &Text<'v>,
        start: Option<Value<'v>>,
        end: Option<Value<'v>>,
    ) -> Fallible<Option<Window<'v>>> {
        if start.is_none() && end.is_none() {
            return Ok(Some(Window { before: 0, text: text.clone() }));
        }
        let count = text.chars().count() as i128;
        let place = |value: Option<Value<'v>>, default| match value {
            None => Ok(default),
            Some(value) => value.whole("an index").map(|at| if at < 0 { (at + count).max(0) } else { at }),
        };
        let (start, end) = (place(start, 0)?, place(end, count)?.min(count));
        if start > end {
            return Ok(None);
        }
        let text = self.slice_text(text, [Some(start), Some(end), None])?;
        Ok(Some(Window { before: start, text }))
    }

    fn split(&mut self, text: &Text<'v>, from_end: bool, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [separator, most] = arguments.bind(["sep", "maxsplit"])?;
        let most = most.whole(-1)?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let parts = match separator.given() {
            Some(Value::Text(by)) if by.is_empty() => return refused("empty separator"),
            Some(Value::Text(by)) => {
                let count = memchr::memmem::find_iter(text.as_bytes(), by.as_bytes()).count() + 1;
                self.room_for_items(count.min(most.saturating_add(1)))?;
                self.room(text.cost_of(text.len()))?;
                if from_end {
                    let mut parts = text.parts(text.rsplitn(most.saturating_add(1), &*by));
                    parts.reverse();
                    parts
                } else {
                    text.parts(text.splitn(most.saturating_add(1), &*by))
                }
            }
            Some(other) => return refused(format!("a separator must be a string, not {}", other.type_name())),
            None => {
                self.room_for_items(text.split(is_space).count())?;
                self.room(text.cost_of(text.len()))?;
                words(text, most, from_end)
            }
        };
        Ok(Value::list(parts))
    }

    pub(super) fn replace(
        &mut self,
        text: &Text<'v>,
        [old, new]: &[Value<'v>; 2],
        count: Option<Value<'v>>,
    ) -> Fallible<Value<'v>> {
        let count = count.map_or(Ok(-1), |count| count.whole("count"))?;
        let (Value::Text(old), Value::Text(new)) = (old, new) else { return refused("replace takes strings") };
        let escaped = (text.is_markup && !new.is_markup).then(|| escape(new));
        let new = escaped.as_deref().unwrap_or(new);
        let found = if old.is_empty() {
            text.chars().count() + 1
        } else {
            memchr::memmem::find_iter(text.as_bytes(), old.as_bytes()).count()
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(found);
        if count == 0 {
            return Ok(Value::Text(text.clone()));
        }
        self.room(text.len().saturating_add(new.len().saturating_mul(count)))?;
        Ok(Value::Text(Text::from(text.replacen(&**old, new, count)).markup(text.is_markup)))
    }

    fn join_strict(&mut self, separator: &Text<'v>, items: &Value<'v>) -> Fallible<Value<'v>> {
        let items = self.items(items)?;
        let mut texts = Vec::new();
        for item in items.iter() {
            texts.push(match item {
                Value::Text(text) if separator.is_markup && !text.is_markup => self.made(escape(&text))?,
                Value::Text(_) => item,
                other => return refused(format!("expected a string to join, not {}", other.type_name())),
            });
        }
        let joined = self.joined(&List::own(Kind::List, texts), separator)?;
        Ok(Value::Text(Text::from(joined).markup(separator.is_markup)))
    }

    fn find(&mut self, text: &Text<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [part, start, end] = arguments.bind(["sub", "start", "end"])?;
        let Value::Text(part) = part.required("sub")? else { return refused("expected a substring to search for") };
        let window = self.window(text, start.given(), end.given())?;
        if name == "count" {
            return Ok(Value::int(match window {
                None => 0,
                Some(Window { text, .. }) if part.is_empty() => text.chars().count() + 1,
                Some(Window { text, .. }) => text.matches(&*part).count(),
            }));
        }
        let place = |Window { before, text }: Window<'v>| {
            let byte = if name.starts_with('r') { text.rfind(&*part) } else { text.find(&*part) }?;
            Some(before + text[..byte].chars().count() as i128)
        };
        match window.and_then(place) {
            Some(at) => Ok(Value::Int(at)),
            None if name.ends_with("index") => refused("substring not found"),
            None => Ok(Value::Int(-1)),
        }
    }

    fn cut(&mut self, text: &Text<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [by] = arguments.bind([if name == "splitlines" { "keepends" } else { "sep" }])?;
        self.room(text.cost_of(text.len()))?;
        if name == "splitlines" {
            self.room_for_items(text.matches(is_line_end).count())?;
            return Ok(Value::list(text.parts(lines(text, by.truth(false)).into_iter())));
        }
        let Value::Text(by) = by.required("sep")? else { return refused(format!("{name} takes a string")) };
        let whole = || Value::Text(text.clone());
        let place = match name {
            "removeprefix" if text.starts_with(&*by) => return Ok(Value::Text(text.part(by.len()..text.len()))),
            "removesuffix" if text.ends_with(&*by) => return Ok(Value::Text(text.part(0..text.len() - by.len()))),
            "removeprefix" | "removesuffix" => return Ok(whole()),
            _ if by.is_empty() => return refused("empty separator"),
            "partition" => text.find(&*by),
            _ => text.rfind(&*by),
        };
        let none = || Value::text("");
        Ok(Value::tuple(match place {
            Some(at) => {
                let behind = text.part(at + by.len()..text.len());
                vec![Value::Text(text.part(0..at)), Value::Text(by), Value::Text(behind)]
            }
            None if name == "partition" => vec![whole(), none(), none()],
            None => vec![none(), none(), whole()],
        }))
    }

    fn padded(&mut self, text: &Text<'v>, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        if name == "expandtabs" {
            let [size] = arguments.bind(["tabsize"])?;
            let size = usize::try_from(size.whole(8)?.max(0)).unwrap_or(usize::MAX);
            self.room(text.len().saturating_add(text.matches('\t').count().saturating_mul(size)))?;
            return Ok(Value::text(expand_tabs(text, size)));
        }
        let [width, fill] = arguments.bind(["width", "fillchar"])?;
        let width = usize::try_from(width.required("width")?.whole("a width")?.max(0)).unwrap_or(usize::MAX);
        let fill = fill.text(if name == "zfill" { "0" } else { " " })?;
        let mut chars = fill.chars();
        let (Some(fill), None) = (chars.next(), chars.next()) else { return refused("the fill must be one character") };
        let missing = width.saturating_sub(text.chars().count());
        self.room(text.len().saturating_add(missing.saturating_mul(fill.len_utf8())))?;
        let left = match name {
            "center" => missing / 2 + (missing & width & 1),
            "ljust" => 0,
            _ => missing,
        };
        let pad = |count| fill.to_string().repeat(count);
        let padded = match (name, text.strip_prefix(['+', '-'])) {
            ("zfill", Some(digits)) => format!("{}{}{digits}", &text[..1], pad(missing)),
            _ => format!("{}{}{}", pad(left), &**text, pad(missing - left)),
        };
        Ok(Value::Text(Text::from(padded).markup(text.is_markup)))
    }
}

/// The ends at which whitespace is stripped.
pub(super) struct Ends {
    pub(super) start: bool,
    pub(super) end: bool,
}

/// Returns the key and value of each entry as a tuple.
pub(super) fn pairs(entries: Vec<Entry<'_>>) -> Vec<Value<'_>> {
    entries.into_iter().map(|entry| Value::tuple(vec![entry.key, entry.value])).collect()
}

/// Implements `split()` at whitespace.
fn words<'v>(text: &Text<'v>, most: usize, from_end: bool) -> Vec<Value<'v>> {
    let mut parts = Vec::new();
    let mut rest = &**text;
    loop {
        rest = if from_end { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        if rest.is_empty() {
            break;
        }
        if parts.len() == most {
            // The remainder retains whitespace inside it and at its far end.
            parts.push(rest);
            break;
        }
        let end = if from_end {
            rest.char_indices().rev().find(|(_, char)| is_space(*char)).map_or(0, |(at, char)| at + char.len_utf8())
        } else {
            rest.find(is_space).unwrap_or(rest.len())
        };
        let (before, behind) = rest.split_at(end);
        parts.push(if from_end { behind } else { before });
        rest = if from_end { before } else { behind };
    }
    if from_end {
        parts.reverse();
    }
    text.parts(parts.into_iter())
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for char in text.chars() {
        match char {
            '\t' if size > 0 => {
                let count = size - column % size;
                out.push_str(&" ".repeat(count));
                column += count;
            }
            '\t' => {}
            other => {
                column = if matches!(other, '\n' | '\r') { 0 } else { column + 1 };
                out.push(other);
            }
        }
    }
    out
}

fn changed(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "lower" | "casefold" => text.to_lowercase(),
        "upper" => text.to_uppercase(),
        "capitalize" => capitalize(text),
        "title" => {
            let mut in_word = false;
            let mut title = String::with_capacity(text.len());
            for char in text.chars() {
                if in_word {
                    title.extend(char.to_lowercase())
                } else {
                    title.extend(char.to_uppercase())
                }
                in_word = char.is_alphabetic();
            }
            title
        }
        "swapcase" => {
            let swap = |char: char| {
                if char.is_uppercase() { char.to_lowercase().to_string() } else { char.to_uppercase().to_string() }
            };
            text.chars().map(swap).collect()
        }
        _ => return None,
    })
}

fn is(text: &str, name: &str) -> bool {
    let cased = || text.chars().any(|char| char.is_lowercase() || char.is_uppercase());
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" => all(|char| char.is_ascii_digit() || (!char.is_ascii() && char.is_numeric())),
        "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "islower" => cased() && !text.chars().any(char::is_uppercase),
        "isupper" => cased() && !text.chars().any(char::is_lowercase),
        "isprintable" => {
            let mut quoted = String::new();
            super::text::quote(text, &mut quoted);
            text.chars().all(|char| !char.is_control()) && !quoted[1..].contains("\\u") && !quoted[1..].contains("\\x")
        }
        "isidentifier" => {
            text.chars().all(|char| char.is_alphanumeric() || char == '_')
                && !text.starts_with(char::is_numeric)
                && !text.is_empty()
        }
        "istitle" => cased() && changed(text, "title").as_deref() == Some(text),
        _ => false,
    }
}
