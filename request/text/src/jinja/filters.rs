//! The list of Jinja2's filters, and the filters for numbers and single values.

use super::arguments::Given;
use super::ast::Filter;
use super::formats;
use super::operators::Number;
use super::run::Run;
use super::value::Text;
use super::{Failure, Fallible, Value, refused};

/// Filter names, implemented here and in [`super::text_filters`] and [`super::list_filters`].
pub(super) const FILTERS: [&str; 51] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "xmlattr",
];

/// Filters that are generators in Python: errors appear when an item is requested, or never.
const GENERATORS: [&str; 9] =
    ["batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice", "unique"];

impl<'v> Run<'v> {
    pub(super) fn filter(&mut self, of: Value<'v>, filter: &'v Filter) -> Fallible<Value<'v>> {
        let arguments = self.arguments(&filter.arguments)?;
        self.apply(&filter.name, of, arguments)
    }

    pub(super) fn apply(&mut self, name: &str, of: Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        self.steps(1)?;
        let depth = self.depth;
        match self.filtered(name, of, arguments) {
            Err(Failure::Refused(reason)) if GENERATORS.contains(&name) => {
                self.depth = depth;
                Ok(Value::failing_iterator(reason))
            }
            filtered => filtered,
        }
    }

    fn filtered(&mut self, name: &str, of: Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        match name {
            "default" | "d" => {
                let [default, boolean] = arguments.bind(["default_value", "boolean"])?;
                let replaced = matches!(of, Value::Undefined) || (boolean.truth(false) && !of.is_true());
                Ok(if replaced { default.any().unwrap_or_else(|| Value::text("")) } else { of })
            }
            "length" | "count" => {
                arguments.none()?;
                self.length(&of)
            }
            "tojson" => self.dumped(&of, arguments),
            "string" => {
                arguments.none()?;
                match of {
                    Value::Text(_) => Ok(of),
                    other => {
                        let text = self.printed(&other)?.into_owned();
                        self.made(text)
                    }
                }
            }
            "int" => self.int(&of, arguments),
            "float" => {
                let [default] = arguments.bind(["default"])?;
                Ok(match (Number::of(&of), &of) {
                    (Some(number), _) => Value::Float(number.float()),
                    (None, Value::Undefined) => return refused("cannot convert an undefined value to float"),
                    (None, Value::Text(text)) if let Some(number) = parse_float(text) => Value::Float(number),
                    _ => default.any().unwrap_or(Value::Float(0.0)),
                })
            }
            "abs" => {
                arguments.none()?;
                match Number::of(&of) {
                    Some(Number::Int(number)) => Ok(Value::Int(number.saturating_abs())),
                    Some(Number::Float(number)) => Ok(Value::Float(number.abs())),
                    None => refused(format!("abs of {}", of.type_name())),
                }
            }
            "round" => round(&of, arguments),
            "attr" => {
                let [name] = arguments.bind(["name"])?;
                let Value::Text(name) = name.required("name")? else { return refused("attr takes a name") };
                match (super::methods::known(&name), &of) {
                    (Some(name), of) if !matches!(of, Value::Map(_)) || super::methods::has(of, name) => {
                        self.attribute(of, name)
                    }
                    (_, Value::Namespace(_) | Value::Loop(_)) => self.item(&of, &Value::Text(name)),
                    (_, Value::Undefined) => refused("an undefined value has no attributes"),
                    _ => Ok(Value::Undefined),
                }
            }
            "items" => {
                arguments.none()?;
                match &of {
                    Value::Map(map) => {
                        self.room_for_items(map.len().saturating_mul(2))?;
                        Ok(Value::iterator(super::methods::pairs(map.entries())))
                    }
                    Value::Undefined => Ok(Value::iterator(Vec::new())),
                    _ => refused("Can only get item pairs from a mapping."),
                }
            }
            _ => match self.text_filter(name, of, arguments)? {
                Ok(value) => Ok(value),
                Err((of, arguments)) => self.list_filter(name, of, arguments),
            },
        }
    }

    pub(super) fn length(&mut self, of: &Value<'v>) -> Fallible<Value<'v>> {
        Ok(Value::int(match of {
            Value::Text(text) => {
                self.steps(text.len() / 64)?;
                text.chars().count()
            }
            Value::List(list) => list.len(),
            Value::Map(map) => map.len(),
            Value::Loop(each) => each.items.len(),
            Value::Undefined => 0,
            other => return refused(format!("object of type {:?} has no len()", other.type_name())),
        }))
    }

    fn int(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let [default, base] = arguments.bind(["default", "base"])?;
        let base = u32::try_from(base.whole(10)?).unwrap_or(0);
        let default = default.any().unwrap_or(Value::Int(0));
        let truncated =
            |number: f64| (number.is_finite() && number.abs() < 1e37).then_some(Value::Int(number.trunc() as i128));
        let found = match of {
            Value::Text(text) => {
                parse_int(text, base).map(Value::Int).or_else(|| parse_float(text).and_then(truncated))
            }
            Value::Undefined => return refused("cannot convert an undefined value to int"),
            other => match Number::of(other) {
                Some(Number::Int(number)) => Some(Value::Int(number)),
                Some(Number::Float(number)) if number.is_infinite() => return refused("int of infinity"),
                Some(Number::Float(number)) => truncated(number),
                None => None,
            },
        };
        Ok(found.unwrap_or(default))
    }

    pub(super) fn text_of(&mut self, value: &Value<'v>) -> Fallible<Text<'v>> {
        match value {
            Value::Text(text) => Ok(text.clone()),
            other => {
                let text = self.printed(other)?.into_owned();
                self.room(text.len())?;
                Ok(text.into())
            }
        }
    }

    /// `'%s' | format(x)`
    pub(super) fn format_filter(&mut self, of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let Given { values, named } = arguments;
        if !values.is_empty() && !named.is_empty() {
            return refused("can't handle positional and keyword arguments at the same time");
        }
        let format = Value::Text(self.text_of(of)?);
        let values = if named.is_empty() {
            Value::tuple(values)
        } else {
            let entries =
                named.into_iter().map(|named| super::value::Entry { key: Value::Text(named.name), value: named.value });
            Value::Map(super::Map::own(entries.collect()))
        };
        self.percent(&format, &values)
    }
}

fn parse_int(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(super::text::is_space);
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (&text[..1], digits),
        None => ("", text),
    };
    let prefix = match base {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let lower = digits.to_ascii_lowercase();
    let digits = lower.strip_prefix(prefix).unwrap_or(&lower);
    let is_apart = |digits: &str| digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    if !(2..=36).contains(&base) || is_apart(digits) || digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), base).ok()
}

fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(super::text::is_space);
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

fn round<'v>(of: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
    let [precision, method] = arguments.bind(["precision", "method"])?;
    let precision = precision.whole(0)?;
    let method = method.text("common")?;
    let Some(number) = Number::of(of) else { return refused(format!("round of {}", of.type_name())) };
    let Ok(places) = i32::try_from(precision.clamp(-30, 300)) else { return refused("round takes a precision") };
    match (&*method, number) {
        ("common", Number::Int(number)) if places >= 0 => Ok(Value::Int(number)),
        ("common", Number::Int(number)) => {
            let Some(unit) = 10_i128.checked_pow(places.unsigned_abs()) else { return Ok(Value::Int(0)) };
            let (low, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
            let up = rest * 2 > unit || (rest * 2 == unit && low % 2 != 0);
            Ok(Value::Int((low + i128::from(up)).saturating_mul(unit)))
        }
        ("common", Number::Float(number)) => Ok(Value::Float(formats::rounded(number, places))),
        ("ceil" | "floor", number) => {
            let unit = 10_f64.powi(places);
            let scaled = number.float() * unit;
            let whole = if &*method == "ceil" { scaled.ceil() } else { scaled.floor() };
            Ok(Value::Float(whole / unit))
        }
        _ => refused("method must be common, ceil or floor"),
    }
}

/// Returns whether a value can be indexed, as tested by `is sequence`.
pub(super) fn is_sequence(value: &Value<'_>) -> bool {
    match value {
        Value::Text(_) | Value::Map(_) => true,
        Value::List(list) => list.kind.has_places(),
        _ => false,
    }
}
