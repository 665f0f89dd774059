//! Walking through a template for one chat. `None` everywhere: the library has to be asked.

use std::borrow::Cow;

use super::{CONTENT, Compared, Context, Expr, LoopItem, Name, Node, OwnTemplate, ROLE, Test};
use crate::chat::{PlainChat, PlainMessage};

/// Typical bytes that a template writes beside the texts.
const FRAME_BYTES: usize = 512;
const FRAME_BYTES_OF_MESSAGE: usize = 64;

impl OwnTemplate {
    /// The library's output for this chat without tools and with the assistant's turn opened; `None` where only the
    /// library can render it.
    pub(crate) fn render(&self, chat: &PlainChat<'_>) -> Option<String> {
        let messages = &chat.messages;
        let texts: usize = messages.iter().map(|message| message.content.len() + FRAME_BYTES_OF_MESSAGE).sum();
        let mut run = Run {
            template: self,
            messages,
            locals: Vec::with_capacity(16),
            frame: 0,
            spaces: Vec::new(),
            loops: Vec::new(),
            out: String::with_capacity(texts + FRAME_BYTES),
        };
        run.body(&self.nodes)?;
        Some(run.out)
    }
}

struct Run<'v> {
    template: &'v OwnTemplate,
    messages: &'v [PlainMessage<'v>],
    /// Variables of all scopes, the innermost last.
    locals: Vec<(Name, Value<'v>)>,
    /// Where the innermost scope begins.
    frame: usize,
    spaces: Vec<Space<'v>>,
    /// Index and length of each loop around.
    loops: Vec<(usize, usize)>,
    out: String,
}

impl<'v> Run<'v> {
    fn body(&mut self, body: &'v [Node]) -> Option<()> {
        body.iter().try_for_each(|node| self.node(node))
    }

    fn node(&mut self, node: &'v Node) -> Option<()> {
        match node {
            Node::Raw(raw) => self.out.push_str(raw),
            Node::Emit(expr) => self.emit(expr)?,
            Node::Set(name, expr) => {
                let value = self.value(expr)?;
                put(&mut self.locals, self.frame, *name, value);
            }
            Node::SetIn(space, name, expr) => {
                let value = self.value(expr)?;
                let Value::Space(space) = self.look_up(*space)? else { return None };
                put(&mut self.spaces[space], 0, *name, value);
            }
            Node::If(test, yes, no) => {
                let body = if self.is_true(test)? { yes } else { no };
                self.body(body)?;
            }
            Node::For { target, over, body, otherwise } => self.each(*target, over, body, otherwise)?,
            Node::Other => return None,
        }
        Some(())
    }

    fn each(&mut self, target: Name, over: &'v Expr, body: &'v [Node], otherwise: &'v [Node]) -> Option<()> {
        let Value::Messages(list) = self.value(over)? else { return None };
        let count = list.count(self.messages);
        let outer = std::mem::replace(&mut self.frame, self.locals.len());
        for index in 0..count {
            // Every turn has a scope of its own.
            self.locals.truncate(self.frame);
            self.locals.push((target, Value::Message(list.get(self.messages, index)?)));
            self.loops.push((index, count));
            self.body(body)?;
            self.loops.pop();
        }
        self.locals.truncate(self.frame);
        self.frame = outer;
        if count == 0 { self.body(otherwise) } else { Some(()) }
    }

