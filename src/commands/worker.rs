//! `semmoe worker`.

use std::path::Path;
use std::sync::Arc;

use semmoe_worker::{DeviceChoice, EngineLimits, KvBudget, Secret, WorkerConfig, WorkerEvent};

use super::plan::Chosen;
use crate::args::WorkerArgs;
use crate::error::CliError;
use crate::progress::say;
use crate::up::default_folder;

/// The environment variable with the rank secret, used if no file is given.
const SECRET_VARIABLE: &str = "SEMMOE_RANK_SECRET";
const TOKEN_VARIABLE: &str = "SEMMOE_ADMIN_TOKEN";

pub(crate) fn run(args: WorkerArgs) -> Result<(), CliError> {
    let (rank, rendezvous) = args.place()?;
    if rank >= args.world {
        return Err(CliError::input(format!("--rank {rank} must be below --world {}", args.world)));
    }
    let limits = limits(&args);
    let mut config = WorkerConfig::new(args.model, rank, args.world, rendezvous);
    config.listen = (rank == 0).then_some(args.listen);
    (config.device, config.gpu_index) = (args.device.read(args.world)?, args.device.gpu);
    if config.device != DeviceChoice::Cpu {
        give_streams_queues();
        config.kernels = Some(default_folder().join("kernels"));
    }
    (config.tables, config.tables_root) = (args.tables, args.tables_root);
    config.transport = args.layout.transport;
    if let (DeviceChoice::Cuda { .. }, Some(wire)) = (config.device, args.layout.wire) {
        return Err(CliError::input(format!("--wire {wire} is CPU-only: on a GPU, rows are sent as --dtype")));
    }
    config.wire = args.layout.wire.unwrap_or_default();
    config.experts = args.layout.experts;
    (config.nodes, config.stages) = (args.nodes, args.stages);
    (config.expert_slots, config.expert_memory) = (args.expert_slots, args.expert_memory);
    config.force_local_rate = args.force_local_rate;
    let unit = args.attention.read()?;
    (config.attention, config.both_attentions, config.shuffle) = (unit.attention, unit.both, unit.shuffle);
    (config.attention_groups, config.switch_groups) = (unit.groups, args.switch_groups);
    config.switch_hybrid = args.switch_hybrid;
    if let Some(path) = &args.plan {
        let planned = Chosen::read(path, &config.model_dir)?.unit()?;
        if planned.ranks != args.world {
            let (planned, world) = (planned.ranks, args.world);
            return Err(CliError::input(format!(
                "the plan {} is for {planned} ranks, --world is {world}",
                path.display()
            )));
        }
        (config.attention, config.experts, config.wire) = (planned.attention, planned.experts, planned.wire);
        (config.attention_groups, config.domains) = (planned.attention_groups, planned.domains);
    }
    config.domains = args.domains.unwrap_or(config.domains);
    config.data_address = args.data_address;
    config.exit_on_stdin_eof = args.exit_on_stdin_eof;
    config.exit_after_loss = args.exit_after_loss.0;
    config.secret = secret(args.secret_file.as_deref(), SECRET_VARIABLE)?;
    config.admin_token = secret(args.admin_token_file.as_deref(), TOKEN_VARIABLE)?;
    config.limits = limits;
    config.threads = args.threads.into();
    config.cpus = args.cpus;
    config.announce = Arc::new(announce);
    semmoe_worker::run(config).map_err(|error| CliError::with_code(error.exit_code(), error))
}

/// Gives each rank's stream its own hardware queue. Ranks that share a GPU have a stream each, whose kernels wait for
/// the other ranks' kernels; two streams in the same queue (of 8 by default) would deadlock.
fn give_streams_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: the process has no other thread yet that reads or writes its environment.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}

/// Reads a secret from its file, or else from the environment. Never from the command line, which other users can see.
fn secret(file: Option<&Path>, variable: &str) -> Result<Option<Secret>, CliError> {
    match (file, std::env::var_os(variable)) {
        (Some(path), _) => Secret::read(path).map(Some).map_err(CliError::input),
        (None, Some(text)) if !text.is_empty() => Secret::new(text.as_encoded_bytes())
            .map(Some)
            .map_err(|error| CliError::input(format!("{variable}: {error}"))),
        (None, _) => Ok(None),
    }
}

fn limits(args: &WorkerArgs) -> EngineLimits {
    // Lossless on 64-bit machines; elsewhere, `usize::MAX` exceeds the available memory.
    let size = |tokens: u64| usize::try_from(tokens).unwrap_or(usize::MAX);
    EngineLimits {
        running: size(args.max_running.into()),
        waiting: size(args.max_waiting.into()),
        step_tokens: size(args.step_tokens.into()),
        kv: match (args.kv_tokens, args.kv_bytes) {
            (Some(tokens), _) => KvBudget::Tokens(size(tokens)),
            (None, Some(bytes)) => KvBudget::Bytes(bytes),
            (None, None) => KvBudget::Auto,
        },
        prefix_reuse: !args.no_prefix_reuse,
        priority_seconds: args.priority_seconds,
    }
}

/// Prints an event as one JSON line for the process that started this rank. If the pipe is closed, the rank keeps
/// running unless --exit-on-stdin-eof is set.
fn announce(event: &WorkerEvent) {
    match serde_json::to_string(event) {
        Ok(line) => super::announce(&line),
        Err(error) => say(&format!("semmoe: {error}")),
    }
}
