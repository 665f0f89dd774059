//! Plans that the search finds, rejects and orders.

use super::*;
use crate::tests::fixtures::{deepseek_v3, h200, qwen3_235b};

fn workload(rate: f64, limits: &str) -> Workload {
    let text = format!("requests_per_second = {rate}\ninput_tokens = 1024\noutput_tokens = 512\n{limits}");
    Workload::from_toml("workload.toml", &text).unwrap()
}

fn plan(shape: &ModelShape, cluster: &Cluster, workload: &Workload) -> Plan {
    search(&Question { shape, cluster, workload, constants: &Constants::uncalibrated() }).unwrap()
}

#[test]
fn every_strategy_is_ranked_or_rejected_with_its_reason() {
    let (shape, cluster) = (qwen3_235b(), h200(2));
    let plan = plan(&shape, &cluster, &workload(4.0, ""));
    // Units of 1, 2, 4, 8 and 16 GPUs: 1 + 5 + 14 + 30 + 55 strategies.
    assert_eq!((plan.strategies, plan.ranked.len() + plan.rejected.len()), (105, 105));
    assert!(plan.rejected.iter().all(|rejected| !matches!(rejected.reason, Infeasible::Block { .. })));
    let one = plan.rejected.iter().find(|rejected| rejected.layout.gpus() == 1).unwrap();
    assert!(one.reason.to_string().starts_with("weights need 470.2 GB per GPU"), "{}", one.reason);
    assert!(plan.ranked.windows(2).all(|p| p[0].at_load.request_seconds <= p[1].at_load.request_seconds));
    for candidate in &plan.ranked {
        assert!((candidate.at_load.requests_per_second / 4.0 - 1.0).abs() < 1e-6);
        assert_eq!(candidate.layout.gpus() * candidate.units, 16);
        let little = candidate.at_load.concurrency * candidate.units as f64 / (4.0 * 512.0);
        assert!((candidate.at_load.itl / little - 1.0).abs() < 1e-6, "Little's law");
    }
}

#[test]
fn eight_bit_blocks_and_overload_are_named() {
    let (shape, cluster) = (deepseek_v3(), h200(2));
    let few = plan(&shape, &cluster, &workload(0.1, ""));
    let blocks = few.rejected.iter().filter(|rejected| matches!(rejected.reason, Infeasible::Block { .. })).count();
    assert_eq!(blocks, 0, "2048 rows over 16 ranks are one block each");
    let many = plan(&shape, &cluster, &workload(1e6, ""));
    assert!(many.ranked.is_empty());
    assert!(
        many.rejected
            .iter()
            .any(|rejected| rejected.reason.to_string().contains("requests/s arrive at a unit, which serves at most"))
    );
}

/// Within limits, a higher rate wins; plans within them precede all others.
#[test]
fn limits_order_by_what_is_served_within_them() {
    let (shape, cluster) = (qwen3_235b(), h200(2));
    let plan = plan(&shape, &cluster, &workload(2.0, "ttft_ms = 800\nitl_ms = 20\n"));
    let kept = plan.ranked.iter().take_while(|candidate| candidate.within_limits).count();
    assert!(kept > 0 && kept < plan.ranked.len());
    assert!(plan.ranked[kept..].iter().all(|candidate| !candidate.within_limits));
    let rate = |candidate: &Candidate| candidate.best.unwrap().requests_per_second;
    assert!(plan.ranked[..kept].windows(2).all(|pair| rate(&pair[0]) >= rate(&pair[1])));
    let best = plan.ranked[0].best.unwrap();
    assert!(best.ttft <= 0.8 && best.itl <= 0.02 && best.requests_per_second >= 2.0);
}

/// The class with priority meets a limit that the other one misses.
#[test]
fn classes_are_judged_apart() {
    let classes = |first: f64, second: f64| {
        let class = |name, limit| format!("[[classes]]\nname = \"{name}\"\nshare = 0.5\nttft_ms = {limit}\n");
        workload(6.0, &(class("chat", first) + &class("batch", second)))
    };
    let (shape, cluster) = (qwen3_235b(), h200(1));
    let kept = |workload: &Workload| {
        plan(&shape, &cluster, workload).ranked.iter().filter(|candidate| candidate.within_limits).count()
    };
    let loose = kept(&classes(1e6, 1e6));
    assert!(loose > 0);
    assert!(kept(&classes(400.0, 1e6)) >= kept(&classes(1e6, 400.0)));
    assert_eq!(kept(&classes(0.001, 1e6)), 0);
}

#[test]
fn no_point_of_the_front_is_beaten() {
    let (shape, cluster) = (qwen3_235b(), h200(2));
    let plan = plan(&shape, &cluster, &workload(2.0, ""));
    assert!(plan.front.len() > 3);
    let rising = |pair: &[FrontPoint]| {
        pair[0].user_tokens_per_second > pair[1].user_tokens_per_second
            && pair[0].gpu_tokens_per_second < pair[1].gpu_tokens_per_second
    };
    assert!(plan.front.windows(2).all(rising));
}
