//! Tables for the configurations, made with the user's commands `semmoe profile record`, `profile build` and `solve`,
//! and judged by `semmoe evaluate`. They are solved on the profile's prompts and judged on the served ones, which are
//! held out.

use std::path::{Path, PathBuf};

use semmoe_bench_placement::baselines::moetuner;
use semmoe_bench_placement::counts::LayerCounts;
use semmoe_engines::http::BaseUrl;
use semmoe_tables::Profile;
use semmoe_text::{LineForm, LinePrompt, PromptLines};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::process::Command;

use crate::analysis::Prediction;
use crate::error::BenchError;

/// Requests in flight while recording.
const CONCURRENCY: &str = "16";

/// The `semmoe` program, and the output folder.
#[derive(Debug)]
pub(crate) struct Workshop<'a> {
    pub(crate) semmoe: &'a Path,
    pub(crate) model: &'a Path,
    pub(crate) folder: &'a Path,
    pub(crate) ranks: u16,
    /// Slots of each layer for replicas in solved tables.
    pub(crate) redundant: u16,
    /// Tokens generated for each prompt.
    pub(crate) max_tokens: u32,
}

/// Recorded routing.
#[derive(Debug)]
pub(crate) struct Recorded {
    profile: PathBuf,
    trace: PathBuf,
    /// Routing of the served prompts.
    served: PathBuf,
}

/// The parallelism of attention, as `solve` takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Attention {
    Dp,
    Tp,
}

impl Attention {
    fn name(self) -> &'static str {
        match self {
            Self::Dp => "dp",
            Self::Tp => "tp",
        }
    }
}

impl std::fmt::Display for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The rule that places experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placing {
    /// The solver's.
    Solved,
    /// Experts stay where they are.
    InOrder,
    /// MoETuner's, of the recorded profile.
    MoeTuner,
}

/// The rule that decides where a token is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Judged<'a> {
    /// A routing policy assigns requests.
    Policy(&'a str),
    /// T and A assign tokens (tables for attention tp), in steps of this many.
    Steps(u32),
    /// Random: rows are split evenly regardless of their experts, in steps of this many.
    AtRandom(u32),
}

/// The fields of `evaluate --json` used here.
#[derive(Debug, Deserialize)]
struct Evaluation {
    lar: f64,
    lar_random: f64,
    remote_ranks_per_token: f64,
    remote_ranks_random: f64,
    #[serde(default)]
    policies: std::collections::BTreeMap<String, Policy>,
    steps: Option<Steps>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Steps {
    fullest_link: f64,
    fullest_link_unshuffled: f64,
}

#[derive(Debug, Deserialize)]
struct Policy {
    request_lar: f64,
    remote_ranks_per_token: f64,
}

impl Workshop<'_> {
    /// Records the routing of both sets of prompts from the unit at `url`.
    pub(crate) async fn record(&self, url: &BaseUrl, profile: &Path, served: &Path) -> Result<Recorded, BenchError> {
        let recorded = Recorded {
            profile: self.folder.join("run.profile.safetensors"),
            trace: self.folder.join("run.trace.safetensors"),
            served: self.folder.join("served.trace.safetensors"),
        };
        let tokens = self.max_tokens.to_string();
        for (prompts, out) in [(profile, &recorded.trace), (served, &recorded.served)] {
            let mut command = self.command(&["profile", "record", "--engine", "semmoe", "--url", &url.to_string()]);
            command.arg("--prompts").arg(prompts).arg("--tokenizer").arg(self.model).arg("--out").arg(out);
            command.args(["--max-tokens", &tokens, "--concurrency", CONCURRENCY]);
            finish(command).await?;
        }
        let mut command = self.command(&["profile", "build"]);
        command.arg(&recorded.trace).arg("--out").arg(&recorded.profile);
        finish(command).await?;
        Ok(recorded)
    }

    /// Solves tables; with `placement` (`linear`) experts stay where they are.
    pub(crate) async fn solve(
        &self,
        recorded: &Recorded,
        attention: Attention,
        placing: Placing,
    ) -> Result<PathBuf, BenchError> {
        let out = self.folder.join(format!("{}-{placing:?}.tables.safetensors", attention.name()));
        let mut command =
            self.command(&["solve", "--attention", attention.name(), "--groups", &self.ranks.to_string()]);
        command.arg("--profile").arg(&recorded.profile).arg("--trace").arg(&recorded.trace);
        command.arg("--tokenizer").arg(self.model).arg("--out").arg(&out);
        match placing {
            Placing::InOrder => command.args(["--placement", "linear"]),
            Placing::MoeTuner => command.arg("--placement").arg(self.moetuner(recorded)?),
            Placing::Solved if self.redundant > 0 => command.args(["--redundant", &self.redundant.to_string()]),
            // A token is sent once to each rank, however many of its experts are there; bytes follow from that.
            Placing::Solved if attention == Attention::Dp => command.args(["--objective", "ranks"]),
            Placing::Solved => &mut command,
        };
        finish(command).await?;
        Ok(out)
    }

    /// MoETuner's placement in the form that engines read: the experts of each layer, rank by rank.
    fn moetuner(&self, recorded: &Recorded) -> Result<PathBuf, BenchError> {
        let profile = Profile::open(&recorded.profile).map_err(BenchError::input)?;
        let counts = LayerCounts::all(&profile);
        let placed = moetuner(&counts, &LayerCounts::transitions(&profile), self.ranks.into());
        let rows: Vec<Vec<usize>> = placed.iter().map(|group_of| rank_by_rank(group_of)).collect();
        let path = self.folder.join("moetuner.json");
        std::fs::write(&path, json!({"physical_to_logical_map": rows}).to_string()).map_err(BenchError::file(&path))?;
        Ok(path)
    }

