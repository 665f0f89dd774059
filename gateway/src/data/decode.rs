//! Decodes bodies before anything reads them: removes content codings and byte order marks, and converts other Unicode
//! encodings to UTF-8. Engines support no content coding, but their parsers accept all of these encodings.
//!
//! The result stays within the body limit, and its memory is charged before it is allocated.

use std::io::Read;
use std::sync::Arc;

use brotli_decompressor::Decompressor;
use bytes::Bytes;
use flate2::bufread::{DeflateDecoder, GzDecoder, ZlibDecoder};
use http::{HeaderMap, header};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use semmoe_engines::Route;
use semmoe_engines::SharedError;
use semmoe_engines::json::{Encoding, begins_object};

use super::{DataPlane, Ticket};
use crate::backends::RequestError;

/// Maximum Zstandard window in content codings (RFC 9659).
const MAX_WINDOW_BYTES: u64 = 8 << 20;
/// Maximum number of gzip members or Zstandard frames per body: encoders write one, and each takes time.
const MAX_MEMBERS: usize = 1024;
/// Initial allocation for a decoded body.
const FIRST_BYTES: usize = 4 << 10;
const INPUT_BYTES: usize = 4 << 10;
/// Number of bytes read at a time.
const PIECE_BYTES: usize = 64 << 10;
/// Number of characters of an unknown coding that an error repeats.
const SHOWN: usize = 32;

/// How a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Gzip,
    Deflate,
    Zstd,
    Brotli,
}

impl Coding {
    /// Removes the content coding from the headers and returns it.
    ///
    /// # Errors
    /// [`RequestError::Coding`] for unknown codings, and for more than one.
    pub(super) fn take(headers: &mut HeaderMap) -> Result<Option<Self>, RequestError> {
        if !headers.contains_key(header::CONTENT_ENCODING) {
            return Ok(None);
        }
        let mut coding = None;
        let values = headers.get_all(header::CONTENT_ENCODING).iter().map(http::HeaderValue::as_bytes);
        for name in values.flat_map(|value| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii) {
            let known = match name.to_ascii_lowercase().as_slice() {
                b"" | b"identity" => continue,
                b"gzip" | b"x-gzip" => Some(Self::Gzip),
                b"deflate" => Some(Self::Deflate),
                b"zstd" => Some(Self::Zstd),
                b"br" => Some(Self::Brotli),
                _ => None,
            };
            if known.is_none() || coding.is_some() {
                let found = String::from_utf8_lossy(name).chars().take(SHOWN).collect();
                return Err(RequestError::Coding { found });
            }
            coding = known;
        }
        headers.remove(header::CONTENT_ENCODING);
        Ok(coding)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
            Self::Brotli => "br",
        }
    }
}

/// Whether a body needs no decoding: it is UTF-8 without a byte order mark, or its route carries audio or forms.
pub(super) fn is_plain(route: Route, body: &[u8]) -> bool {
    Encoding::of(body) == (Encoding::Utf8, 0) || (route == Route::Extra && !begins_object(body))
}

/// Returns the body without its content coding, as UTF-8 without a byte order mark. Runs off the network threads,
/// because a short body can expand a lot.
///
/// # Errors
/// [`RequestError::BodyCoding`] or [`RequestError::BodyJson`] if the body does not match its headers, or an error about
/// its size limits.
pub(super) async fn plain(
    plane: &Arc<DataPlane>,
    coding: Option<Coding>,
    route: Route,
    body: Bytes,
    ticket: &mut Ticket,
) -> Result<Bytes, RequestError> {
    let permit = Arc::clone(&plane.skimming).acquire_owned().await;
    let mut account = Account::new(Arc::clone(plane));
    let made = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let body = match coding {
            Some(coding) => account.decoded(coding, &body)?,
            None => body,
        };
        let plain = if is_plain(route, &body) { body } else { account.utf8(&body)? };
        Ok((plain, account))
    });
    let (plain, account) = made.await.unwrap_or_else(|error| Err(RequestError::from(error)))?;
    // The encoded body has been freed.
    ticket.release_body();
    ticket.take_over(account.keep(plain.len()));
    Ok(plain)
}

/// The memory reserved for decoding one body, released on drop.
struct Account {
    plane: Arc<DataPlane>,
    bytes: usize,
    limit_bytes: usize,
    memory_bytes: usize,
}

impl Account {
    fn new(plane: Arc<DataPlane>) -> Self {
        let (limit_bytes, memory_bytes) = {
            let limits = &plane.backends.current.load().config.limits;
            (limits.body_bytes, limits.body_memory_bytes)
        };
        Self { plane, bytes: 0, limit_bytes, memory_bytes }
    }

