//! Evaluation of expressions.

use std::rc::Rc;

use super::ast::{Comparison, Expr, Name, Operator};
use super::methods;
use super::run::Run;
use super::value::{Callable, Entry, Generator, Kind, Loop, Text};
use super::{Fallible, List, Map, Value, refused};

/// Names that Jinja2 and Transformers provide to every template.
pub(super) const FUNCTIONS: [&str; 8] =
    ["range", "dict", "namespace", "raise_exception", "strftime_now", "cycler", "joiner", "lipsum"];

impl<'v> Run<'v> {
    pub(super) fn value(&mut self, expr: &'v Expr) -> Fallible<Value<'v>> {
        match expr {
            Expr::Name(name) => return self.look_up(*name),
            Expr::Text(text) => return Ok(Value::text(&**text)),
            Expr::Int(number) => return Ok(Value::Int(*number)),
            Expr::Bool(is) => return Ok(Value::Bool(*is)),
            Expr::None => return Ok(Value::None),
            Expr::Undefined => return Ok(Value::Undefined),
            Expr::Float(number) => return Ok(Value::Float(*number)),
            _ => {}
        }
        self.deeper()?;
        let value = match expr {
            Expr::Attr(of, name) => {
                let of = self.value(of)?;
                self.attribute(&of, name)
            }
            Expr::Item(of, key) => {
                let of = self.value(of)?;
                let key = self.value(key)?;
                self.item(&of, &key)
            }
            Expr::Not(of) => Ok(Value::Bool(!self.value(of)?.is_true())),
            Expr::And(left, right) => match self.value(left)? {
                left if left.is_true() => self.value(right),
                left => Ok(left),
            },
            Expr::Or(left, right) => match self.value(left)? {
                left if left.is_true() => Ok(left),
                _ => self.value(right),
            },
            Expr::Choose { test, yes, no } => {
                let chosen = if self.value(test)?.is_true() { yes } else { no };
                self.value(chosen)
            }
            Expr::Compare(first, others) => self.comparisons(first, others),
            Expr::Binary(operator, left, right) => {
                let (left, right) = (self.value(left)?, self.value(right)?);
                self.binary(*operator, left, right)
            }
            Expr::Test(of, test) => {
                let of = self.value(of)?;
                let arguments = self.arguments(&test.arguments)?;
                self.test(&test.name, &of, arguments).map(Value::Bool)
            }
            Expr::Filter(of, filter) => {
                let of = self.value(of)?;
                self.filter(of, filter)
            }
            Expr::Call(callee, arguments) => self.call_expr(callee, arguments),
            _ => self.made_by(expr),
        };
        self.depth -= 1;
        value
    }

    /// Evaluates expressions that build lists and strings.
    fn made_by(&mut self, expr: &'v Expr) -> Fallible<Value<'v>> {
        match expr {
            Expr::List(items) => {
                let list = List::own(Kind::List, self.values(items)?);
                self.made_list(Value::List(list))
            }
            Expr::Tuple(items) => {
                let list = List::own(Kind::Tuple, self.values(items)?);
                self.made_list(Value::List(list))
            }
            Expr::Dict(entries) => {
                let mut made = Vec::new();
                for (key, value) in entries {
                    let (key, value) = (self.value(key)?, self.value(value)?);
                    self.insert(&mut made, Entry { key, value })?;
                }
                self.made_list(Value::Map(Map::own(made)))
            }
            Expr::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    let part = self.value(part)?;
                    let part = self.printed(&part)?;
                    self.room(part.len())?;
                    text.push_str(&part);
                }
                Ok(Value::text(text))
            }
            Expr::Slice(of, parts) => {
                let of = self.value(of)?;
                let mut bounds = [None, None, None];
                for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
                    *bound = match part.as_ref().map(|part| self.value(part)).transpose()? {
                        None | Some(Value::None) => None,
                        Some(Value::Int(number)) => Some(number),
                        Some(Value::Bool(is)) => Some(is.into()),
                        Some(other) => return refused(format!("a slice needs numbers, not {}", other.type_name())),
                    };
                }
                self.slice(&of, bounds)
            }
            Expr::Negative(of) => match self.value(of)? {
                Value::Int(number) => {
                    number.checked_neg().map_or_else(|| refused("number too large"), |n| Ok(Value::Int(n)))
                }
                Value::Bool(is) => Ok(Value::Int(-i128::from(is))),
                Value::Float(number) => Ok(Value::Float(-number)),
                other => refused(format!("- of {}", other.type_name())),
            },
            Expr::Positive(of) => match self.value(of)? {
                Value::Bool(is) => Ok(Value::Int(is.into())),
                number @ (Value::Int(_) | Value::Float(_)) => Ok(number),
                other => refused(format!("+ of {}", other.type_name())),
            },
            _ => Ok(Value::Undefined),
        }
    }

    fn values(&mut self, exprs: &'v [Expr]) -> Fallible<Vec<Value<'v>>> {
        self.room_for_items(exprs.len())?;
        exprs.iter().map(|expr| self.value(expr)).collect()
    }

    /// Rejects keys that Python cannot hash: lists, mappings, and tuples that contain them.
    pub(super) fn hashable(&mut self, of: &Value<'v>) -> Fallible<()> {
        self.steps(1)?;
        match of {
            Value::List(List { kind: Kind::Range | Kind::Values, .. }) => Ok(()),
            Value::List(items) if items.kind == Kind::Tuple => items.iter().try_for_each(|item| self.hashable(&item)),
            Value::List(_) | Value::Map(_) => refused(format!("unhashable type: {}", of.type_name())),
            _ => Ok(()),
        }
    }

    pub(super) fn insert(&mut self, entries: &mut Vec<Entry<'v>>, new: Entry<'v>) -> Fallible<()> {
        self.hashable(&new.key)?;
        self.room_for_items(2 + entries.len() / 16)?;
        for entry in entries.iter_mut() {
            if self.equal(&entry.key, &new.key)? {
                entry.value = new.value;
                return Ok(());
            }
        }
        entries.push(new);
        Ok(())
    }

    fn comparisons(&mut self, first: &'v Expr, others: &'v [(Comparison, Expr)]) -> Fallible<Value<'v>> {
        let mut left = self.value(first)?;
        for (how, right) in others {
            let right = self.value(right)?;
            if !self.compare(*how, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn binary(&mut self, operator: Operator, left: Value<'v>, right: Value<'v>) -> Fallible<Value<'v>> {
        match operator {
            Operator::Add => self.add(left, right),
            Operator::Multiply => self.multiply(&left, &right),
            Operator::Modulo if matches!(left, Value::Text(_)) => self.percent(&left, &right),
            _ => super::operators::arithmetic(operator, &left, &right),
        }
    }

    /// Returns a variable that no scope defines.
    pub(super) fn global(&mut self, name: Name) -> Fallible<Value<'v>> {
        let at = name as usize;
        if let Some(known) = &self.globals[at] {
            return Ok(known.clone());
        }
        let value = self.found(&self.template.names[at]);
        self.globals[at] = Some(value.clone());
        Ok(value)
    }

    fn found(&self, name: &'v str) -> Value<'v> {
        let input = self.input;
        match name {
            "messages" => return input.messages.clone(),
            "tools" => return input.tools.clone(),
            "add_generation_prompt" => return input.add_generation_prompt.clone(),
            _ => {}
        }
        let given = input.variables.and_then(|variables| variables.get(name)).or_else(|| input.special.get(name));
        match (given, FUNCTIONS.into_iter().find(|known| *known == name)) {
            (Some(given), _) => Value::json(given),
            (None, _) if name == "documents" => input.documents.clone(),
            (None, Some(function)) => Value::Callable(Rc::new(Callable::Function(function))),
            (None, None) => Value::Undefined,
        }
    }

    /// `of.name`: attributes of Python types take precedence over the entries of a mapping.
    pub(super) fn attribute(&mut self, of: &Value<'v>, name: &'v str) -> Fallible<Value<'v>> {
        Ok(match of {
            Value::Undefined => return refused(format!("an undefined value has no {name}")),
            Value::Namespace(at) => self.namespace_item(*at, name)?,
            Value::Loop(each) => self.loop_item(each, name)?,
            _ if methods::has(of, name) => Value::Callable(Rc::new(Callable::Method { of: of.clone(), name })),
            Value::Map(map) => {
                self.steps(map.len() / 16)?;
                map.get_text(name).unwrap_or(Value::Undefined)
            }
            Value::Callable(callable) => match (&**callable, name) {
                (Callable::Macro { node, .. }, "name") => Value::text(self.template.names[node.name as usize].as_str()),
                (Callable::Cycler { items, at }, "current") => items.get(at.get()).unwrap_or(Value::Undefined),
                _ => Value::Undefined,
            },
            _ => Value::Undefined,
        })
    }

    fn namespace_item(&mut self, at: usize, name: &str) -> Fallible<Value<'v>> {
        self.steps(self.namespaces[at].len() / 16)?;
        let found = self.namespaces[at].iter().find(|known| *known.name == *name);
        Ok(found.map_or(Value::Undefined, |known| known.value.clone()))
    }

    fn loop_item(&mut self, each: &Rc<Loop<'v>>, name: &'v str) -> Fallible<Value<'v>> {
        let (at, count) = (each.index.get(), each.items.len());
        Ok(match name {
            "first" => Value::Bool(at == 0),
            "last" => Value::Bool(at + 1 == count),
            "index" => Value::int(at + 1),
            "index0" => Value::int(at),
            "revindex" => Value::int(count - at),
            "revindex0" => Value::int(count - at - 1),
            "length" => Value::int(count),
            "depth" => Value::int(each.depth + 1),
            "depth0" => Value::int(each.depth),
            "previtem" => at.checked_sub(1).and_then(|at| each.items.get(at)).unwrap_or(Value::Undefined),
            "nextitem" => each.items.get(at + 1).unwrap_or(Value::Undefined),
            "cycle" | "changed" => {
                Value::Callable(Rc::new(Callable::Method { of: Value::Loop(Rc::clone(each)), name }))
            }
            _ => Value::Undefined,
        })
    }

    /// `of[key]`
    pub(super) fn item(&mut self, of: &Value<'v>, key: &Value<'v>) -> Fallible<Value<'v>> {
        let found = match (of, key) {
            (Value::Undefined, _) => return refused("an undefined value has no items"),
            (Value::Map(map), Value::Text(key)) => {
                self.steps(map.len() / 16)?;
                map.get_text(key)
            }
            (Value::Map(map), key) => self.entry(map, key)?,
            (Value::List(list), Value::Int(_) | Value::Bool(_)) if list.kind.has_places() => {
                index(key, list.len()).and_then(|at| list.get(at))
            }
            (Value::Text(text), Value::Int(_) | Value::Bool(_)) => {
                self.steps(text.len() / 64)?;
                let count = if text.is_ascii() { text.len() } else { text.chars().count() };
                index(key, count).map(|at| Value::Text(char_at(text, at)))
            }
            _ => None,
        };
        match (found, key) {
            (Some(found), _) => Ok(found),
            // As a fallback, look up the attribute of this name, as Jinja2 does.
            (None, Value::Text(name)) => match methods::known(name) {
                Some(name) => self.attribute(of, name),
                None => self.attribute_by(of, name),
            },
            (None, _) => Ok(Value::Undefined),
        }
    }

    /// Returns an attribute of a value without methods.
    fn attribute_by(&mut self, of: &Value<'v>, name: &Text<'v>) -> Fallible<Value<'v>> {
        match of {
            Value::Namespace(at) => self.namespace_item(*at, name),
            Value::Loop(each) => match methods::LOOP_ITEMS.into_iter().find(|known| *known == &**name) {
                Some(known) => self.loop_item(each, known),
                None => Ok(Value::Undefined),
            },
            _ => Ok(Value::Undefined),
        }
    }

    /// Returns the entry of a key that is not a string.
    fn entry(&mut self, map: &Map<'v>, key: &Value<'v>) -> Fallible<Option<Value<'v>>> {
        let Map::Own(entries, _) = map else { return Ok(None) };
        for entry in entries.iter() {
            if self.equal(&entry.key, key)? {
                return Ok(Some(entry.value.clone()));
            }
        }
        Ok(None)
    }

    /// Returns the list that a `for` or a filter iterates over.
    pub(super) fn items(&mut self, of: &Value<'v>) -> Fallible<List<'v>> {
        let items = match of {
            Value::List(list) => {
                self.steps(list.len())?;
                return Ok(list.clone());
            }
            Value::Undefined => Vec::new(),
            Value::Map(map) => {
                self.room_for_items(map.len())?;
                map.keys()
            }
            Value::Text(text) => {
                self.room_for_items(text.len())?;
                let ends = text.char_indices().map(|(at, char)| at..at + char.len_utf8());
                ends.map(|range| Value::Text(text.part(range).markup(false))).collect()
            }
            Value::Iterator(generator) => started(generator)?.items.take().into(),
            other => return refused(format!("{:?} object is not iterable", other.type_name())),
        };
        Ok(List::own(Kind::List, items))
    }
}

/// Requests items from a generator, which raises the error that was deferred until then, if any.
pub(super) fn started<'g, 'v>(generator: &'g Generator<'v>) -> Fallible<&'g Generator<'v>> {
    generator.failure.as_ref().map_or(Ok(generator), |reason| refused(reason.clone()))
}

/// Returns the position in a sequence that an index refers to.
pub(super) fn index(key: &Value<'_>, count: usize) -> Option<usize> {
    let at = match key {
        Value::Int(at) => *at,
        Value::Bool(at) => (*at).into(),
        _ => return None,
    };
    let at = if at < 0 { at.checked_add(count as i128)? } else { at };
    usize::try_from(at).ok().filter(|at| *at < count)
}

fn char_at<'v>(text: &Text<'v>, at: usize) -> Text<'v> {
    let found = text.char_indices().nth(at);
    found.map_or_else(|| "".into(), |(start, char)| text.part(start..start + char.len_utf8()))
}
