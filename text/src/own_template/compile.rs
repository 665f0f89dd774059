//! From the library's syntax tree to ours.

use minijinja::Environment;
use minijinja::machinery::{WhitespaceConfig, ast, parse};
use minijinja::value::ValueKind;
use serde_json::{Map, Value as Json};

use super::{Compared, Context, Expr, LoopItem, Name, Node, OwnTemplate, Test};

/// Texts that are longer are looked for by no template.
const MAX_TEXT_BYTES: usize = 64;

impl OwnTemplate {
    /// Compiles what the environment was given as `source`; `special` are the texts that it may write by name.
    ///
    /// # Errors
    /// The library's message, shortened.
    pub(crate) fn new(
        source: &str,
        environment: &Environment<'_>,
        special: &Map<String, Json>,
    ) -> Result<Self, String> {
        // As the environment of `crate::template` has it.
        let space = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        let tree = parse(source, "chat_template", Default::default(), space).map_err(|error| error.to_string())?;
        let ast::Stmt::Template(template) = &tree else { return Err("it is no template".to_owned()) };
        let mut names = Names { names: vec!["role".to_owned(), "content".to_owned()], texts: Vec::new() };
        let nodes = names.body(&template.children);
        let context = names.names.iter().map(|name| of_name(name, environment, special)).collect();
        Ok(Self { nodes, context, texts: names.texts })
    }
}

fn of_name(name: &str, environment: &Environment<'_>, special: &Map<String, Json>) -> Context {
    match name {
        "messages" => Context::Messages,
        "tools" => Context::None,
        "add_generation_prompt" => Context::True,
        "loop" | "self" | "caller" | "super" => Context::Other,
        _ => match special.get(name) {
            Some(Json::String(text)) => Context::Text(text.clone()),
            Some(_) => Context::Other,
            None if environment.globals().any(|(global, _)| global == name) => Context::Other,
            None => Context::Undefined,
        },
    }
}

struct Names {
    /// By number; [`super::ROLE`] and [`super::CONTENT`] come first.
    names: Vec<String>,
    texts: Vec<String>,
}

impl Names {
    fn name(&mut self, name: &str) -> Name {
        let known = self.names.iter().position(|known| known == name);
        let at = known.unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        // A file has a size limit; names beyond it would be one another's.
        Name::try_from(at).unwrap_or(Name::MAX)
    }

