//! Logging to standard error, one event per line.

use std::io::{IsTerminal, Result, Stderr, Write};

use tracing_subscriber::filter::LevelFilter;

/// The logging options of the command line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogChoice {
    pub(crate) level: Option<LevelFilter>,
    pub(crate) json: bool,
}

impl LogChoice {
    /// Starts logging to standard error; command-line options take precedence over these arguments.
    pub(crate) fn start(self, level: LevelFilter, json: bool) {
        let json = json || self.json;
        let colours = !json && std::io::stderr().is_terminal();
        let logger = tracing_subscriber::fmt()
            .with_max_level(self.level.unwrap_or(level))
            .with_writer(move || EscapedLines { to: std::io::stderr(), colours });
        if json {
            logger.json().init();
        } else {
            logger.with_ansi(colours).init();
        }
    }
}

/// Writes each event as one line of printable characters, so that text from clients or engines can neither forge a line
/// nor control a terminal. Control characters become `\u000a`, which is valid in JSON strings, too.
struct EscapedLines {
    to: Stderr,
    /// Lets the logger's own colour escape sequences through; the logger escapes those inside texts.
    colours: bool,
}

impl Write for EscapedLines {
    /// `event` is a complete event, including the line break.
    fn write(&mut self, event: &[u8]) -> Result<usize> {
        self.to.write_all(escaped(event, self.colours).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.to.flush()
    }
}

fn escaped(event: &[u8], colours: bool) -> String {
    let text = String::from_utf8_lossy(event);
    let mut line = String::with_capacity(text.len());
    for character in text.strip_suffix('\n').unwrap_or(&text).chars() {
        // Some readers treat the last two as line breaks.
        let breaks = character.is_control() || matches!(character, '\u{2028}' | '\u{2029}');
        if breaks && !(colours && character == '\u{1b}') {
            line.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            line.push(character);
        }
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_printable_characters() {
        for (event, line) in [
            ("INFO a=1\n", "INFO a=1\n"),
            ("path=x\n2026 INFO forged\n", "path=x\\u000a2026 INFO forged\n"),
            ("\r\t\u{7f}\u{85}\u{9b}2J\u{2028}é\n", "\\u000d\\u0009\\u007f\\u0085\\u009b2J\\u2028é\n"),
            ("\u{1b}[2J\n", "\\u001b[2J\n"),
        ] {
            assert_eq!(escaped(event.as_bytes(), false), line);
        }
        assert_eq!(escaped("\u{1b}[2mINFO\n".as_bytes(), true), "\u{1b}[2mINFO\n");
        assert_eq!(escaped(b"\xff\n", false), "\u{fffd}\n");
    }
}
