//! Maps requests to two dimensions by the experts that they activate: the paper's figure 6 (a).
//!
//! Uses t-SNE (van der Maaten and Hinton, 2008), initialized with the first two principal components, without
//! randomness. Distances are Hellinger distances between the requests' expert shares, so busy experts do not dominate.

use semmoe_tables::{LayerIdx, Trace};

use crate::ProfilerError;
use crate::error::check;

/// Maximum number of requests to draw, evenly spaced over the trace.
const MAX_REQUESTS: usize = 400;
const PERPLEXITY: f64 = 25.0;
const ROUNDS: usize = 400;
/// Number of initial rounds, in which stronger attraction between neighbours lets clusters form.
const EARLY: usize = 100;
const EXAGGERATION: f64 = 8.0;

/// A map of requests.
#[derive(Debug)]
pub struct RequestMap {
    /// One point per request.
    pub points: Vec<[f64; 2]>,
    /// Topic of each request, as an index into `topics`.
    pub topic_of: Vec<usize>,
    /// Sorted topic names.
    pub topics: Vec<String>,
}

/// Maps the requests of a trace; `topics` has one entry per request.
///
/// # Errors
/// If the number of topics differs from the number of requests.
pub(crate) fn requests(trace: &Trace, topics: &[String]) -> Result<RequestMap, ProfilerError> {
    let found = format!("a file of {} lines", topics.len());
    check(topics.len() == trace.requests(), "topics", found, "one line per request in the trace")?;
    let step = topics.len().div_ceil(MAX_REQUESTS).max(1);
    let chosen: Vec<usize> = (0..topics.len()).step_by(step).collect();
    let vectors: Vec<Vec<f64>> = chosen.iter().map(|request| vector(trace, *request)).collect();
    let distances = distances(&vectors);
    let mut names: Vec<String> = chosen.iter().map(|request| topics[*request].clone()).collect();
    names.sort();
    names.dedup();
    let topic_of = chosen.iter().map(|request| names.binary_search(&topics[*request]).unwrap_or(0)).collect();
    Ok(RequestMap { points: embed(&distances), topic_of, topics: names })
}

/// Returns the square roots of all experts' shares in all layers.
fn vector(trace: &Trace, request: usize) -> Vec<f64> {
    let (model, request) = (trace.model(), trace.request(request));
    let experts = usize::from(model.num_experts);
    let mut counts = vec![0.0; model.layers() * experts];
    for at in 0..request.token_ids().len() {
        for layer in 0..model.layers() {
            let route = request.route(at, LayerIdx::new(layer as u16));
            route
                .into_iter()
                .flat_map(|route| route.experts())
                .for_each(|expert| counts[layer * experts + expert.index()] += 1.0);
        }
    }
    let total: f64 = counts.iter().sum::<f64>().max(1.0);
    counts.iter().map(|count| (count / total).sqrt()).collect()
}

/// Computes all pairwise squared distances.
fn distances(vectors: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let apart = |a: &Vec<f64>, b: &Vec<f64>| a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
    vectors.iter().map(|a| vectors.iter().map(|b| apart(a, b)).collect()).collect()
}

