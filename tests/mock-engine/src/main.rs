//! `cargo run -p semmoe-mock-engine -- sglang|sglang-0.5.16|sglang-old|vllm PORT MODEL_DIR [RANKS [MILLISECONDS]]`
//!
//! Serves a model's folder (`config.json`, `tokenizer.json`) like SGLang or vLLM, with a synthetic router and synthetic
//! answers that take MILLISECONDS per token: to try `profile record` and the guides in `docs/` without a GPU.
#![allow(clippy::print_stdout, reason = "a tool that prints")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use semmoe_mock_engine::{Engine, SGLANG_0_5_10, SGLANG_0_5_16, SGLANG_0_5_23, VLLM_0_32, router};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engine, port, folder, more @ ..] = arguments.as_slice() else {
        return Err(
            "semmoe-mock-engine sglang|sglang-0.5.16|sglang-old|vllm PORT MODEL_DIR [RANKS [MILLISECONDS]]".into()
        );
    };
    let number = |at: usize, usual: u16| more.get(at).map_or(Ok(usual), |given| given.parse());
    let (ranks, milliseconds) = (number(0, 1)?, number(1, 0)?);
    let dialect = match engine.as_str() {
        "sglang" => SGLANG_0_5_23,
        "sglang-0.5.16" => SGLANG_0_5_16,
        "sglang-old" => SGLANG_0_5_10,
        "vllm" => VLLM_0_32,
        other => return Err(format!("unknown engine {other:?}").into()),
    };
    let folder = Path::new(folder);
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let engine = Engine::of(dialect, &name, folder)?.forgetful().with(|settings| {
        (settings.ranks, settings.token_time) = (ranks, Duration::from_millis(milliseconds.into()));
    });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    println!("{} {} on http://{}", dialect.engine, dialect.version, listener.local_addr()?);
    axum::serve(listener, router(Arc::new(engine))).await?;
    Ok(())
}
