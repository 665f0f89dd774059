//! Even groups on recorded routing: how close the greedy rule comes to the exact one, and how much it relieves the
//! fullest link.

use std::ops::ControlFlow;

use semmoe_tables::Attention;

use super::*;
use crate::fixtures::{profile_of, provenance, recorded};
use crate::input::options::{EvalOptions, SolveOptions};
use crate::solve::solve;
use crate::step::transport::Transport;
use crate::{EvalInput, evaluate};

const GROUPS: u16 = 4;
/// A share as an integer.
const ONE: f64 = (1u64 << 40) as f64;

fn solved() -> Tables {
    let trace = recorded("profile.trace.safetensors");
    let options =
        SolveOptions { starts: 2, threads: 2, bounds: None, ..SolveOptions::new(GROUPS, Attention::Tp, provenance()) };
    solve(&profile_of(&trace), Some(&trace), &options, &mut |_| ControlFlow::Continue(())).unwrap().tables
}

/// The total share that the rows of a layer keep, and the maximum that any even split keeps.
fn kept(tables: &Tables, layer: LayerIdx, rows: &[Row<'_>]) -> [f64; 2] {
    let mut even = EvenGroups::new(GROUPS);
    let mut known = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        let token = TokenId::new(row.request.token_ids()[row.position]);
        let before = row.main.before(layer.index()).map(|(older, newer)| (older.into(), newer.into()));
        even.push(|shares| {
            let likely = tables.group_shares(layer, token, before, shares)?;
            known.push((at, shares.to_vec()));
            Some(likely)
        });
    }
    even.settle();
    let kept = known.iter().map(|(row, shares)| shares[usize::from(even.groups()[*row])]).sum();
    let profit: Vec<i64> = known.iter().flat_map(|(_, shares)| shares).map(|share| (share * ONE) as i64).collect();
    let capacity = vec![rows.len().div_ceil(GROUPS.into()) as u64; GROUPS.into()];
    let exact = Transport { mass: &vec![1; known.len()], profit: &profit, capacity: &capacity }.solve(None);
    [kept, exact.primal as f64 / ONE]
}

#[test]
fn even_parts_take_bytes_off_the_fullest_link_and_keep_what_an_exact_split_keeps() {
    let (tables, trace) = (solved(), recorded("serve.trace.safetensors"));
    let rows = trace.iter().flat_map(|request| (0..request.token_ids().len()).map(move |at| (request, at)));
    let rows: Vec<Row<'_>> =
        rows.filter_map(|(request, at)| Row::new(tables.placement(), request, at, Half::default())).collect();
    for (step_tokens, most) in [(16, 0.75), (64, 0.8), (512, 0.88)] {
        let options = EvalOptions { step_tokens: Some(step_tokens), ..EvalOptions::default() };
        let judged = evaluate(&tables, EvalInput::Trace(&trace), &options).unwrap();
        let figures = judged.steps.unwrap();
        let left = figures.fullest_link / figures.fullest_link_wanted;
        assert!(left < most, "steps of {step_tokens}: {left} of the rows over the fullest link, {judged:?}");

        let [mut sum, mut greatest] = [0.0; 2];
        for step in rows.chunks(step_tokens) {
            for layer in 0..tables.placement().layers() {
                let [kept, exact] = kept(&tables, LayerIdx::new(layer as u16), step);
                assert!(kept <= exact + 1e-6);
                (sum, greatest) = (sum + kept, greatest + exact);
            }
        }
        assert!(sum > 0.99 * greatest, "steps of {step_tokens}: {}", sum / greatest);
    }
}

#[test]
fn links_carry_what_their_tokens_send_and_receive() {
    let tables = solved();
    let hosts = &Hosts::new(&tables, None).unwrap();
    let mut links = Links::new(hosts.places);
    let on = |group: usize| (0..hosts.experts).filter(move |&expert| hosts.is_local(hosts.column(0, expert), group));
    let experts = |groups: &[usize]| groups.iter().flat_map(|&group| on(group).take(2)).collect::<Vec<_>>().into_iter();
    // Three tokens on 0 and one on 1: SRS brings 3 x 3 rows to 0. In dispatch 0 sends two rows and 3 receives three.
    for (place, groups) in [(0, &[0, 3][..]), (0, &[3]), (0, &[0]), (1, &[1, 3])] {
        links.add(hosts, 0, experts(groups), place);
    }
    assert_eq!(links.fullest(), 2 * (9 + 3));
    links.clear();
    // All places equal, and nothing to dispatch: each place receives 3 rows in SRS, and sends 3.
    for place in 0..4 {
        links.add(hosts, 0, experts(&[place]), place);
    }
    assert_eq!(links.fullest(), 2 * 3);
    // One more, from 0 to all others: 0 has two tokens, and sends three rows.
    links.add(hosts, 0, experts(&[1, 2, 3]), 0);
    assert_eq!(links.fullest(), 2 * (6 + 3));
}
