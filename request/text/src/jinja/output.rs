//! Converts values to strings: `str`, `repr` and JSON.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::arguments::Bound;
use super::run::Run;
use super::text::{float, quote, quote_json};
use super::value::{Kind, Map};
use super::{Failure, Fallible, List, MAX_VALUE_DEPTH, Value, refused};

/// Maximum nesting of a request's JSON plus that of the lists around it.
const MAX_PRINTED_DEPTH: u32 = 128 + MAX_VALUE_DEPTH;
/// Maximum indent per level of JSON.
const MAX_INDENT: usize = 64;

/// Settings of `tojson`.
struct Json {
    ascii: bool,
    indent: Option<String>,
    between: String,
    after_key: String,
    sort: bool,
}

impl<'v> Run<'v> {
    /// `str(value)`
    pub(super) fn printed<'t>(&mut self, value: &'t Value<'v>) -> Fallible<Cow<'t, str>> {
        Ok(match value {
            Value::Text(text) => Cow::Borrowed(text),
            Value::Undefined => Cow::Borrowed(""),
            Value::None => Cow::Borrowed("None"),
            Value::Bool(is) => Cow::Borrowed(if *is { "True" } else { "False" }),
            Value::Int(number) => Cow::Owned(number.to_string()),
            Value::Float(number) => Cow::Owned(float(*number)),
            Value::Callable(callable) if let super::value::Callable::Joiner { .. } = &**callable => {
                return refused("a joiner prints as a memory address");
            }
            other => {
                let mut out = String::new();
                self.repr(other, &mut out)?;
                Cow::Owned(out)
            }
        })
    }

    /// Appends `repr(value)`.
    pub(super) fn repr(&mut self, value: &Value<'v>, out: &mut String) -> Fallible<()> {
        let start = out.len();
        match value {
            Value::Text(text) if text.is_markup => {
                out.push_str("Markup(");
                quote(text, out);
                out.push(')');
            }
            Value::Text(text) => {
                self.room(text.len())?;
                quote(text, out);
            }
            Value::Undefined => out.push_str("Undefined"),
            Value::List(list) => self.repr_list(list, out)?,
            Value::Map(map) => self.repr_map(map, out)?,
            Value::Namespace(at) => {
                out.push_str("<Namespace ");
                let attributes = self.attributes(*at);
                self.repr_map(&attributes, out)?;
                out.push('>');
            }
            Value::Loop(each) => {
                let _ = write!(out, "<LoopContext {}/{}>", each.index.get() + 1, each.items.len());
            }
            Value::Callable(callable) => match &**callable {
                super::value::Callable::Macro { node, .. } => {
                    let _ = write!(out, "<Macro '{}'>", self.template.names[node.name as usize]);
                }
                _ => return refused("a function prints as a memory address"),
            },
            Value::Iterator(_) => return refused("a generator prints as a memory address"),
            other => {
                let text = self.printed(other)?;
                out.push_str(&text);
            }
        }
        self.steps(1 + (out.len() - start) / 64)
    }

    fn down(&mut self) -> Fallible<()> {
        self.depth += 1;
        if self.depth > super::MAX_DEPTH + MAX_PRINTED_DEPTH {
            return Err(Failure::TooMuch { what: "nesting levels", limit: MAX_PRINTED_DEPTH.into() });
        }
        Ok(())
    }

    fn repr_list(&mut self, list: &List<'v>, out: &mut String) -> Fallible<()> {
        let (open, close) = match list.kind {
            Kind::List => ("[", "]"),
            Kind::Tuple if list.len() == 1 => ("(", ",)"),
            Kind::Tuple => ("(", ")"),
            Kind::Keys => ("dict_keys([", "])"),
            Kind::Values => ("dict_values([", "])"),
            Kind::Items => ("dict_items([", "])"),
            Kind::Range => {
                let [start, step] = list.range_of().unwrap_or([0, 1]);
                let stop = start + step * list.len() as i128;
                let _ = if step == 1 {
                    write!(out, "range({start}, {stop})")
                } else {
                    write!(out, "range({start}, {stop}, {step})")
                };
                return Ok(());
            }
        };
        self.down()?;
        out.push_str(open);
        for (at, item) in list.iter().enumerate() {
            if at > 0 {
                out.push_str(", ");
            }
            self.repr(&item, out)?;
        }
        out.push_str(close);
        self.depth -= 1;
        self.room(0)
    }

