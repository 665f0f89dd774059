//! Requests that an engine refused over HTTP/2: sent again, whatever the retry rules. Frames are written by hand,
//! because no library refuses streams on demand.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Client, metric, settled, shown, start};
use crate::wire::{HEADERS, SETTINGS};

const COMPLETIONS: &str = "/v1/completions";
/// `:method: POST` of the static table; hyper writes it first.
const POST: u8 = 0x83;
/// `:status: 200`, the end of the stream.
const OK: &[u8] = &[0, 0, 1, HEADERS, 5, 0, 0, 0, 0, 0x88];
const NO_SETTINGS: &[u8] = &[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
/// RST_STREAM with REFUSED_STREAM, and with INTERNAL_ERROR.
const REFUSED: &[u8] = &[0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 0, 0, 7];
const BROKEN: &[u8] = &[0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 0, 0, 2];
/// GOAWAY for the connection, with last stream 0.
const GOAWAY: &[u8] = &[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// An engine that answers requests with these frames in sequence, repeating the last one.
struct Engine {
    url: String,
    requests: Arc<AtomicUsize>,
}

impl Engine {
    async fn start(answers: &'static [&'static [u8]]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serve(socket, answers, Arc::clone(&seen)));
            }
        });
        Self { url, requests }
    }

    fn seen(&self) -> usize {
        self.requests.swap(0, Ordering::SeqCst)
    }
}

async fn serve(
    mut socket: TcpStream,
    answers: &'static [&'static [u8]],
    seen: Arc<AtomicUsize>,
) -> std::io::Result<()> {
    let mut preface = [0; 24];
    socket.read_exact(&mut preface).await?;
    socket.write_all(NO_SETTINGS).await?;
    loop {
        let mut head = [0; 9];
        socket.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        socket.read_exact(&mut payload).await?;
        let is_ack = head[4] & 1 == 1;
        if head[3] == SETTINGS && !is_ack {
            socket.write_all(&[0, 0, 0, SETTINGS, 1, 0, 0, 0, 0]).await?;
        }
        if head[3] != HEADERS {
            continue;
        }
        let answer = match payload[0] {
            POST => answers[seen.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1)],
            _ => OK,
        };
        let mut answer = answer.to_vec();
        if answer != GOAWAY {
            answer[5..9].copy_from_slice(&head[5..]);
        }
        socket.write_all(&answer).await?;
        if answer == GOAWAY {
            // If it were closed with unread bytes, the connection would be reset, and the frame lost.
            return tokio::io::copy(&mut socket, &mut tokio::io::sink()).await.map(drop);
        }
    }
}

/// Nothing may run twice, and there are no retries.
fn careful(engines: &[&Engine]) -> String {
    let backend = |(name, engine): (char, &&Engine)| {
        format!(
            "[[models.backends]]\nname = \"pod-{name}\"\nengine = \"openai\"\nurl = \"{}\"\nhttp2 = true\n",
            engine.url
        )
    };
    let backends: String = ('a'..).zip(engines).map(backend).collect();
    format!(
        "[retry]\nafter_send = false\nattempts = 1\nbudget_ratio = 0.0\nbudget_per_second = 0.0\n\
         [[models]]\nname = \"tiny\"\npolicy = \"round_robin\"\n{backends}"
    )
}

#[tokio::test]
async fn a_request_that_was_not_taken_is_sent_again() {
    for answers in [&[REFUSED, OK][..], &[GOAWAY, OK]] {
        let engine = Engine::start(answers).await;
        let gateway = start(&careful(&[&engine])).await;
        assert_eq!(Client::data(&gateway).post(COMPLETIONS, "{}").await.status, 200);
        assert_eq!(engine.seen(), 2);
        settled(&gateway).await;
    }
}

#[tokio::test]
async fn one_that_takes_nothing_costs_no_request() {
    for answers in [&[REFUSED][..], &[GOAWAY]] {
        let (a, b) = (Engine::start(answers).await, Engine::start(&[OK]).await);
        let gateway = start(&careful(&[&a, &b])).await;
        let client = Client::data(&gateway);
        for number in 0..6 {
            let answer = client.post(COMPLETIONS, format!("{{\"n\":{number}}}")).await;
            assert_eq!((answer.status, answer.header("x-semmoe-backend")), (200, "pod-b"), "{answer:?}");
        }
        assert_eq!((a.seen(), b.seen()), (12, 6), "each is sent to it twice");
        assert_eq!(metric(&gateway, "semmoe_retries_total{cause=\"not_taken\",outcome=\"answered\"}").await, 6.0);
        assert_eq!(shown(&gateway, "pod-a").await["breaker"]["failures"], 0);
        settled(&gateway).await;
    }
}

/// It may have begun.
#[tokio::test]
async fn a_stream_that_breaks_is_not_sent_again() {
    let (a, b) = (Engine::start(&[BROKEN]).await, Engine::start(&[BROKEN]).await);
    let gateway = start(&careful(&[&a, &b])).await;
    assert_eq!(Client::data(&gateway).post(COMPLETIONS, "{}").await.status, 502);
    assert_eq!(a.seen() + b.seen(), 1);
    settled(&gateway).await;
}
