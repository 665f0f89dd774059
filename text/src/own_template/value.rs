//! The values that plain chats need.

use std::borrow::Cow;

use super::Name;
use crate::chat::PlainMessage;

/// Initial value of a name.
#[derive(Clone, Debug)]
pub(super) enum Context {
    Undefined,
    /// No tools were given.
    None,
    True,
    Messages,
    Text(String),
    /// A function of the library, or `loop`.
    Other,
}

#[derive(Clone, Debug)]
pub(super) enum Value<'v> {
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
pub(super) enum List {
    From(usize),
    Reversed,
}

impl Value<'_> {
    /// `None` where it is not used.
    pub(super) fn is_true(&self) -> Option<bool> {
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
pub(super) type Space<'v> = Vec<(Name, Value<'v>)>;
