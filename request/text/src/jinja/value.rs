//! The values of a template: Python equivalents of JSON, literals and filter results.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::{Deref, Range};
use std::rc::Rc;

use serde_json::{Map as Object, Value as Json};

use super::ast::{For, Macro, Name};
use crate::chat::PlainMessage;

#[derive(Clone, Debug)]
pub(crate) enum Value<'v> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Text<'v>),
    List(List<'v>),
    Map(Map<'v>),
    /// A generator: items taken from it are consumed.
    Iterator(Rc<Generator<'v>>),
    /// A namespace, by index.
    Namespace(usize),
    Loop(Rc<Loop<'v>>),
    Callable(Rc<Callable<'v>>),
}

#[derive(Debug)]
pub(crate) struct Generator<'v> {
    pub(crate) items: RefCell<VecDeque<Value<'v>>>,
    /// The reason why the generator has no items. As in Python, it is reported only when the first item is requested.
    pub(crate) failure: Option<String>,
    depth: u32,
}

/// A string, and whether it is markup, i.e. whether text added to it with `+` is escaped.
#[derive(Clone, Debug)]
pub(crate) struct Text<'v> {
    body: Body<'v>,
    pub(crate) is_markup: bool,
}

#[derive(Clone, Debug)]
enum Body<'v> {
    Borrowed(&'v str),
    // An `Rc<str>` would copy the text again.
    Owned(Rc<String>),
}

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.body {
            Body::Borrowed(text) => text,
            Body::Owned(text) => text,
        }
    }
}

impl<'v> From<&'v str> for Text<'v> {
    fn from(text: &'v str) -> Self {
        Self { body: Body::Borrowed(text), is_markup: false }
    }
}

impl From<String> for Text<'_> {
    fn from(text: String) -> Self {
        Self { body: Body::Owned(Rc::new(text)), is_markup: false }
    }
}

impl<'v> Text<'v> {
    pub(crate) fn markup(self, is_markup: bool) -> Self {
        Self { is_markup, ..self }
    }

    /// Returns a substring, which is borrowed if the text is.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        let is_markup = self.is_markup;
        match &self.body {
            Body::Borrowed(text) => Self { body: Body::Borrowed(&text[range]), is_markup },
            Body::Owned(text) if range.len() == text.len() => self.clone(),
            Body::Owned(text) => Self::from(text[range].to_owned()).markup(is_markup),
        }
    }

    /// Returns the memory to charge for a part of this many bytes.
    pub(crate) fn cost_of(&self, bytes: usize) -> usize {
        if matches!(self.body, Body::Borrowed(_)) { 0 } else { bytes }
    }

    /// Returns several parts of this text, each of which `parts` borrows from it.
    pub(crate) fn parts<'t>(&'t self, parts: impl Iterator<Item = &'t str>) -> Vec<Value<'v>> {
        let base = self.as_ptr() as usize;
        let place = |part: &str| {
            let start = part.as_ptr() as usize - base;
            Value::Text(self.part(start..start + part.len()))
        };
        parts.map(place).collect()
    }
}

/// The Python type of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    List,
    Tuple,
    Range,
    Keys,
    Values,
    Items,
}

impl Kind {
    /// Returns whether lists of this kind can be indexed.
    pub(crate) fn has_places(self) -> bool {
        matches!(self, Self::List | Self::Tuple | Self::Range)
    }

    pub(crate) fn is_list_or_tuple(self) -> bool {
        matches!(self, Self::List | Self::Tuple)
    }
}

fn depth_of(items: &[Value<'_>]) -> u32 {
    items.iter().map(Value::depth).max().unwrap_or(0) + 1
}

#[derive(Clone, Debug)]
pub(crate) struct List<'v> {
    pub(crate) kind: Kind,
    items: Items<'v>,
}

#[derive(Clone, Debug)]
enum Items<'v> {
    Json(&'v [Json]),
    Messages(&'v [PlainMessage<'v>]),
    Own(Rc<Vec<Value<'v>>>, u32),
    // Kept small, since this variant determines the size of all values.
    Range { start: i64, step: i64, length: usize },
}

impl<'v> List<'v> {
    pub(crate) fn json(items: &'v [Json]) -> Self {
        Self { kind: Kind::List, items: Items::Json(items) }
    }

