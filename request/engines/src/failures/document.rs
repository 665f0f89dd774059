//! Scans a JSON response, piece by piece, for the few places where engines report failures.
//!
//! Stores only the keys on the current path and one short word, since documents are long and are relayed as they
//! arrive. Invalid JSON is harmless, but gives no reliable result.

use super::Failure;

/// Maximum depth of a relevant value: `[{"choices": [{"finish_reason": {"type": ...`.
const DEEPEST: usize = 6;
/// Maximum length of a relevant key or word.
const LONGEST: usize = 24;

/// Types and codes of server errors, compared if there is no numeric code.
const SERVER_ERRORS: [&[u8]; 7] = [
    b"InternalServerError",
    b"INTERNAL_SERVER_ERROR",
    b"internal_server_error",
    b"server_error",
    b"api_error",
    b"overloaded_error",
    b"ServiceUnavailableError",
];

/// The key at one level, if it is relevant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Key {
    #[default]
    Other,
    /// No key, since the level is an array.
    Element,
    Error,
    Response,
    Choices,
    MetaInfo,
    FinishReason,
    Type,
    Code,
    StatusCode,
}

impl Key {
    fn of(word: Option<&[u8]>) -> Self {
        match word {
            Some(b"error") => Self::Error,
            Some(b"response") => Self::Response,
            Some(b"choices") => Self::Choices,
            Some(b"meta_info") => Self::MetaInfo,
            Some(b"finish_reason") => Self::FinishReason,
            Some(b"type") => Self::Type,
            Some(b"code") => Self::Code,
            Some(b"status_code") => Self::StatusCode,
            _ => Self::Other,
        }
    }
}

/// The meaning of a value at its position in the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Elsewhere,
    Error,
    ErrorType,
    ErrorCode,
    Reason,
    ReasonType,
    ReasonStatus,
}

/// A partially scanned document.
#[derive(Debug, Default)]
pub struct Document {
    keys: [Key; DEEPEST],
    /// One bit per level, set if the level is an object.
    objects: u8,
    /// Number of open arrays and objects.
    depth: u32,
    in_string: bool,
    after_backslash: bool,
    /// Whether the next string is a key.
    at_key: bool,
    /// The string or literal being scanned.
    word: [u8; LONGEST],
    /// Length of `word`; a word longer than [`LONGEST`] is irrelevant.
    length: u8,
    /// Status code of the error or finish reason being scanned.
    status: Option<u16>,
    is_named: bool,
    failure: Option<Failure>,
}

impl Document {
    /// Scans the next piece; `is_last` marks the final one. Returns the failure reported so far, if any.
    pub fn push(&mut self, piece: &[u8], is_last: bool) -> Option<Failure> {
        // Most documents arrive in one piece and report no failure, so skip the scan if the piece cannot contain one.
        if !is_last || self.depth > 0 || super::may_report(piece) {
            self.read(piece);
        }
        self.failure
    }

    fn read(&mut self, piece: &[u8]) {
        let mut at = 0;
        while let Some(&byte) = piece.get(at) {
            if self.in_string {
                at += self.string(&piece[at..]);
                continue;
            }
            match byte {
                b'"' => (self.in_string, self.length) = (true, 0),
                b'{' | b'[' => self.open(byte == b'{'),
                b'}' | b']' => self.close(),
                b',' => {
                    self.literal();
                    self.at_key = self.level().is_some_and(|level| self.objects >> level & 1 == 1);
                }
                b':' | b' ' | b'\t' | b'\n' | b'\r' => self.literal(),
                _ => self.add(&[byte]),
            }
            at += 1;
        }
    }

    /// Continues a string; returns the number of bytes consumed.
    fn string(&mut self, rest: &[u8]) -> usize {
        if std::mem::take(&mut self.after_backslash) {
            return 1;
        }
        let length = memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
        self.add(&rest[..length]);
        match rest.get(length) {
            None => return length,
            Some(b'"') => {
                self.in_string = false;
                self.end_of_string();
            }
            Some(_) => {
                self.after_backslash = true;
                // No relevant word contains an escape.
                self.length = LONGEST as u8 + 1;
            }
        }
        length + 1
    }

