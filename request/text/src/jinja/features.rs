//! The language features that a template uses.

use super::eval::FUNCTIONS;
use super::lexer::{Placed, Token};

/// Returns the kind and name of each feature. A method is any name called after a dot.
pub(super) fn of(tokens: &[Placed]) -> Vec<String> {
    let token = |at: usize| tokens.get(at).map_or(&Token::End, |placed| &placed.token);
    let mut found = Vec::new();
    for at in 1..tokens.len() {
        let Token::Name(name) = token(at) else { continue };
        let before = if *token(at - 1) == Token::Name("not".to_owned()) && at > 1 { at - 2 } else { at - 1 };
        let kind = match token(before) {
            Token::BlockBegin if !name.starts_with("end") => "tag",
            Token::Operator("|") => "filter",
            Token::Name(is) if is == "is" && name != "not" => "test",
            Token::Operator(".") if *token(at + 1) == Token::Operator("(") => "method",
            _ if FUNCTIONS.contains(&name.as_str()) => "function",
            _ => continue,
        };
        found.push(format!("{kind} {name}"));
    }
    found
}