    pub(crate) fn messages(messages: &'v [PlainMessage<'v>]) -> Self {
        Self { kind: Kind::List, items: Items::Messages(messages) }
    }

    pub(crate) fn range(start: i128, step: i128, length: usize) -> Self {
        let [start, step] = [start, step].map(|number| i64::try_from(number).unwrap_or(i64::MAX));
        Self { kind: Kind::Range, items: Items::Range { start, step, length } }
    }

    pub(crate) fn own(kind: Kind, items: Vec<Value<'v>>) -> Self {
        let depth = depth_of(&items);
        Self { kind, items: Items::Own(Rc::new(items), depth) }
    }

    fn depth(&self) -> u32 {
        match self.items {
            Items::Own(_, depth) => depth,
            _ => 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.items {
            Items::Json(items) => items.len(),
            Items::Messages(items) => items.len(),
            Items::Own(items, _) => items.len(),
            Items::Range { length, .. } => *length,
        }
    }

    pub(crate) fn get(&self, at: usize) -> Option<Value<'v>> {
        match &self.items {
            Items::Json(items) => items.get(at).map(Value::json),
            Items::Messages(items) => items.get(at).map(|message| Value::Map(Map::Message(message))),
            Items::Own(items, _) => items.get(at).cloned(),
            Items::Range { start, step, length } => {
                let number = || i128::from(*start) + i128::from(*step) * at as i128;
                (at < *length).then(|| Value::Int(number()))
            }
        }
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = Value<'v>> + '_ {
        (0..self.len()).map(|at| self.get(at).unwrap_or(Value::Undefined))
    }

    /// Returns a range of items, which is borrowed if the list is.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        let items = match &self.items {
            Items::Json(items) => Items::Json(&items[range]),
            Items::Messages(items) => Items::Messages(&items[range]),
            Items::Own(items, depth) => Items::Own(Rc::new(items[range].to_vec()), *depth),
            Items::Range { start, step, .. } => {
                let start = i128::from(*start) + i128::from(*step) * range.start as i128;
                return Self::range(start, (*step).into(), range.len());
            }
        };
        Self { kind: self.kind, items }
    }

    /// Returns the start and step of a range.
    pub(crate) fn range_of(&self) -> Option<[i128; 2]> {
        match self.items {
            Items::Range { start, step, .. } => Some([start.into(), step.into()]),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Map<'v> {
    Json(&'v Object<String, Json>),
    Message(&'v PlainMessage<'v>),
    Own(Rc<Vec<Entry<'v>>>, u32),
}

#[derive(Clone, Debug)]
pub(crate) struct Entry<'v> {
    pub(crate) key: Value<'v>,
    pub(crate) value: Value<'v>,
}

impl<'v> Map<'v> {
    pub(crate) fn own(entries: Vec<Entry<'v>>) -> Self {
        let depth = entries.iter().map(|entry| entry.value.depth().max(entry.key.depth())).max().unwrap_or(0) + 1;
        Self::Own(Rc::new(entries), depth)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Json(object) => object.len(),
            Self::Message(_) => 2,
            Self::Own(entries, _) => entries.len(),
        }
    }

    pub(crate) fn get_text(&self, key: &str) -> Option<Value<'v>> {
        match self {
            Self::Json(object) => object.get(key).map(Value::json),
            Self::Message(message) => message.text(key).map(|text| Value::Text(text.into())),
            Self::Own(entries, _) => {
                let found = entries.iter().find(|entry| matches!(&entry.key, Value::Text(text) if **text == *key));
                found.map(|entry| entry.value.clone())
            }
        }
    }

    pub(crate) fn entries(&self) -> Vec<Entry<'v>> {
        let text = |text: &'v str| Value::Text(text.into());
        match self {
            Self::Json(object) => {
                object.iter().map(|(key, value)| Entry { key: text(key), value: Value::json(value) }).collect()
            }
            Self::Message(message) => {
                message.entries().map(|(key, value)| Entry { key: text(key), value: text(value) }).to_vec()
            }
            Self::Own(entries, _) => entries.to_vec(),
        }
    }

    pub(crate) fn keys(&self) -> Vec<Value<'v>> {
        self.entries().into_iter().map(|entry| entry.key).collect()
    }
}

