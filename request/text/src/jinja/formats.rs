//! `%` and `str.format`.

use super::arguments::Given;
use super::operators::Number;
use super::run::Run;
use super::text::{escape, float};
use super::value::{Kind, Text};
use super::{Fallible, List, Value, refused};

/// Maximum width and precision.
const MAX_WIDTH: usize = 1 << 16;
const MAX_PRECISION: usize = 100;

/// A parsed format specification.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    /// `+` or a space, written before non-negative numbers.
    sign: Option<char>,
    alternate: bool,
    commas: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

/// How a format numbers its fields: either all of them automatically, or none.
#[derive(Debug, Default)]
struct Numbering {
    next: usize,
    is_automatic: Option<bool>,
}

impl Numbering {
    /// Returns the position of a field's argument; `None` if the field is named.
    fn place(&mut self, field: &str) -> Fallible<Option<usize>> {
        let place = field.parse().ok();
        let is_automatic = field.is_empty();
        if !is_automatic && place.is_none() {
            return Ok(None);
        }
        if self.is_automatic.replace(is_automatic).is_some_and(|before| before != is_automatic) {
            return refused("cannot mix numbered and automatic fields");
        }
        if is_automatic {
            self.next += 1;
            return Ok(Some(self.next - 1));
        }
        Ok(place)
    }
}

