//! Arguments of `worker`, some shared with `up`: unit layout, serving limits, network and trust.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use semmoe_kernels::Dtype;
use semmoe_tables::{Attention, Domains};
use semmoe_worker::{
    CpuList, DeviceChoice, EngineLimits, ExpertLayout, ForcedRate, NodeLayout, TransportChoice, WireType,
};

use super::attention;
use crate::error::CliError;

/// Examples at the end of `worker --help`.
pub(super) const WORKER_EXAMPLES: &str = "\
Examples (a unit of two ranks, each in its own terminal):
  semmoe worker --model DIR --rank 0 --world 2 --rendezvous 127.0.0.1:7000 --listen 127.0.0.1:30000
  semmoe worker --model DIR --rank 1 --world 2 --rendezvous 127.0.0.1:7000

The same on one GPU, in one process:
  semmoe worker --model DIR --world 2 --device cuda --listen 127.0.0.1:30000

On two GPUs, in a process each; rank R uses GPU R:
  semmoe worker --model DIR --rank 0 --world 2 --ranks-here 1 --device cuda \\
    --rendezvous 127.0.0.1:7000 --listen 127.0.0.1:30000
  semmoe worker --model DIR --rank 1 --world 2 --ranks-here 1 --device cuda \\
    --rendezvous 127.0.0.1:7000";

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Directory of a Hugging Face checkpoint.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// This rank's number, from 0; rank 0 serves HTTP for the whole unit [default: 0, if this process runs all ranks].
    #[arg(long, required_unless_present_any = ["device", "ranks_here"])]
    pub(crate) rank: Option<u16>,
    /// Number of ranks in the unit.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) world: u16,
    /// Rendezvous address: rank 0 binds it (port 0 picks a free port), the other ranks connect to it [default: a free
    /// port on 127.0.0.1, if this process runs all ranks].
    #[arg(long, value_name = "ADDRESS", required_unless_present_any = ["device", "ranks_here"])]
    pub(crate) rendezvous: Option<SocketAddr>,
    /// HTTP address of rank 0.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:30000")]
    pub(crate) listen: SocketAddr,
    /// Tables whose placement E the unit runs [default: contiguous placement]. Not with --experts tp.
    #[arg(long, value_name = "FILE")]
    pub(crate) tables: Option<PathBuf>,
    /// Directory from which `/switch` may load tables; it also resolves relative paths [default: the directory of
    /// --tables; with neither, no tables are accepted].
    #[arg(long, value_name = "DIR")]
    pub(crate) tables_root: Option<PathBuf>,
    /// Read attention, experts, domains and wire from the output of `semmoe plan --json` for this model and number of
    /// ranks; add --domains 1 to run the plan's layout with tables.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["attention", "attention_groups", "experts", "wire"])]
    pub(crate) plan: Option<PathBuf>,
    /// Expert slots per layer to allocate on each rank, which lets the unit switch to tables with more replicas. Must
    /// be the same on all ranks [default: as many as the initial placement needs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) expert_slots: Option<u16>,
    /// Numbers of independent groups of consecutive ranks that the unit can switch to: with 8 ranks, 2 means two groups
    /// of four, each with all experts and its own requests (layout tp:2x4). Keeps attention weights for each layout.
    /// Must be the same on all ranks.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(2..))]
    pub(crate) switch_groups: Vec<u16>,
    /// Hybrid nodes that the unit can switch to (layout dp-hybrid): each of N nodes of P consecutive ranks has the
    /// experts of its ranks, and each rank has a slice of them. Together with --experts hybrid:NxP, the unit starts in
    /// that layout and can leave it. Tables are for ranks. Must be the same on all ranks.
    #[arg(long, value_name = "NxP[:C]")]
    pub(crate) switch_hybrid: Option<NodeLayout>,
    #[command(flatten)]
    pub(crate) device: WorkerDeviceArgs,
    #[command(flatten)]
    pub(crate) attention: UnitAttentionArgs,
    #[command(flatten)]
    pub(crate) layout: UnitLayoutArgs,
    /// With --experts ep and without tables: N consecutive ranks form an expert domain, and each holds the experts of
    /// all N, so tokens leave the domain only for other experts. N:S/W forms domains on two levels: the ranks at the
    /// same position in N groups of W, and S neighbours within each group. Must be the same on all ranks [default:
    /// those of --plan, else 1].
    #[arg(long, value_name = "N[:S/W]...")]
    pub(crate) domains: Option<Domains>,
    /// Number of nodes, each with consecutive ranks, for counting bytes by level [default: the nodes of --experts
    /// hybrid, otherwise the ranks that share memory form a node].
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<u16>,
    /// Memory for this rank's experts, in bytes: experts that do not fit are prefetched from the checkpoint in every
    /// step. Switching layouts or tables requires all experts in memory. Ranks may differ [default: all experts stay in
    /// memory].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) expert_memory: Option<u64>,
    /// Measure the cost of communication: send each activation to its token's own rank with this probability (0 to 1)
    /// and to another rank otherwise, whatever the router chose. All output is wrong by design, so `semmoe serve`
    /// rejects the unit. Must be the same on all ranks.
    #[arg(long, value_name = "RATE", value_parser = forced_rate)]
    pub(crate) force_local_rate: Option<ForcedRate>,
    /// On exit, write the start and end times of the stages of this rank's last 4096 MoE layers, one JSON object per
    /// line.
    #[arg(long, value_name = "FILE")]
    pub(crate) stages: Option<PathBuf>,
    /// Maximum running sequences per rank. Rank 0's limits apply to all ranks.
    #[arg(long, help_heading = "Serving", value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_running: u32,
    /// Maximum waiting sequences per rank; more are rejected with 503.
    #[arg(long, help_heading = "Serving", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) max_waiting: u32,
    /// Head start per priority level, in seconds: with 5, a request of priority 2 is scheduled before requests of
    /// priority 0 that arrived less than 10 s earlier. Negative if lower numbers are more urgent. With 0, requests are
    /// scheduled in order of arrival, and those with a priority are rejected.
    #[arg(long, help_heading = "Serving", value_name = "SECONDS", default_value_t = EngineLimits::default().priority_seconds, value_parser = head_start, allow_negative_numbers = true)]
    pub(crate) priority_seconds: f64,
    /// Maximum tokens per step and rank, prefill chunks and decoded tokens together.
    #[arg(long, help_heading = "Serving", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) step_tokens: u32,
    /// Size of the KV cache per rank, in tokens; the smallest of all ranks applies [default: 32768 or one full context,
    /// but at most half of the available memory divided by the number of ranks].
    #[arg(long, help_heading = "Serving", value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "kv_bytes")]
    pub(crate) kv_tokens: Option<u64>,
    /// Size of the KV cache per rank, in bytes.
    #[arg(long, help_heading = "Serving", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) kv_bytes: Option<u64>,
    /// Number of threads per rank for large steps. Results do not depend on it.
    #[arg(long, help_heading = "Serving", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: u16,
    /// CPUs to pin these threads to, such as 0-3,8; ranks on the same machine need different CPUs.
    #[arg(long, help_heading = "Serving", value_name = "LIST")]
    pub(crate) cpus: Option<CpuList>,
    /// Disable prefix caching: compute every prompt in full.
    #[arg(long, help_heading = "Serving")]
    pub(crate) no_prefix_reuse: bool,
    /// This rank's address for traffic between ranks, if they have a separate network [default: the rendezvous address
    /// on rank 0; on other ranks, the local address from which they connect to it].
    #[arg(long, help_heading = "Network and trust", value_name = "IP")]
    pub(crate) data_address: Option<IpAddr>,
    /// File with the secret that ranks use to authenticate each other, at least 16 bytes; or set SEMMOE_RANK_SECRET.
    /// Required unless the rendezvous and data addresses are loopback addresses.
    #[arg(long, help_heading = "Network and trust", value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// File with the token for admin routes (/drain, /flush_cache), at least 16 bytes; or set SEMMOE_ADMIN_TOKEN.
    /// Without a token, admin routes are open if HTTP is served on a loopback address, and closed otherwise.
    #[arg(long, help_heading = "Network and trust", value_name = "FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Exit when standard input closes, so that a rank never outlives the process that started it.
    #[arg(long)]
    pub(crate) exit_on_stdin_eof: bool,
    /// After losing another rank, rank 0 responds with 503 and the cause for this long, then exits with code 3; with
    /// never, it keeps responding until it is stopped. The other ranks exit immediately.
    #[arg(long, value_name = "SECONDS|never", default_value = "5")]
    pub(crate) exit_after_loss: ExitAfterLoss,
}

