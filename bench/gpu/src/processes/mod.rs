//! Two processes with memory mapped into each other: reduce-scatter and allgather, checked.
//!
//! On a GPU, memory is shared by cuIpc or by file descriptors. The GPU runs one process at a time here, so this checks
//! correctness only. On the CPU both map a file, at different addresses.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use half::bf16;
use semmoe_kernels::{Dtype, RankOrder, RowSplit};
use semmoe_kernels_cuda::{Allgather, Buffer, Grid, Launch, ReduceScatter, RowOrder, Rows, SIGNAL_BYTES, Split, Team};
use semmoe_reference as reference;
use serde_json::json;

use crate::machine::{Machine, text};
use crate::measure::Report;
use crate::options::Options;
use crate::world::{Reports, elements, order};
use semmoe_reference::data::same;

mod shared;

const RANKS: usize = 2;

/// Sizes of the test.
#[derive(Clone, Copy)]
struct Size {
    tokens: usize,
    hidden: usize,
    grid: Grid,
}

impl Size {
    fn of(options: &Options) -> Self {
        match options.cpu || options.small {
            true => Self { tokens: 13, hidden: 24, grid: Grid { blocks: 2, threads: 32 } },
            false => Self { tokens: 257, hidden: 512, grid: Grid::of_blocks(8) },
        }
    }

    fn bytes(self) -> usize {
        self.tokens * self.hidden * 2
    }
}

/// Starts both ranks, exchanges their handles, and collects their results.
pub(crate) fn report(options: &Options) -> Report {
    let mut children = Vec::new();
    for rank in 0..RANKS {
        children.push(start(rank, options)?);
    }
    let handles: Vec<String> = children.iter_mut().map(|child| line(&mut child.2)).collect::<Result<_, _>>()?;
    for (rank, (_, input, _)) in children.iter_mut().enumerate() {
        writeln!(input, "{}", handles[1 - rank]).map_err(text)?;
    }
    let mut results = Vec::new();
    for (_, _, output) in &mut children {
        results.push(line(output)?);
    }
    // Only now may either rank unmap memory that the other uses.
    for (mut child, input, _) in children {
        drop(input);
        child.wait().map_err(text)?;
    }
    let good = results.iter().all(|result| result == "equal");
    let memory = match (options.cpu, options.vmm) {
        (true, _) => "a file",
        (false, true) => "file descriptors",
        (false, false) => "cuIpc",
    };
    Ok((json!({ "processes": RANKS, "memory": memory, "seed": options.seed, "results": results }), good))
}

