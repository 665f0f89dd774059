//! Executes a template's statements for one chat.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use serde_json::{Map as Object, Value as Json};

use super::ast::{Expr, Filter, For, Macro, Name, Node, NodeKind, Operator, Target};
use super::value::{Callable, Entry, Kind, Local, Loop, Map, Text};
use super::{Budget, Failure, Fallible, LOOP, List, MAX_DEPTH, MAX_VALUE_DEPTH, Template, Value, refused};

/// Number of bytes of text that count as one step.
const BYTES_A_STEP: usize = 64;
/// Typical output size in bytes.
const OUTPUT_BYTES: usize = 4096;

/// The inputs for rendering a chat.
#[derive(Debug)]
pub(crate) struct Input<'v> {
    pub(crate) messages: Value<'v>,
    pub(crate) tools: Value<'v>,
    pub(crate) documents: Value<'v>,
    pub(crate) add_generation_prompt: Value<'v>,
    /// The request's variables, which take precedence over those in `special`.
    pub(crate) variables: Option<&'v Object<String, Json>>,
    pub(crate) special: &'v Object<String, Json>,
    /// Clock that `strftime_now` reads, in Unix seconds.
    pub(crate) clock: fn() -> i64,
    /// Time zone offset east of UTC.
    pub(crate) zone_seconds: i32,
}

pub(crate) struct Run<'v> {
    pub(super) template: &'v Template,
    pub(super) input: &'v Input<'v>,
    /// Template-wide variables, filled in when first looked up.
    pub(super) globals: Vec<Option<Value<'v>>>,
    /// Variables of all scopes, innermost last.
    locals: Vec<Local<'v>>,
    scopes: Vec<Scope>,
    pub(super) namespaces: Vec<Vec<Attribute<'v>>>,
    out: String,
    budget: Budget,
    steps_left: u64,
    bytes_left: usize,
    pub(super) depth: u32,
    line: u32,
}

/// A range of consecutive variables in `locals`.
#[derive(Clone, Copy)]
struct Scope {
    start: usize,
    /// Index of the enclosing scope.
    parent: usize,
}

pub(super) struct Attribute<'v> {
    pub(super) name: Text<'v>,
    pub(super) value: Value<'v>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

pub(super) fn render<'v>(template: &'v Template, input: &'v Input<'v>, budget: Budget) -> Result<String, Failure> {
    let mut run = Run {
        template,
        input,
        globals: template.names.iter().map(|_| None).collect(),
        locals: Vec::with_capacity(16),
        scopes: vec![Scope { start: 0, parent: 0 }],
        namespaces: Vec::new(),
        out: String::with_capacity(OUTPUT_BYTES),
        budget,
        steps_left: budget.steps,
        bytes_left: budget.bytes,
        depth: 0,
        line: 1,
    };
    match run.body(&template.nodes) {
        Ok(_) => Ok(run.out),
        Err(Failure::Refused(reason)) => refused(format!("{reason} (template line {})", run.line)),
        Err(failure) => Err(failure),
    }
}

impl<'v> Run<'v> {
    pub(super) fn steps(&mut self, steps: usize) -> Fallible<()> {
        match self.steps_left.checked_sub(steps as u64) {
            Some(left) => self.steps_left = left,
            None => return Err(Failure::TooMuch { what: "steps", limit: self.budget.steps }),
        }
        Ok(())
    }

    /// Charges memory for a text or list before it is created.
    pub(super) fn room(&mut self, bytes: usize) -> Fallible<()> {
        match self.bytes_left.checked_sub(bytes) {
            Some(left) => self.bytes_left = left,
            None => return Err(Failure::TooMuch { what: "bytes", limit: self.budget.bytes as u64 }),
        }
        self.steps(bytes / BYTES_A_STEP)
    }