impl<'v> Run<'v> {
    /// `text % values`
    pub(super) fn percent(&mut self, text: &Value<'v>, values: &Value<'v>) -> Fallible<Value<'v>> {
        let Value::Text(text) = text else { return refused("the left side of % is not a string") };
        let list = match values {
            Value::List(list) if list.kind == Kind::Tuple => list.iter().collect(),
            other => vec![other.clone()],
        };
        let mut next = list.into_iter();
        let mut out = String::new();
        let mut rest = &**text;
        while let Some(at) = rest.find('%') {
            self.room(at + 1)?;
            out.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            let name = match rest.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
                Some((name, after)) => {
                    rest = after;
                    Some(name)
                }
                None => None,
            };
            let mut take = || next.next().map_or_else(|| refused("not enough arguments for format string"), Ok);
            let spec = percent_spec(&mut rest, &mut take)?;
            if spec.kind == Some('%') {
                out.push('%');
                continue;
            }
            let value = match (name, values) {
                (Some(name), Value::Map(map)) => {
                    map.get_text(name).map_or_else(|| refused(format!("no key {name}")), Ok)?
                }
                (Some(_), _) => return refused("format requires a mapping"),
                (None, _) => take()?,
            };
            let is_safe = !text.is_markup || matches!(&value, Value::Text(text) if text.is_markup);
            self.put(&value, &spec, is_safe, &mut out)?;
        }
        // Python treats these values as mappings, and a mapping may have unused entries.
        let is_mapping = matches!(
            values,
            Value::Map(_) | Value::Undefined | Value::List(List { kind: Kind::List | Kind::Range, .. })
        );
        if next.next().is_some() && !is_mapping {
            return refused("not all arguments converted during string formatting");
        }
        self.ended(text, out, rest)
    }

    /// `text.format(...)`
    pub(super) fn format(&mut self, text: &Text<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        let mut out = String::new();
        let mut rest = &**text;
        let mut numbering = Numbering::default();
        while let Some(at) = rest.find(['{', '}']) {
            self.room(at + 1)?;
            out.push_str(&rest[..at]);
            let mark = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(mark) {
                out.push_str(mark);
                rest = after;
                continue;
            }
            let Some((field, after)) = rest.split_once('}').filter(|_| mark == "{") else {
                return refused("unmatched brace in a format");
            };
            rest = after;
            let (path, spec) = field.split_once(':').unwrap_or((field, ""));
            if spec.contains('{') {
                return refused("nested replacement fields in a format are not supported");
            }
            let (path, conversion) = path.split_once('!').map_or((path, None), |(path, how)| (path, Some(how)));
            let mut value = self.field(path, &mut numbering, &arguments)?;
            if let Some(how) = conversion {
                value = match how {
                    "s" => Value::text(self.printed(&value)?.into_owned()),
                    "r" | "a" => self.repr_of(&value)?,
                    _ => return refused("unknown conversion"),
                };
            }
            self.put(&value, &format_spec(spec)?, !text.is_markup, &mut out)?;
        }
        self.ended(text, out, rest)
    }

    /// Appends a value, escaped unless `is_safe`.
    fn put(&mut self, value: &Value<'v>, spec: &Spec, is_safe: bool, out: &mut String) -> Fallible<()> {
        let written = self.formatted(value, spec)?;
        self.room(written.len())?;
        out.push_str(&if is_safe { written } else { escape(&written) });
        Ok(())
    }

    /// Returns the result of a format, with the text after its last field.
    fn ended(&mut self, text: &Text<'v>, out: String, rest: &str) -> Fallible<Value<'v>> {
        self.room(rest.len())?;
        Ok(Value::Text(Text::from(out + rest).markup(text.is_markup)))
    }

    fn repr_of(&mut self, value: &Value<'v>) -> Fallible<Value<'v>> {
        let mut out = String::new();
        self.repr(value, &mut out)?;
        Ok(Value::text(out))
    }

    /// Returns the value of a field: `0`, `name`, `name.attribute` or `name[key]`.
    fn field(&mut self, path: &str, numbering: &mut Numbering, arguments: &Given<'v>) -> Fallible<Value<'v>> {
        let end = path.find(['.', '[']).unwrap_or(path.len());
        let (first, mut rest) = path.split_at(end);
        let place = numbering.place(first)?;
        let found = match place {
            Some(place) => arguments.values.get(place),
            None => arguments.named.iter().find(|named| *named.name == *first).map(|named| &named.value),
        };
        let Some(mut value) = found.cloned() else { return refused(format!("the format field {first} is missing")) };
        while !rest.is_empty() {
            let (key, after) = if let Some(inner) = rest.strip_prefix('[') {
                inner.split_once(']').unwrap_or((inner, ""))
            } else {
                let name = &rest[1..];
                name.split_at(name.find(['.', '[']).unwrap_or(name.len()))
            };
            let key = match key.parse() {
                Ok(index) => Value::Int(index),
                Err(_) => Value::text(key.to_owned()),
            };
            value = self.item(&value, &key)?;
            rest = after;
        }
        Ok(value)
    }

    fn formatted(&mut self, value: &Value<'v>, spec: &Spec) -> Fallible<String> {
        let number = Number::of(value);
        let (digits, is_number) = match (spec.kind, number) {
            (Some('s'), _) | (None, None) => (self.cut_to(value, spec)?, false),
            (Some('r' | 'a'), _) => {
                let quoted = self.repr_of(value)?;
                (self.cut_to(&quoted, spec)?, false)
            }
            (Some('c'), _) => match value {
                Value::Int(_) | Value::Bool(_) => {
                    let char = u32::try_from(value.whole("a character")?).ok().and_then(char::from_u32);
                    (char.map_or_else(|| refused("invalid character code"), |char| Ok(char.to_string()))?, false)
                }
                Value::Text(text) if text.chars().count() == 1 => (text.to_string(), false),
                _ => return refused("%c requires an int or a character"),
            },
            (None, Some(_)) if matches!(value, Value::Bool(_)) && spec.width == 0 => {
                (self.printed(value)?.into_owned(), false)
            }
            (kind, Some(number)) => (numeral(number, kind, spec)?, true),
            (Some(kind), None) => {
                return refused(format!("%{kind} format: a number is required, not {}", value.type_name()));
            }
        };
        Ok(padded(digits, spec, is_number))
    }

    fn cut_to(&mut self, value: &Value<'v>, spec: &Spec) -> Fallible<String> {
        let text = self.printed(value)?;
        Ok(match spec.precision {
            Some(count) => text.chars().take(count).collect(),
            None => text.into_owned(),
        })
    }
}

/// Parses the specification after a `%`.
fn percent_spec<'v>(rest: &mut &str, take: &mut dyn FnMut() -> Fallible<Value<'v>>) -> Fallible<Spec> {
    let mut spec = Spec::default();
    loop {
        match rest.chars().next() {
            Some('-') => spec.align = Some('<'),
            Some('+') => spec.sign = Some('+'),
            Some(' ') => spec.sign = spec.sign.or(Some(' ')),
            Some('0') if spec.align.is_none() => (spec.fill, spec.align) = (Some('0'), Some('=')),
            Some('0') => {}
            Some('#') => spec.alternate = true,
            _ => break,
        }
        *rest = &rest[1..];
    }
    let mut size = |rest: &mut &str| -> Fallible<Option<usize>> {
        if let Some(after) = rest.strip_prefix('*') {
            *rest = after;
            return Ok(Some(usize::try_from(take()?.whole("a width")?.max(0)).unwrap_or(usize::MAX)));
        }
        Ok(digits(rest))
    };
    spec.width = size(rest)?.unwrap_or(0);
    if let Some(after) = rest.strip_prefix('.') {
        *rest = after;
        spec.precision = Some(size(rest)?.unwrap_or(0));
    }
    while let Some(after) = rest.strip_prefix(['h', 'l', 'L']) {
        *rest = after;
    }
    let Some(kind) = rest.chars().next() else { return refused("incomplete format") };
    *rest = &rest[kind.len_utf8()..];
    spec.kind = Some(match kind {
        'i' | 'u' => 'd',
        kind @ ('d' | 's' | 'r' | 'a' | 'c' | 'f' | 'F' | 'e' | 'E' | 'g' | 'G' | 'x' | 'X' | 'o' | '%') => kind,
        _ => return refused(format!("unsupported format character {kind:?}")),
    });
    if spec.align.is_none() {
        spec.align = Some('>');
    }
    bounded(spec)
}

/// Parses the specification after the colon of a `str.format` field.
fn format_spec(mut rest: &str) -> Fallible<Spec> {
    let mut spec = Spec::default();
    let mut chars = rest.chars();
    let (first, second) = (chars.next(), chars.next());
    let is_align = |char: &char| matches!(char, '<' | '>' | '^' | '=');
    if second.as_ref().is_some_and(is_align) {
        (spec.fill, spec.align) = (first, second);
        rest = &rest[first.map_or(0, char::len_utf8) + 1..];
    } else if first.as_ref().is_some_and(is_align) {
        spec.align = first;
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix(['+', '-', ' ']) {
        spec.sign = rest.chars().next().filter(|sign| *sign != '-');
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('#') {
        spec.alternate = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('0').filter(|_| spec.align.is_none()) {
        (spec.fill, spec.align) = (Some('0'), Some('='));
        rest = after;
    }
    spec.width = digits(&mut rest).unwrap_or(0);
    if let Some(after) = rest.strip_prefix([',', '_']) {
        spec.commas = rest.chars().next();
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision = digits(&mut rest);
    }
    let mut chars = rest.chars();
    spec.kind = chars.next();
    if chars.next().is_some() {
        return refused("invalid format specifier");
    }
    bounded(spec)
}

fn bounded(spec: Spec) -> Fallible<Spec> {
    if spec.width > MAX_WIDTH
        || spec.precision.is_some_and(|precision| precision > MAX_PRECISION && spec.kind != Some('s'))
    {
        return refused("a format is too wide");
    }
    Ok(spec)
}

fn digits(rest: &mut &str) -> Option<usize> {
    let count = rest.len() - rest.trim_start_matches(|char: char| char.is_ascii_digit()).len();
    let (number, after) = rest.split_at(count);
    *rest = after;
    if count == 0 { None } else { Some(number.parse().unwrap_or(usize::MAX)) }
}

fn numeral(number: Number, kind: Option<char>, spec: &Spec) -> Fallible<String> {
    let precision = spec.precision.unwrap_or(6);
    let (whole, value) = match number {
        Number::Int(whole) => (Some(whole), whole as f64),
        Number::Float(value) => (None, value),
    };
    let value = if kind == Some('d') && value > -1.0 && value < 0.0 { 0.0 } else { value };
    let is_negative = whole.map_or(value.is_sign_negative() && !value.is_nan(), |whole| whole < 0);
    let size = value.abs();
    let digits = match (kind, whole) {
        (None | Some('n'), Some(whole)) | (Some('d'), Some(whole)) => whole.unsigned_abs().to_string(),
        (Some('d'), None) if value.is_finite() => format!("{:.0}", size.trunc()),
        (Some('x'), Some(whole)) => format!("{}{:x}", if spec.alternate { "0x" } else { "" }, whole.unsigned_abs()),
        (Some('X'), Some(whole)) => format!("{}{:X}", if spec.alternate { "0X" } else { "" }, whole.unsigned_abs()),
        (Some('o'), Some(whole)) => format!("{}{:o}", if spec.alternate { "0o" } else { "" }, whole.unsigned_abs()),
        (Some('b'), Some(whole)) => format!("{}{:b}", if spec.alternate { "0b" } else { "" }, whole.unsigned_abs()),
        (Some('f' | 'F'), _) => format!("{size:.precision$}"),
        (Some('%'), _) => format!("{:.precision$}%", size * 100.0),
        (Some('e'), _) => exponential(size, precision),
        (Some('E'), _) => exponential(size, precision).to_uppercase(),
        (Some('g' | 'n'), _) => general(size, precision),
        (Some('G'), _) => general(size, precision).to_uppercase(),
        (None, None) => match spec.precision {
            Some(precision) => general(size, precision),
            None => float(size),
        },
        (Some(kind), _) => return refused(format!("format {kind:?} does not apply to this number")),
    };
    let digits = match spec.commas {
        Some(comma) => grouped(&digits, comma),
        None => digits,
    };
    let sign = if is_negative { "-".to_owned() } else { spec.sign.map(String::from).unwrap_or_default() };
    Ok(sign + &digits)
}

fn grouped(digits: &str, comma: char) -> String {
    let end = digits.find(|char: char| !char.is_ascii_digit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (at, digit) in digits[..end].chars().enumerate() {
        if at > 0 && (end - at) % 3 == 0 {
            out.push(comma);
        }
        out.push(digit);
    }
    out + &digits[end..]
}

fn exponential(size: f64, precision: usize) -> String {
    let plain = format!("{size:.precision$e}");
    match plain.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        None => plain.to_lowercase(),
    }
}

fn general(size: f64, precision: usize) -> String {
    let precision = precision.max(1);
    let scientific = exponential(size, precision - 1);
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |digits: &str| {
        if digits.contains('.') {
            digits.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            digits.to_owned()
        }
    };
    if size != 0.0 && (exponent < -4 || exponent >= i32::try_from(precision).unwrap_or(i32::MAX)) {
        return format!("{}e{}{:02}", trimmed(digits), if exponent < 0 { '-' } else { '+' }, exponent.abs());
    }
    let places = usize::try_from(i32::try_from(precision).unwrap_or(0) - 1 - exponent).unwrap_or(0);
    trimmed(&format!("{size:.places$}"))
}

fn padded(text: String, spec: &Spec, is_number: bool) -> String {
    let missing = spec.width.saturating_sub(text.chars().count());
    if missing == 0 {
        return text;
    }
    let fill = spec.fill.unwrap_or(' ').to_string();
    match spec.align.unwrap_or(if is_number { '>' } else { '<' }) {
        '<' => text + &fill.repeat(missing),
        '^' => format!("{}{text}{}", fill.repeat(missing / 2), fill.repeat(missing - missing / 2)),
        '=' if is_number => {
            let sign = text.len() - text.trim_start_matches(['+', '-', ' ']).len();
            format!("{}{}{}", &text[..sign], fill.repeat(missing), &text[sign..])
        }
        '=' => format!("{}{text}", " ".repeat(missing)),
        _ => fill.repeat(missing) + &text,
    }
}

/// `round(number, places)`: rounds half to even.
pub(super) fn rounded(number: f64, places: i32) -> f64 {
    if !number.is_finite() {
        return number;
    }
    match usize::try_from(places) {
        Ok(places) => format!("{number:.places$}").parse().unwrap_or(number),
        Err(_) => {
            let unit = 10_f64.powi(-places);
            (number / unit).round_ties_even() * unit
        }
    }
}
