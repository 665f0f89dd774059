//! One control link: a reader and a writer thread.

use std::io;
use std::net::{Shutdown as Half, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{self, FrameError, MAX_FRAME_BYTES};

/// A peer that accepts no frames for this long is considered lost.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// The sending end of a control link. The link's thread writes frames in order. Messages sent after the peer has
/// disconnected are dropped, because the reader has already reported that. When all clones are dropped, the link sends
/// the queued messages and closes.
#[derive(Clone, Debug)]
pub(crate) struct LinkSender<T> {
    frames: mpsc::Sender<T>,
}

impl<T> LinkSender<T> {
    pub(crate) fn send(&self, message: T) {
        let _ = self.frames.send(message);
    }
}

/// The reason that a link ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkEnd {
    #[error("its process is gone")]
    ProcessGone,
    #[error(transparent)]
    Frame(FrameError),
}

/// Starts both threads. `receive` is called with every frame, and finally once with the reason that the link ended.
pub(crate) fn start<Out, In>(
    name: &str,
    stream: TcpStream,
    mut receive: impl FnMut(Result<In, LinkEnd>) + Send + 'static,
) -> io::Result<LinkSender<Out>>
where
    Out: Serialize + Send + 'static,
    In: DeserializeOwned + 'static,
{
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let mut reading = stream.try_clone()?;
    let mut writing = stream;
    let (frames, queue) = mpsc::channel::<Out>();
    std::thread::Builder::new().name(format!("{name}-write")).spawn(move || {
        while let Ok(message) = queue.recv() {
            if let Err(error) = frame::write(&mut writing, &message) {
                tracing::warn!(%error, "cannot write to a control link");
                break;
            }
        }
        // All messages have been written: the shutdown ends both the peer's reader and this one.
        let _ = writing.shutdown(Half::Both);
    })?;
    std::thread::Builder::new().name(format!("{name}-read")).spawn(move || {
        loop {
            match frame::read::<In>(&mut reading, MAX_FRAME_BYTES) {
                Ok(message) => receive(Ok(message)),
                Err(FrameError::Closed) => return receive(Err(LinkEnd::ProcessGone)),
                Err(error) => return receive(Err(LinkEnd::Frame(error))),
            }
        }
    })?;
    Ok(LinkSender { frames })
}