    /// The prediction of `evaluate` for the served prompts.
    pub(crate) async fn evaluate(
        &self,
        recorded: &Recorded,
        tables: &Path,
        how: Judged<'_>,
    ) -> Result<Prediction, BenchError> {
        let mut command = self.command(&["evaluate", "--json"]);
        command.arg("--tables").arg(tables).arg("--trace").arg(&recorded.served);
        if let Judged::Steps(tokens) | Judged::AtRandom(tokens) = how {
            command.args(["--step-tokens", &tokens.to_string()]);
        }
        let text = finish(command).await?;
        let found: Evaluation = serde_json::from_str(&text)
            .map_err(|error| BenchError::failed(format!("unexpected output of semmoe evaluate: {error}")))?;
        match how {
            Judged::Steps(_) => Ok(Prediction {
                lar: found.lar,
                remote_ranks: found.remote_ranks_per_token,
                fullest_link: found.steps.map(|steps| steps.fullest_link),
            }),
            Judged::AtRandom(_) => Ok(Prediction {
                lar: found.lar_random,
                remote_ranks: found.remote_ranks_random,
                fullest_link: found.steps.map(|steps| steps.fullest_link_unshuffled),
            }),
            Judged::Policy(policy) => {
                let figures = found
                    .policies
                    .get(policy)
                    .ok_or_else(|| BenchError::failed(format!("semmoe evaluate printed no figures for {policy}")))?;
                Ok(Prediction {
                    lar: figures.request_lar,
                    remote_ranks: figures.remote_ranks_per_token,
                    fullest_link: None,
                })
            }
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.semmoe);
        command.args(arguments).kill_on_drop(true).process_group(0);
        command
    }
}

/// The experts in order of their ranks.
fn rank_by_rank(group_of: &[u16]) -> Vec<usize> {
    let mut experts: Vec<usize> = (0..group_of.len()).collect();
    experts.sort_by_key(|&expert| group_of[expert]);
    experts
}

/// Runs the command to completion and returns its standard output.
async fn finish(mut command: Command) -> Result<String, BenchError> {
    let shown = || {
        let command = command.as_std();
        let words = command.get_args().take(2).map(|word| word.to_string_lossy().into_owned());
        format!("semmoe {}", words.collect::<Vec<_>>().join(" "))
    };
    let shown = shown();
    let failed = |cause: String| BenchError::Command { command: shown.clone(), cause };
    let done = command.output().await.map_err(|error| failed(error.to_string()))?;
    if !done.status.success() {
        let words = String::from_utf8_lossy(&done.stderr);
        let last = words.lines().rev().find(|line| !line.trim().is_empty());
        return Err(failed(last.map_or_else(|| done.status.to_string(), str::to_owned)));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Writes at most `most` prompts of `path` as chats, so that profiling, judging and serving render them identically.
pub(crate) fn chats(path: &Path, out: &Path, most: Option<usize>) -> Result<usize, BenchError> {
    let mut lines = String::new();
    let mut count = 0;
    let prompts = PromptLines::open(path, LineForm::Json).map_err(BenchError::input)?;
    for prompt in prompts.take(most.unwrap_or(usize::MAX)) {
        let messages = match prompt.map_err(BenchError::input)? {
            (_, LinePrompt::Messages { messages, .. }) => messages,
            (_, LinePrompt::Text(prompt)) => json!([{"role": "user", "content": prompt}]),
            (line, LinePrompt::Ids(_)) => {
                return Err(BenchError::input(format!("{} line {line}: ids, expected a text", path.display())));
            }
        };
        lines.push_str(&json!({"messages": messages}).to_string());
        lines.push('\n');
        count += 1;
    }
    if count == 0 {
        return Err(BenchError::input(format!("{} has no prompts", path.display())));
    }
    std::fs::write(out, lines).map_err(BenchError::file(out))?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn prompts_become_chats() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(
            &from,
            "{\"prompt\": \"hi\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"prompt\": \"y\"}\n",
        )
        .unwrap();
        assert_eq!(chats(&from, &to, None).unwrap(), 2);
        let lines = std::fs::read_to_string(&to).unwrap();
        let contents: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(contents[0], json!({"messages": [{"role": "user", "content": "hi"}]}));
        assert_eq!(contents[1]["messages"][0]["content"], "x");
        assert_eq!(chats(&from, &to, Some(1)).unwrap(), 1);
    }

    #[test]
    fn experts_are_listed_rank_by_rank() {
        assert_eq!(rank_by_rank(&[1, 0, 2, 1, 0, 2]), [1, 4, 0, 3, 2, 5]);
    }

    #[test]
    fn wrong_prompts_name_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b"));
        for (text, cause) in [
            ("{\"prompt\": \"hi\"}\n{\"prompt\": 1}\n", "line 2: "),
            ("{\"input_ids\": [1]}", "line 1: ids"),
            ("", "has no prompts"),
        ] {
            std::fs::write(&from, text).unwrap();
            let error = chats(&from, &to, None).unwrap_err();
            assert!(error.to_string().contains(cause) && error.exit_code() == 2, "{error}");
        }
    }
}