    fn body(&mut self, body: &[ast::Stmt<'_>]) -> Vec<Node> {
        body.iter().map(|node| self.node(node).unwrap_or(Node::Other)).collect()
    }

    /// `None`: left to the library.
    fn node(&mut self, node: &ast::Stmt<'_>) -> Option<Node> {
        Some(match node {
            ast::Stmt::EmitRaw(raw) => Node::Raw(raw.raw.into()),
            ast::Stmt::EmitExpr(emit) => Node::Emit(self.expr(&emit.expr)),
            ast::Stmt::Set(set) => match &set.target {
                ast::Expr::Var(var) if var.id != "loop" => Node::Set(self.name(var.id), self.expr(&set.expr)),
                ast::Expr::GetAttr(attr) => match &attr.expr {
                    ast::Expr::Var(var) => Node::SetIn(self.name(var.id), self.name(attr.name), self.expr(&set.expr)),
                    _ => return None,
                },
                _ => return None,
            },
            ast::Stmt::IfCond(cond) => {
                Node::If(self.expr(&cond.expr), self.body(&cond.true_body), self.body(&cond.false_body))
            }
            ast::Stmt::ForLoop(each) => {
                let ast::Expr::Var(target) = &each.target else { return None };
                if each.recursive || each.filter_expr.is_some() || target.id == "loop" {
                    return None;
                }
                Node::For {
                    target: self.name(target.id),
                    over: self.expr(&each.iter),
                    body: self.body(&each.body),
                    otherwise: self.body(&each.else_body),
                }
            }
            _ => return None,
        })
    }

    fn expr(&mut self, expr: &ast::Expr<'_>) -> Expr {
        self.known(expr).unwrap_or(Expr::Other)
    }

    fn boxed(&mut self, expr: &ast::Expr<'_>) -> Box<Expr> {
        Box::new(self.expr(expr))
    }

    fn known(&mut self, expr: &ast::Expr<'_>) -> Option<Expr> {
        Some(match expr {
            ast::Expr::Var(var) => Expr::Var(self.name(var.id)),
            ast::Expr::Const(value) => self.constant(&value.value)?,
            ast::Expr::UnaryOp(op) => match op.op {
                ast::UnaryOpKind::Not => Expr::Not(self.boxed(&op.expr)),
                ast::UnaryOpKind::Neg => match self.expr(&op.expr) {
                    Expr::Int(number) => Expr::Int(number.checked_neg()?),
                    _ => return None,
                },
            },
            ast::Expr::BinOp(op) => self.binary(op)?,
            ast::Expr::IfExpr(choice) => Expr::Choose {
                test: self.boxed(&choice.test_expr),
                yes: self.boxed(&choice.true_expr),
                no: choice.false_expr.as_ref().map(|no| self.boxed(no)),
            },
            ast::Expr::Filter(filter) => {
                let of = self.boxed(filter.expr.as_ref()?);
                match (filter.name, filter.args.is_empty()) {
                    ("trim", true) => Expr::Strip { of, start: true, end: true, chars: None },
                    ("length" | "count", true) => Expr::Length(of),
                    _ => return None,
                }
            }
            ast::Expr::Test(test) => self.test(test)?,
            ast::Expr::GetAttr(attr) => self.attr(&attr.expr, attr.name)?,
            ast::Expr::GetItem(item) => self.item(item)?,
            ast::Expr::Slice(slice) => self.slice(slice)?,
            ast::Expr::Call(call) => self.call(call)?,
            // A comparison of two is a binary operator; `a < b < c` is none.
            ast::Expr::Compare(_) | ast::Expr::List(_) | ast::Expr::Map(_) => return None,
        })
    }

    fn test(&mut self, test: &ast::Test<'_>) -> Option<Expr> {
        let kind = match (test.name, test.args.is_empty()) {
            ("defined", true) => Test::Defined,
            ("undefined", true) => Test::Undefined,
            ("none", true) => Test::None,
            ("string", true) => Test::String,
            ("true", true) => Test::True,
            ("false", true) => Test::False,
            _ => return None,
        };
        Some(Expr::Is(kind, self.boxed(&test.expr)))
    }

    fn constant(&mut self, value: &minijinja::Value) -> Option<Expr> {
        Some(match value.kind() {
            ValueKind::None => Expr::None,
            ValueKind::Bool => Expr::Bool(value.is_true()),
            ValueKind::Number if value.is_integer() => Expr::Int(value.as_i64()?),
            ValueKind::String => {
                let text = value.as_str()?;
                if text.len() <= MAX_TEXT_BYTES {
                    self.texts.push(text.to_owned());
                }
                Expr::Text(text.into())
            }
            _ => return None,
        })
    }

    fn binary(&mut self, op: &ast::BinOp<'_>) -> Option<Expr> {
        let compared = match op.op {
            ast::BinOpKind::Eq => Some(Compared::Eq),
            ast::BinOpKind::Ne => Some(Compared::Ne),
            ast::BinOpKind::Lt => Some(Compared::Lt),
            ast::BinOpKind::Lte => Some(Compared::Lte),
            ast::BinOpKind::Gt => Some(Compared::Gt),
            ast::BinOpKind::Gte => Some(Compared::Gte),
            ast::BinOpKind::In => Some(Compared::In),
            _ => None,
        };
        let (left, right) = (self.boxed(&op.left), self.boxed(&op.right));
        if let Some(compared) = compared {
            return Some(Expr::Compare(compared, left, right));
        }
        match op.op {
            ast::BinOpKind::ScAnd => Some(Expr::And(left, right)),
            ast::BinOpKind::ScOr => Some(Expr::Or(left, right)),
            ast::BinOpKind::Add => Some(Expr::Add(left, right)),
            ast::BinOpKind::Sub => Some(Expr::Sub(left, right)),
            ast::BinOpKind::Rem => Some(Expr::Rem(left, right)),
            _ => None,
        }
    }

    fn attr(&mut self, of: &ast::Expr<'_>, name: &str) -> Option<Expr> {
        if let ast::Expr::Var(var) = of
            && var.id == "loop"
        {
            return Some(Expr::Loop(match name {
                "first" => LoopItem::First,
                "last" => LoopItem::Last,
                "index" => LoopItem::Index,
                "index0" => LoopItem::Index0,
                "length" => LoopItem::Length,
                _ => return None,
            }));
        }
        Some(Expr::Attr(self.boxed(of), self.name(name)))
    }

    fn item(&mut self, item: &ast::GetItem<'_>) -> Option<Expr> {
        let key = self.expr(&item.subscript_expr);
        if let Expr::Text(name) = &key {
            return self.attr(&item.expr, name);
        }
        if let Expr::Int(at @ (0 | -1)) = key
            && let ast::Expr::Call(call) = &item.expr
            && let Some((of, "split", [ast::CallArg::Pos(by)])) = method(call)
            && let Expr::Text(by) = self.expr(by)
        {
            return Some(Expr::Part { of: self.boxed(of), by, last: at == -1 });
        }
        Some(Expr::Item(self.boxed(&item.expr), Box::new(key)))
    }

    fn slice(&mut self, slice: &ast::Slice<'_>) -> Option<Expr> {
        let number = |names: &mut Self, expr: &Option<ast::Expr<'_>>| match expr.as_ref().map(|expr| names.expr(expr)) {
            None => Some(None),
            Some(Expr::Int(number)) => Some(Some(number)),
            Some(_) => None,
        };
        let (start, stop, step) = (number(self, &slice.start)?, number(self, &slice.stop)?, number(self, &slice.step)?);
        match (start, stop, step) {
            (None, None, Some(-1)) => Some(Expr::Reversed(self.boxed(&slice.expr))),
            (Some(from), None, None) => Some(Expr::From(self.boxed(&slice.expr), usize::try_from(from).ok()?)),
            _ => None,
        }
    }

