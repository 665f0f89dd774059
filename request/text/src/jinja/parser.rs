//! Parses the statements of a template; [`super::expressions`] parses expressions.

use super::ast::{Expr, Filter, For, Macro, Name, Node, NodeKind, Target};
use super::lexer::{Placed, SyntaxError, Token, tokens};
use super::{CALLER, LOOP, WELL_KNOWN};

/// Maximum nesting of statements and expressions.
const MAX_NESTING: u32 = 100;
/// Maximum number of variables, macros and parameters, since lookup is linear.
const MAX_NAMES: usize = 1000;
/// Maximum template size in bytes, ten times that of the longest known template.
pub(crate) const MAX_SOURCE_BYTES: usize = 1 << 20;

pub(crate) struct Parser {
    pub(super) tokens: Vec<Placed>,
    pub(super) at: usize,
    pub(super) nesting: u32,
    /// Number of operators and brackets in the current expression.
    pub(super) links: u32,
    names: Vec<String>,
    in_loop: bool,
}

/// Parses a template into its statements and its names by number.
pub(crate) fn parse(source: &str) -> Result<(Vec<Node>, Vec<String>), SyntaxError> {
    if source.len() > MAX_SOURCE_BYTES {
        let reason = format!("it has {} bytes, more than the {MAX_SOURCE_BYTES} allowed", source.len());
        return Err(SyntaxError { line: 1, reason });
    }
    let names = WELL_KNOWN.map(str::to_owned).to_vec();
    let mut parser = Parser { tokens: tokens(source)?, at: 0, nesting: 0, links: 0, names, in_loop: false };
    let body = parser.body(&[])?;
    Ok((body, parser.names))
}

impl Parser {
    pub(super) fn peek(&self) -> &Token {
        &self.tokens[self.at.min(self.tokens.len() - 1)].token
    }

    fn line(&self) -> u32 {
        self.tokens[self.at.min(self.tokens.len() - 1)].line
    }

    pub(super) fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    pub(super) fn error<T>(&self, reason: impl Into<String>) -> Result<T, SyntaxError> {
        Err(SyntaxError { line: self.line(), reason: reason.into() })
    }

