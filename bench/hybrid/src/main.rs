//! Expert layouts over two levels of limited links, measured and predicted. See README.md.
//!
//! | module | what |
//! |---|---|
//! | `args` | the command line |
//! | `layouts` | what is compared, and the planner's prediction |
//! | `measure` | units under load |
//! | `stages` | the ranks' own time stamps |
//! | `gantt` | charts of single layers |
//! | `report` | tables and verdicts |

mod args;
mod gantt;
mod layouts;
mod measure;
mod report;
mod stages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser as _;
use semmoe_bench_e2e::error::BenchError;
use semmoe_bench_e2e::network::{self, Inside, Namespaces, Network, Shape};
use semmoe_bench_e2e::program::{self, say};
use semmoe_bench_e2e::unit;
use semmoe_bench_papers::mixserve::TwoLevels;
use serde::Deserialize;

use args::Args;
use layouts::{Layout, MANY_NODES, NODES, WIDTH};
use measure::{Block, Contestant, Nodes};
use report::{Links, Row};
use stages::LayerStages;

/// A step is full if its ranks have at least this share of the maximum tokens.
const FULL: f64 = 0.9;

fn main() -> ExitCode {
    let args = Args::parse();
    program::main("bench/hybrid", run(&args))
}

async fn run(args: &Args) -> Result<(), BenchError> {
    if args.clean {
        let removed = network::clean()?;
        say(&format!("removed {} namespaces", removed.len()));
        return Ok(());
    }
    let model = Model::read(&args.model)?;
    let folder = tempfile::tempdir().map_err(BenchError::file(Path::new("the temporary folder")))?;
    unit::write_secret(&folder.path().join("secret"))?;
    fs::create_dir_all(&args.out).map_err(BenchError::file(&args.out))?;
    let on_nodes = |nodes| [Layout::Domains(1), Layout::Unfused(nodes), Layout::Fused { nodes, chunks: args.chunks }];
    let [flat, unfused, fused] = on_nodes(NODES);

    let all = [flat, Layout::Domains(2), Layout::Domains(4), unfused, fused];
    let ratios: Vec<Option<f64>> = args.ratios.iter().copied().map(Some).collect();
    let stage =
        Stage { args, folder: folder.path(), inside: Inside::Links, on: Nodes { nodes: NODES, transport: "tcp" } };
    let found = stage.measure(&all, &ratios).await?;
    let limited: Vec<Links> = args
        .ratios
        .iter()
        .map(|&ratio| Ok(Links { unit: model.unit(args, ratio)?, rows: found.rows(Some(ratio), &all, args) }))
        .collect::<Result<_, BenchError>>()?;
    for (&ratio, layout) in args.ratios.iter().flat_map(|ratio| [(ratio, unfused), (ratio, fused)]) {
        found.chart(ratio, layout, args)?;
    }

    let on = Nodes { nodes: NODES, transport: "auto" };
    let host = Stage { inside: Inside::Host, on, ..stage }.rows(&on_nodes(NODES)).await?;
    let on = Nodes { nodes: MANY_NODES, ..on };
    let many = Stage { inside: Inside::Host, on, ..stage }.rows(&on_nodes(MANY_NODES)).await?;

    let text = report::markdown(&limited, &host, &many, args.chunks)?;
    let path = args.out.join("results.md");
    fs::write(&path, &text).map_err(BenchError::file(&path))?;
    say(&text);
    Ok(())
}

/// The settings of the measurement over one kind of network.
#[derive(Clone, Copy)]
struct Stage<'a> {
    args: &'a Args,
    folder: &'a Path,
    inside: Inside,
    on: Nodes,
}

/// Blocks, and the stages of all ranks by layout.
struct Measured {
    blocks: Vec<Block>,
    logs: Vec<(Layout, Vec<Vec<LayerStages>>)>,
}

