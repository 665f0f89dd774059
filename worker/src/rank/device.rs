//! A rank's compute device: CPUs, or its process's GPU.

use std::fmt;

use semmoe_kernels::Dtype;
use semmoe_tables::Domains;

use super::config::WorkerConfig;
use super::error::WorkerError;
use crate::ep::{ExpertLayout, WireType};
use crate::model::{AttentionKind, LATENT, ModelConfig, ModelError};

pub(super) const NO_GPU: &str = "this build has no GPU support: --device cuda requires a build with the feature cuda";

/// Maximum number of ranks that the kernels support on one GPU.
const MAX_RANKS_HERE: u16 = 8;

/// The device that a rank computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceChoice {
    /// The machine's CPUs, in f32.
    #[default]
    Cpu,
    /// A GPU.
    Cuda {
        /// Element type of weights, rows, keys and values: f32 or bf16. Sums are in f32.
        dtype: Dtype,
        /// Number of consecutive ranks in this process, each on its own thread; they share the GPU. Must be equal in
        /// all processes.
        ranks_here: u16,
    },
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("CPUs"),
            Self::Cuda { dtype, ranks_here } => write!(f, "GPUs ({}, ranks on each: {ranks_here})", dtype.name()),
        }
    }
}

impl DeviceChoice {
    /// Number of ranks in this process.
    pub(super) fn ranks_here(self) -> u16 {
        match self {
            Self::Cpu => 1,
            Self::Cuda { ranks_here, .. } => ranks_here,
        }
    }
}

/// Returns the GPU architectures that this build has kernels for, as NVRTC names them; empty without the feature
/// `cuda`.
pub fn gpu_kernels() -> Vec<&'static str> {
    #[cfg(feature = "cuda")]
    {
        use semmoe_kernels_cuda::{Target, embedded};
        Target::ALL.into_iter().filter(|target| embedded(*target).is_some()).map(Target::name).collect()
    }
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// Rejects layouts that are not implemented on GPUs, before any file is read.
pub(super) fn check(config: &WorkerConfig) -> Result<(), WorkerError> {
    let DeviceChoice::Cuda { dtype, ranks_here } = config.device else { return Ok(()) };
    let refused = |detail: String| Err(WorkerError::Arguments(detail));
    if !cfg!(feature = "gpu") {
        return refused(NO_GPU.to_owned());
    }
    let (rank, world) = (config.rank, config.world);
    if !(1..=MAX_RANKS_HERE).contains(&ranks_here) {
        return refused(format!("{ranks_here} ranks on a GPU, expected 1 to {MAX_RANKS_HERE}"));
    }
    if !world.is_multiple_of(ranks_here) {
        return refused(format!("{ranks_here} ranks per process do not divide the world of {world}"));
    }
    if !rank.is_multiple_of(ranks_here) {
        return refused(format!(
            "this process starts at rank {rank}, expected a multiple of --ranks-here {ranks_here}"
        ));
    }
    let not_built = [
        (dtype == Dtype::F16, "the type f16"),
        (matches!(config.experts, ExpertLayout::Hybrid(_)), "experts hybrid"),
        (config.domains != Domains::NONE, "expert domains"),
        (config.expert_memory.is_some(), "experts streamed from the checkpoint (--expert-memory)"),
        (config.attention_groups != 1, "attention groups"),
        (config.switch_hybrid.is_some(), "switches to experts hybrid (--switch-hybrid)"),
    ];
    if let Some((_, what)) = not_built.iter().find(|(given, _)| *given) {
        return Err(ModelError::NotOnGpu(what).into());
    }
    match config.wire {
        WireType::F32 => Ok(()),
        wire => refused(format!("--wire {wire} is CPU-only: on a GPU, rows are sent as --dtype")),
    }
}

/// Returns the index of the process's GPU among the visible ones: `--gpu`, or the only visible GPU, or else the
/// process's position in the unit.
#[cfg(feature = "gpu")]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "other GPUs are not numbered"))]
pub(super) fn gpu_index(config: &WorkerConfig, visible: usize) -> Result<usize, WorkerError> {
    let index = match config.gpu_index {
        Some(index) => index.into(),
        None if visible == 1 => 0,
        None => usize::from(config.rank / config.device.ranks_here()),
    };
    if index < visible {
        return Ok(index);
    }
    let rank = config.rank;
    Err(WorkerError::Arguments(format!(
        "rank {rank} needs GPU {index}, but {visible} GPUs are visible: see --gpu and CUDA_VISIBLE_DEVICES"
    )))
}

