//! Calls of functions, macros and methods.

use std::cell::Cell;
use std::rc::Rc;

use super::arguments::{Given, Named};
use super::ast::{Arguments, Expr, Macro};
use super::run::Run;
use super::strftime::strftime;
use super::value::{Callable, Entry, Kind, Loop};
use super::{CALLER, Fallible, KWARGS, List, Map, VARARGS, Value, refused};

/// The longest range that Jinja2's sandbox allows.
const MAX_RANGE: i128 = 100_000;
/// Maximum magnitude of the arguments of `range`.
const RANGE_BOUND: i128 = 1 << 62;

impl<'v> Run<'v> {
    pub(super) fn call_expr(&mut self, callee: &'v Expr, arguments: &'v Arguments) -> Fallible<Value<'v>> {
        // Methods are called without creating an intermediate value.
        if let Expr::Attr(of, name) = callee {
            let of = self.value(of)?;
            if super::methods::has(&of, name) {
                let arguments = self.arguments(arguments)?;
                return self.method(&of, name, arguments);
            }
            let callee = self.attribute(&of, name)?;
            let arguments = self.arguments(arguments)?;
            return match (&of, &**name) {
                (Value::Callable(callable), "next" | "reset") if let Callable::Cycler { items, at } = &**callable => {
                    let current = items.get(at.get()).unwrap_or(Value::Undefined);
                    let is_next = &**name == "next";
                    at.set(if is_next { (at.get() + 1) % items.len().max(1) } else { 0 });
                    Ok(if is_next { current } else { Value::None })
                }
                (_, name) if matches!(callee, Value::Undefined) => refused(format!("{} has no {name}", of.type_name())),
                _ => self.call(&callee, arguments),
            };
        }
        let callee = self.value(callee)?;
        let arguments = self.arguments(arguments)?;
        self.call(&callee, arguments)
    }

    pub(super) fn call(&mut self, callee: &Value<'v>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        match callee {
            Value::Callable(callable) => match &**callable {
                Callable::Function(name) => self.function(name, arguments),
                Callable::Method { of, name } => self.method(of, name, arguments),
                Callable::Macro { node, scope, caller } => self.call_macro(node, *scope, arguments, caller.clone()),
                Callable::Joiner { separator, used } => {
                    arguments.none()?;
                    Ok(if used.replace(true) { Value::Text(separator.clone()) } else { Value::text("") })
                }
                Callable::Cycler { .. } => refused("a cycler cannot be called"),
            },
            Value::Loop(each) => self.call_loop(each, arguments),
            Value::Undefined => refused("an undefined value cannot be called"),
            other => refused(format!("{:?} object is not callable", other.type_name())),
        }
    }

    /// Evaluates `loop(items)` in a recursive loop.
    fn call_loop(&mut self, each: &Rc<Loop<'v>>, arguments: Given<'v>) -> Fallible<Value<'v>> {
        if !each.each.recursive {
            return refused("the loop is not recursive");
        }
        let [items] = arguments.bind(["iterable"])?;
        let items = items.required("iterable")?;
        self.deeper()?;
        let text = self.captured(|run| run.for_loop(each.each, &items, each.depth + 1))?;
        self.depth -= 1;
        Ok(Value::text(text))
    }

    pub(super) fn call_macro(
        &mut self,
        node: &'v Macro,
        scope: usize,
        arguments: Given<'v>,
        caller: Option<Value<'v>>,
    ) -> Fallible<Value<'v>> {
        self.deeper()?;
        self.enter_from(scope);
        let Given { values, named } = arguments;
        let count = node.parameters.len();
        let mut values = values.into_iter();
        let mut given: Vec<Option<Value<'v>>> = (0..count).map(|_| values.next()).collect();
        let mut more = Vec::new();
        let mut caller = caller;
        self.steps(named.len().saturating_mul(count) / 16)?;
        for Named { name, value } in named {
            let known = node.parameters.iter().position(|(known, _)| self.template.names[*known as usize] == *name);
            match known {
                Some(at) if given[at].is_some() => return refused(format!("{} is given twice", &*name)),
                Some(at) => given[at] = Some(value),
                None if &*name == "caller" => caller = Some(value),
                None => more.push(Entry { key: Value::Text(name), value }),
            }
        }
        let rest: Vec<_> = values.collect();
        if !rest.is_empty() && !node.takes_more {
            return refused(format!("a macro takes at most {count} arguments"));
        }
        if let Some(entry) = more.first().filter(|_| !node.takes_named) {
            let Value::Text(name) = &entry.key else { return refused("keywords must be strings") };
            return refused(format!("a macro takes no argument {}", &**name));
        }
        for ((name, default), value) in node.parameters.iter().zip(given) {
            let value = match (value, default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.value(default)?,
                (None, None) => Value::Undefined,
            };
            self.set(*name, value);
        }
        if node.takes_more {
            let rest = self.made_list(Value::tuple(rest))?;
            self.set(VARARGS, rest);
        }
        if node.takes_named {
            let more = self.made_list(Value::Map(Map::own(more)))?;
            self.set(KWARGS, more);
        }
        match caller {
            Some(_) if !node.takes_caller => return refused("the macro does not use its caller"),
            Some(caller) => self.set(CALLER, caller),
            None => {}
        }
        let text = self.captured(|run| run.body(&node.body).map(drop))?;
        self.leave();
        self.depth -= 1;
        Ok(Value::text(text))
    }

    fn function(&mut self, name: &str, arguments: Given<'v>) -> Fallible<Value<'v>> {
        match name {
            "range" => self.range(arguments),
            "namespace" => {
                let entries = self.dict(arguments)?;
                self.namespaces.push(Vec::new());
                let at = self.namespaces.len() - 1;
                for entry in entries {
                    match entry.key {
                        Value::Text(name) => self.set_attribute(at, name, entry.value)?,
                        _ => return refused("attributes of a namespace must be named"),
                    }
                }
                self.room_for_items(1)?;
                Ok(Value::Namespace(at))
            }
            "dict" => {
                let entries = self.dict(arguments)?;
                self.made_list(Value::Map(Map::own(entries)))
            }
            "raise_exception" => {
                let [message] = arguments.bind(["message"])?;
                let message = message.required("message")?;
                let message = self.printed(&message)?;
                refused(message)
            }
            "strftime_now" => {
                let [format] = arguments.bind(["format"])?;
                let format = format.required("format")?;
                let Value::Text(format) = &format else { return refused("a date format must be a string") };
                self.room(format.len().saturating_mul(16))?;
                Ok(Value::text(strftime(format, (self.input.clock)() + i64::from(self.input.zone_seconds))))
            }
            "cycler" => {
                let items = List::own(Kind::Tuple, arguments.values);
                if items.len() == 0 {
                    return refused("at least one item has to be provided");
                }
                self.made_list(Value::Callable(Rc::new(Callable::Cycler { items, at: Cell::new(0) })))
            }
            "joiner" => {
                let [separator] = arguments.bind(["sep"])?;
                let separator = separator.text(", ")?;
                Ok(Value::Callable(Rc::new(Callable::Joiner { separator, used: Cell::new(false) })))
            }
            _ => refused(format!("{name} is not deterministic")),
        }
    }

    fn range(&mut self, arguments: Given<'v>) -> Fallible<Value<'v>> {
        if !arguments.named.is_empty() {
            return refused("range does not take named arguments");
        }
        let mut bounds = Vec::new();
        for value in &arguments.values {
            match value.whole("a range bound")? {
                bound if bound.abs() <= RANGE_BOUND => bounds.push(bound),
                _ => return refused("a range bound is too large"),
            }
        }
        let (start, stop, step) = match bounds.as_slice() {
            [stop] => (0, *stop, 1),
            [start, stop] => (*start, *stop, 1),
            [start, stop, step] if *step != 0 => (*start, *stop, *step),
            _ => return refused("range takes one to three numbers, and its step must not be zero"),
        };
        let span = if step > 0 { stop - start } else { start - stop };
        let count = if span > 0 { (span - 1) / step.abs() + 1 } else { 0 };
        if count > MAX_RANGE {
            return refused(format!("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MAX_RANGE})."));
        }
        Ok(Value::List(List::range(start, step, usize::try_from(count).unwrap_or(0))))
    }

    /// Converts a pair to an entry of a mapping.
    pub(super) fn pair(&mut self, pair: &Value<'v>) -> Fallible<Entry<'v>> {
        let pair = self.items(pair)?;
        match (pair.get(0), pair.get(1), pair.len()) {
            (Some(key), Some(value), 2) => Ok(Entry { key, value }),
            _ => refused("a mapping must be built from pairs"),
        }
    }

    /// `dict(...)`
    fn dict(&mut self, arguments: Given<'v>) -> Fallible<Vec<Entry<'v>>> {
        let Given { values, named } = arguments;
        let mut entries = Vec::new();
        match values.as_slice() {
            [] => {}
            [Value::Map(map)] => {
                self.room_for_items(map.len())?;
                entries = map.entries();
            }
            [pairs] => {
                for pair in self.items(pairs)?.iter() {
                    let pair = self.pair(&pair)?;
                    self.insert(&mut entries, pair)?;
                }
            }
            _ => return refused("dict takes at most one positional argument"),
        }
        for Named { name, value } in named {
            self.insert(&mut entries, Entry { key: Value::Text(name), value })?;
        }
        Ok(entries)
    }
}