    fn look_up(&self, name: Name) -> Option<Value<'v>> {
        if let Some((_, value)) = self.locals.iter().rev().find(|(known, _)| *known == name) {
            return Some(value.clone());
        }
        Some(match self.template.context.get(usize::from(name))? {
            Context::Undefined => Value::Undefined,
            Context::None => Value::None,
            Context::True => Value::Bool(true),
            Context::Messages => Value::Messages(List::From(0)),
            Context::Text(text) => Value::Text(Cow::Borrowed(text)),
            Context::Other => return None,
        })
    }

    fn emit(&mut self, expr: &'v Expr) -> Option<()> {
        match expr {
            Expr::Add(left, right) => {
                self.emit_text(left)?;
                self.emit_text(right)?;
            }
            _ => match self.value(expr)? {
                Value::Text(text) => self.out.push_str(&text),
                Value::Int(number) => self.out.push_str(&number.to_string()),
                Value::Undefined => {}
                _ => return None,
            },
        }
        Some(())
    }

    /// One side of a `+` of texts.
    fn emit_text(&mut self, expr: &'v Expr) -> Option<()> {
        match expr {
            Expr::Add(..) => self.emit(expr),
            _ => {
                let text = self.text(expr)?;
                self.out.push_str(&text);
                Some(())
            }
        }
    }

    fn is_true(&mut self, expr: &'v Expr) -> Option<bool> {
        self.value(expr)?.is_true()
    }

    fn text(&mut self, expr: &'v Expr) -> Option<Cow<'v, str>> {
        match self.value(expr)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    fn int(&mut self, expr: &'v Expr) -> Option<i64> {
        match self.value(expr)? {
            Value::Int(number) => Some(number),
            _ => None,
        }
    }

    fn value(&mut self, expr: &'v Expr) -> Option<Value<'v>> {
        Some(match expr {
            Expr::Text(text) => Value::Text(Cow::Borrowed(text)),
            Expr::Int(number) => Value::Int(*number),
            Expr::Bool(is) => Value::Bool(*is),
            Expr::None => Value::None,
            Expr::Var(name) => self.look_up(*name)?,
            Expr::Attr(of, name) => self.attr(of, *name)?,
            Expr::Loop(item) => self.loop_item(*item)?,
            Expr::Item(list, at) => self.item(list, at)?,
            Expr::From(list, from) => Value::Messages(self.whole(list).map(|()| List::From(*from))?),
            Expr::Reversed(list) => Value::Messages(self.whole(list).map(|()| List::Reversed)?),
            Expr::Add(left, right) => match (self.value(left)?, self.value(right)?) {
                (Value::Text(left), Value::Text(right)) => Value::Text(left + right),
                (Value::Int(left), Value::Int(right)) => Value::Int(left.checked_add(right)?),
                _ => return None,
            },
            Expr::Sub(left, right) => Value::Int(self.int(left)?.checked_sub(self.int(right)?)?),
            Expr::Rem(left, right) => Value::Int(self.int(left)?.checked_rem_euclid(self.int(right)?)?),
            Expr::Not(expr) => Value::Bool(!self.is_true(expr)?),
            Expr::And(left, right) => {
                let left = self.value(left)?;
                if left.is_true()? { self.value(right)? } else { left }
            }
            Expr::Or(left, right) => {
                let left = self.value(left)?;
                if left.is_true()? { left } else { self.value(right)? }
            }
            Expr::Compare(how, left, right) => {
                let (left, right) = (self.value(left)?, self.value(right)?);
                Value::Bool(compare(*how, &left, &right)?)
            }
            Expr::Choose { test, yes, no } => match (self.is_true(test)?, no) {
                (true, _) => self.value(yes)?,
                (false, Some(no)) => self.value(no)?,
                (false, None) => Value::Undefined,
            },
            Expr::Is(test, of) => Value::Bool(is(*test, &self.value(of)?)),
            Expr::Length(of) => match self.value(of)? {
                Value::Messages(List::From(0)) => Value::Int(i64::try_from(self.messages.len()).ok()?),
                _ => return None,
            },
            Expr::Strip { .. } | Expr::Begins { .. } | Expr::Part { .. } => self.of_text(expr)?,
            Expr::Namespace(attributes) => self.space(attributes)?,
            Expr::Other => return None,
        })
    }

    /// String methods of templates.
    fn of_text(&mut self, expr: &'v Expr) -> Option<Value<'v>> {
        Some(match expr {
            Expr::Strip { of, start, end, chars } => {
                Value::Text(sliced(self.text(of)?, |text| strip(text, *start, *end, chars.as_deref())))
            }
            Expr::Begins { of, with, end } => {
                let text = self.text(of)?;
                Value::Bool(if *end { text.ends_with(&**with) } else { text.starts_with(&**with) })
            }
            Expr::Part { of, by, last } => {
                let part = |text: &str| {
                    // The library looks from the left, also for the last one.
                    let mut parts = text.split(&**by);
                    let length = if *last { parts.last() } else { parts.next() }.map_or(0, str::len);
                    if *last { text.len() - length..text.len() } else { 0..length }
                };
                // An empty separator cuts between characters.
                if by.is_empty() {
                    return None;
                }
                Value::Text(sliced(self.text(of)?, part))
            }
            _ => return None,
        })
    }

    fn space(&mut self, attributes: &'v [(Name, Expr)]) -> Option<Value<'v>> {
        let mut space = Vec::with_capacity(attributes.len());
        for (name, value) in attributes {
            let value = self.value(value)?;
            put(&mut space, 0, *name, value);
        }
        self.spaces.push(space);
        Some(Value::Space(self.spaces.len() - 1))
    }

    fn attr(&mut self, of: &'v Expr, name: Name) -> Option<Value<'v>> {
        match self.value(of)? {
            Value::Message(message) => Some(match name {
                ROLE => Value::Text(Cow::Borrowed(&message.role)),
                CONTENT => Value::Text(Cow::Borrowed(&message.content)),
                _ => Value::Undefined,
            }),
            Value::Space(space) => {
                let found = self.spaces[space].iter().find(|(known, _)| *known == name);
                Some(found.map_or(Value::Undefined, |(_, value)| value.clone()))
            }
            _ => None,
        }
    }

    fn loop_item(&self, item: LoopItem) -> Option<Value<'v>> {
        let &(index, count) = self.loops.last()?;
        let number = |number: usize| i64::try_from(number).ok().map(Value::Int);
        match item {
            LoopItem::First => Some(Value::Bool(index == 0)),
            LoopItem::Last => Some(Value::Bool(index + 1 == count)),
            LoopItem::Index => number(index + 1),
            LoopItem::Index0 => number(index),
            LoopItem::Length => number(count),
        }
    }

    fn item(&mut self, list: &'v Expr, at: &'v Expr) -> Option<Value<'v>> {
        let Value::Messages(list @ List::From(_)) = self.value(list)? else { return None };
        let (at, count) = (self.int(at)?, list.count(self.messages));
        let at = if at < 0 { i64::try_from(count).ok()?.checked_add(at)? } else { at };
        let found = usize::try_from(at).ok().and_then(|at| list.get(self.messages, at));
        Some(found.map_or(Value::Undefined, Value::Message))
    }

    /// Whether this is the list of all messages as they came.
    fn whole(&mut self, list: &'v Expr) -> Option<()> {
        matches!(self.value(list)?, Value::Messages(List::From(0))).then_some(())
    }
}

/// The values that plain chats need.
#[derive(Clone, Debug)]
enum Value<'v> {
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    Text(Cow<'v, str>),
    Messages(List),
    Message(&'v PlainMessage<'v>),
    /// A namespace, by number.
    Space(usize),
}

/// Which messages, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    From(usize),
    Reversed,
}

impl Value<'_> {
    /// `None` where it is not used.
    fn is_true(&self) -> Option<bool> {
        match self {
            Self::Undefined | Self::None => Some(false),
            Self::Bool(is) => Some(*is),
            Self::Int(number) => Some(*number != 0),
            Self::Text(text) => Some(!text.is_empty()),
            // No chat is without messages.
            Self::Messages(List::From(0)) => Some(true),
            Self::Messages(_) | Self::Message(_) | Self::Space(_) => None,
        }
    }
}

/// Attributes of one namespace.
type Space<'v> = Vec<(Name, Value<'v>)>;

