//! Parses the expressions of a template, with Jinja2's precedences.

use super::ast::{Arguments, Comparison, Expr, Filter, Operator};
use super::lexer::{SyntaxError, Token};
use super::parser::Parser;

/// Maximum operators, attributes, calls and brackets in one expression, since evaluating and dropping it are recursive.
const MAX_LINKS: u32 = 1000;
const MAX_NESTING: u32 = 100;

impl Parser {
    /// Parses a full expression.
    pub(super) fn expression(&mut self) -> Result<Expr, SyntaxError> {
        if self.nesting > MAX_NESTING {
            return self.error(format!("more than {MAX_NESTING} nested expressions"));
        }
        self.nesting += 1;
        let mut yes = self.or()?;
        while self.take_name("if") {
            let test = Box::new(self.or()?);
            let no = if self.take_name("else") { self.expression()? } else { Expr::Undefined };
            self.link()?;
            yes = Expr::Choose { test, yes: Box::new(yes), no: Box::new(no) };
        }
        self.nesting -= 1;
        Ok(yes)
    }

    /// Parses one expression, or several separated by commas. `condition` is whether `a if b` is allowed.
    pub(super) fn tuple(&mut self, condition: bool, ends: &[&str]) -> Result<Expr, SyntaxError> {
        self.links = 0;
        self.several(condition, ends, false)
    }

    fn several(&mut self, condition: bool, ends: &[&str], in_brackets: bool) -> Result<Expr, SyntaxError> {
        let mut values = Vec::new();
        let mut is_tuple = false;
        loop {
            let over = matches!(self.peek(), Token::VariableEnd | Token::BlockEnd)
                || self.is(")")
                || ends.iter().any(|end| self.is_name(end));
            if over {
                break;
            }
            values.push(if condition { self.expression()? } else { self.or()? });
            if !self.take(",") {
                break;
            }
            is_tuple = true;
        }
        match (values.pop(), is_tuple) {
            (Some(only), false) => Ok(only),
            (None, _) if !in_brackets => self.error("expected an expression"),
            (last, _) => {
                values.extend(last);
                Ok(Expr::Tuple(values))
            }
        }
    }

