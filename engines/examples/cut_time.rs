//! How long it takes to cut routed experts out of an answer: the figure in `docs/profile-and-solve.md`.
//!
//! `cargo run --release -p semmoe-engines --example cut_time`
#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::time::Instant;

use semmoe_engines::routed::{self, Place};

const ROUNDS: usize = 20;

fn main() {
    for mib in [1usize, 2, 8] {
        let (text, experts) = ("x".repeat(2000), "A".repeat(mib << 20));
        let answer = format!(r#"{{"text":"{text}","meta_info":{{"id":1,"routed_experts":"{experts}"}}}}"#);
        let mut best_seconds = f64::INFINITY;
        for _ in 0..ROUNDS {
            let began = Instant::now();
            let cut = routed::cut(Place::MetaInfo, answer.as_bytes());
            best_seconds = best_seconds.min(began.elapsed().as_secs_f64());
            assert!(matches!(cut, Ok(Some(cut)) if cut.found && cut.rest.len() < 3000), "the experts are cut out");
        }
        println!("{mib} MiB: {:.2} ms", best_seconds * 1e3);
    }
}