fn embed(distances: &[Vec<f64>]) -> Vec<[f64; 2]> {
    let count = distances.len();
    let mut points = principal(distances);
    if count < 4 {
        return points;
    }
    let neighbours = neighbours(distances);
    let mut speed = vec![[0.0f64; 2]; count];
    for round in 0..ROUNDS {
        let (pull, momentum) = if round < EARLY { (EXAGGERATION, 0.5) } else { (1.0, 0.8) };
        let near = |a: &[f64; 2], b: &[f64; 2]| 1.0 / (1.0 + (a[0] - b[0]).powi(2) + (a[1] - b[1]).powi(2));
        let sum: f64 = points.iter().flat_map(|a| points.iter().map(move |b| near(a, b))).sum::<f64>() - count as f64;
        let mut moves = vec![[0.0f64; 2]; count];
        for (one, by) in moves.iter_mut().enumerate() {
            for (other, point) in points.iter().enumerate().filter(|(other, _)| *other != one) {
                let q = near(&points[one], point);
                let force = 4.0 * (pull * neighbours[one][other] - q / sum) * q;
                by.iter_mut().zip(points[one].iter().zip(point)).for_each(|(by, (a, b))| *by += force * (a - b));
            }
        }
        let rate = (count as f64 / EXAGGERATION).max(20.0);
        for (point, (speed, by)) in points.iter_mut().zip(speed.iter_mut().zip(&moves)) {
            for axis in 0..2 {
                speed[axis] = momentum * speed[axis] - rate * by[axis];
                point[axis] += speed[axis];
            }
        }
    }
    points
}

/// Computes symmetric neighbour probabilities; bisection finds each row's spread such that its perplexity is
/// `PERPLEXITY`.
fn neighbours(distances: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let count = distances.len();
    let target = PERPLEXITY.min((count - 1) as f64 / 3.0).max(1.5).ln();
    let row = |one: usize| -> Vec<f64> {
        let (mut low, mut high, mut beta) = (0.0f64, f64::INFINITY, 1.0f64);
        let mut weights = vec![0.0; count];
        for _ in 0..60 {
            for other in 0..count {
                weights[other] = if other == one { 0.0 } else { (-beta * distances[one][other]).exp() };
            }
            let sum = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            weights.iter_mut().for_each(|weight| *weight /= sum);
            let entropy: f64 = weights.iter().filter(|weight| **weight > 0.0).map(|weight| -weight * weight.ln()).sum();
            if entropy > target {
                low = beta;
                beta = if high.is_finite() { (beta + high) / 2.0 } else { beta * 2.0 };
            } else {
                high = beta;
                beta = (beta + low) / 2.0;
            }
        }
        weights
    };
    let rows: Vec<Vec<f64>> = (0..count).map(row).collect();
    let both = |one: usize, other: usize| ((rows[one][other] + rows[other][one]) / (2.0 * count as f64)).max(1e-12);
    (0..count).map(|one| (0..count).map(|other| both(one, other)).collect()).collect()
}

/// Computes the first two principal components (classical scaling by power iteration), scaled down as t-SNE requires.
fn principal(distances: &[Vec<f64>]) -> Vec<[f64; 2]> {
    let count = distances.len();
    let mean = |row: &[f64]| row.iter().sum::<f64>() / count.max(1) as f64;
    let rows: Vec<f64> = distances.iter().map(|row| mean(row)).collect();
    let all = mean(&rows);
    let gram = |one: usize, other: usize| -0.5 * (distances[one][other] - rows[one] - rows[other] + all);
    let gram: Vec<Vec<f64>> = (0..count).map(|one| (0..count).map(|other| gram(one, other)).collect()).collect();
    let mut points = vec![[0.0; 2]; count];
    let mut found: Vec<Vec<f64>> = Vec::new();
    for axis in 0..2 {
        // Start vectors differ between axes and have no regular pattern that could be orthogonal to the eigenvector.
        let mut vector: Vec<f64> = (0..count).map(|at| ((at * (axis + 2) + 1) as f64).sin()).collect();
        for _ in 0..100 {
            let mut next: Vec<f64> = gram.iter().map(|row| row.iter().zip(&vector).map(|(a, b)| a * b).sum()).collect();
            for before in &found {
                let along: f64 = next.iter().zip(before).map(|(a, b)| a * b).sum();
                next.iter_mut().zip(before).for_each(|(a, b)| *a -= along * b);
            }
            let length = next.iter().map(|value| value * value).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
            next.iter_mut().for_each(|value| *value /= length);
            vector = next;
        }
        points.iter_mut().zip(&vector).for_each(|(point, value)| point[axis] = value * 0.01);
        found.push(vector);
    }
    points
}