    fn link(&mut self) -> Result<(), SyntaxError> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return self.error(format!("an expression has more than {MAX_LINKS} operators"));
        }
        Ok(())
    }

    fn or(&mut self) -> Result<Expr, SyntaxError> {
        let mut left = self.and()?;
        while self.take_name("or") {
            self.link()?;
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, SyntaxError> {
        let mut left = self.not()?;
        while self.take_name("and") {
            self.link()?;
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, SyntaxError> {
        let mut nots = 0_u32;
        while self.take_name("not") {
            self.link()?;
            nots += 1;
        }
        let mut value = self.comparison()?;
        for _ in 0..nots {
            value = Expr::Not(Box::new(value));
        }
        Ok(value)
    }

    fn comparison(&mut self) -> Result<Expr, SyntaxError> {
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let how = match self.peek() {
                Token::Operator("==") => Comparison::Equal,
                Token::Operator("!=") => Comparison::Unequal,
                Token::Operator("<") => Comparison::Less,
                Token::Operator("<=") => Comparison::LessOrEqual,
                Token::Operator(">") => Comparison::Greater,
                Token::Operator(">=") => Comparison::GreaterOrEqual,
                Token::Name(name) if name == "in" => Comparison::In,
                Token::Name(name) if name == "not" && self.followed_by_in() => {
                    self.at += 1;
                    Comparison::NotIn
                }
                _ => break,
            };
            self.at += 1;
            others.push((how, self.sum()?));
        }
        Ok(if others.is_empty() { first } else { Expr::Compare(Box::new(first), others) })
    }

    fn followed_by_in(&self) -> bool {
        self.tokens.get(self.at + 1).is_some_and(|next| next.token == Token::Name("in".into()))
    }

    /// Parses left-associative operators of one precedence, between operands parsed by `inner`.
    fn left_to_right(
        &mut self,
        operators: &[(&str, Operator)],
        inner: fn(&mut Self) -> Result<Expr, SyntaxError>,
    ) -> Result<Expr, SyntaxError> {
        let mut left = inner(self)?;
        while let Some((_, operator)) = operators.iter().find(|(sign, _)| self.is(sign)) {
            self.at += 1;
            self.link()?;
            left = Expr::Binary(*operator, Box::new(left), Box::new(inner(self)?));
        }
        Ok(left)
    }

    fn sum(&mut self) -> Result<Expr, SyntaxError> {
        self.left_to_right(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concat)
    }

    fn concat(&mut self) -> Result<Expr, SyntaxError> {
        let first = self.product()?;
        if !self.is("~") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.take("~") {
            all.push(self.product()?);
        }
        Ok(Expr::Concat(all))
    }

    fn product(&mut self) -> Result<Expr, SyntaxError> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Modulo),
        ];
        self.left_to_right(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Expr, SyntaxError> {
        self.left_to_right(&[("**", Operator::Power)], |parser| parser.unary(true))
    }

    fn unary(&mut self, filtered: bool) -> Result<Expr, SyntaxError> {
        let value = if self.is("-") || self.is("+") {
            let is_negative = self.is("-");
            self.at += 1;
            self.link()?;
            self.nesting += 1;
            if self.nesting > MAX_NESTING {
                return self.error("too many signs");
            }
            let of = Box::new(self.unary(false)?);
            self.nesting -= 1;
            if is_negative { Expr::Negative(of) } else { Expr::Positive(of) }
        } else {
            self.primary()?
        };
        self.postfix(value, filtered)
    }

    fn primary(&mut self) -> Result<Expr, SyntaxError> {
        Ok(match self.next() {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => Expr::Bool(true),
                "false" | "False" => Expr::Bool(false),
                "none" | "None" => Expr::None,
                _ => Expr::Name(self.name(&name)?),
            },
            Token::Text(mut text) => {
                while let Token::Text(more) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Expr::Text(text.into())
            }
            Token::Int(number) => Expr::Int(number),
            Token::Float(number) => Expr::Float(number),
            Token::Operator("(") => {
                self.link()?;
                let value = self.several(true, &[], true)?;
                self.expect(")")?;
                value
            }
            Token::Operator("[") => {
                self.link()?;
                Expr::List(self.listed("]")?)
            }
            Token::Operator("{") => {
                self.link()?;
                self.dict()?
            }
            _ => {
                self.at -= 1;
                return self.error("expected an expression");
            }
        })
    }

    /// Parses comma-separated expressions up to `end`.
    fn listed(&mut self, end: &str) -> Result<Vec<Expr>, SyntaxError> {
        let mut values = Vec::new();
        while !self.take(end) {
            if !values.is_empty() {
                self.expect(",")?;
                if self.take(end) {
                    break;
                }
            }
            values.push(self.expression()?);
        }
        Ok(values)
    }

    fn dict(&mut self) -> Result<Expr, SyntaxError> {
        let mut entries = Vec::new();
        while !self.take("}") {
            if !entries.is_empty() {
                self.expect(",")?;
                if self.take("}") {
                    break;
                }
            }
            let key = self.expression()?;
            self.expect(":")?;
            entries.push((key, self.expression()?));
        }
        Ok(Expr::Dict(entries))
    }

    /// Parses the suffixes of a value: attributes, items and calls, then filters, tests and calls if `filtered`.
    fn postfix(&mut self, mut value: Expr, filtered: bool) -> Result<Expr, SyntaxError> {
        let mut is_plain = true;
        loop {
            if is_plain && self.take(".") {
                value = match self.next() {
                    Token::Name(name) => Expr::Attr(Box::new(value), name.into()),
                    Token::Int(index) => Expr::Item(Box::new(value), Box::new(Expr::Int(index))),
                    _ => return self.error("expected a name"),
                };
            } else if is_plain && self.take("[") {
                value = self.subscript(value)?;
            } else if self.is("(") {
                value = Expr::Call(Box::new(value), Box::new(self.arguments()?));
            } else if filtered && self.take("|") {
                is_plain = false;
                value = Expr::Filter(Box::new(value), Box::new(self.filter_or_test()?));
            } else if filtered && self.take_name("is") {
                is_plain = false;
                value = self.test(value)?;
            } else {
                return Ok(value);
            }
            self.link()?;
        }
    }

    fn subscript(&mut self, of: Expr) -> Result<Expr, SyntaxError> {
        let of = Box::new(of);
        let mut keys = Vec::new();
        loop {
            let start = if self.is(":") { None } else { Some(self.expression()?) };
            if start.is_some() && !self.is(":") {
                keys.extend(start);
            } else {
                self.expect(":")?;
                let mut parts = [start, None, None];
                if !self.is(":") && !self.is("]") && !self.is(",") {
                    parts[1] = Some(self.expression()?);
                }
                if self.take(":") && !self.is("]") && !self.is(",") {
                    parts[2] = Some(self.expression()?);
                }
                self.expect("]")?;
                if !keys.is_empty() {
                    return self.error("a slice cannot be combined with other items");
                }
                return Ok(Expr::Slice(of, Box::new(parts)));
            }
            if !self.take(",") {
                break;
            }
        }
        self.expect("]")?;
        let key = if keys.len() == 1 { keys.remove(0) } else { Expr::Tuple(keys) };
        Ok(Expr::Item(of, Box::new(key)))
    }

    fn arguments(&mut self) -> Result<Arguments, SyntaxError> {
        let mut arguments = Arguments::default();
        let mut first = true;
        self.expect("(")?;
        while !self.take(")") {
            if !std::mem::take(&mut first) {
                self.expect(",")?;
                if self.take(")") {
                    break;
                }
            }
            if self.take("**") {
                arguments.mapping = Some(self.expression()?);
            } else if self.take("*") {
                arguments.list = Some(self.expression()?);
            } else if let Some(name) = self.name_of_argument() {
                arguments.named.push((name.into(), self.expression()?));
            } else if arguments.named.is_empty() && arguments.mapping.is_none() && arguments.list.is_none() {
                arguments.values.push(self.expression()?);
            } else {
                return self.error("a positional argument follows a named one");
            }
        }
        Ok(arguments)
    }

    fn name_of_argument(&mut self) -> Option<String> {
        let Token::Name(name) = self.peek().clone() else { return None };
        let followed = self.tokens.get(self.at + 1).is_some_and(|next| next.token == Token::Operator("="));
        followed.then(|| {
            self.at += 2;
            name
        })
    }

    pub(super) fn filter_or_test(&mut self) -> Result<Filter, SyntaxError> {
        let name = self.dotted()?.into();
        let arguments = if self.is("(") { self.arguments()? } else { Arguments::default() };
        Ok(Filter { name, arguments })
    }

    fn dotted(&mut self) -> Result<String, SyntaxError> {
        let mut name = self.identifier()?;
        while self.take(".") {
            name = format!("{name}.{}", self.identifier()?);
        }
        Ok(name)
    }

    fn test(&mut self, value: Expr) -> Result<Expr, SyntaxError> {
        let is_negated = self.take_name("not");
        let mut test = self.filter_or_test()?;
        let has_brackets = self.tokens[self.at - 1].token == Token::Operator(")");
        if !has_brackets && self.begins_argument() {
            if self.is_name("is") {
                return self.error("tests cannot be chained with is");
            }
            let argument = self.primary()?;
            test.arguments.values.push(self.postfix(argument, false)?);
        }
        let test = Expr::Test(Box::new(value), Box::new(test));
        Ok(if is_negated { Expr::Not(Box::new(test)) } else { test })
    }

    /// Returns whether the only argument of a test follows without brackets.
    fn begins_argument(&self) -> bool {
        match self.peek() {
            Token::Name(name) => !matches!(name.as_str(), "else" | "or" | "and"),
            Token::Text(_) | Token::Int(_) | Token::Float(_) => true,
            Token::Operator(operator) => matches!(*operator, "[" | "{"),
            _ => false,
        }
    }
}