    fn call(&mut self, call: &ast::Call<'_>) -> Option<Expr> {
        if let ast::Expr::Var(var) = &call.expr
            && var.id == "namespace"
        {
            let value = |argument: &ast::CallArg<'_>| match argument {
                ast::CallArg::Kwarg(name, value) => Some((self.name(name), self.expr(value))),
                _ => None,
            };
            return call.args.iter().map(value).collect::<Option<_>>().map(Expr::Namespace);
        }
        let (of, name, arguments) = method(call)?;
        let text = match arguments {
            [] => None,
            [ast::CallArg::Pos(text)] => match self.expr(text) {
                Expr::Text(text) => Some(text),
                _ => return None,
            },
            _ => return None,
        };
        let of = self.boxed(of);
        let strip = |of, start, end| {
            let chars = text.as_ref().map(|text| text.chars().collect());
            Some(Expr::Strip { of, start, end, chars })
        };
        match name {
            "strip" => strip(of, true, true),
            "lstrip" => strip(of, true, false),
            "rstrip" => strip(of, false, true),
            "startswith" => Some(Expr::Begins { of, with: text?, end: false }),
            "endswith" => Some(Expr::Begins { of, with: text?, end: true }),
            _ => None,
        }
    }
}

/// The object, the name and the arguments of a call of a method.
fn method<'a, 's>(call: &'a ast::Call<'s>) -> Option<(&'a ast::Expr<'s>, &'s str, &'a [ast::CallArg<'s>])> {
    match &call.expr {
        ast::Expr::GetAttr(attr) => Some((&attr.expr, attr.name, &call.args[..])),
        _ => None,
    }
}
