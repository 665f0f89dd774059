//! Length-prefixed JSON: a four-byte little-endian length, followed by that many bytes of JSON.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Size limit of a control frame. The largest content is the routes of a long sequence.
pub(crate) const MAX_FRAME_BYTES: usize = 64 << 20;
/// Size limit of an unauthenticated frame: a registration with its model information.
pub(crate) const MAX_HELLO_BYTES: usize = 1 << 20;

/// Reasons why no frame was received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The peer closed the connection between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The frame exceeds the reader's limit.
    #[error("a frame has {found} bytes, but at most {limit} are accepted")]
    TooLong { found: usize, limit: usize },
    /// Unexpected content.
    #[error("a frame has unexpected content: {0}")]
    Content(#[from] serde_json::Error),
}

/// Writes one frame in a single call, so that packet captures show whole frames.
pub(crate) fn write<T: Serialize>(stream: &mut impl Write, message: &T) -> Result<(), FrameError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = frame.len() - 4;
    match u32::try_from(length) {
        Ok(prefix) if length <= MAX_FRAME_BYTES => frame[..4].copy_from_slice(&prefix.to_le_bytes()),
        _ => return Err(FrameError::TooLong { found: length, limit: MAX_FRAME_BYTES }),
    }
    stream.write_all(&frame)?;
    stream.flush()?;
    Ok(())
}

/// Reads one frame of at most `limit` bytes. Memory grows with the bytes received, not with the announced length.
pub(crate) fn read<T: DeserializeOwned>(stream: &mut impl Read, limit: usize) -> Result<T, FrameError> {
    let mut prefix = Vec::with_capacity(4);
    stream.by_ref().take(4).read_to_end(&mut prefix)?;
    let length = match prefix[..] {
        [] => return Err(FrameError::Closed),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]) as usize,
        _ => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
    };
    if length > limit {
        return Err(FrameError::TooLong { found: length, limit });
    }
    let mut body = Vec::new();
    stream.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_bad_ones_are_reported() {
        let mut bytes = Vec::new();
        write(&mut bytes, &"first").unwrap();
        write(&mut bytes, &[1, 2, 3]).unwrap();
        let mut stream = &bytes[..];
        assert_eq!(read::<String>(&mut stream, 100).unwrap(), "first");
        assert!(matches!(read::<String>(&mut stream, 100), Err(FrameError::Content(_))));
        assert!(matches!(read::<String>(&mut stream, 100), Err(FrameError::Closed)));

        assert!(matches!(read::<String>(&mut &bytes[..], 3), Err(FrameError::TooLong { found: 7, limit: 3 })));
        for cut in 1..bytes.len() {
            let mut stream = &bytes[..cut];
            let outcome = read::<String>(&mut stream, 100).and_then(|_| read::<Vec<u8>>(&mut stream, 100));
            assert!(outcome.is_err(), "cut at {cut}");
        }
        // An announced gigabyte must not be allocated.
        assert!(read::<String>(&mut &[0, 0, 0, 3, b'x'][..], MAX_FRAME_BYTES).is_err());
    }
}