/// Rejects models that are not implemented on GPUs.
pub(super) fn check_model(config: &WorkerConfig, model: &ModelConfig) -> Result<(), WorkerError> {
    match (config.device, &model.attention) {
        (DeviceChoice::Cuda { .. }, AttentionKind::Latent(_)) => Err(ModelError::NotOnGpu(LATENT).into()),
        _ => Ok(()),
    }
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(adjust: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
        let mut config = WorkerConfig::new("model".into(), 0, 4, ([127, 0, 0, 1], 0).into());
        config.device = DeviceChoice::Cuda { dtype: Dtype::Bf16, ranks_here: 4 };
        adjust(&mut config);
        config
    }

    #[test]
    fn what_is_not_built_for_gpus_is_refused_by_name() {
        type Adjust = fn(&mut WorkerConfig);
        let refused: [(&str, Adjust); 10] = [
            ("type f16", |config| config.device = DeviceChoice::Cuda { dtype: Dtype::F16, ranks_here: 4 }),
            ("3 ranks per process", |config| config.device = DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: 3 }),
            ("starts at rank 1", |config| {
                (config.rank, config.device) = (1, DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: 2 });
            }),
            ("9 ranks on a GPU", |config| {
                (config.world, config.device) = (9, DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: 9 });
            }),
            ("experts hybrid", |config| config.experts = "hybrid:2x2".parse().unwrap()),
            ("expert domains", |config| config.domains = 2.into()),
            ("--expert-memory", |config| config.expert_memory = Some(1)),
            ("attention groups", |config| config.attention_groups = 2),
            ("--switch-hybrid", |config| config.switch_hybrid = Some("2x2".parse().unwrap())),
            ("--wire bf16", |config| config.wire = WireType::Bf16),
        ];
        check(&config(|_| {})).unwrap();
        check(&config(|config| config.both_attentions = true)).unwrap();
        check(&config(|config| {
            (config.rank, config.device) = (2, DeviceChoice::Cuda { dtype: Dtype::F32, ranks_here: 2 });
        }))
        .unwrap();
        for (name, adjust) in refused {
            let error = check(&config(adjust)).expect_err(name);
            assert!(error.to_string().contains(name), "{name}: {error}");
            assert_eq!(error.exit_code(), 2, "{error}");
        }
        check(&config(|config| {
            (config.device, config.wire) = (DeviceChoice::Cpu, WireType::Bf16);
        }))
        .unwrap();
    }

    #[test]
    fn a_process_uses_the_gpu_of_its_place_among_the_unit_s_processes() {
        let here = |rank, ranks_here, gpu_index| {
            config(|config| {
                (config.rank, config.gpu_index) = (rank, gpu_index);
                config.device = DeviceChoice::Cuda { dtype: Dtype::Bf16, ranks_here };
            })
        };
        assert_eq!(gpu_index(&here(3, 1, None), 4).unwrap(), 3);
        assert_eq!(gpu_index(&here(2, 2, None), 4).unwrap(), 1);
        assert_eq!(gpu_index(&here(3, 1, None), 1).unwrap(), 0, "the only one that CUDA_VISIBLE_DEVICES leaves");
        assert_eq!(gpu_index(&here(3, 1, Some(1)), 4).unwrap(), 1);
        for (config, visible) in [(here(3, 1, None), 2), (here(0, 4, Some(4)), 4), (here(0, 4, None), 0)] {
            let error = gpu_index(&config, visible).unwrap_err();
            assert!(error.to_string().contains(&format!("{visible} GPUs are visible")), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn models_with_latent_attention_are_refused_on_a_gpu_alone() {
        let model = |folder: &str| ModelConfig::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let (grouped, latent) = (model("../assets/tiny-qwen3moe-15m"), model("tests/fixtures/deepseek-v3"));
        check_model(&config(|_| {}), &grouped).unwrap();
        assert!(check_model(&config(|_| {}), &latent).unwrap_err().to_string().contains("(MLA)"));
        check_model(&config(|config| config.device = DeviceChoice::Cpu), &latent).unwrap();
    }
}
