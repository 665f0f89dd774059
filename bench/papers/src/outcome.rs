//! The result of whatever may fail here.

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
