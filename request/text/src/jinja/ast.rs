//! The syntax tree of a template.

/// The number of a name in the template.
pub(crate) type Name = u32;

/// Names with a built-in meaning, in the order of their numbers.
pub(super) const WELL_KNOWN: [&str; 4] = ["loop", "caller", "varargs", "kwargs"];
pub(super) const LOOP: Name = 0;
pub(super) const CALLER: Name = 1;
pub(super) const VARARGS: Name = 2;
pub(super) const KWARGS: Name = 3;

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Template {
    pub(super) nodes: Vec<Node>,
    pub(super) names: Vec<String>,
    pub(super) source: String,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) line: u32,
    pub(crate) kind: NodeKind,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    Text(Box<str>),
    Emit(Expr),
    Set(Target, Expr),
    /// `{% set x | filter %}...{% endset %}`
    SetBlock {
        target: Target,
        filters: Vec<Filter>,
        body: Vec<Node>,
    },
    If {
        branches: Vec<(Expr, Vec<Node>)>,
        otherwise: Vec<Node>,
    },
    For(Box<For>),
    Macro(Box<Macro>),
    /// `{% call(x) f(y) %}...{% endcall %}`
    Call {
        caller: Box<Macro>,
        call: Expr,
    },
    FilterBlock {
        filters: Vec<Filter>,
        body: Vec<Node>,
    },
    With {
        values: Vec<(Target, Expr)>,
        body: Vec<Node>,
    },
    /// A block with its own variables: `generation`, `block`, `autoescape false`.
    Scope(Vec<Node>),
    Break,
    Continue,
    /// A tag that requires other files, which chat templates cannot use.
    Refused(&'static str),
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) over: Expr,
    pub(crate) only_if: Option<Expr>,
    pub(crate) body: Vec<Node>,
    pub(crate) otherwise: Vec<Node>,
    pub(crate) recursive: bool,
}

#[derive(Debug)]
pub(crate) struct Macro {
    /// The macro's name; [`CALLER`] for the body of a `call`.
    pub(crate) name: Name,
    pub(crate) parameters: Vec<(Name, Option<Expr>)>,
    pub(crate) body: Vec<Node>,
    /// Whether the body uses `varargs`.
    pub(crate) takes_more: bool,
    /// Whether the body uses `kwargs`.
    pub(crate) takes_named: bool,
    /// Whether the body uses `caller`.
    pub(crate) takes_caller: bool,
}

/// The target of an assignment.
#[derive(Debug)]
pub(crate) enum Target {
    Name(Name),
    /// An attribute of a namespace.
    Attr(Name, Box<str>),
    Each(Vec<Target>),
}

#[derive(Debug)]
pub(crate) enum Expr {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Box<str>),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, Box<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Box<Arguments>),
    Filter(Box<Expr>, Box<Filter>),
    Test(Box<Expr>, Box<Filter>),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Choose { test: Box<Expr>, yes: Box<Expr>, no: Box<Expr> },
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
}

/// A filter or test with its arguments.
#[derive(Debug)]
pub(crate) struct Filter {
    pub(crate) name: Box<str>,
    pub(crate) arguments: Arguments,
}

#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) values: Vec<Expr>,
    pub(crate) named: Vec<(Box<str>, Expr)>,
    /// `*list`
    pub(crate) list: Option<Expr>,
    /// `**mapping`
    pub(crate) mapping: Option<Expr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}