impl List {
    fn count(self, messages: &[PlainMessage<'_>]) -> usize {
        match self {
            Self::From(from) => messages.len().saturating_sub(from),
            Self::Reversed => messages.len(),
        }
    }

    fn get<'v>(self, messages: &'v [PlainMessage<'v>], at: usize) -> Option<&'v PlainMessage<'v>> {
        match self {
            Self::From(from) => messages.get(from.checked_add(at)?),
            Self::Reversed => messages.get(messages.len().checked_sub(at)?.checked_sub(1)?),
        }
    }
}

/// Sets a name among those from `first` on.
fn put<'v>(space: &mut Space<'v>, first: usize, name: Name, value: Value<'v>) {
    match space[first..].iter_mut().find(|(known, _)| *known == name) {
        Some((_, known)) => *known = value,
        None => space.push((name, value)),
    }
}

fn compare(how: Compared, left: &Value<'_>, right: &Value<'_>) -> Option<bool> {
    let equal = || {
        Some(match (left, right) {
            (Value::Text(left), Value::Text(right)) => left == right,
            (Value::Int(left), Value::Int(right)) => left == right,
            (Value::Bool(left), Value::Bool(right)) => left == right,
            (Value::Text(_), Value::None | Value::Undefined) | (Value::None | Value::Undefined, Value::Text(_)) => {
                false
            }
            _ => return None,
        })
    };
    let order = || match (left, right) {
        (Value::Int(left), Value::Int(right)) => Some(left.cmp(right)),
        _ => None,
    };
    let part = || match (left, right) {
        (Value::Text(part), Value::Text(whole)) => Some(whole.contains(&**part)),
        _ => None,
    };
    match how {
        Compared::Eq => equal(),
        Compared::Ne => equal().map(|equal| !equal),
        Compared::Lt => order().map(std::cmp::Ordering::is_lt),
        Compared::Lte => order().map(std::cmp::Ordering::is_le),
        Compared::Gt => order().map(std::cmp::Ordering::is_gt),
        Compared::Gte => order().map(std::cmp::Ordering::is_ge),
        Compared::In => part(),
    }
}

fn is(test: Test, value: &Value<'_>) -> bool {
    match test {
        Test::Defined => !matches!(value, Value::Undefined),
        Test::Undefined => matches!(value, Value::Undefined),
        Test::None => matches!(value, Value::None),
        Test::String => matches!(value, Value::Text(_)),
        Test::True => matches!(value, Value::Bool(true)),
        Test::False => matches!(value, Value::Bool(false)),
    }
}

/// A part of a text, borrowed where the text is.
fn sliced<'v>(text: Cow<'v, str>, part: impl FnOnce(&str) -> std::ops::Range<usize>) -> Cow<'v, str> {
    let part = part(&text);
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(&text[part]),
        Cow::Owned(text) => Cow::Owned(text[part].to_owned()),
    }
}

fn strip(text: &str, start: bool, end: bool, chars: Option<&[char]>) -> std::ops::Range<usize> {
    let goes = |char: char| chars.map_or_else(|| char.is_whitespace(), |chars| chars.contains(&char));
    let from = if start { text.len() - text.trim_start_matches(goes).len() } else { 0 };
    let left = if end { text[from..].trim_end_matches(goes).len() } else { text.len() - from };
    from..from + left
}
