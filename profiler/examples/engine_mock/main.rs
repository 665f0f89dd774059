//! `cargo run -p semmoe-profiler --example engine_mock -- sglang|sglang-0.5.16|sglang-old|vllm PORT MODEL_DIR [RANKS]`
//!
//! Serves what SGLang or vLLM would of a model's folder (`config.json`, `tokenizer.json`), with a made-up router and
//! made-up answers: for trying `profile record` and the guides in `docs/` where there is no GPU.
#![allow(clippy::print_stdout, reason = "a tool that prints")]

mod mock;

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use mock::{Dialect, Engine, Ranks, Texts, router};
use semmoe_tables::ModelInfo;
use semmoe_text::{ChatTemplate, Tokenizer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (engine, port, folder, ranks) = match arguments.as_slice() {
        [engine, port, folder] => (engine, port, folder, 1),
        [engine, port, folder, ranks] => (engine, port, folder, ranks.parse()?),
        _ => return Err("engine_mock sglang|sglang-0.5.16|sglang-old|vllm PORT MODEL_DIR [RANKS]".into()),
    };
    let dialect = match engine.as_str() {
        "sglang" => Dialect::Sglang0_5_23,
        "sglang-0.5.16" => Dialect::Sglang0_5_16,
        "sglang-old" => Dialect::Sglang0_5_10,
        "vllm" => Dialect::Vllm,
        other => return Err(format!("unknown engine {other:?}").into()),
    };
    let folder = Path::new(folder);
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let model = ModelInfo { model: name, ..semmoe_profiler::model_config(folder)? };
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
    let template = ChatTemplate::beside(&folder.join("tokenizer.json"), || 0).ok();
    let mut engine = Engine::new(dialect, model, Texts::Model(Box::new(tokenizer), template.map(Box::new)));
    engine.ranks = Ranks::new(ranks);
    // As an engine that runs somewhere else would say it.
    engine.model_path = format!("/models/{}", engine.model.model);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    println!("{dialect:?} on http://{}", listener.local_addr()?);
    axum::serve(listener, router(Arc::new(engine))).await?;
    Ok(())
}