    fn add(&mut self, bytes: &[u8]) {
        let start = usize::from(self.length);
        let end = start.saturating_add(bytes.len());
        if let Some(free) = self.word.get_mut(start..end) {
            free.copy_from_slice(bytes);
        }
        self.length = end.min(LONGEST + 1) as u8;
    }

    fn word(&self) -> Option<&[u8]> {
        self.word.get(..usize::from(self.length))
    }

    fn end_of_string(&mut self) {
        if std::mem::take(&mut self.at_key) {
            if let Some(level) = self.level() {
                self.keys[level] = Key::of(self.word());
            }
        } else {
            self.value();
        }
        self.length = 0;
    }

    /// Finishes a number or another literal, if one was being scanned.
    fn literal(&mut self) {
        if self.length > 0 {
            self.value();
            self.length = 0;
        }
    }

    fn open(&mut self, is_object: bool) {
        if matches!(self.place(), Place::Error | Place::Reason) {
            (self.status, self.is_named) = (None, false);
        }
        self.depth = self.depth.saturating_add(1);
        self.at_key = is_object;
        if let Some(level) = self.level() {
            self.keys[level] = if is_object { Key::Other } else { Key::Element };
            self.objects = self.objects & !(1 << level) | u8::from(is_object) << level;
        }
    }

    fn close(&mut self) {
        self.literal();
        self.depth = self.depth.saturating_sub(1);
        self.at_key = false;
        let failure = match self.place() {
            Place::Error if self.status.map_or(self.is_named, |status| status >= 500) => Failure::Error,
            Place::Reason if self.is_named && !self.status.is_some_and(|status| (400..500).contains(&status)) => {
                Failure::Abort
            }
            _ => return,
        };
        self.failure = Some(failure);
    }

    /// Handles a complete string or literal.
    fn value(&mut self) {
        let place = self.place();
        if place == Place::Elsewhere {
            return;
        }
        let word = self.word().unwrap_or_default();
        let number = || std::str::from_utf8(word).ok()?.parse().ok();
        match place {
            Place::Reason if word == b"abort" => self.failure = Some(Failure::Abort),
            Place::ReasonType => self.is_named = word == b"abort",
            Place::ReasonStatus => self.status = number(),
            Place::ErrorType => self.is_named |= SERVER_ERRORS.contains(&word),
            Place::ErrorCode => {
                (self.status, self.is_named) = (number(), self.is_named | SERVER_ERRORS.contains(&word))
            }
            _ => {}
        }
    }

    /// Returns the level of the innermost open array or object, if it is relevant.
    fn level(&self) -> Option<usize> {
        (self.depth as usize).checked_sub(1).filter(|level| *level < DEEPEST)
    }

    /// Returns the meaning of the value at the current position. An object echoed from the client has other keys above
    /// it and so never matches.
    fn place(&self) -> Place {
        let Some(keys) = self.keys.get(..self.depth as usize) else { return Place::Elsewhere };
        let keys = keys.strip_prefix(&[Key::Element]).unwrap_or(keys);
        match keys.strip_prefix(&[Key::Response]).unwrap_or(keys) {
            [Key::Error] => Place::Error,
            [Key::Error, Key::Type] => Place::ErrorType,
            [Key::Error, Key::Code] => Place::ErrorCode,
            [Key::Choices, Key::Element, Key::FinishReason, rest @ ..]
            | [Key::MetaInfo, Key::FinishReason, rest @ ..] => match rest {
                [] => Place::Reason,
                [Key::Type] => Place::ReasonType,
                [Key::StatusCode] => Place::ReasonStatus,
                _ => Place::Elsewhere,
            },
            _ => Place::Elsewhere,
        }
    }
}
