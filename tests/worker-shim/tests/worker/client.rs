//! Requests to a serving unit.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

/// A client of the unit that serves at this address.
pub(super) struct Client(pub(super) SocketAddr);

impl Client {
    /// Status and body of an answer.
    pub(super) fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.0).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n");
        let length = body.len();
        write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    /// The tokens that follow each prompt, all requested at once.
    pub(super) fn continued(&self, prompts: &[String], sampling: &str) -> Vec<String> {
        self.continued_by(4, prompts, sampling)
    }

    pub(super) fn continued_by(&self, tokens: usize, prompts: &[String], sampling: &str) -> Vec<String> {
        std::thread::scope(|scope| {
            let ask = |prompt: &String| {
                let params = format!(r#"{{"max_new_tokens": {tokens}, {sampling}}}"#);
                let body = format!(r#"{{"input_ids": {prompt}, "sampling_params": {params}}}"#);
                scope.spawn(move || {
                    let (status, answer) = self.ask("POST", "/generate", &body);
                    assert_eq!(status, 200, "{answer}");
                    let from = answer.find("\"output_ids\"").expect("an answer names its tokens");
                    answer[from..].split_once(']').unwrap().0.to_owned()
                })
            };
            let asked: Vec<_> = prompts.iter().map(ask).collect();
            asked.into_iter().map(|answer| answer.join().unwrap()).collect()
        })
    }

    /// The sum of a metric over ranks.
    pub(super) fn counted(&self, name: &str) -> f64 {
        let (_, metrics) = self.ask("GET", "/metrics", "");
        metrics.lines().filter_map(|line| line.strip_prefix(name)?.split_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    fn is_busy(&self) -> bool {
        let (_, metrics) = self.ask("GET", "/metrics", "");
        metrics.lines().any(|line| line.starts_with("semmoe_requests_in_flight{") && !line.ends_with(" 0"))
    }

    /// Waits until the unit runs a request.
    pub(super) fn wait_until_busy(&self) {
        while !self.is_busy() {
            std::thread::yield_now();
        }
    }

    /// The tokens that follow a prompt while the unit switches from ep to tp, back, and to tp.
    pub(super) fn continued_through_switches(&self, tokens: usize, prompt: &[String], sampling: &str) -> Vec<String> {
        std::thread::scope(|scope| {
            let request = scope.spawn(|| self.continued_by(tokens, prompt, sampling));
            while !self.is_busy() {
                assert!(!request.is_finished(), "the request was over before a switch began");
                std::thread::yield_now();
            }
            for to in ["tp", "ep", "tp"] {
                let (status, answer) = self.ask("POST", "/switch", &format!(r#"{{"to": "{to}"}}"#));
                assert!(status == 200 && answer.contains(&format!(r#""layout":"{to}""#)), "{status}: {answer}");
            }
            assert!(!request.is_finished(), "the request was over before the switches were");
            request.join().unwrap()
        })
    }
}
