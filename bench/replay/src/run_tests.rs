use semmoe_routing::{RankLoad, Request};

use super::*;
use crate::model::{Model, Part};

fn plain_job(at: f64, prompt_tokens: u32, output_tokens: u32, local: &[f64]) -> Job {
    Job { at, prompt_tokens, output_tokens, blocks: Vec::new(), expected: local.to_vec(), local: local.to_vec() }
}

const LIMITS: Limits = Limits { step_tokens: 1000, sequences: 4, cache_blocks: 64, kv_tokens: u64::MAX };

fn setup(jobs: &[Job], ranks: u16, communication: f64) -> Setup<'_> {
    Setup {
        jobs,
        ranks,
        prices: &[],
        limits: LIMITS,
        time: StepTime::new(Model::Full, communication, ranks),
        speed: 1.0,
        settings: Box::leak(Box::default()),
    }
}

#[test]
fn one_request_alone_takes_its_own_time() {
    let jobs = [plain_job(0.0, 2500, 11, &[0.5, 0.5])];
    let setup = setup(&jobs, 2, 0.5);
    let StepTime { fixed, dense, expert, context, sequence, held, transfer, .. } = setup.time;
    let figures = run("round_robin", setup).unwrap();
    // Three chunks with half of the activations remote; then ten decode steps.
    let first = 3.0 * fixed + 2500.0 * (dense + expert / 2.0 + transfer / 2.0 + context * 1250.0);
    let token = fixed + sequence + held * 2505.5 + expert / 2.0 + transfer / 2.0;
    assert!((figures.ttft_median - first).abs() < 1e-9 && (figures.per_token_p99 - token).abs() < 1e-9, "{figures:?}");
    assert!((figures.goodput - 1.0 / (first + 10.0 * token)).abs() < 1e-9, "{figures:?}");
    assert_eq!((figures.good, figures.cached, figures.tokens_max_over_mean), (1.0, 0.0, 2.0));
    assert!((figures.lar - 0.5).abs() < 1e-12);
    // The latency limits assume the experts' work of a busy unit, of which each rank has its share.
    let alone = setup.time.alone(2500, 1000, 2);
    assert!((alone.0 - first - 2500.0 * expert / 2.0).abs() < 1e-9, "{alone:?} {first}");

    let linear = Setup { time: StepTime::new(Model::Linear, 0.5, 2), ..setup };
    let figures = run("round_robin", linear).unwrap();
    let first = 3.0 * fixed + 2500.0 * (dense + expert + transfer / 2.0);
    assert!((figures.ttft_median - first).abs() < 1e-9, "{figures:?}");
}

#[test]
fn a_prompt_that_comes_again_is_not_computed_again() {
    let mut jobs: Vec<Job> = (0..4).map(|at| plain_job(f64::from(at) * 10.0, 1100, 2, &[1.0])).collect();
    jobs.iter_mut().for_each(|job| job.blocks = vec![7, 8]);
    let figures = run("prefix", setup(&jobs, 1, 0.0)).unwrap();
    assert!((figures.cached - 3.0 * 1024.0 / 4400.0).abs() < 1e-9, "{figures:?}");
    let uncached = Limits { cache_blocks: 0, ..LIMITS };
    let figures = run("prefix", Setup { limits: uncached, ..setup(&jobs, 1, 0.0) }).unwrap();
    assert_eq!(figures.cached, 0.0);
}

#[test]
fn local_tokens_cost_less_and_affinity_finds_them() {
    let local = |at: u32| if at.is_multiple_of(2) { [0.9, 0.1] } else { [0.1, 0.9] };
    // Round robin sends even requests to odd ranks, except for the first ones.
    let jobs: Vec<Job> = (0..400).map(|at| plain_job(f64::from(at) * 0.05, 800, 3, &local(at / 2))).collect();
    let setup = setup(&jobs, 2, 0.5);
    let (turns, affinity) = (run("round_robin", setup).unwrap(), run("affinity", setup).unwrap());
    assert!((turns.lar - 0.5).abs() < 0.01, "{turns:?}");
    assert!(affinity.lar > 0.85 && affinity.tokens_max_over_mean < 1.1, "{affinity:?}");
    assert!(affinity.ttft_p99 < turns.ttft_p99 && affinity.goodput >= turns.goodput, "{affinity:?} {turns:?}");
}

