//! Python's operators.

use std::cmp::Ordering;

use super::ast::{Comparison, Operator};
use super::run::Run;
use super::text::escape;
use super::value::{Kind, Text};
use super::{Fallible, List, Map, Value, refused};

/// A numeric value.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(is) => Some(Self::Int((*is).into())),
            Value::Int(number) => Some(Self::Int(*number)),
            Value::Float(number) => Some(Self::Float(*number)),
            _ => None,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Self::Int(number) => number as f64,
            Self::Float(number) => number,
        }
    }

    fn compare(self, other: Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Int(left), Self::Int(right)) => Some(left.cmp(&right)),
            (left, right) => left.float().partial_cmp(&right.float()),
        }
    }
}

fn numbers(left: &Value<'_>, right: &Value<'_>) -> Option<[Number; 2]> {
    Some([Number::of(left)?, Number::of(right)?])
}

/// Applies an operator to two numbers.
pub(super) fn arithmetic<'v>(operator: Operator, left: &Value<'v>, right: &Value<'v>) -> Fallible<Value<'v>> {
    let Some([a, b]) = numbers(left, right) else {
        return refused(format!("{operator:?} does not apply to {} and {}", left.type_name(), right.type_name()));
    };
    let is_zero = b.float() == 0.0;
    if is_zero && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Modulo) {
        return refused("division by zero");
    }
    let whole = match (operator, a, b) {
        (Operator::Divide, ..) => return Ok(Value::Float(a.float() / b.float())),
        (_, Number::Int(a), Number::Int(b)) => match operator {
            Operator::Add => a.checked_add(b),
            Operator::Subtract => a.checked_sub(b),
            Operator::Multiply => a.checked_mul(b),
            Operator::FloorDivide => a.checked_div_euclid(b).map(|_| floor_divide(a, b)),
            Operator::Modulo => a.checked_rem_euclid(b).map(|_| a - b * floor_divide(a, b)),
            Operator::Power if b < 0 => return Ok(Value::Float((a as f64).powf(b as f64))),
            // Any exponent is safe for 0, 1 and -1.
            _ if a.abs() <= 1 && b > 0 => Some(if b % 2 == 0 { a * a } else { a }),
            _ => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        },
        _ => {
            let (a, b) = (a.float(), b.float());
            return Ok(Value::Float(match operator {
                Operator::Add => a + b,
                Operator::Subtract => a - b,
                Operator::Multiply => a * b,
                Operator::FloorDivide => (a / b).floor(),
                Operator::Modulo => {
                    let rest = a % b;
                    if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
                }
                _ => a.powf(b),
            }));
        }
    };
    whole.map_or_else(|| refused("integer too large"), |number| Ok(Value::Int(number)))
}

