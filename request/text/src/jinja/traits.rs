//! Properties of a template that engines detect before rendering.

use std::collections::{BTreeMap, BTreeSet};

use super::Template;
use super::ast::{Arguments, Expr, Filter, For, Macro, Name, Node, NodeKind, Target};

/// The properties that engines detect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Whether the template iterates over the content of messages, according to vLLM's search.
    pub(crate) loops_vllm: bool,
    /// Whether the template iterates over the content of messages, according to SGLang's search.
    pub(crate) loops_sglang: bool,
    /// Whether the template mentions the developer role.
    pub(crate) names_developer: bool,
    /// Whether the template has a variable `low_effort` for a `reasoning_effort` of "low".
    pub(crate) has_low_effort: bool,
}

impl Template {
    pub(crate) fn traits(&self) -> Traits {
        let has = |text: &str| self.source.contains(text);
        let found = Found::of(self);
        Traits {
            loops_vllm: found.loops_vllm().unwrap_or(false),
            loops_sglang: ["image", "audio", "video", "vision"].into_iter().any(has) || found.loops_sglang(),
            names_developer: has("\"developer\"") || has("'developer'"),
            has_low_effort: has("low_effort") && has("truncate_history_thinking"),
        }
    }
}

/// The loops, assignments, macros and calls of a template. Each is visited only once, since a hostile template may have
/// many.
#[derive(Default)]
struct Found<'t> {
    names: &'t [String],
    /// All loops, each with its enclosing macros as indices into `macros`.
    loops: Vec<(&'t For, Vec<usize>)>,
    /// Assignment targets, keyed by the assigned variable.
    sets: BTreeMap<&'t str, Vec<&'t Target>>,
    macros: Vec<&'t Macro>,
    calls: Vec<(Name, &'t Arguments)>,
    inside: Vec<usize>,
}

/// A variable, or the named member of that variable.
type Part<'t> = (&'t str, Option<&'t str>);

impl<'t> Found<'t> {
    fn of(template: &'t Template) -> Self {
        let mut found = Self { names: &template.names, ..Self::default() };
        found.body(&template.nodes);
        found
    }

    fn name(&self, name: Name) -> &'t str {
        self.names.get(name as usize).map_or("", String::as_str)
    }

    /// Performs vLLM's search for loops over content; returns an error where vLLM stops searching.
    fn loops_vllm(&self) -> Result<bool, ()> {
        let lists = self.assigned("messages")?;
        let mut messages = BTreeSet::new();
        for (one, _) in &self.loops {
            if matches!(self.part(&one.over), Some((list, None)) if lists.contains(list)) {
                messages.insert(target(self, &one.target)?);
            }
        }
        let is_content =
            |expr: &'t Expr| matches!(self.part(expr), Some((message, Some("content"))) if messages.contains(message));
        let taken = self.parameters(&is_content);
        for (one, macros) in &self.loops {
            let over = if let Expr::Name(name) = one.over { self.name(name) } else { "" };
            let from_macro = || macros.iter().any(|at| taken.contains(&(*at, over)));
            if is_content(&one.over) || from_macro() || macros.is_empty() && over == "content" {
                return target(self, &one.target).map(|_| true);
            }
        }
        Ok(false)
    }

    /// Returns the names that refer to a variable or to a part of its list.
    fn assigned(&self, variable: &'t str) -> Result<BTreeSet<&'t str>, ()> {
        let (mut all, mut next) = (BTreeSet::from([variable]), vec![variable]);
        while let Some(name) = next.pop() {
            for to in self.sets.get(name).into_iter().flatten() {
                let to = target(self, to)?;
                if all.insert(to) {
                    next.push(to);
                }
            }
        }
        Ok(all)
    }

    /// Returns the macro parameters that receive the content of a message in some call.
    fn parameters(&self, is_content: &dyn Fn(&'t Expr) -> bool) -> BTreeSet<(usize, &'t str)> {
        let (mut by_place, mut by_name) = (BTreeSet::new(), BTreeSet::new());
        for (called, arguments) in &self.calls {
            let values = arguments.values.iter().enumerate().filter(|(_, value)| is_content(value));
            by_place.extend(values.map(|(at, _)| (*called, at)));
            let named = arguments.named.iter().filter(|(_, value)| is_content(value));
            by_name.extend(named.map(|(name, _)| (*called, &**name)));
        }
        let mut taken = BTreeSet::new();
        for (index, definition) in self.macros.iter().enumerate() {
            for (at, (parameter, _)) in definition.parameters.iter().enumerate() {
                let parameter = self.name(*parameter);
                if by_place.contains(&(definition.name, at)) || by_name.contains(&(definition.name, parameter)) {
                    taken.insert((index, parameter));
                }
            }
        }
        taken
    }

    fn loops_sglang(&self) -> bool {
        let is = |over| matches!(self.part(over), Some(("message" | "msg" | "m", Some("content"))));
        self.loops.iter().any(|(one, _)| is(&one.over))
    }

    /// Returns the variable, or its member, to which filters, tests and slices are applied.
    fn part(&self, expr: &'t Expr) -> Option<Part<'t>> {
        match expr {
            Expr::Filter(of, _) | Expr::Test(of, _) | Expr::Slice(of, _) => self.part(of),
            Expr::Name(name) => Some((self.name(*name), None)),
            Expr::Attr(of, member) => self.member(of, member),
            Expr::Item(of, key) => match &**key {
                Expr::Text(member) => self.member(of, member),
                _ => None,
            },
            _ => None,
        }
    }

    fn member(&self, of: &'t Expr, member: &'t str) -> Option<Part<'t>> {
        if let Expr::Name(name) = of { Some((self.name(*name), Some(member))) } else { None }
    }

    fn body(&mut self, nodes: &'t [Node]) {
        for node in nodes {
            self.node(&node.kind);
        }
    }

    fn node(&mut self, node: &'t NodeKind) {
        match node {
            NodeKind::Text(_) | NodeKind::Break | NodeKind::Continue | NodeKind::Refused(_) => {}
            NodeKind::Emit(expr) => self.expr(expr),
            NodeKind::Set(target, expr) => {
                if let Some((variable, None)) = self.part(expr) {
                    self.sets.entry(variable).or_default().push(target);
                }
                self.expr(expr);
            }
            NodeKind::SetBlock { filters, body, .. } | NodeKind::FilterBlock { filters, body } => {
                filters.iter().for_each(|filter| self.filter(filter));
                self.body(body);
            }
            NodeKind::If { branches, otherwise } => {
                for (test, body) in branches {
                    self.expr(test);
                    self.body(body);
                }
                self.body(otherwise);
            }
            NodeKind::For(one) => {
                self.loops.push((one, self.inside.clone()));
                self.expr(&one.over);
                one.only_if.iter().for_each(|test| self.expr(test));
                self.body(&one.body);
                self.body(&one.otherwise);
            }
            NodeKind::Macro(definition) => {
                self.inside.push(self.macros.len());
                self.macros.push(definition);
                self.body(&definition.body);
                self.inside.pop();
            }
            NodeKind::Call { caller, call } => {
                self.expr(call);
                self.body(&caller.body);
            }
            NodeKind::With { values, body } => {
                values.iter().for_each(|(_, value)| self.expr(value));
                self.body(body);
            }
            NodeKind::Scope(body) => self.body(body),
        }
    }

    fn filter(&mut self, filter: &'t Filter) {
        self.arguments(&filter.arguments);
    }

    fn arguments(&mut self, arguments: &'t Arguments) {
        let named = arguments.named.iter().map(|(_, value)| value);
        let all = arguments.values.iter().chain(named).chain(&arguments.list).chain(&arguments.mapping);
        all.for_each(|value| self.expr(value));
    }

    fn expr(&mut self, expr: &'t Expr) {
        match expr {
            Expr::Undefined | Expr::None | Expr::Bool(_) | Expr::Int(_) | Expr::Float(_) => {}
            Expr::Text(_) | Expr::Name(_) => {}
            Expr::List(items) | Expr::Tuple(items) | Expr::Concat(items) => {
                items.iter().for_each(|item| self.expr(item))
            }
            Expr::Dict(entries) => {
                for (key, value) in entries {
                    self.expr(key);
                    self.expr(value);
                }
            }
            Expr::Attr(of, _) | Expr::Not(of) | Expr::Negative(of) | Expr::Positive(of) => self.expr(of),
            Expr::Item(one, other) | Expr::And(one, other) | Expr::Or(one, other) | Expr::Binary(_, one, other) => {
                self.expr(one);
                self.expr(other);
            }
            Expr::Slice(of, bounds) => {
                self.expr(of);
                bounds.iter().flatten().for_each(|bound| self.expr(bound));
            }
            Expr::Call(of, arguments) => {
                if let Expr::Name(name) = **of {
                    self.calls.push((name, arguments));
                }
                self.expr(of);
                self.arguments(arguments);
            }
            Expr::Filter(of, filter) | Expr::Test(of, filter) => {
                self.expr(of);
                self.filter(filter);
            }
            Expr::Choose { test, yes, no } => [test, yes, no].into_iter().for_each(|part| self.expr(part)),
            Expr::Compare(first, rest) => {
                self.expr(first);
                rest.iter().for_each(|(_, other)| self.expr(other));
            }
        }
    }
}

fn target<'t>(found: &Found<'t>, target: &Target) -> Result<&'t str, ()> {
    if let Target::Name(name) = target { Ok(found.name(*name)) } else { Err(()) }
}
