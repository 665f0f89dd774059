//! Many switches leak nothing: memory, mappings, descriptors, counts. Runs alone in its process, which it measures.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use serde_json::json;
use support::{Unit, golden, greedy};

/// Resources that this process holds.
#[derive(Debug)]
struct Held {
    mappings: usize,
    descriptors: usize,
    resident_kb: usize,
}

impl Held {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            resident_kb: resident.trim().strip_suffix(" kB").unwrap().parse().unwrap(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_switches_leave_memory_and_counts_flat() {
    let unit = Unit::start(2);
    let prompt = &golden()[0];
    let mut before = None;
    for epoch in 1..=220 {
        let to = if epoch % 2 == 1 { "dp-tp" } else { "ep" };
        assert_eq!(unit.ok("/switch", &json!({"to": to, "if_epoch": epoch - 1})).await["epoch"], epoch);
        if epoch % 20 == 0 {
            let body = greedy(&prompt["input_ids"], 16);
            assert_eq!(unit.ok("/generate", &body).await["output_ids"], prompt["greedy_16"]);
        }
        if epoch == 20 {
            before = Some(Held::now());
        }
    }
    let (before, after) = (before.unwrap(), Held::now());
    // Threads and connections vary slightly; a leak would add one per switch.
    assert!(after.mappings < before.mappings + 50, "{before:?} {after:?}");
    assert!(after.descriptors < before.descriptors + 20, "{before:?} {after:?}");
    assert!(after.resident_kb < before.resident_kb + 16_384, "{before:?} {after:?}");
    let metrics = unit.metrics().await;
    assert_eq!(metrics.sum("semmoe_switch_total", &[("outcome", "committed")]), 220);
    assert_eq!(metrics.sum("semmoe_requests_in_flight", &[]), 0);
    unit.stop(0);
}