// Not a doc comment, as clap would use it as the command's help.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct WorkerDeviceArgs {
    /// Compute on CPUs, or on one NVIDIA GPU (requires a build with the cuda feature).
    #[arg(long, help_heading = "GPU", value_enum, default_value = "cpu")]
    device: DeviceArg,
    /// With --device cuda: data type of weights, rows, keys and values; sums are always f32 [default: bf16].
    #[arg(long, help_heading = "GPU", value_enum)]
    dtype: Option<DtypeArg>,
    /// With --device cuda: number of consecutive ranks that this process runs on its GPU, starting with --rank. With 1,
    /// each rank has its own process and GPU; all processes must be on one host. Must be the same in all processes
    /// [default: all ranks].
    #[arg(long, help_heading = "GPU", value_name = "P", value_parser = clap::value_parser!(u16).range(1..=8))]
    ranks_here: Option<u16>,
    /// With --device cuda: this process's GPU, counted among those that CUDA_VISIBLE_DEVICES leaves visible [default:
    /// the only one, or --rank / --ranks-here].
    #[arg(long, help_heading = "GPU", value_name = "INDEX")]
    pub(crate) gpu: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceArg {
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    Bf16,
    F32,
}

impl WorkerDeviceArgs {
    /// # Errors
    /// If a GPU argument is given without `--device cuda`.
    pub(crate) fn read(self, world: u16) -> Result<DeviceChoice, CliError> {
        let given = [
            ("--dtype", self.dtype.is_some()),
            ("--ranks-here", self.ranks_here.is_some()),
            ("--gpu", self.gpu.is_some()),
        ];
        match (self.device, given.iter().find(|(_, given)| *given)) {
            (DeviceArg::Cpu, Some((name, _))) => Err(CliError::input(format!("{name} requires --device cuda"))),
            (DeviceArg::Cpu, None) => Ok(DeviceChoice::Cpu),
            (DeviceArg::Cuda, _) => {
                let dtype = if self.dtype == Some(DtypeArg::F32) { Dtype::F32 } else { Dtype::Bf16 };
                Ok(DeviceChoice::Cuda { dtype, ranks_here: self.ranks_here.unwrap_or(world) })
            }
        }
    }
}

