//! Synthetic routing calibrated to Table 1 of the Sem-MoE paper: a linear top-6-of-64 router over token embedding,
//! request context and noise, six layers deep; vocabulary 20,000 with Zipf's law, requests of 150 tokens on 40 topics.
//!
//! On held-out requests the median share of a token's likeliest six experts among those that it activates is 1.0 in
//! the first layer and 0.833 deeper, as in the paper; a test checks it.

use semmoe_tables::{ModelInfo, Phase, Profile, ProfileBuilder, Trace, TraceBuilder};

use crate::domains::{Split, compare_all};
use crate::error::BenchError;
use crate::methods::{Setting, provenance};

const EXPERTS: usize = 64;
const TOP_K: usize = 6;
const VOCABULARY: usize = 20_000;
const WIDTH: usize = 24;
const TOPICS: usize = 40;
const REQUEST_TOKENS: usize = 150;
const SUPER_TOPICS: usize = 8;
/// Share of a request's tokens that do not depend on its topic.
const FUNCTION_WORDS: f64 = 0.55;
const TOPIC_WEIGHT: f64 = 0.6;
/// Spread of the router's bias.
const BIAS: f64 = 0.12;
/// How closely experts cluster around super-topics.
const GATHERED: f64 = 0.1;
/// Layer by layer: noise, and weight of the request's context.
const LAYERS: [(u16, f64, f64); 6] =
    [(1, 0.04, 0.02), (6, 0.13, 0.06), (11, 0.18, 0.10), (16, 0.20, 0.12), (21, 0.24, 0.15), (26, 0.24, 0.15)];

type Point = [f64; WIDTH];

/// Requests to solve on, and equally many to judge on.
pub(crate) fn generate(requests: usize, seed: u64) -> Result<(Trace, Trace), BenchError> {
    let mut random = Draw(fastrand::Rng::with_seed(seed));
    let world = World::new(&mut random);
    let contexts: Vec<(usize, Point)> = (0..requests).map(|_| world.context(&mut random)).collect();
    let ids: Vec<u32> = contexts.iter().flat_map(|context| world.tokens(context.0, &mut random)).collect();
    let mut routes = vec![0u16; ids.len() * LAYERS.len() * TOP_K];
    for (layer, &(_, noise, context_weight)) in LAYERS.iter().enumerate() {
        let router = world.router(&mut random);
        for (position, &token) in ids.iter().enumerate() {
            let context = &contexts[position / REQUEST_TOKENS].1;
            let input = |axis: usize| world.token[token as usize][axis] + context_weight * context[axis];
            let input: Point = std::array::from_fn(|axis| input(axis) + noise * random.normal());
            let at = (position * LAYERS.len() + layer) * TOP_K;
            routes[at..at + TOP_K].copy_from_slice(&router.top(&input));
        }
    }
    let mut order: Vec<usize> = (0..requests).collect();
    random.0.shuffle(&mut order);
    let mut halves = [TraceBuilder::new(model(), provenance())?, TraceBuilder::new(model(), provenance())?];
    for (rank, request) in order.into_iter().enumerate() {
        let tokens = request * REQUEST_TOKENS..(request + 1) * REQUEST_TOKENS;
        let activations = LAYERS.len() * TOP_K;
        let routes = &routes[tokens.start * activations..tokens.end * activations];
        halves[rank % 2].push(&ids[tokens], REQUEST_TOKENS as u32, routes, None)?;
    }
    let [solve, judge] = halves;
    Ok((solve.finish()?, judge.finish()?))
}

/// Every method on synthetic routing, tokens layer by layer.
pub(crate) fn run(requests: usize, groups: &[u16], setting: &Setting) -> Result<(), BenchError> {
    let (solve, judge) = generate(requests, setting.seed)?;
    let held_out = profile(&judge)?;
    let splits = [Split { solving: profile(&solve)?, held_out: &held_out }];
    for &groups in groups {
        let setting = Setting { groups, strings: None, ..setting.clone() };
        let title = format!(
            "**synthetic routing, {groups} groups**: solved on {} requests, judged on as many",
            solve.requests()
        );
        compare_all(&title, &["held out".to_owned()], &splits, &setting)?;
    }
    Ok(())
}

/// The counts of a trace.
pub(crate) fn profile(trace: &Trace) -> Result<Profile, BenchError> {
    let mut builder = ProfileBuilder::new(trace.model().clone(), provenance(), Phase::All)?;
    builder.add_trace(trace)?;
    Ok(builder.finish()?)
}

fn model() -> ModelInfo {
    ModelInfo {
        model: "synthetic-table1".into(),
        tokenizer_sha256: None,
        num_experts: EXPERTS as u16,
        top_k: TOP_K as u16,
        vocab_size: VOCABULARY as u32,
        num_hidden_layers: 27,
        layer_ids: LAYERS.iter().map(|layer| layer.0).collect(),
    }
}

/// Normal and discrete draws.
struct Draw(fastrand::Rng);

impl Draw {
    /// By the Box-Muller transform.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.0.f64()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.0.f64()).cos()
    }

    fn point(&mut self) -> Point {
        std::array::from_fn(|_| self.normal())
    }

    /// An index by cumulative weights.
    fn index(&mut self, cumulative: &[f64]) -> usize {
        let at = self.0.f64() * cumulative.last().copied().unwrap_or(0.0);
        cumulative.partition_point(|&sum| sum <= at).min(cumulative.len() - 1)
    }
}

/// The part of the model that all requests share.
struct World {
    super_topic: Vec<Point>,
    topic: Vec<Point>,
    /// \[V\], each of length sqrt(WIDTH).
    token: Vec<Point>,
    /// Cumulative weights of all tokens.
    anywhere: Vec<f64>,
    /// Tokens of each topic with their cumulative weights.
    of_topic: Vec<(Vec<u32>, Vec<f64>)>,
}

