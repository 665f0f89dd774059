//! One-line hints for common beginner failures, looked up by the failure's text.
//!
//! Libraries report the problem; only the command line knows which option or command fixes it.
//! `tests/command/mistakes.rs` triggers each of these failures.

/// Part of a failure's text, and the hint to print.
const HINTS: [(&str, &str); 10] = [
    (
        "\"code\":\"route_not_found\"",
        "this is semmoe's gateway: `profile record` needs the URL of the engine behind it, `load` the address that `serve` \
         prints as ready",
    ),
    ("Address already in use", "another process uses this address: choose another address or stop that process"),
    (
        "stream did not contain valid UTF-8",
        "the file is not text; expected a TOML file like the one that `serve --print-config` prints",
    ),
    ("expected \"semmoe.tables\"", "`semmoe solve` writes tables"),
    ("expected \"semmoe.profile\"", "`semmoe profile build` makes profiles from traces; pass a trace with --trace"),
    ("expected \"semmoe.trace\"", "`semmoe profile record` writes traces; pass a profile with --profile"),
    (
        "not 64 hexadecimal digits",
        "`printf %s TOKEN | sha256sum` prints the digest of a token, `semmoe keys hash` that of a key",
    ),
    ("the objective `ranks` needs a trace", "pass one with --trace"),
    ("or padding or redundant slots", "`semmoe solve` takes --pad and --redundant"),
    ("the model directory", "models are not downloaded: pass a checkpoint directory to --model"),
];

/// Returns the hint for a failure, if any.
pub(crate) fn hint(failure: &str) -> Option<&'static str> {
    HINTS.iter().find(|(part, _)| failure.contains(part)).map(|(_, hint)| *hint)
}