    pub(super) fn room_for_items(&mut self, items: usize) -> Fallible<()> {
        self.steps(items)?;
        self.room(items.saturating_mul(size_of::<Value<'_>>()))
    }

    /// Wraps a new text and only then charges its memory, which is acceptable for texts at most a few times longer than
    /// their inputs.
    pub(super) fn made(&mut self, text: String) -> Fallible<Value<'v>> {
        self.room(text.len())?;
        Ok(Value::text(text))
    }

    /// Wraps a new list.
    pub(super) fn made_list(&mut self, list: Value<'v>) -> Fallible<Value<'v>> {
        if list.depth() > MAX_VALUE_DEPTH {
            return Err(Failure::TooMuch { what: "nested lists", limit: MAX_VALUE_DEPTH.into() });
        }
        Ok(list)
    }

    pub(super) fn deeper(&mut self) -> Fallible<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Failure::TooMuch { what: "nested calls", limit: MAX_DEPTH.into() });
        }
        self.steps(1)
    }

    pub(super) fn write(&mut self, text: &str) -> Fallible<()> {
        self.room(text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    pub(super) fn body(&mut self, body: &'v [Node]) -> Fallible<Flow> {
        self.deeper()?;
        for node in body {
            self.line = node.line;
            let flow = self.node(node)?;
            if flow != Flow::Next {
                self.depth -= 1;
                return Ok(flow);
            }
        }
        self.depth -= 1;
        Ok(Flow::Next)
    }

    fn node(&mut self, node: &'v Node) -> Fallible<Flow> {
        match &node.kind {
            NodeKind::Text(text) => self.write(text)?,
            NodeKind::Emit(expr) => self.emit(expr)?,
            NodeKind::Set(target, expr) => {
                let value = self.value(expr)?;
                self.assign(target, value)?;
            }
            NodeKind::If { branches, otherwise } => {
                for (test, body) in branches {
                    if self.value(test)?.is_true() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            NodeKind::For(each) => {
                let over = self.value(&each.over)?;
                self.for_loop(each, &over, 0)?;
            }
            NodeKind::Break => return Ok(Flow::Break),
            NodeKind::Continue => return Ok(Flow::Continue),
            _ => return self.block(node),
        }
        Ok(Flow::Next)
    }

    /// Executes the less common statements.
    fn block(&mut self, node: &'v Node) -> Fallible<Flow> {
        match &node.kind {
            NodeKind::SetBlock { target, filters, body } => {
                let value = self.filtered_body(body, filters)?;
                self.assign(target, value)?;
            }
            NodeKind::FilterBlock { filters, body } => {
                let value = self.filtered_body(body, filters)?;
                self.emit_value(&value)?;
            }
            NodeKind::Macro(node) => {
                let value = self.macro_value(node);
                self.set(node.name, value);
            }
            NodeKind::Call { caller, call } => {
                let caller = self.macro_value(caller);
                let value = self.call_with(call, caller)?;
                self.emit_value(&value)?;
            }
            NodeKind::With { values, body } => {
                let values: Vec<_> = values
                    .iter()
                    .map(|(target, expr)| self.value(expr).map(|value| (target, value)))
                    .collect::<Fallible<_>>()?;
                self.enter();
                for (target, value) in values {
                    self.assign(target, value)?;
                }
                let flow = self.body(body)?;
                self.leave();
                return Ok(flow);
            }
            NodeKind::Scope(body) => {
                self.enter();
                let flow = self.body(body)?;
                self.leave();
                return Ok(flow);
            }
            NodeKind::Refused(reason) => return refused(*reason),
            _ => {}
        }
        Ok(Flow::Next)
    }

    fn filtered_body(&mut self, body: &'v [Node], filters: &'v [Filter]) -> Fallible<Value<'v>> {
        self.enter();
        let text = self.captured(|run| run.body(body).map(drop))?;
        self.leave();
        let mut value = Value::text(text);
        for filter in filters {
            value = self.filter(value, filter)?;
        }
        Ok(value)
    }

    /// Captures the text that `work` writes.
    pub(super) fn captured(&mut self, work: impl FnOnce(&mut Self) -> Fallible<()>) -> Fallible<String> {
        let outer = std::mem::take(&mut self.out);
        work(self)?;
        Ok(std::mem::replace(&mut self.out, outer))
    }

    fn macro_value(&self, node: &'v Macro) -> Value<'v> {
        let scope = self.scopes.len() - 1;
        Value::Callable(Rc::new(Callable::Macro { node, scope, caller: None }))
    }

    /// Writes an expression; the parts of a concatenation are written directly instead of being joined first.
    fn emit(&mut self, expr: &'v Expr) -> Fallible<()> {
        match expr {
            Expr::Binary(Operator::Add, left, right) => match self.write_sum(left, right)? {
                Some(sum) => self.emit_value(&sum),
                None => Ok(()),
            },
            Expr::Concat(parts) => parts.iter().try_for_each(|part| {
                let value = self.value(part)?;
                self.emit_value(&value)
            }),
            _ => {
                let value = self.value(expr)?;
                self.emit_value(&value)
            }
        }
    }

    /// Writes the sum of two values directly if it is text; otherwise returns it.
    fn write_sum(&mut self, left: &'v Expr, right: &'v Expr) -> Fallible<Option<Value<'v>>> {
        let start = self.out.len();
        let sum = match left {
            Expr::Binary(Operator::Add, left, right) => self.write_sum(left, right)?,
            _ => Some(self.value(left)?),
        };
        let right = self.value(right)?;
        match (sum, right) {
            (Some(Value::Text(left)), Value::Text(right)) if !left.is_markup && !right.is_markup => {
                self.write(&left)?;
                self.write(&right)?;
                Ok(None)
            }
            (None, Value::Text(right)) if !right.is_markup => self.write(&right).map(|()| None),
            (Some(left), right) => self.add(left, right).map(Some),
            (None, right) => {
                let left = Value::text(self.out.split_off(start));
                self.add(left, right).map(Some)
            }
        }
    }

    fn emit_value(&mut self, value: &Value<'v>) -> Fallible<()> {
        match value {
            Value::Text(text) => self.write(text),
            Value::Undefined => Ok(()),
            other => {
                let text = self.printed(other)?;
                self.write(&text)
            }
        }
    }

    pub(super) fn enter(&mut self) {
        let parent = self.scopes.len() - 1;
        self.scopes.push(Scope { start: self.locals.len(), parent });
    }

    /// Enters a scope whose parent is not the current one.
    pub(super) fn enter_from(&mut self, parent: usize) {
        let parent = parent.min(self.scopes.len() - 1);
        self.scopes.push(Scope { start: self.locals.len(), parent });
    }

    pub(super) fn leave(&mut self) {
        if let Some(scope) = self.scopes.pop() {
            self.locals.truncate(scope.start);
        }
    }

    pub(super) fn look_up(&mut self, name: Name) -> Fallible<Value<'v>> {
        let mut at = self.scopes.len() - 1;
        loop {
            let scope = self.scopes[at];
            let end = self.scopes.get(at + 1).map_or(self.locals.len(), |next| next.start);
            if let Some(local) = self.locals[scope.start..end].iter().find(|local| local.name == name) {
                return Ok(local.value.clone());
            }
            if at == 0 {
                return self.global(name);
            }
            at = scope.parent;
        }
    }

    pub(super) fn set(&mut self, name: Name, value: Value<'v>) {
        let start = self.scopes.last().map_or(0, |scope| scope.start);
        match self.locals[start..].iter_mut().find(|local| local.name == name) {
            Some(local) => local.value = value,
            None => self.locals.push(Local { name, value }),
        }
    }

    fn assign(&mut self, target: &'v Target, value: Value<'v>) -> Fallible<()> {
        match target {
            Target::Name(name) => self.set(*name, value),
            Target::Attr(name, attribute) => match self.look_up(*name)? {
                Value::Namespace(at) => self.set_attribute(at, (&**attribute).into(), value)?,
                _ => return refused("only attributes of a namespace can be assigned"),
            },
            Target::Each(targets) => {
                let values = self.items(&value)?;
                if values.len() != targets.len() {
                    return refused(format!("{} values for {} names", values.len(), targets.len()));
                }
                for (target, value) in targets.iter().zip(values.iter()) {
                    self.assign(target, value)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn set_attribute(&mut self, at: usize, name: Text<'v>, value: Value<'v>) -> Fallible<()> {
        if name.starts_with('_') {
            return refused(format!("a namespace has no attribute {}", &*name));
        }
        let attributes = &mut self.namespaces[at];
        match attributes.iter_mut().find(|known| *known.name == *name) {
            Some(known) => known.value = value,
            None => attributes.push(Attribute { name, value }),
        }
        let count = self.namespaces[at].len();
        self.steps(count / 16)
    }

    /// Runs a loop's body for each item; `depth` is the recursion depth of a recursive loop.
    pub(super) fn for_loop(&mut self, each: &'v For, over: &Value<'v>, depth: usize) -> Fallible<()> {
        let mut items = self.items(over)?;
        if let Some(test) = &each.only_if {
            let mut kept = Vec::new();
            self.enter();
            for item in items.iter() {
                self.assign(&each.target, item.clone())?;
                if self.value(test)?.is_true() {
                    kept.push(item);
                }
            }
            self.leave();
            self.room_for_items(kept.len())?;
            items = List::own(Kind::List, kept);
        }
        if items.len() == 0 {
            self.enter();
            self.body(&each.otherwise)?;
            self.leave();
            return Ok(());
        }
        self.enter();
        let state = Rc::new(Loop { each, items, index: Cell::new(0), depth, seen: RefCell::new(None) });
        let start = self.locals.len();
        for at in 0..state.items.len() {
            self.locals.truncate(start);
            self.locals.push(Local { name: LOOP, value: Value::Loop(Rc::clone(&state)) });
            state.index.set(at);
            let item = state.items.get(at).unwrap_or(Value::Undefined);
            self.assign(&each.target, item)?;
            if self.body(&each.body)? == Flow::Break {
                break;
            }
        }
        self.leave();
        Ok(())
    }

    /// Returns the result of `{% call %}`.
    fn call_with(&mut self, call: &'v Expr, caller: Value<'v>) -> Fallible<Value<'v>> {
        let Expr::Call(callee, arguments) = call else { return Ok(Value::Undefined) };
        let callee = self.value(callee)?;
        let arguments = self.arguments(arguments)?;
        match &callee {
            Value::Callable(callable) if let Callable::Macro { node, scope, .. } = &**callable => {
                self.call_macro(node, *scope, arguments, Some(caller))
            }
            _ => self.call(&callee, arguments),
        }
    }

    /// Returns the attributes of a namespace as a mapping.
    pub(super) fn attributes(&self, at: usize) -> Map<'v> {
        let entry = |known: &Attribute<'v>| Entry { key: Value::Text(known.name.clone()), value: known.value.clone() };
        Map::own(self.namespaces[at].iter().map(entry).collect())
    }
}
