//! Figures of the Sem-MoE paper with more than two configurations, as Markdown.
//!
//! | module | figure |
//! |---|---|
//! | `rates` | 4, tables 5 and 6: latency by rate, throughput within limits |
//! | `light` | table 2: one request a second |
//! | `forced` | 6d: collectives by local rate |

mod forced;
mod light;
mod rates;

use std::fs;
use std::path::PathBuf;

use semmoe_load::Api;
use semmoe_text::{LineForm, LinePrompt, PromptLines, Tokenizer};
use serde_json::json;

pub(crate) use forced::forced;

use crate::args::Args;
use crate::configs::{Config, DP, MOETUNER, TP};
use crate::contest::{Say, Stage};
use crate::error::BenchError;
use crate::measure::Traffic;
use crate::prepare::{Attention, Placing, Recorded};

/// A figure of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Figure {
    #[value(name = "4")]
    Four,
    #[value(name = "6d")]
    SixD,
    #[value(name = "table-2")]
    TableTwo,
}

impl Figure {
    fn file(self) -> &'static str {
        match self {
            Self::Four => "figure-4.md",
            Self::SixD => "figure-6d.md",
            Self::TableTwo => "table-2.md",
        }
    }
}

/// Tables of a figure on standard output and in the folder.
pub(crate) fn write(args: &Args, text: &str) -> Result<(), BenchError> {
    let Some(figure) = args.figure else { return Ok(()) };
    let path = args.out.join(figure.file());
    fs::create_dir_all(&args.out).map_err(BenchError::file(&args.out))?;
    fs::write(&path, text).map_err(BenchError::file(&path))?;
    crate::say(text);
    Ok(())
}

/// Figure 4 or table 2: contiguous experts and round robin as in SGLang, MoETuner's placement, and semmoe.
pub(crate) async fn three_systems(
    figure: Figure,
    stage: &Stage<'_>,
    recorded: &Recorded,
    say: Say<'_>,
) -> Result<String, BenchError> {
    let attention = if figure == Figure::TableTwo { Attention::Tp } else { Attention::Dp };
    let configs = match attention {
        Attention::Dp => [DP.before, MOETUNER[0], DP.after],
        Attention::Tp => [TP.before, MOETUNER[1], TP.after],
    };
    let mut sides = Vec::new();
    for (config, placing) in configs.into_iter().zip([Placing::InOrder, Placing::MoeTuner, Placing::Solved]) {
        say(&format!("starting: {}", config.name));
        let tables = if config.solved { Some(stage.workshop.solve(recorded, attention, placing).await?) } else { None };
        let unit = stage.unit(attention, config, tables.as_ref()).await?;
        sides.push(stage.contestant(config, attention, unit, tables.as_ref()).await?);
    }
    stage.network.limit(stage.schedule.rates.first().copied())?;
    let text = match figure {
        Figure::TableTwo => light::measure(stage, &sides, say).await?,
        Figure::Four | Figure::SixD => rates::measure(stage, &sides, say).await?,
    };
    stage.network.limit(None)?;
    for side in sides {
        side.stop().await?;
    }
    Ok(text)
}

/// The link, as a phrase for the middle of a sentence.
fn link(stage: &Stage<'_>) -> String {
    let rate = stage.schedule.rates.first();
    rate.map_or_else(|| "unlimited links".to_owned(), |bits| format!("links of {:.0} Mbit/s", *bits as f64 / 1e6))
}

/// Prompts of exactly this many tokens: the served ones concatenated, then cut.
fn prompts_of(stage: &Stage<'_>, tokens: usize) -> Result<PathBuf, BenchError> {
    let tokenizer = Tokenizer::from_file(&stage.workshop.model.join("tokenizer.json")).map_err(BenchError::input)?;
    let mut ids = Vec::new();
    for prompt in PromptLines::open(&stage.traffic.prompts, LineForm::Json).map_err(BenchError::input)? {
        let (_, LinePrompt::Messages { messages, .. }) = prompt.map_err(BenchError::input)? else { continue };
        let texts = messages.as_array().into_iter().flatten().filter_map(|message| message["content"].as_str());
        for text in texts {
            ids.extend(tokenizer.encode(text).map_err(BenchError::input)?);
        }
    }
    let lines: String = ids.chunks_exact(tokens).map(|ids| format!("{}\n", json!({"input_ids": ids}))).collect();
    if lines.is_empty() {
        return Err(BenchError::input(format!("the prompts have {} tokens, expected {tokens}", ids.len())));
    }
    let path = stage.workshop.folder.join(format!("{tokens}-tokens.jsonl"));
    fs::write(&path, lines).map_err(BenchError::file(&path))?;
    Ok(path)
}

/// Requests of this many tokens, sent to the unit without a gateway.
fn direct(stage: &Stage<'_>, tokens: usize) -> Result<Traffic, BenchError> {
    Ok(Traffic { prompts: prompts_of(stage, tokens)?, api: Api::Generate, ..stage.traffic.clone() })
}

/// A table's column heads: the first ones, then the configurations' names.
fn columns<'a>(first: &[&'a str], configs: impl Iterator<Item = &'a Config>) -> Vec<&'a str> {
    first.iter().copied().chain(configs.map(|config| config.name)).collect()
}