impl<'v> Value<'v> {
    pub(crate) fn json(json: &'v Json) -> Self {
        match json {
            Json::Null => Self::None,
            Json::Bool(is) => Self::Bool(*is),
            Json::Number(number) => match number.as_i128() {
                Some(number) => Self::Int(number),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::Text(text.as_str().into()),
            Json::Array(items) => Self::List(List::json(items)),
            Json::Object(object) => Self::Map(Map::Json(object)),
        }
    }

    pub(crate) fn text(text: impl Into<Text<'v>>) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn list(items: Vec<Value<'v>>) -> Self {
        Self::List(List::own(Kind::List, items))
    }

    pub(crate) fn tuple(items: Vec<Value<'v>>) -> Self {
        Self::List(List::own(Kind::Tuple, items))
    }

    pub(crate) fn iterator(items: Vec<Value<'v>>) -> Self {
        let depth = depth_of(&items);
        Self::Iterator(Rc::new(Generator { items: RefCell::new(items.into()), failure: None, depth }))
    }

    pub(crate) fn failing_iterator(reason: String) -> Self {
        Self::Iterator(Rc::new(Generator { items: RefCell::default(), failure: Some(reason), depth: 1 }))
    }

    pub(crate) fn int(number: usize) -> Self {
        Self::Int(number as i128)
    }

    /// Returns the nesting depth of lists created by the template; that of JSON is limited by the JSON parser.
    pub(crate) fn depth(&self) -> u32 {
        match self {
            Self::List(list) => list.depth(),
            Self::Map(Map::Own(_, depth)) => *depth,
            Self::Iterator(generator) => generator.depth,
            Self::Callable(callable) => callable.depth(),
            Self::Loop(each) => each.items.depth() + 1,
            _ => 0,
        }
    }

    pub(crate) fn is_true(&self) -> bool {
        match self {
            Self::Undefined | Self::None => false,
            Self::Bool(is) => *is,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::List(list) => list.len() > 0,
            Self::Map(map) => map.len() > 0,
            Self::Loop(each) => each.items.len() > 0,
            Self::Iterator(_) | Self::Namespace(_) | Self::Callable(_) => true,
        }
    }

    /// Returns both lists if both values are lists or both are tuples.
    pub(crate) fn alike<'a>(&'a self, other: &'a Self) -> Option<[&'a List<'v>; 2]> {
        match (self, other) {
            (Self::List(a), Self::List(b)) if a.kind == b.kind && a.kind.is_list_or_tuple() => Some([a, b]),
            _ => None,
        }
    }

    /// Returns the name of the value's Python type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(text) if text.is_markup => "Markup",
            Self::Text(_) => "str",
            Self::List(list) => match list.kind {
                Kind::List => "list",
                Kind::Tuple => "tuple",
                Kind::Range => "range",
                Kind::Keys => "dict_keys",
                Kind::Values => "dict_values",
                Kind::Items => "dict_items",
            },
            Self::Map(_) => "dict",
            Self::Iterator(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Loop(_) => "LoopContext",
            Self::Callable(_) => "function",
        }
    }
}

/// The variable `loop`.
#[derive(Debug)]
pub(crate) struct Loop<'v> {
    pub(crate) each: &'v For,
    pub(crate) items: List<'v>,
    pub(crate) index: Cell<usize>,
    pub(crate) depth: usize,
    /// The values last passed to `changed`, as printed.
    pub(crate) seen: RefCell<Option<String>>,
}

#[derive(Debug)]
pub(crate) enum Callable<'v> {
    Function(&'static str),
    Method {
        of: Value<'v>,
        name: &'v str,
    },
    Macro {
        node: &'v Macro,
        /// The enclosing scope.
        scope: usize,
        caller: Option<Value<'v>>,
    },
    Cycler {
        items: List<'v>,
        at: Cell<usize>,
    },
    Joiner {
        separator: Text<'v>,
        used: Cell<bool>,
    },
}

impl Callable<'_> {
    fn depth(&self) -> u32 {
        match self {
            Self::Method { of, .. } => of.depth() + 1,
            Self::Macro { caller: Some(caller), .. } => caller.depth() + 1,
            Self::Cycler { items, .. } => items.depth() + 1,
            _ => 0,
        }
    }
}

/// A variable of a scope.
#[derive(Debug)]
pub(crate) struct Local<'v> {
    pub(crate) name: Name,
    pub(crate) value: Value<'v>,
}