    fn repr_map(&mut self, map: &Map<'v>, out: &mut String) -> Fallible<()> {
        self.down()?;
        self.room_for_items(map.len())?;
        out.push('{');
        for (at, entry) in map.entries().iter().enumerate() {
            if at > 0 {
                out.push_str(", ");
            }
            self.repr(&entry.key, out)?;
            out.push_str(": ");
            self.repr(&entry.value, out)?;
        }
        out.push('}');
        self.depth -= 1;
        Ok(())
    }

    /// Implements Transformers' filter `tojson`, which is `json.dumps`.
    pub(super) fn dumped(&mut self, value: &Value<'v>, arguments: super::arguments::Given<'v>) -> Fallible<Value<'v>> {
        let [ascii, indent, separators, sort] =
            arguments.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
        let indent = match indent.given() {
            None => None,
            Some(Value::Text(text)) if text.len() <= MAX_INDENT => Some(text.to_string()),
            Some(other) => match usize::try_from(other.whole("indent")?.max(0)) {
                Ok(width) if width <= MAX_INDENT => Some(" ".repeat(width)),
                _ => return refused(format!("the indent must not exceed {MAX_INDENT}")),
            },
        };
        let (between, after_key) = match separators.given() {
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some(pair) => match self.items(&pair)?.iter().collect::<Vec<_>>().as_slice() {
                [Value::Text(between), Value::Text(after)] => (between.to_string(), after.to_string()),
                _ => return refused("separators must be two strings"),
            },
        };
        let is = |value: Bound<'v>| value.given().is_some_and(|value| value.is_true());
        let how = Json { ascii: is(ascii), indent, between, after_key, sort: is(sort) };
        let mut out = String::new();
        self.json(value, &how, 0, &mut out)?;
        Ok(Value::text(out))
    }

    fn json(&mut self, value: &Value<'v>, how: &Json, level: usize, out: &mut String) -> Fallible<()> {
        let start = out.len();
        self.steps(1)?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(is) => out.push_str(if *is { "true" } else { "false" }),
            Value::Int(number) => {
                let _ = write!(out, "{number}");
            }
            Value::Float(number) => out.push_str(&json_float(*number)),
            Value::Text(text) => {
                self.room(text.len())?;
                quote_json(text, how.ascii, out);
            }
            Value::List(list) if list.kind.is_list_or_tuple() => {
                return self.json_list(list, how, level, out);
            }
            Value::Map(map) => return self.json_map(map, how, level, out),
            other => return refused(format!("Object of type {} is not JSON serializable", other.type_name())),
        }
        self.steps((out.len() - start) / 64)
    }

    fn json_list(&mut self, list: &List<'v>, how: &Json, level: usize, out: &mut String) -> Fallible<()> {
        self.down()?;
        out.push('[');
        for (at, item) in list.iter().enumerate() {
            self.item_start(how, level + 1, at == 0, out)?;
            self.json(&item, how, level + 1, out)?;
        }
        if list.len() > 0 {
            self.line(how, level, out)?;
        }
        out.push(']');
        self.depth -= 1;
        Ok(())
    }

    fn json_map(&mut self, map: &Map<'v>, how: &Json, level: usize, out: &mut String) -> Fallible<()> {
        self.down()?;
        self.room_for_items(map.len())?;
        let mut entries = map.entries();
        if how.sort {
            self.sort_by(&mut entries, |run, a, b| run.order(&a.key, &b.key))?;
        }
        out.push('{');
        for (at, entry) in entries.iter().enumerate() {
            self.item_start(how, level + 1, at == 0, out)?;
            match &entry.key {
                Value::Text(key) => quote_json(key, how.ascii, out),
                key @ (Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_)) => {
                    out.push('"');
                    self.json(key, how, level, out)?;
                    out.push('"');
                }
                other => return refused(format!("{} is not a JSON key", other.type_name())),
            }
            out.push_str(&how.after_key);
            self.json(&entry.value, how, level + 1, out)?;
        }
        if !entries.is_empty() {
            self.line(how, level, out)?;
        }
        out.push('}');
        self.depth -= 1;
        Ok(())
    }

    fn item_start(&mut self, how: &Json, level: usize, is_first: bool, out: &mut String) -> Fallible<()> {
        if !is_first {
            out.push_str(&how.between);
            self.room(how.between.len())?;
        }
        self.line(how, level, out)
    }

    fn line(&mut self, how: &Json, level: usize, out: &mut String) -> Fallible<()> {
        let Some(indent) = &how.indent else { return Ok(()) };
        self.room(1 + level * indent.len())?;
        out.push('\n');
        (0..level).for_each(|_| out.push_str(indent));
        Ok(())
    }
}

fn json_float(number: f64) -> String {
    match float(number).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        plain => plain.to_owned(),
    }
}