fn start(rank: usize, options: &Options) -> Result<(Child, ChildStdin, BufReader<ChildStdout>), String> {
    let mut command = Command::new(std::env::current_exe().map_err(text)?);
    command.args(["rank", &rank.to_string(), "--seed", &options.seed.to_string()]);
    command.args(options.cpu.then_some("--cpu")).args(options.small.then_some("--small"));
    command.args(options.vmm.then_some("--vmm"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(text)?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    match (input, output) {
        (Some(input), Some(output)) => Ok((child, input, BufReader::new(output))),
        _ => Err("a rank's process has no pipes".to_owned()),
    }
}

fn line(output: &mut impl BufRead) -> Result<String, String> {
    let mut line = String::new();
    output.read_line(&mut line).map_err(text)?;
    if line.is_empty() { Err("a rank exited early; see its own error".to_owned()) } else { Ok(line.trim().to_owned()) }
}

/// Sends one line to the parent.
#[allow(clippy::print_stdout, reason = "a pipe to the parent")]
fn say(line: &str) -> Result<(), String> {
    println!("{line}");
    std::io::stdout().flush().map_err(text)
}

/// One rank's process: prints its handles, reads the other's, prints `equal` or the difference.
pub(crate) fn rank(options: &Options, reported: &[String]) -> Report {
    let rank = match reported {
        [rank] => rank.parse().ok().filter(|&rank: &usize| rank < RANKS),
        _ => None,
    }
    .ok_or_else(|| format!("rank is {}, expected below {RANKS}", reported.join(" ")))?;
    let machine = Machine::of(options)?;
    machine.beside_others();
    // Both ranks generate the same data.
    let mut rng = Rng::with_seed(options.seed);
    let size = Size::of(options);
    let order = order(&mut rng, size.tokens, RANKS);
    let parts: Vec<Vec<bf16>> = (0..RANKS).map(|_| elements(&mut rng, size.tokens * size.hidden)).collect();
    let sizes = [SIGNAL_BYTES as usize, size.bytes(), size.bytes()];
    let own = shared::own(&machine, sizes, options.vmm)?;
    own.write(1, bytemuck::cast_slice(&parts[rank]))?;
    say(&own.handle()?)?;
    let peer = shared::peer(&machine, &line(&mut std::io::stdin().lock())?, sizes, options.vmm)?;
    let both = |which: usize| {
        let (own, peer) = (own.buffer(which), peer.buffer(which));
        if rank == 0 { [own, peer] } else { [peer, own] }
    };
    let ranks = Ranks { machine: &machine, rank, size, shared: [both(0), both(1), both(2)] };
    let answer = ranks.compare(&order, &parts, || own.read(2)).err().unwrap_or_else(|| "equal".to_owned());
    say(&answer)?;
    // The other rank may use this memory until its end of the pipe closes.
    std::io::stdin().lock().read_line(&mut String::new()).map_err(text)?;
    Ok((json!({ "rank": rank }), answer == "equal"))
}

/// One rank's side of the calls: signals, parts and gathered rows of both ranks, by rank.
struct Ranks<'a> {
    machine: &'a Machine,
    rank: usize,
    size: Size,
    shared: [[Buffer; RANKS]; 3],
}

impl Ranks<'_> {
    fn compare(
        &self,
        order: &RankOrder,
        parts: &[Vec<bf16>],
        gathered: impl FnOnce() -> Result<Vec<u8>, String>,
    ) -> Result<(), String> {
        let Self { machine, rank, size, shared: [signals, parts_at, out_at] } = *self;
        let reports = Reports::new(machine, 1)?;
        // The other process's time slices last milliseconds.
        let timeout = Duration::from_secs(30);
        let team = Team::new(&signals, rank as u32, &reports.buffers(), timeout).map_err(text)?;
        let permutation = machine.holding(bytemuck::cast_slice(order.permutation()))?;
        let offsets = machine.holding(bytemuck::cast_slice(order.offsets()))?;
        let (permutation, offsets) = ([permutation.buffer()], [offsets.buffer()]);
        let split = Split { permutation: Some(&permutation), offsets: Some(&offsets) };
        let sums = machine.filled(size.bytes(), 0xff)?;
        let sums_at = [sums.buffer()];
        let rows = Rows { tokens: size.tokens as u64, hidden: size.hidden as u64, dtype: Dtype::Bf16 };
        let row_order = RowOrder { rows, split, capacity: rows.tokens, multicast: None };
        let reduce = ReduceScatter { parts: &parts_at, out: &sums_at, order: row_order };
        let gather = Allgather { from: &sums_at, out: &out_at, order: row_order };
        let launches: [Launch; 2] =
            [reduce.launch(&team, size.grid).map_err(text)?, gather.launch(&team, size.grid).map_err(text)?];
        machine.run(&launches).map_err(|error| reports.explain(error))?;

        let slices: Vec<&[bf16]> = parts.iter().map(Vec::as_slice).collect();
        let split = RowSplit::from(order);
        let expected = reference::reduce_scatter(&slices, size.hidden, split).map_err(text)?;
        same("sums", &sums.read::<bf16>()?[..expected[rank].len()], &expected[rank])?;
        let rows: Vec<&[bf16]> = expected.iter().map(Vec::as_slice).collect();
        let expected = reference::allgather(&rows, size.hidden, split).map_err(text)?;
        let found: Vec<bf16> = gathered()?.chunks_exact(2).map(bytemuck::pod_read_unaligned).collect();
        same("gathered rows", &found, &expected)
    }
}
