//! The result type of this crate.

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
