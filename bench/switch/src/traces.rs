//! Load over time: four synthetic traces from a seed, two recorded ones.

use semmoe_planner::policy::{ByLayout, Layout};

use crate::engines::{Engine, Rates};

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Request {
    /// Seconds from the start.
    pub(crate) at: f64,
    pub(crate) prompt_tokens: u32,
    /// At least 1.
    pub(crate) output_tokens: u32,
    /// 1 for every fifth request, which has a target for its first token; 0 for others.
    pub(crate) priority: u8,
}

/// Requests in order of time.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<Request>,
    /// Length of the phases for which the oracle chooses layouts.
    pub(crate) phase_seconds: f64,
    /// All arrive at once, and only the total time counts.
    pub(crate) rollout: bool,
}

/// The kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Moebius' serving trace: 5 requests/s for 375 s, two bursts of 8 s with 80 and 120 requests/s.
    Bursty,
    /// Requests in flight oscillate around 256, Moebius' threshold, every 10 s.
    Oscillating,
    /// Requests in flight oscillate around the batch at which the engine's curves cross, or 256 if they do not.
    Crossing,
    /// 2,048 prompts at once, lengths with a long tail.
    Rollout,
    /// Azure's conversation trace of 2023, as recorded.
    AzureConv,
    /// Azure's conversation trace of 2023 at double speed.
    AzureConv2,
    /// Azure's code trace of 2023, as recorded.
    AzureCode,
}

/// Selects the part of a recorded hour, and the seeds of synthetic loads: settings were chosen on one part and are
/// judged on the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// The first 20 minutes.
    Tune,
    /// The rest.
    Judge,
}

/// Where the recorded hour is split.
const CUT_SECONDS: f64 = 1200.0;
const CONV: &str = include_str!("../data/azure_conv.csv");
const CODE: &str = include_str!("../data/azure_code.csv");

impl Kind {
    pub(crate) const ALL: [Kind; 7] = [
        Kind::Bursty,
        Kind::Oscillating,
        Kind::Crossing,
        Kind::Rollout,
        Kind::AzureConv,
        Kind::AzureConv2,
        Kind::AzureCode,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Bursty => "bursty",
            Kind::Oscillating => "oscillating",
            Kind::Crossing => "crossing",
            Kind::Rollout => "rollout",
            Kind::AzureConv => "azure conv",
            Kind::AzureConv2 => "azure conv x2",
            Kind::AzureCode => "azure code",
        }
    }

    pub(crate) fn trace(self, engine: &Engine, rates: Rates, seed: u64, part: Part) -> Trace {
        let mut random = fastrand::Rng::with_seed(seed);
        match self {
            Kind::Bursty => bursty(&mut random),
            Kind::Oscillating => swinging(256, engine, rates, &mut random),
            Kind::Crossing => swinging(crossing(engine).unwrap_or(256), engine, rates, &mut random),
            Kind::Rollout => rollout(&mut random),
            Kind::AzureConv => recorded(CONV, 1.0, part),
            Kind::AzureConv2 => recorded(CONV, 2.0, part),
            Kind::AzureCode => recorded(CODE, 1.0, part),
        }
    }
}

/// The smallest batch at which EP's step is no longer than TP's.
pub(crate) fn crossing(engine: &Engine) -> Option<u32> {
    let ByLayout { tp, ep } = &engine.steps;
    (1..=engine.max_sequences).find(|&batch| ep.seconds(batch) <= tp.seconds(batch))
}

/// A normal variate.
pub(crate) fn normal(random: &mut fastrand::Rng) -> f64 {
    let (length, turn) = (1.0 - random.f64(), random.f64());
    (-2.0 * length.ln()).sqrt() * (std::f64::consts::TAU * turn).cos()
}

/// Log-normal lengths with the given mean and sigma (of the logarithm), from 1 to `most`.
fn length(random: &mut fastrand::Rng, mean: f64, sigma: f64, most: u32) -> u32 {
    let value = mean * (sigma * normal(random) - sigma * sigma / 2.0).exp();
    (value.round() as u32).clamp(1, most)
}

fn priority(number: usize) -> u8 {
    u8::from(number.is_multiple_of(5))
}

/// Length distribution of a synthetic trace.
struct Lengths {
    prompt: f64,
    output: f64,
}

/// Poisson arrivals at `rate(seconds)`, at most `most` per second, by thinning.
fn poisson(
    seconds: f64,
    most: f64,
    lengths: &Lengths,
    random: &mut fastrand::Rng,
    rate: &dyn Fn(f64) -> f64,
) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut at = 0.0;
    loop {
        at -= (1.0 - random.f64()).ln() / most;
        if at >= seconds {
            return requests;
        }
        if random.f64() * most < rate(at) {
            requests.push(Request {
                at,
                prompt_tokens: length(random, lengths.prompt, 0.8, 16_384),
                output_tokens: length(random, lengths.output, 0.8, 4096),
                priority: priority(requests.len()),
            });
        }
    }
}

fn bursty(random: &mut fastrand::Rng) -> Trace {
    let rate = |at: f64| match at {
        30.0..38.0 => 80.0,
        338.0..346.0 => 120.0,
        _ => 5.0,
    };
    let lengths = Lengths { prompt: 512.0, output: 256.0 };
    Trace { requests: poisson(375.0, 120.0, &lengths, random, &rate), phase_seconds: 5.0, rollout: false }
}

/// A square wave with a period of 10 s, 40% up and down, around the rate that keeps `batch` sequences busy.
fn swinging(batch: u32, engine: &Engine, rates: Rates, random: &mut fastrand::Rng) -> Trace {
    let lengths = Lengths { prompt: 256.0, output: 128.0 };
    let decode = [Layout::Tp, Layout::Ep].map(|layout| engine.steps[layout].seconds(batch).unwrap_or(0.04));
    let busy = f64::from(batch);
    let mean = busy / (lengths.output * decode[0].min(decode[1]) + busy * lengths.prompt / rates.tp);
    let rate = |at: f64| mean * if at % 10.0 < 5.0 { 1.4 } else { 0.6 };
    Trace { requests: poisson(180.0, 1.4 * mean, &lengths, random, &rate), phase_seconds: 5.0, rollout: false }
}

fn rollout(random: &mut fastrand::Rng) -> Trace {
    let request = |number| Request {
        at: 0.0,
        prompt_tokens: length(random, 100.0, 0.5, 1024),
        output_tokens: length(random, 495.0, 1.0, 16_384),
        priority: priority(number),
    };
    Trace { requests: (0..2048).map(request).collect(), phase_seconds: 4.0, rollout: true }
}

/// A recorded hour at `speed` times its speed. The files are part of this repository, so every line parses.
fn recorded(text: &str, speed: f64, part: Part) -> Trace {
    let mut at = 0.0;
    let all = text.lines().skip(1).filter_map(|line| {
        let mut fields = line.split(',').map(str::parse::<u32>);
        let (wait, prompt, output) = (fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?);
        at += f64::from(wait) / 1e3;
        Some((at, prompt.max(1), output.max(1)))
    });
    let (from, to) = if part == Part::Tune { (0.0, CUT_SECONDS) } else { (CUT_SECONDS, f64::INFINITY) };
    let kept = all.filter(|request| (from..to).contains(&request.0)).enumerate();
    let requests = kept.map(|(number, (at, prompt_tokens, output_tokens))| Request {
        at: (at - from) / speed,
        prompt_tokens,
        output_tokens,
        priority: priority(number),
    });
    Trace { requests: requests.collect(), phase_seconds: 30.0, rollout: false }
}