/// Twice the sustainable load: routing still follows locality as at light load, and so serves more.
#[test]
fn queues_do_not_drown_what_is_local() {
    let home = |at: u32| [0, 1, 2, 3].map(|rank| if rank == at * 7 % 13 % 4 { 0.55 } else { 0.15 });
    let jobs = |gap: f64| -> Vec<Job> {
        (0..800).map(|at| plain_job(f64::from(at) * gap, 100 + at * 31 % 400, 2, &home(at))).collect()
    };
    let (light, heavy) = (jobs(0.02), jobs(0.001));
    let [light, heavy] = [&light, &heavy].map(|jobs| run("affinity", setup(jobs, 4, 0.4)).unwrap());
    assert!(heavy.ttft_median > 10.0 * light.ttft_median, "expected a queue: {heavy:?}");
    assert!(heavy.lar > 0.97 * light.lar && heavy.tokens_max_over_mean < 1.1, "{light:?} {heavy:?}");
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let jobs: Vec<Job> = (0..200).map(|at| plain_job(f64::from(at) * 0.01, 300 + at * 7, 5, &[0.25; 4])).collect();
    for policy in ["random", "least_load", "affinity", "prefix"] {
        assert_eq!(run(policy, setup(&jobs, 4, 0.4)).unwrap(), run(policy, setup(&jobs, 4, 0.4)).unwrap(), "{policy}");
    }
    assert!(run("none", setup(&jobs, 4, 0.4)).is_err());
}

#[test]
fn what_is_local_to_another_rank_is_work_there() {
    // All on rank 0, but every expert on rank 1: rank 1's links and experts bound the step.
    let time = StepTime::new(Model::Full, 0.5, 2);
    let sends = Part { prefilled: 100.0, ..Part::default() };
    let receives = Part { received: 100.0, ..Part::default() };
    let seconds = time.fixed + 100.0 * (time.dense + time.expert + time.transfer);
    assert!((time.step(&[sends, receives]) - seconds).abs() < 1e-12);
    let local = Part { local: 100.0, ..sends };
    assert!((time.step(&[local, Part::default()]) - (seconds - 100.0 * time.transfer)).abs() < 1e-12);
}

#[test]
fn full_memory_queues_and_preempts_and_loses_nothing() {
    let jobs: Vec<Job> = (0..6).map(|_| plain_job(0.0, 100, 100, &[1.0])).collect();
    let full = Limits { kv_tokens: 450, ..LIMITS };
    let figures = run("round_robin", Setup { limits: full, ..setup(&jobs, 1, 0.0) }).unwrap();
    let roomy = run("round_robin", setup(&jobs, 1, 0.0)).unwrap();
    assert!(figures.preemptions > 0 && roomy.preemptions == 0, "{figures:?}");
    assert!(
        figures.throughput < roomy.throughput && figures.per_token_p99 > roomy.per_token_p99,
        "{figures:?} {roomy:?}"
    );
    // A prompt larger than the memory runs alone.
    let figures = run("round_robin", Setup { limits: Limits { kv_tokens: 50, ..LIMITS }, ..setup(&jobs, 1, 0.0) });
    assert_eq!(figures.unwrap().preemptions, 0);
}

#[test]
fn peers_follow_caches_until_queues_differ() {
    let request = Request { tokens: 1000, cached: Some(&[0, 512]), ..Request::default() };
    let rank = |pending_tokens, in_flight_requests| RankLoad {
        pending_tokens,
        in_flight_requests,
        in_flight_tokens: pending_tokens,
        ..RankLoad::IDLE
    };
    for (name, busy) in [("dynamo", rank(600, 1)), ("llm_d", rank(600, 1)), ("sglang_cache_aware", rank(0, 65))] {
        let peer = peers::policy(name).unwrap();
        let choice = |loads: [RankLoad; 2]| peer.choose(&request, &loads, 0).unwrap().rank;
        assert_eq!((choice([RankLoad::IDLE; 2]), choice([RankLoad::IDLE, busy])), (1, 0), "{name}");
    }
}
