//! Judges bodies for `tests/ids/run.py`: reads lines `ROUTE BODY` and writes `0` for each, or `1` if a token id is
//! outside the vocabulary. Usage: `judge_ids SIZE`.

use std::io::{BufRead, BufWriter, Write};

use bytes::Bytes;
use semmoe_engines::Route;
use semmoe_engines::fields::Rules;
use semmoe_engines::pin::Stripped;

fn is_refused(route: Route, size: u32, body: &str) -> bool {
    let rules = Rules { route, vocabulary: Some(size), adapters: None };
    let (body, mut is_bad) = (Bytes::copy_from_slice(body.as_bytes()), false);
    let seen = Stripped::seeing(&body, None, |member, field| {
        let field = field.filter(|field| field.is_on(route));
        is_bad |= field.is_some_and(|field| rules.check(field, &body[member.value.clone()]).is_err());
    });
    is_bad || seen.is_err()
}

fn main() -> std::io::Result<()> {
    let size = std::env::args().nth(1).and_then(|size| size.parse().ok()).ok_or(std::io::ErrorKind::InvalidInput)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (path, body) = line.split_once(' ').ok_or(std::io::ErrorKind::InvalidData)?;
        let route = Route::ALL.into_iter().find(|route| route.path() == path).unwrap_or(Route::Extra);
        out.write_all(if is_refused(route, size, body) { b"1\n" } else { b"0\n" })?;
    }
    out.flush()
}