impl Stage<'_> {
    /// Rows for unlimited links inside nodes.
    async fn rows(&self, layouts: &[Layout]) -> Result<Vec<Row>, BenchError> {
        Ok(self.measure(layouts, &[None]).await?.rows(None, layouts, self.args))
    }

    /// Starts all layouts, and measures each at every ratio in turn.
    async fn measure(&self, layouts: &[Layout], ratios: &[Option<f64>]) -> Result<Measured, BenchError> {
        let Stage { args, folder, inside, on } = *self;
        // Declared first, so dropped after everything that uses it.
        let network = Network::Namespaces(Namespaces::create(Shape { ranks: on.nodes * WIDTH, width: WIDTH, inside })?);
        let mut units = Vec::new();
        for &layout in layouts {
            say(&format!("starting {} over {}", layout.name(), on.transport));
            units.push(Contestant::start(args, &network, folder, layout, on).await?);
        }
        let mut blocks = Vec::new();
        network.limit(Some(bits(args.between)))?;
        for round in 1..=args.rounds {
            for &ratio in ratios {
                if let Some(ratio) = ratio {
                    network.limit_inside(Some(bits(args.between * ratio)))?;
                }
                for unit in &units {
                    let block = unit.load(args, ratio).await?;
                    let (name, rate) = (unit.layout.name(), block.throughput);
                    say(&format!("round {round}, inner over outer {ratio:?}: {name}: {rate:.0} tokens/s"));
                    blocks.push(block);
                }
            }
        }
        let mut logs = Vec::new();
        for unit in units {
            let (layout, paths) = unit.stop().await?;
            logs.push((layout, stages::read(&paths)?));
        }
        Ok(Measured { blocks, logs })
    }
}

impl Measured {
    fn blocks_of(&self, ratio: Option<f64>, layout: Layout) -> Vec<&Block> {
        self.blocks.iter().filter(|block| block.ratio == ratio && block.layout == layout).collect()
    }

    /// Full layers in the blocks of one layout at one ratio.
    fn layers(&self, ratio: Option<f64>, layout: Layout, args: &Args) -> Vec<stages::OnAllRanks<'_>> {
        let logs = self.logs.iter().filter(|(of, _)| *of == layout).map(|(_, logs)| logs);
        let least = (FULL * f64::from(args.step_tokens)) as usize;
        let times: Vec<_> = self.blocks_of(ratio, layout).iter().map(|block| block.time.clone()).collect();
        logs.flat_map(|logs| times.iter().flat_map(move |time| stages::within(logs, time.clone(), least))).collect()
    }

    fn rows(&self, ratio: Option<f64>, layouts: &[Layout], args: &Args) -> Vec<Row> {
        let row = |&layout: &Layout| {
            let exchange = stages::median(&self.layers(ratio, layout, args), args.step_tokens.into());
            Row::of(&self.blocks_of(ratio, layout), exchange)
        };
        layouts.iter().filter_map(row).collect()
    }

    /// Draws the full layer whose exchange time is the median of its ratio.
    fn chart(&self, ratio: f64, layout: Layout, args: &Args) -> Result<(), BenchError> {
        let mut layers = self.layers(Some(ratio), layout, args);
        let seconds = |ranks: &[&LayerStages]| stages::exchange(ranks).unwrap_or_default().seconds;
        layers.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let Some(middle) = layers.get(layers.len() / 2) else { return Ok(()) };
        let tokens: usize = middle.iter().map(|rank| rank.tokens).sum();
        let title = format!(
            "{}, inner over outer bandwidth {ratio}, MoE layer {} with {tokens} tokens",
            layout.name(),
            middle[0].layer
        );
        let name = if matches!(layout, Layout::Unfused(_)) { "unfused" } else { "fused" };
        let path = args.out.join(format!("gantt-{name}-{ratio}.svg"));
        fs::write(&path, gantt::draw(&title, middle)).map_err(BenchError::file(&path))
    }
}

/// The fields of `config.json` that the prediction needs, by the names of Qwen3-MoE.
#[derive(Debug, Deserialize)]
struct Model {
    hidden_size: u64,
    num_experts: u64,
    num_experts_per_tok: u64,
}

impl Model {
    fn read(folder: &Path) -> Result<Self, BenchError> {
        let path: PathBuf = folder.join("config.json");
        let text = fs::read_to_string(&path).map_err(BenchError::file(&path))?;
        serde_json::from_str(&text).map_err(|error| BenchError::input(format!("{}: {error}", path.display())))
    }

    fn unit(&self, args: &Args, ratio: f64) -> Result<TwoLevels, BenchError> {
        let between = args.between * 1e6 / 8.0;
        let unit = TwoLevels {
            tokens: args.step_tokens.into(),
            row_bytes: 4.0 * self.hidden_size as f64,
            experts: self.num_experts,
            top_k: self.num_experts_per_tok,
            nodes: NODES.into(),
            width: WIDTH.into(),
            inside: ratio * between,
            between,
        };
        unit.check().map_err(BenchError::input)?;
        Ok(unit)
    }
}

fn bits(millions: f64) -> u64 {
    (millions * 1e6) as u64
}
