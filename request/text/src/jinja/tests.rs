//! Jinja2's tests: `value is test`.

use super::arguments::Given;
use super::ast::Comparison;
use super::filters::{FILTERS, is_sequence};
use super::operators::Number;
use super::run::Run;
use super::value::Kind;
use super::{Fallible, Value, refused};

const TESTS: [&str; 39] = [
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "==",
    "even",
    "escaped",
    "false",
    "filter",
    "float",
    "ge",
    ">=",
    "greaterthan",
    "gt",
    ">",
    "in",
    "integer",
    "iterable",
    "le",
    "<=",
    "lessthan",
    "lower",
    "lt",
    "<",
    "mapping",
    "ne",
    "!=",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

impl<'v> Run<'v> {
    pub(super) fn test(&mut self, name: &str, of: &Value<'v>, arguments: Given<'v>) -> Fallible<bool> {
        let comparison = match name {
            "eq" | "equalto" | "==" => Some(Comparison::Equal),
            "ne" | "!=" => Some(Comparison::Unequal),
            "lt" | "lessthan" | "<" => Some(Comparison::Less),
            "le" | "<=" => Some(Comparison::LessOrEqual),
            "gt" | "greaterthan" | ">" => Some(Comparison::Greater),
            "ge" | ">=" => Some(Comparison::GreaterOrEqual),
            "in" => Some(Comparison::In),
            _ => None,
        };
        if let Some(how) = comparison {
            let [other] = arguments.bind(["other"])?;
            let other = other.required("other")?;
            return self.compare(how, of, &other);
        }
        match name {
            "divisibleby" => {
                let [by] = arguments.bind(["num"])?;
                let by = by.required("num")?;
                let rest = super::operators::arithmetic(super::ast::Operator::Modulo, of, &by)?;
                return Ok(!rest.is_true());
            }
            "sameas" => {
                let [other] = arguments.bind(["other"])?;
                let other = other.required("other")?;
                return same(of, &other);
            }
            _ => arguments.none()?,
        }
        Ok(match name {
            "defined" => !matches!(of, Value::Undefined),
            "undefined" => matches!(of, Value::Undefined),
            "none" => matches!(of, Value::None),
            "string" => matches!(of, Value::Text(_)),
            "mapping" => matches!(of, Value::Map(_)),
            "true" => matches!(of, Value::Bool(true)),
            "false" => matches!(of, Value::Bool(false)),
            "boolean" => matches!(of, Value::Bool(_)),
            "integer" => matches!(of, Value::Int(_)),
            "float" => matches!(of, Value::Float(_)),
            "number" => Number::of(of).is_some(),
            "sequence" => is_sequence(of) || matches!(of, Value::Undefined),
            "iterable" => is_iterable(of),
            "callable" => matches!(of, Value::Callable(_) | Value::Loop(_) | Value::Undefined),
            "escaped" => matches!(of, Value::Text(text) if text.is_markup),
            "even" | "odd" => {
                let rest = super::operators::arithmetic(super::ast::Operator::Modulo, of, &Value::Int(2))?;
                let is_odd = self.equal(&rest, &Value::Int(1))?;
                if name == "odd" { is_odd } else { !rest.is_true() }
            }
            "lower" | "upper" => {
                let text = self.text_of(of)?;
                let method = if name == "lower" { "islower" } else { "isupper" };
                return Ok(self.method(&Value::Text(text), method, Given::default())?.is_true());
            }
            "filter" | "test" => {
                self.hashable(of)?;
                let names = if name == "filter" { &FILTERS[..] } else { &TESTS[..] };
                matches!(of, Value::Text(asked) if names.contains(&&**asked))
            }
            _ => return refused(format!("No test named '{name}'.")),
        })
    }
}

fn is_iterable(value: &Value<'_>) -> bool {
    matches!(
        value,
        Value::Undefined | Value::Text(_) | Value::List(_) | Value::Map(_) | Value::Iterator(_) | Value::Loop(_)
    )
}

/// Python's `is`, where it does not depend on interned objects.
fn same(left: &Value<'_>, right: &Value<'_>) -> Fallible<bool> {
    Ok(match (left, right) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Namespace(a), Value::Namespace(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b && (-5..=256).contains(a),
        (Value::Text(a), Value::Text(b)) => **a == **b && a.len() < 2,
        (Value::List(a), Value::List(b)) if a.kind == Kind::Tuple && b.kind == Kind::Tuple => a.len() + b.len() == 0,
        _ => false,
    })
}