    pub(super) fn is(&self, operator: &str) -> bool {
        matches!(self.peek(), Token::Operator(found) if *found == operator)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == name)
    }

    pub(super) fn take(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        self.at += usize::from(found);
        found
    }

    pub(super) fn take_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, operator: &str) -> Result<(), SyntaxError> {
        if self.take(operator) { Ok(()) } else { self.error(format!("expected {operator}")) }
    }

    pub(super) fn identifier(&mut self) -> Result<String, SyntaxError> {
        match self.next() {
            Token::Name(name) => Ok(name),
            _ => self.error("expected a name"),
        }
    }

    pub(super) fn name(&mut self, name: &str) -> Result<Name, SyntaxError> {
        let at = self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        match Name::try_from(at) {
            Ok(name) if at < MAX_NAMES => Ok(name),
            _ => self.error(format!("it has more than {MAX_NAMES} names")),
        }
    }

    /// Parses statements up to the end or to one of the tags `ends`, without consuming the name of that tag.
    fn body(&mut self, ends: &[&str]) -> Result<Vec<Node>, SyntaxError> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return self.error(format!("more than {MAX_NESTING} nested statements"));
        }
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                Token::Data(text) => NodeKind::Text(text.into()),
                Token::VariableBegin => {
                    let value = self.tuple(true, &[])?;
                    self.end_of(&Token::VariableEnd)?;
                    NodeKind::Emit(value)
                }
                Token::BlockBegin if ends.iter().any(|end| self.is_name(end)) => break,
                Token::BlockBegin => self.statement()?,
                Token::End if ends.is_empty() => break,
                _ => return self.error(format!("{} is missing", ends.last().unwrap_or(&"an end"))),
            };
            nodes.push(Node { line, kind });
        }
        self.nesting -= 1;
        Ok(nodes)
    }

    fn end_of(&mut self, end: &Token) -> Result<(), SyntaxError> {
        if self.next() == *end { Ok(()) } else { self.error("expected the end of the tag") }
    }

    fn end_of_block(&mut self) -> Result<(), SyntaxError> {
        self.end_of(&Token::BlockEnd)
    }

    /// Parses the remainder of a tag, then statements up to and including the tag `end`.
    fn body_of(&mut self, end: &str) -> Result<Vec<Node>, SyntaxError> {
        self.end_of_block()?;
        let body = self.body(&[end])?;
        self.at += 1;
        Ok(body)
    }

    fn statement(&mut self) -> Result<NodeKind, SyntaxError> {
        self.links = 0;
        let tag = self.identifier()?;
        let kind = match tag.as_str() {
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "set" => self.set()?,
            "with" => self.with()?,
            "macro" => {
                let name = self.identifier()?;
                let name = self.name(&name)?;
                let parameters = self.parameters()?;
                NodeKind::Macro(Box::new(self.function(name, parameters, "endmacro")?))
            }
            "call" => {
                let parameters = if self.is("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(call, Expr::Call(..)) {
                    return self.error("call needs a call");
                }
                NodeKind::Call { caller: Box::new(self.function(CALLER, parameters, "endcall")?), call }
            }
            "filter" => {
                let filters = self.filters(true)?;
                NodeKind::FilterBlock { filters, body: self.body_of("endfilter")? }
            }
            "generation" => NodeKind::Scope(self.apart("endgeneration")?),
            "autoescape" => match self.expression()? {
                Expr::Bool(false) => NodeKind::Scope(self.body_of("endautoescape")?),
                _ => return self.error("autoescape is not supported"),
            },
            "block" => self.block()?,
            "print" => NodeKind::Emit(self.tuple(true, &[])?),
            "break" | "continue" if !self.in_loop => return self.error(format!("{tag} is outside a loop")),
            "break" => NodeKind::Break,
            "continue" => NodeKind::Continue,
            "include" | "import" | "extends" | "from" => {
                while !matches!(self.peek(), Token::BlockEnd | Token::End) {
                    self.at += 1;
                }
                NodeKind::Refused("a chat template cannot use other files")
            }
            _ => return self.error(format!("unknown tag {tag}")),
        };
        self.end_of_block()?;
        Ok(kind)
    }

    fn for_loop(&mut self) -> Result<NodeKind, SyntaxError> {
        let target = self.targets()?;
        if !self.take_name("in") {
            return self.error("expected in");
        }
        let over = self.tuple(false, &["recursive"])?;
        let only_if = if self.take_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.take_name("recursive");
        self.end_of_block()?;
        let outer = std::mem::replace(&mut self.in_loop, true);
        let body = self.body(&["endfor", "else"])?;
        self.in_loop = outer;
        let otherwise = if self.next() == Token::Name("else".into()) { self.body_of("endfor")? } else { Vec::new() };
        Ok(NodeKind::For(Box::new(For { target, over, only_if, body, otherwise, recursive })))
    }

    fn condition(&mut self) -> Result<NodeKind, SyntaxError> {
        let mut branches = Vec::new();
        let mut otherwise = Vec::new();
        loop {
            let test = self.tuple(false, &[])?;
            self.end_of_block()?;
            branches.push((test, self.body(&["elif", "else", "endif"])?));
            match self.identifier()?.as_str() {
                "elif" => {}
                "else" => {
                    otherwise = self.body_of("endif")?;
                    break;
                }
                _ => break,
            }
        }
        Ok(NodeKind::If { branches, otherwise })
    }

    fn set(&mut self) -> Result<NodeKind, SyntaxError> {
        let target = self.targets()?;
        if self.take("=") {
            return Ok(NodeKind::Set(target, self.tuple(true, &[])?));
        }
        let filters = self.filters(false)?;
        Ok(NodeKind::SetBlock { target, filters, body: self.body_of("endset")? })
    }

    /// Parses the body of a macro or call, which is not part of the surrounding loop.
    fn apart(&mut self, end: &str) -> Result<Vec<Node>, SyntaxError> {
        let outer = std::mem::replace(&mut self.in_loop, false);
        let body = self.body_of(end);
        self.in_loop = outer;
        body
    }

    fn with(&mut self) -> Result<NodeKind, SyntaxError> {
        let mut values = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !values.is_empty() {
                self.expect(",")?;
            }
            let target = self.target()?;
            self.expect("=")?;
            values.push((target, self.expression()?));
        }
        Ok(NodeKind::With { values, body: self.body_of("endwith")? })
    }

    fn block(&mut self) -> Result<NodeKind, SyntaxError> {
        self.identifier()?;
        while self.take_name("scoped") || self.take_name("required") {}
        let body = self.body_of("endblock")?;
        // The block's name may be repeated.
        if matches!(self.peek(), Token::Name(_)) {
            self.at += 1;
        }
        Ok(NodeKind::Scope(body))
    }

    fn function(&mut self, name: Name, parameters: Vec<(Name, Option<Expr>)>, end: &str) -> Result<Macro, SyntaxError> {
        let start = self.at;
        let body = self.apart(end)?;
        let tokens = &self.tokens[start..self.at];
        let uses =
            |name: &str| tokens.iter().any(|placed| matches!(&placed.token, Token::Name(found) if found == name));
        let (takes_more, takes_named, takes_caller) = (uses("varargs"), uses("kwargs"), uses("caller"));
        Ok(Macro { name, parameters, body, takes_more, takes_named, takes_caller })
    }

    fn parameters(&mut self) -> Result<Vec<(Name, Option<Expr>)>, SyntaxError> {
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        self.expect("(")?;
        while !self.is(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.identifier()?;
            let name = self.name(&name)?;
            let default = if self.take("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.error("a parameter without a default follows one with a default");
            }
            parameters.push((name, default));
        }
        self.expect(")")?;
        Ok(parameters)
    }

    /// Parses one target, or several separated by commas.
    fn targets(&mut self) -> Result<Target, SyntaxError> {
        let first = self.target()?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.take(",") {
            if matches!(self.peek(), Token::Name(name) if name != "in") || self.is("(") {
                all.push(self.target()?);
            }
        }
        Ok(Target::Each(all))
    }

    fn target(&mut self) -> Result<Target, SyntaxError> {
        if self.take("(") {
            self.nesting += 1;
            if self.nesting > MAX_NESTING {
                return self.error("too many brackets");
            }
            let inner = self.targets()?;
            self.nesting -= 1;
            self.expect(")")?;
            return Ok(inner);
        }
        let name = self.identifier()?;
        if matches!(name.as_str(), "true" | "false" | "none" | "True" | "False" | "None" | "not") {
            return self.error(format!("{name} cannot be set"));
        }
        let name = self.name(&name)?;
        if self.take(".") {
            return Ok(Target::Attr(name, self.identifier()?.into()));
        }
        if name == LOOP {
            return self.error("loop cannot be set");
        }
        Ok(Target::Name(name))
    }

    /// Parses a chain of filters; if `inline`, the first one has no `|`.
    fn filters(&mut self, inline: bool) -> Result<Vec<Filter>, SyntaxError> {
        let mut filters = Vec::new();
        if inline {
            filters.push(self.filter_or_test()?);
        }
        while self.take("|") {
            filters.push(self.filter_or_test()?);
        }
        Ok(filters)
    }
}
