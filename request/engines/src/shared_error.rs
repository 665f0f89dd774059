//! The source of another error, in a form that can be cloned and compared.

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Any error, or just a message. Displays the error and its sources on one line; two are equal if their texts are.
#[derive(Clone, Debug)]
pub struct SharedError(Arc<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for SharedError {
    fn from(error: E) -> Self {
        Self(Arc::from(error.into()))
    }
}

/// Dereferences to the error, so that `#[source]` accepts it.
impl Deref for SharedError {
    type Target = dyn Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        for source in std::iter::successors(self.0.source(), |error| (*error).source()) {
            let message = source.to_string();
            // Many errors already include the text of their sources.
            if !text.contains(&message) {
                text.push_str(": ");
                text.push_str(&message);
            }
        }
        f.write_str(&text)
    }
}

impl PartialEq for SharedError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for SharedError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer {
        #[source]
        cause: SharedError,
    }

    #[test]
    fn shows_each_source_once_and_keeps_the_error() {
        let inner = || std::io::Error::from_raw_os_error(111);
        let outer = Outer { cause: inner().into() };
        let kept = outer.source().and_then(|error| error.downcast_ref::<std::io::Error>());
        assert_eq!(kept.and_then(std::io::Error::raw_os_error), Some(111));
        let shown = SharedError::from(Outer { cause: inner().into() });
        assert_eq!(shown.to_string(), format!("outer: {}", inner()));
        // An error of this kind repeats the inner one's text.
        assert_eq!(SharedError::from(std::io::Error::other(inner())).to_string(), inner().to_string());
        assert_eq!((shown.clone() == shown, shown == "outer".into()), (true, false));
    }
}