impl WorkerArgs {
    /// Returns this process's first rank and the rendezvous address. A unit that runs entirely in this process needs
    /// neither argument.
    ///
    /// # Errors
    /// If either is missing although other processes run ranks of the unit.
    pub(crate) fn place(&self) -> Result<(u16, SocketAddr), CliError> {
        let device = self.device.read(self.world)?;
        let whole = matches!(device, DeviceChoice::Cuda { ranks_here, .. } if ranks_here == self.world);
        match (self.rank, self.rendezvous) {
            (Some(rank), Some(rendezvous)) => Ok((rank, rendezvous)),
            (rank, rendezvous) if whole => {
                Ok((rank.unwrap_or(0), rendezvous.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)))))
            }
            _ => Err(CliError::input(
                "--rank and --rendezvous are required unless this process runs all ranks of the unit on one GPU",
            )),
        }
    }
}

// For `worker` and `up`. Not a doc comment, as clap would use it as the command's help.
#[derive(Debug, Clone, Args)]
pub(crate) struct UnitAttentionArgs {
    /// How the ranks divide attention: dp = each rank has its own requests, tp = every rank computes some heads of all
    /// requests; dp,tp or tp,dp = start with the first, and switch while serving (keeps the weights of both). Must be
    /// the same on all ranks.
    #[arg(
        long,
        help_heading = "Layout of the unit",
        value_parser = attention(),
        value_delimiter = ',',
        num_args = 1,
        default_value = "dp"
    )]
    attention: Vec<Attention>,
    /// With --attention tp: number of groups of consecutive ranks, each with its own requests. Excludes tables and
    /// switching. Must be the same on all ranks.
    #[arg(long, help_heading = "Layout of the unit", value_name = "N", default_value_t = 1)]
    attention_groups: u16,
    /// With --attention tp: where rows are sent after attention. auto = to the rank that the tables' T and A predict,
    /// off = in order, in equal parts (as without tables) [default: auto].
    #[arg(long, help_heading = "Layout of the unit", value_enum)]
    shuffle: Option<ShuffleArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ShuffleArg {
    Auto,
    Off,
}

