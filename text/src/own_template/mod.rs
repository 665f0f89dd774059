//! Chat templates rendered without the template library, where that is known to give the same.
//!
//! A template is compiled here from the library's own syntax tree. What follows knows the part of the language that
//! plain chats need: loops over messages, conditions, namespaces, and what templates do with texts. Everything else is
//! compiled to a node that leaves the whole chat to the library when it is reached ([`OwnTemplate::render`] gives
//! `None` then, which is counted), so that there is no second meaning of anything. Texts are borrowed until they are
//! written, and written once; the library copies them for every value and every `+`.
//!
//! When a template is loaded both render the chats of [`probes`]; one that differs is not rendered here at all.

mod compile;
mod eval;
mod probes;

pub(crate) use probes::probes;

/// A name of the template, by number.
type Name = u16;
/// The names of what a plain message has.
const ROLE: Name = 0;
const CONTENT: Name = 1;

/// A template in the form in which it is walked through.
#[derive(Debug)]
pub(crate) struct OwnTemplate {
    nodes: Vec<Node>,
    /// Initial value of each name.
    context: Vec<Context>,
    /// Texts that the template compares with or looks for.
    pub(crate) texts: Vec<String>,
}

/// Initial value of a name.
#[derive(Clone, Debug)]
enum Context {
    Undefined,
    /// No tools were given.
    None,
    True,
    Messages,
    Text(String),
    /// A function of the library, or `loop`.
    Other,
}

/// A statement.
#[derive(Debug)]
enum Node {
    Raw(Box<str>),
    Emit(Expr),
    Set(Name, Expr),
    /// An attribute of a namespace.
    SetIn(Name, Name, Expr),
    If(Expr, Vec<Node>, Vec<Node>),
    For {
        target: Name,
        over: Expr,
        body: Vec<Node>,
        otherwise: Vec<Node>,
    },
    /// Left to the library.
    Other,
}

/// An expression.
#[derive(Debug)]
enum Expr {
    Text(Box<str>),
    Int(i64),
    Bool(bool),
    None,
    Var(Name),
    /// `x.name`, of a message or a namespace.
    Attr(Box<Expr>, Name),
    /// Of the loop around.
    Loop(LoopItem),
    /// `list[number]`
    Item(Box<Expr>, Box<Expr>),
    /// `list[from:]`
    From(Box<Expr>, usize),
    /// `list[::-1]`
    Reversed(Box<Expr>),
    /// `a + b`: of texts or of numbers.
    Add(Box<Expr>, Box<Expr>),
    Sub(Box<Expr>, Box<Expr>),
    Rem(Box<Expr>, Box<Expr>),
    Not(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Compare(Compared, Box<Expr>, Box<Expr>),
    Choose {
        test: Box<Expr>,
        yes: Box<Expr>,
        no: Option<Box<Expr>>,
    },
    Is(Test, Box<Expr>),
    Length(Box<Expr>),
    Strip {
        of: Box<Expr>,
        start: bool,
        end: bool,
        /// White space where there are none.
        chars: Option<Vec<char>>,
    },
    /// `startswith` or, at the `end`, `endswith`.
    Begins {
        of: Box<Expr>,
        with: Box<str>,
        end: bool,
    },
    /// `x.split(by)[0]` or, the `last`, `[-1]`.
    Part {
        of: Box<Expr>,
        by: Box<str>,
        last: bool,
    },
    Namespace(Vec<(Name, Expr)>),
    /// Left to the library.
    Other,
}

#[derive(Clone, Copy, Debug)]
enum LoopItem {
    First,
    Last,
    Index,
    Index0,
    Length,
}

#[derive(Clone, Copy, Debug)]
enum Compared {
    Eq,
    Ne,
    Lt,
    Lte,
    Gt,
    Gte,
    /// The left one is part of the right one, both texts.
    In,
}

#[derive(Clone, Copy, Debug)]
enum Test {
    Defined,
    Undefined,
    None,
    String,
    True,
    False,
}
