//! Bounds over all placements: above what a solve reaches, in every scope, which the report states.

use std::ops::ControlFlow;

use crate::common::{options, planted, profile_of, quiet, solve_trace};
use semmoe_solver::{BoundOptions, BoundScope, SolveOptions, bounds, solve};
use semmoe_tables::Attention;

#[test]
fn every_scope_bounds_what_a_solve_reaches() {
    let trace = planted(4, 300, 0.8, 11);
    let profile = profile_of(&trace);
    let work = BoundOptions::default();
    // 3 layers of 16 experts.
    let scopes = [
        (BoundScope::Full, BoundOptions { joint_columns: 48, ..work }),
        (BoundScope::JointSpectral, BoundOptions { joint_columns: 47, joint_spectral_columns: 48, ..work }),
        (BoundScope::PerLayer, BoundOptions { joint_columns: 0, joint_spectral_columns: 47, ..work }),
    ];
    let mut last = 0.0;
    for (scope, work) in scopes {
        let options = SolveOptions { bounds: Some(work), ..options(4, Attention::Dp) };
        let report = solve(&profile, Some(&trace), &options, &mut quiet).unwrap().report;
        let found = bounds(&profile, Some(&trace), &options).unwrap();
        assert_eq!((found.scope, found.layers.len()), (scope, 3));
        assert_eq!((report.bound_spectral, report.bound_sdp), (Some(found.spectral), Some(found.sdp)));
        assert_eq!(report.gap, Some(1.0 - report.lar / found.best()));
        assert!(report.gap.unwrap() > 0.0 && found.best() >= report.lar_bound, "{report:?}");
        assert_eq!(report.bound_note.is_some(), scope != BoundScope::Full);
        assert!(found.best() >= last, "less work bounds no tighter");
        last = found.best();
    }
}

#[test]
fn bounds_are_the_same_for_any_number_of_threads() {
    let trace = planted(4, 100, 0.6, 12);
    let profile = profile_of(&trace);
    for attention in [Attention::Dp, Attention::Tp] {
        let all = [1, 2, 5].map(|threads| {
            let options = SolveOptions { threads, ..options(4, attention) };
            bounds(&profile, Some(&trace), &options).unwrap()
        });
        assert!(all[0] == all[1] && all[0] == all[2], "{all:?}");
        assert_eq!(all[0].scope, BoundScope::Full);
    }
}

#[test]
fn a_report_without_bounds_says_why() {
    let trace = planted(4, 60, 0.6, 13);
    let options = options(4, Attention::Dp);
    let report = solve_trace(&trace, &options).unwrap().report;
    assert!(report.gap.is_none() && report.bound_sdp.is_none());
    assert_eq!(report.bound_note.as_deref(), Some("not requested"));
    let options = SolveOptions { bounds: Some(BoundOptions::default()), ..options };
    let stopped = solve(&profile_of(&trace), None, &options, &mut |_| ControlFlow::Break(())).unwrap().report;
    assert!(stopped.gap.is_none() && stopped.bound_note.unwrap().contains("ended early"));
}