/// How a unit's attention is parallelized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitAttention {
    pub(crate) attention: Attention,
    /// With tp: groups of ranks, each with its own requests.
    pub(crate) groups: u16,
    /// Whether attention can be switched while serving.
    pub(crate) both: bool,
    /// With attention tp: whether to shuffle rows according to the tables, if any.
    pub(crate) shuffle: bool,
}

impl UnitAttentionArgs {
    /// # Errors
    /// If `--attention` does not name one or two layouts, or `--shuffle` has nothing to shuffle.
    pub(crate) fn read(&self) -> Result<UnitAttention, CliError> {
        let (attention, both) = match self.attention[..] {
            [attention] => (attention, false),
            [first, second] if first != second => (first, true),
            _ => return Err(CliError::input("expected --attention dp, tp, dp,tp or tp,dp")),
        };
        if self.attention_groups != 1 && (attention == Attention::Dp || both) {
            return Err(CliError::input("--attention-groups requires --attention tp without dp"));
        }
        match self.shuffle {
            Some(_) if attention == Attention::Dp && !both => Err(CliError::input(
                "--shuffle requires --attention tp: with attention dp, rows stay on their request's rank",
            )),
            shuffle => {
                let groups = self.attention_groups;
                Ok(UnitAttention { attention, groups, both, shuffle: shuffle != Some(ShuffleArg::Off) })
            }
        }
    }
}

// For `worker` and `up`. Not a doc comment, as clap would use it as the command's help.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct UnitLayoutArgs {
    /// How ranks exchange data: shm = shared memory of one host, tcp = TCP, auto = shm if all ranks are on one host,
    /// otherwise tcp. Must be the same on all ranks.
    #[arg(long, help_heading = "Layout of the unit", value_name = "auto|shm|tcp", default_value = "auto")]
    pub(crate) transport: TransportChoice,
    /// Data type of the rows that ranks exchange: bf16 takes half the bytes of f32, but rounds the rows and the sums
    /// over ranks. Must be the same on all ranks [default: f32].
    #[arg(long, help_heading = "Layout of the unit", value_name = "f32|bf16")]
    pub(crate) wire: Option<WireType>,
    /// How experts are divided among the ranks: ep = each expert on one rank, by tables or in order; tp = every rank
    /// has a slice of each expert and gathers the tokens of all ranks; hybrid:NxP = each expert on one of N nodes,
    /// sliced over its P ranks; hybrid:NxP:C also overlaps the two levels in C chunks. Tables work with ep, and with
    /// hybrid if they have one group per node. Must be the same on all ranks.
    #[arg(long, help_heading = "Layout of the unit", value_name = "ep|tp|hybrid:NxP[:C]", default_value = "ep")]
    pub(crate) experts: ExpertLayout,
}

fn head_start(text: &str) -> Result<f64, &'static str> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.abs() <= 86_400.0);
    seconds.ok_or("expected seconds from -86400 to 86400")
}

fn forced_rate(text: &str) -> Result<ForcedRate, &'static str> {
    text.parse().ok().and_then(ForcedRate::new).ok_or("expected a number from 0 to 1")
}

/// How long rank 0 keeps responding after a rank is lost; `None`: until it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExitAfterLoss(pub(crate) Option<Duration>);

impl FromStr for ExitAfterLoss {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        if text == "never" {
            return Ok(Self(None));
        }
        match text.parse::<f64>() {
            Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(Self(Some(Duration::from_secs_f64(seconds)))),
            _ => Err("expected seconds from 0 to 86400, or never"),
        }
    }
}
