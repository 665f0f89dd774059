//! One control link: a thread that reads, a thread that writes.

use std::io;
use std::net::{Shutdown as Half, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::frame::{self, FrameError, MAX_FRAME_BYTES};

/// A peer that does not take its frames for so long is lost.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// The sending end of a control link. Frames are written in order by the link's own thread; messages sent after the
/// peer has gone are dropped, as the reader has reported the end already. Once all clones are dropped the link closes,
/// after everything that was sent.
#[derive(Clone, Debug)]
pub(crate) struct LinkSender<T> {
    frames: mpsc::Sender<T>,
}

impl<T> LinkSender<T> {
    pub(crate) fn send(&self, message: T) {
        let _ = self.frames.send(message);
    }
}

/// Starts both threads. `receive` gets every frame and at last, once, why there will be no more.
pub(crate) fn start<Out, In>(
    name: &str,
    stream: TcpStream,
    mut receive: impl FnMut(Result<In, String>) + Send + 'static,
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
        // Everything is written: the peer's reader sees the end, and so does our own.
        let _ = writing.shutdown(Half::Both);
    })?;
    std::thread::Builder::new().name(format!("{name}-read")).spawn(move || {
        loop {
            match frame::read::<In>(&mut reading, MAX_FRAME_BYTES) {
                Ok(message) => receive(Ok(message)),
                Err(FrameError::Closed) => return receive(Err("its process is gone".into())),
                Err(error) => return receive(Err(error.to_string())),
            }
        }
    })?;
    Ok(LinkSender { frames })
}
