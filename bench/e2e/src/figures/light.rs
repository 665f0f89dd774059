//! Table 2: three systems at one request a second, by the length of prompts.

use std::fs;

use super::{direct, link};
use crate::analysis::Spread;
use crate::contest::{Say, Stage, turned};
use crate::error::BenchError;
use crate::measure::{Block, Contestant, OPEN, Traffic};
use crate::report::{head, row, shown};

/// Tokens of a prompt.
const LENGTHS: [usize; 3] = [256, 512, 1024];
/// Arrivals in the file: more than any block has.
const ARRIVALS: u32 = 7200;

pub(super) async fn measure(stage: &Stage<'_>, sides: &[Contestant], say: Say<'_>) -> Result<String, BenchError> {
    let arrivals = stage.workshop.folder.join("each-second.csv");
    let seconds: String = (0..ARRIVALS).map(|second| format!("{second}\n")).collect();
    fs::write(&arrivals, seconds).map_err(BenchError::file(&arrivals))?;
    let traffics = LENGTHS.map(|length| {
        Ok::<_, BenchError>(Traffic { arrivals: arrivals.clone(), arrivals_per_second: 1.0, ..direct(stage, length)? })
    });
    let traffics = traffics.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut blocks: Vec<Vec<Vec<Block>>> = Vec::new();
    for round in 0..stage.schedule.rounds {
        say(&format!("round {} of {}", round + 1, stage.schedule.rounds));
        let mut of_round = Vec::new();
        for traffic in &traffics {
            // One system at a time: long prompts keep all cores and links busy.
            let mut of_length: Vec<(usize, Block)> = Vec::new();
            for side in turned(sides.len(), round) {
                of_length.push((side, sides[side].arrive(traffic, 1.0, None).await?));
            }
            of_length.sort_by_key(|(side, _)| *side);
            of_round.push(of_length.into_iter().map(|(_, block)| block).collect());
        }
        blocks.push(of_round);
    }
    let mut text = format!(
        "One request a second, one system at a time, over {}; {} tokens generated; median (lowest to highest) of {} blocks of {:.0} \
         requests.\n\n",
        link(stage),
        stage.traffic.max_tokens,
        stage.schedule.rounds,
        OPEN * stage.traffic.seconds
    );
    head(&["prompt tokens", "", "first token p50, ms", "p99", "end to end p50, ms", "local"], &mut text);
    for (at, length) in LENGTHS.into_iter().enumerate() {
        for (side, contestant) in sides.iter().enumerate() {
            let of = |figure: fn(&Block) -> Option<f64>, digits| {
                shown(Spread::of(blocks.iter().filter_map(|round| figure(&round[at][side]))), 1.0, digits)
            };
            let cells = [
                length.to_string(),
                contestant.config.name.to_owned(),
                of(|block| block.ttft_ms.map(|latency| latency.p50), 1),
                of(|block| block.ttft_ms.map(|latency| latency.p99), 1),
                of(|block| block.e2e_ms.map(|latency| latency.p50), 1),
                of(|block| Some(block.counters.lar()), 3),
            ];
            row(&cells, &mut text);
        }
    }
    Ok(text)
}
