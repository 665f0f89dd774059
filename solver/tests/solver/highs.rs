//! Small instances whose optimum HiGHS has proved (`highs/make.py`): co-clustering reaches it, and no bound is below
//! it. `transport_tests.rs` has the instances of the unit step.

use crate::common::{model, options, profile_of, provenance, quiet};
use semmoe_solver::{BoundOptions, SolveOptions, solve};
use semmoe_tables::{Attention, Profile, TraceBuilder};
use serde_json::Value;

fn numbers<T: TryFrom<u64, Error: std::fmt::Debug>>(list: &Value) -> Vec<T> {
    list.as_array().unwrap().iter().map(|number| T::try_from(number.as_u64().unwrap()).unwrap()).collect()
}

fn profile(instance: &Value) -> Profile {
    let (ids, layers) = (numbers::<u32>(&instance["ids"]), instance["routes"].as_array().unwrap());
    let experts: u16 = instance["experts"].as_u64().unwrap().try_into().unwrap();
    let mut trace = TraceBuilder::new(model(layers.len() as u16, experts, 2, 16), provenance()).unwrap();
    let routes: Vec<u16> =
        (0..ids.len()).flat_map(|at| layers.iter().flat_map(move |layer| numbers::<u16>(&layer[at]))).collect();
    trace.push(&ids, ids.len() as u32, &routes, None).unwrap();
    profile_of(&trace.finish().unwrap())
}

#[test]
fn co_clustering_reaches_the_optimum_and_no_bound_is_below_it() {
    let instances: Value = serde_json::from_str(include_str!("../highs/instances.json")).unwrap();
    let instances = instances["clusters"].as_array().unwrap();
    assert_eq!(instances.len(), 16);
    for (at, instance) in instances.iter().enumerate() {
        let groups = instance["groups"].as_u64().unwrap() as u16;
        let options = SolveOptions {
            starts: 32,
            expert_load_limit: 1000.0,
            bounds: Some(BoundOptions::default()),
            ..options(groups, Attention::Dp)
        };
        let report = solve(&profile(instance), None, &options, &mut quiet).unwrap().report;
        let optimum = instance["optimum"].as_f64().unwrap();
        // The dual value is that of the placement found, with tokens split as in the program.
        let found = report.lar_bound * report.activations as f64;
        assert!((found - optimum).abs() < 1e-4, "instance {at}: {found} is not {optimum}");
        assert!(report.lar <= report.lar_bound + 1e-12, "{report:?}");
        for bound in [report.bound_spectral.unwrap(), report.bound_sdp.unwrap()] {
            assert!(bound * report.activations as f64 >= optimum - 1e-6, "instance {at}: {bound} excludes {optimum}");
        }
    }
}