    fn take(&mut self, bytes: usize) -> Result<(), RequestError> {
        self.plane.body_memory.take(bytes, self.memory_bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Releases all but `bytes`, which another account takes over.
    fn keep(mut self, bytes: usize) -> usize {
        let kept = bytes.min(self.bytes);
        self.bytes -= kept;
        kept
    }

    fn decoded(&mut self, coding: Coding, body: &[u8]) -> Result<Bytes, RequestError> {
        let bad = |source| RequestError::BodyCoding { coding: coding.name(), source };
        let mut plain = Vec::new();
        let mut rest = body;
        let mut frames = FrameDecoder::new();
        frames.set_max_window_size(MAX_WINDOW_BYTES);
        let mut windows_bytes = 0;
        for _ in 0..MAX_MEMBERS {
            let wanted_bytes = window_bytes(coding, rest);
            self.take(wanted_bytes.saturating_sub(windows_bytes))?;
            windows_bytes = windows_bytes.max(wanted_bytes);
            let read = match coding {
                Coding::Gzip => self.fill(&mut plain, GzDecoder::new(&mut rest), bad),
                Coding::Deflate if has_zlib_head(rest) => self.fill(&mut plain, ZlibDecoder::new(&mut rest), bad),
                Coding::Deflate => self.fill(&mut plain, DeflateDecoder::new(&mut rest), bad),
                Coding::Brotli => self.fill(&mut plain, Decompressor::new(std::mem::take(&mut rest), INPUT_BYTES), bad),
                Coding::Zstd => {
                    let frame = StreamingDecoder::new_with_decoder(&mut rest, &mut frames);
                    self.fill(&mut plain, frame.map_err(|error| bad(error.into()))?, bad)
                }
            };
            read?;
            let sums = [frames.get_checksum_from_data(), frames.get_calculated_checksum()];
            if matches!(sums, [Some(written), Some(found)] if written != found) {
                return Err(bad("its checksum is wrong".into()));
            }
            let may_go_on = matches!(coding, Coding::Gzip | Coding::Zstd);
            match rest.is_empty() {
                true => {
                    plain.shrink_to_fit();
                    return Ok(plain.into());
                }
                false if !may_go_on => return Err(bad(format!("{} bytes follow its end", rest.len()).into())),
                false => {}
            }
        }
        Err(bad(format!("it has more than {MAX_MEMBERS} members").into()))
    }

    /// Decodes one member to its end. `bad` converts the decoder's error.
    fn fill(
        &mut self,
        plain: &mut Vec<u8>,
        mut member: impl Read,
        bad: impl Fn(SharedError) -> RequestError,
    ) -> Result<(), RequestError> {
        loop {
            let length = plain.len();
            if length == plain.capacity() {
                // Allow one byte beyond the limit, so that larger bodies are detected.
                let room = self.limit_bytes.saturating_add(1).saturating_sub(length).min(length.max(FIRST_BYTES));
                self.take(room)?;
                plain.reserve_exact(room);
            }
            plain.resize(plain.capacity().min(length + PIECE_BYTES), 0);
            let read = member.read(&mut plain[length..]);
            plain.truncate(length + *read.as_ref().unwrap_or(&0));
            if plain.len() > self.limit_bytes {
                return Err(RequestError::BodyTooLong { limit_bytes: self.limit_bytes });
            }
            match read {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(bad(error.into())),
            }
        }
    }

    /// Converts a text from the encoding that Python's JSON parser would detect.
    fn utf8(&mut self, body: &Bytes) -> Result<Bytes, RequestError> {
        let (encoding, start) = Encoding::of(body);
        if encoding == Encoding::Utf8 {
            self.take(body.len())?;
            return Ok(body.slice(start..));
        }
        let characters = || encoding.characters(&body[start..]);
        let mut length = 0;
        for character in characters() {
            length += character.map_err(|error| RequestError::BodyJson { source: error.into() })?.len_utf8();
        }
        if length > self.limit_bytes {
            return Err(RequestError::BodyTooLong { limit_bytes: self.limit_bytes });
        }
        self.take(length)?;
        let mut text = String::with_capacity(length);
        text.extend(characters().map_while(Result::ok));
        Ok(text.into())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.plane.body_memory.give_back(self.bytes);
    }
}

/// Detects a zlib header: `deflate` requires one, but some clients send raw DEFLATE.
fn has_zlib_head(body: &[u8]) -> bool {
    matches!(body, [first, second, ..] if first & 15 == 8 && (u32::from(*first) << 8 | u32::from(*second)) % 31 == 0)
}

/// Returns the window size that a decoder needs, according to a member's header.
fn window_bytes(coding: Coding, member: &[u8]) -> usize {
    match (coding, member) {
        (Coding::Gzip | Coding::Deflate, _) => 32 << 10,
        (Coding::Zstd, [_, _, _, _, descriptor, head @ ..]) => zstd_window_bytes(*descriptor, head),
        (Coding::Zstd, _) => 0,
        // Window sizes by RFC 7932, 9.1.
        (_, [first, ..]) => {
            let bits = match (first & 1, first >> 1 & 7, first >> 4 & 7) {
                (0, ..) => 16,
                (_, 0, 0) => 17,
                (_, 0, more) => 8 + more,
                (_, bits, _) => 17 + bits,
            };
            1 << bits
        }
        (_, []) => 0,
    }
}

/// Returns the window size from a frame header (RFC 8878, 3.1.1.1); `head` follows the descriptor.
fn zstd_window_bytes(descriptor: u8, head: &[u8]) -> usize {
    let is_one_segment = descriptor & 0x20 != 0;
    let bytes = if is_one_segment {
        let length = 1_usize << (descriptor >> 6);
        let start = [0, 1, 2, 4][usize::from(descriptor & 3)];
        let size = head.get(start..start + length).unwrap_or_default();
        let size = size.iter().rev().fold(0_u64, |size, byte| size << 8 | u64::from(*byte));
        if length == 2 { size + 256 } else { size }
    } else {
        let window = head.first().copied().unwrap_or_default();
        let base = 1_u64 << (10 + (window >> 3));
        base + (base >> 3) * u64::from(window & 7)
    };
    bytes.min(MAX_WINDOW_BYTES) as usize
}