fn floor_divide(a: i128, b: i128) -> i128 {
    let quotient = a / b;
    if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

impl<'v> Run<'v> {
    pub(super) fn add(&mut self, left: Value<'v>, right: Value<'v>) -> Fallible<Value<'v>> {
        match (&left, &right) {
            (Value::Text(a), Value::Text(b)) => {
                let is_markup = a.is_markup || b.is_markup;
                let part = |text: &Text<'v>| if is_markup && !text.is_markup { Some(escape(text)) } else { None };
                let (escaped_a, escaped_b) = (part(a), part(b));
                let (a, b) = (escaped_a.as_deref().unwrap_or(a), escaped_b.as_deref().unwrap_or(b));
                self.room(a.len() + b.len())?;
                let mut sum = String::with_capacity(a.len() + b.len());
                sum.push_str(a);
                sum.push_str(b);
                Ok(Value::Text(Text::from(sum).markup(is_markup)))
            }
            _ => match left.alike(&right) {
                Some([a, b]) => {
                    self.room_for_items(a.len() + b.len())?;
                    Ok(Value::List(List::own(a.kind, a.iter().chain(b.iter()).collect())))
                }
                None => arithmetic(Operator::Add, &left, &right),
            },
        }
    }

    pub(super) fn multiply(&mut self, left: &Value<'v>, right: &Value<'v>) -> Fallible<Value<'v>> {
        let (of, times) = match (left, right) {
            (of @ (Value::Text(_) | Value::List(_)), times) | (times, of @ (Value::Text(_) | Value::List(_))) => {
                (of, times)
            }
            _ => return arithmetic(Operator::Multiply, left, right),
        };
        let Some(Number::Int(times)) = Number::of(times) else {
            return refused(format!("{} times {}", left.type_name(), right.type_name()));
        };
        let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
        match of {
            Value::Text(text) => {
                self.room(text.len().saturating_mul(times))?;
                let times = if text.is_empty() { 0 } else { times };
                Ok(Value::Text(Text::from(text.repeat(times)).markup(text.is_markup)))
            }
            Value::List(list) if list.kind.is_list_or_tuple() => {
                self.room_for_items(list.len().saturating_mul(times))?;
                let times = if list.len() == 0 { 0 } else { times };
                let items = std::iter::repeat_n(list, times).flat_map(List::iter).collect();
                Ok(Value::List(List::own(list.kind, items)))
            }
            other => refused(format!("a number times {}", other.type_name())),
        }
    }

    pub(super) fn compare(&mut self, how: Comparison, left: &Value<'v>, right: &Value<'v>) -> Fallible<bool> {
        Ok(match how {
            Comparison::Equal => self.equal(left, right)?,
            Comparison::Unequal => !self.equal(left, right)?,
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
            Comparison::Less => self.order(left, right)?.is_some_and(Ordering::is_lt),
            Comparison::LessOrEqual => self.order(left, right)?.is_some_and(Ordering::is_le),
            Comparison::Greater => self.order(left, right)?.is_some_and(Ordering::is_gt),
            Comparison::GreaterOrEqual => self.order(left, right)?.is_some_and(Ordering::is_ge),
        })
    }

    pub(super) fn equal(&mut self, left: &Value<'v>, right: &Value<'v>) -> Fallible<bool> {
        self.steps(1)?;
        Ok(match (left, right) {
            (Value::Text(a), Value::Text(b)) => {
                self.steps(a.len().min(b.len()) / 64)?;
                **a == **b
            }
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::List(a), Value::List(b)) => {
                let same = |kind| matches!(kind, Kind::Keys | Kind::Items);
                if (a.kind != b.kind && !(same(a.kind) && same(b.kind))) || a.len() != b.len() {
                    return Ok(false);
                }
                self.first_unequal(a, b)?.is_none()
            }
            (Value::Map(a), Value::Map(b)) => self.equal_maps(a, b)?,
            (Value::Namespace(a), Value::Namespace(b)) => a == b,
            (Value::Callable(a), Value::Callable(b)) => std::rc::Rc::ptr_eq(a, b),
            (Value::Iterator(a), Value::Iterator(b)) => std::rc::Rc::ptr_eq(a, b),
            (Value::Loop(a), Value::Loop(b)) => std::rc::Rc::ptr_eq(a, b),
            _ => numbers(left, right).is_some_and(|[a, b]| a.compare(b) == Some(Ordering::Equal)),
        })
    }

    /// Returns the first pair of items in which two lists differ, up to the shorter length.
    fn first_unequal(&mut self, a: &List<'v>, b: &List<'v>) -> Fallible<Option<[Value<'v>; 2]>> {
        for (a, b) in a.iter().zip(b.iter()) {
            if !self.equal(&a, &b)? {
                return Ok(Some([a, b]));
            }
        }
        Ok(None)
    }

    fn equal_maps(&mut self, a: &Map<'v>, b: &Map<'v>) -> Fallible<bool> {
        if a.len() != b.len() {
            return Ok(false);
        }
        self.room_for_items(a.len())?;
        for entry in a.entries() {
            let other = self.item(&Value::Map(b.clone()), &entry.key)?;
            if matches!(other, Value::Undefined | Value::Callable(_)) || !self.equal(&entry.value, &other)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Compares two values; `None` if a number is NaN.
    pub(super) fn order(&mut self, left: &Value<'v>, right: &Value<'v>) -> Fallible<Option<Ordering>> {
        self.steps(1)?;
        if let (Value::Text(a), Value::Text(b)) = (left, right) {
            self.steps(a.len().min(b.len()) / 64)?;
            return Ok(Some((**a).cmp(&**b)));
        }
        if let Some([a, b]) = left.alike(right) {
            return match self.first_unequal(a, b)? {
                Some([a, b]) => self.order(&a, &b),
                None => Ok(Some(a.len().cmp(&b.len()))),
            };
        }
        match numbers(left, right) {
            Some([a, b]) => Ok(a.compare(b)),
            None => refused(format!("{} and {} cannot be ordered", left.type_name(), right.type_name())),
        }
    }

    pub(super) fn contains(&mut self, whole: &Value<'v>, part: &Value<'v>) -> Fallible<bool> {
        if let (Value::Text(whole), Value::Text(part)) = (whole, part) {
            self.steps(whole.len() / 64)?;
            return Ok(memchr::memmem::find(whole.as_bytes(), part.as_bytes()).is_some());
        }
        match (whole, part) {
            (Value::Text(_), other) => refused(format!("a string cannot contain {}", other.type_name())),
            (Value::Map(map), Value::Text(key)) => {
                let found = map.get_text(key).is_some();
                self.steps(map.len() / 16).map(|()| found)
            }
            _ => {
                if matches!(whole, Value::Map(_)) {
                    self.hashable(part)?;
                }
                let items = self.items(whole)?;
                for item in items.iter() {
                    if self.equal(&item, part)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    pub(super) fn slice_text(&mut self, text: &Text<'v>, bounds: [Option<i128>; 3]) -> Fallible<Text<'v>> {
        self.steps(text.len() / 64)?;
        let is_ascii = text.is_ascii();
        let taken = places(bounds, if is_ascii { text.len() } else { text.chars().count() })?;
        if taken.step == 1 {
            let byte = |at: usize| match is_ascii {
                true => at,
                false => text.char_indices().nth(at).map_or(text.len(), |(at, _)| at),
            };
            let range = byte(taken.first)..byte(taken.first + taken.count);
            self.room(text.cost_of(range.len()))?;
            return Ok(text.part(range));
        }
        self.room(text.len().saturating_mul(5))?;
        let chars: Vec<char> = text.chars().collect();
        Ok(Text::from(taken.iter().map(|at| chars[at]).collect::<String>()).markup(text.is_markup))
    }

    /// `of[start:stop:step]`
    pub(super) fn slice(&mut self, of: &Value<'v>, bounds: [Option<i128>; 3]) -> Fallible<Value<'v>> {
        match of {
            Value::Text(text) => self.slice_text(text, bounds).map(Value::Text),
            Value::List(list) if list.kind.has_places() => {
                let taken = places(bounds, list.len())?;
                if taken.step == 1 {
                    self.room_for_items(taken.count)?;
                    return Ok(Value::List(list.part(taken.first..taken.first + taken.count)));
                }
                if let Some([start, step]) = list.range_of() {
                    let start = start + step * taken.first as i128;
                    return Ok(Value::List(List::range(start, step * taken.step, taken.count)));
                }
                self.room_for_items(taken.count)?;
                let items = taken.iter().filter_map(|at| list.get(at));
                Ok(Value::List(List::own(list.kind, items.collect())))
            }
            other => refused(format!("{:?} object cannot be sliced", other.type_name())),
        }
    }
}

/// The positions that a slice selects.
struct Places {
    first: usize,
    step: i128,
    count: usize,
}

impl Places {
    fn iter(&self) -> impl Iterator<Item = usize> {
        let (first, step) = (self.first as i128, self.step);
        (0..self.count).map(move |at| usize::try_from(first + step * at as i128).unwrap_or(0))
    }
}

/// `slice.indices`
fn places([start, stop, step]: [Option<i128>; 3], count: usize) -> Fallible<Places> {
    let step = step.unwrap_or(1).clamp(i128::from(i64::MIN), i128::from(i64::MAX));
    if step == 0 {
        return refused("a slice step cannot be zero");
    }
    let count = count as i128;
    let (low, high) = if step > 0 { (0, count) } else { (-1, count - 1) };
    let bound = |at: Option<i128>, default| match at {
        None => default,
        Some(at) if at < 0 => at.saturating_add(count).max(low),
        Some(at) => at.min(high),
    };
    let (first, end) =
        if step > 0 { (bound(start, 0), bound(stop, count)) } else { (bound(start, count - 1), bound(stop, -1)) };
    let span = if step > 0 { end - first } else { first - end };
    let taken = if span > 0 { (span - 1) / step.abs() + 1 } else { 0 };
    let place = |at: i128| usize::try_from(at).unwrap_or(0);
    let step = if taken > 1 { step } else { 1 };
    Ok(Places { first: place(first), step, count: place(taken) })
}
