//! One control link: a reader and a writer thread.

use std::io;
use std::net::{Shutdown as Half, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{self, FrameError, MAX_FRAME_BYTES};

/// A peer that does not accept frames for this long is lost.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// The sending end of a control link. The link's thread writes frames in order. Messages sent after the peer has gone
/// are dropped, because the reader has already reported the end. When all clones are dropped, the link sends what is
/// queued and closes.
#[derive(Clone, Debug)]
pub(crate) struct LinkSender<T> {
    frames: mpsc::Sender<T>,
}

impl<T> LinkSender<T> {
    pub(crate) fn send(&self, message: T) {
        let _ = self.frames.send(message);
    }
}

/// Why a link has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkEnd {
    #[error("its process is gone")]
    ProcessGone,
    #[error(transparent)]
    Frame(FrameError),
}

/// Starts both threads. `receive` gets every frame and finally, once, why there will be no more.
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
                tracing::warn!(%error, "a control link cannot be written");
                break;
            }
        }
        // Everything has been written: the peer's reader sees the end, and so does ours.
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
