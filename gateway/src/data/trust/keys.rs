//! API keys. The configuration contains only digests; a presented key is hashed and compared with all of them.

use std::hint::black_box;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header};
use sha2::{Digest, Sha256};

use super::API_KEY;
use crate::backends::RequestError;
use crate::config::KeyConfig;

/// Maximum key length. Longer keys are rejected without hashing, so that strangers cannot make the gateway hash
/// megabytes.
const MAX_KEY_BYTES: usize = 512;

/// The sender of a request: a key, or any client if no keys are configured.
#[derive(Clone, Default)]
pub(crate) struct Caller(Option<Arc<KeyConfig>>);

impl Caller {
    /// Returns the key's name, never the key.
    pub(crate) fn name(&self) -> Option<&str> {
        self.0.as_ref().map(|key| key.name.as_str())
    }

    /// The models that this caller may use; `None` allows all.
    pub(crate) fn models(&self) -> Option<&[String]> {
        self.0.as_ref()?.models.as_deref()
    }

    /// Whether the caller may use a model, given by its own name rather than an alias.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        self.models().is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }
}

/// Finds the caller's key; if no keys are configured, every client is admitted.
pub(super) fn check(keys: &[Arc<KeyConfig>], headers: &HeaderMap) -> Result<Caller, RequestError> {
    if keys.is_empty() {
        return Ok(Caller::default());
    }
    let presented = presented(headers)?;
    if presented.len() > MAX_KEY_BYTES {
        return Err(RequestError::KeyWrong);
    }
    let digest: [u8; 32] = Sha256::digest(presented).into();
    find(keys, &digest).map(|key| Caller(Some(key))).ok_or(RequestError::KeyWrong)
}

/// Compares all bytes of all digests, in constant time.
fn find(keys: &[Arc<KeyConfig>], digest: &[u8; 32]) -> Option<Arc<KeyConfig>> {
    let mut found = usize::MAX;
    for (at, key) in keys.iter().enumerate() {
        let differs = key.sha256.0.iter().zip(digest).fold(0, |differs, (one, other)| differs | (one ^ other));
        // All ones if no byte differs.
        let mask = usize::from(black_box(differs) == 0).wrapping_neg();
        found = (found & !mask) | (at & mask);
    }
    keys.get(found).cloned()
}

/// Returns the key in the headers. Repeated headers are rejected, because another server might read the other one.
fn presented(headers: &HeaderMap) -> Result<&[u8], RequestError> {
    let only = |name: &http::HeaderName| -> Result<Option<&HeaderValue>, RequestError> {
        let mut values = headers.get_all(name).iter();
        let first = values.next();
        if values.next().is_some() { Err(RequestError::KeyWrong) } else { Ok(first) }
    };
    let key = match (only(&header::AUTHORIZATION)?, only(&API_KEY)?) {
        (Some(value), _) => bearer(value.as_bytes()).ok_or(RequestError::KeyWrong)?,
        (None, Some(value)) => value.as_bytes().trim_ascii(),
        (None, None) => return Err(RequestError::KeyMissing),
    };
    if key.is_empty() { Err(RequestError::KeyMissing) } else { Ok(key) }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer".len())?;
    let blank = key.first().is_none_or(|byte| *byte == b' ');
    (scheme.eq_ignore_ascii_case(b"bearer") && blank).then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SecretDigest;
    use http::HeaderName;

    fn keys() -> Vec<Arc<KeyConfig>> {
        let key = |name: &str, key: &str, models: Option<&str>| {
            let (name, sha256) = (name.to_owned(), SecretDigest(Sha256::digest(key).into()));
            Arc::new(KeyConfig { name, sha256, models: models.map(|model| vec![model.to_owned()]) })
        };
        vec![key("a", "first", None), key("b", "second", Some("tiny"))]
    }

    fn check(headers: &[(&'static str, &str)]) -> Result<Option<String>, RequestError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        }
        super::check(&keys(), &map).map(|caller| caller.name().map(str::to_owned))
    }

    #[test]
    fn the_right_key_is_found_by_either_header() {
        for (header, value, name) in [
            ("authorization", "Bearer first", "a"),
            ("authorization", "bearer  second ", "b"),
            ("x-api-key", "second", "b"),
        ] {
            assert_eq!(check(&[(header, value)]), Ok(Some(name.to_owned())), "{value}");
        }
        let both = check(&[("authorization", "Bearer first"), ("x-api-key", "wrong")]);
        assert_eq!(both, Ok(Some("a".to_owned())));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let long = format!("Bearer {}", "x".repeat(1 << 16));
        for (headers, error) in [
            (vec![], RequestError::KeyMissing),
            (vec![("authorization", "Bearer")], RequestError::KeyMissing),
            (vec![("x-api-key", " ")], RequestError::KeyMissing),
            (vec![("authorization", "Bearer third")], RequestError::KeyWrong),
            (vec![("authorization", "first")], RequestError::KeyWrong),
            (vec![("authorization", "Basic first")], RequestError::KeyWrong),
            (vec![("authorization", "Bearerfirst")], RequestError::KeyWrong),
            (vec![("authorization", "Bearer firs")], RequestError::KeyWrong),
            (vec![("authorization", long.as_str())], RequestError::KeyWrong),
            (vec![("authorization", "Basic x"), ("x-api-key", "first")], RequestError::KeyWrong),
            (vec![("authorization", "Bearer first"), ("authorization", "Bearer first")], RequestError::KeyWrong),
        ] {
            assert_eq!(check(&headers), Err(error), "{headers:?}");
        }
    }

    #[test]
    fn a_key_may_use_the_models_that_it_names() {
        let of = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(API_KEY, HeaderValue::from_str(key).unwrap());
            super::check(&keys(), &headers).unwrap()
        };
        assert!(of("first").may_use("tiny") && of("first").may_use("other"));
        assert!(of("second").may_use("tiny") && !of("second").may_use("other"));
        assert!(Caller::default().may_use("other"));
    }
}