impl World {
    fn new(random: &mut Draw) -> Self {
        let topic_of: Vec<usize> = (0..VOCABULARY).map(|_| random.0.usize(0..TOPICS)).collect();
        let super_topic: Vec<Point> = (0..SUPER_TOPICS).map(|_| random.point()).collect();
        let own: Vec<Point> = (0..TOPICS).map(|_| random.point()).collect();
        let topic: Vec<Point> =
            own.iter().enumerate().map(|(z, own)| mix(&super_topic[z % SUPER_TOPICS], 0.9, own, 0.6)).collect();
        let token = topic_of.iter().map(|&z| scaled(&mix(&topic[z], TOPIC_WEIGHT, &random.point(), 1.0))).collect();
        let weight = |rank: usize| 1.0 / (rank + 1) as f64;
        let cumulative = |ids: &[u32]| -> Vec<f64> {
            let sums = ids.iter().scan(0.0, |sum, &id| {
                *sum += weight(id as usize);
                Some(*sum)
            });
            sums.collect()
        };
        let members = |z: usize| -> Vec<u32> {
            (0u32..).zip(&topic_of).filter(|(_, of)| **of == z).map(|(token, _)| token).collect()
        };
        let of_topic = (0..TOPICS).map(members).map(|ids| (ids.clone(), cumulative(&ids))).collect();
        let all: Vec<u32> = (0..VOCABULARY as u32).collect();
        World { super_topic, topic, token, anywhere: cumulative(&all), of_topic }
    }

    /// A request's topic and context.
    fn context(&self, random: &mut Draw) -> (usize, Point) {
        let topic = random.0.usize(0..TOPICS);
        (topic, scaled(&mix(&self.topic[topic], 1.0, &random.point(), 0.7)))
    }

    fn tokens(&self, topic: usize, random: &mut Draw) -> Vec<u32> {
        let (ids, cumulative) = &self.of_topic[topic];
        let draw = |_| {
            if random.0.f64() < FUNCTION_WORDS || ids.is_empty() {
                random.index(&self.anywhere) as u32
            } else {
                ids[random.index(cumulative)]
            }
        };
        (0..REQUEST_TOKENS).map(draw).collect()
    }

    fn router(&self, random: &mut Draw) -> Router {
        let mut centre: Vec<usize> = (0..EXPERTS).map(|expert| expert * SUPER_TOPICS / EXPERTS).collect();
        random.0.shuffle(&mut centre);
        let row = |centre: usize, random: &mut Draw| {
            let own: Point = random.point().map(|x| x / (WIDTH as f64).sqrt());
            let length = norm(&self.super_topic[centre]);
            mix(&own, 1.0 - GATHERED, &self.super_topic[centre].map(|x| x / length), GATHERED)
        };
        let weight = centre.into_iter().map(|centre| row(centre, random)).collect();
        Router { weight, bias: std::array::from_fn(|_| BIAS * random.normal()) }
    }
}

struct Router {
    weight: Vec<Point>,
    bias: [f64; EXPERTS],
}

impl Router {
    /// The experts with the largest logits, in arbitrary order.
    fn top(&self, input: &Point) -> [u16; TOP_K] {
        let logit = |expert: usize| self.bias[expert] + dot(&self.weight[expert], input);
        let logits: [f64; EXPERTS] = std::array::from_fn(logit);
        let mut order: [u16; EXPERTS] = std::array::from_fn(|expert| expert as u16);
        order.select_nth_unstable_by(TOP_K, |&a, &b| logits[usize::from(b)].total_cmp(&logits[usize::from(a)]));
        std::array::from_fn(|rank| order[rank])
    }
}

fn mix(a: &Point, x: f64, b: &Point, y: f64) -> Point {
    std::array::from_fn(|axis| x * a[axis] + y * b[axis])
}

fn dot(a: &Point, b: &Point) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &Point) -> f64 {
    dot(a, a).sqrt()
}

/// Scales to length sqrt(WIDTH).
fn scaled(a: &Point) -> Point {
    let factor = (WIDTH as f64).sqrt() / norm(a);
    a.map(|x| x * factor)
}

#[cfg(test)]
mod tests {
    use semmoe_tables::{LayerIdx, TokenId};

    use super::*;

    /// Overlap of each held-out token with its likeliest six experts: the medians match the reference generator.
    #[test]
    fn medians_are_those_of_the_papers_table() {
        let (solve, judge) = generate(1200, 0).expect("traces");
        let solving = profile(&solve).expect("a profile");
        for layer in 0..LAYERS.len() {
            let id = LayerIdx::new(layer as u16);
            let mut overlap = [0usize; TOP_K + 1];
            for request in judge.iter() {
                for (position, &token) in request.token_ids().iter().enumerate() {
                    let row = solving.row(id, TokenId::new(token));
                    let mut known: Vec<(u32, u16)> =
                        row.counts.iter().copied().zip(row.experts.iter().copied()).collect();
                    known.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
                    known.truncate(TOP_K);
                    let Some(route) = request.route(position, id) else { continue };
                    let hit = |expert: u16| known.iter().any(|(_, other)| *other == expert);
                    overlap[route.experts().filter(|expert| hit(expert.get())).count()] += 1;
                }
            }
            let half = overlap.iter().sum::<usize>() / 2;
            let mut seen = 0;
            let median = (0..=TOP_K).find(|&hits| {
                seen += overlap[hits];
                seen > half
            });
            assert_eq!(median, Some(if layer == 0 { TOP_K } else { TOP_K - 1 }), "layer {layer}: {overlap:?}");
        }
    }
}
