//! The program under two limits: HiGHS' optimum on fixed cases, and its proof on random ones.

use proptest::prelude::*;

use super::*;

/// A division within the limits, checked against the value that its prices prove.
fn check(requests: Requests<'_>, margins: Margins) -> Division {
    let found = requests.divide(margins);
    let units = requests.tokens.len() as f64;
    let all: f64 = requests.tokens.iter().sum();
    let ranks = requests.ranks as f64;
    assert!(found.token_price.iter().chain(&found.sequence_price).all(|price| *price >= 0.0), "{found:?}");
    for row in found.parts.chunks_exact(requests.ranks) {
        assert!(row.iter().all(|part| *part >= 0.0) && (row.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{row:?}");
    }
    for rank in 0..requests.ranks {
        let of_rank = || found.parts.iter().skip(rank).step_by(requests.ranks);
        let tokens: f64 = of_rank().zip(requests.tokens).map(|(part, tokens)| part * tokens).sum();
        assert!(tokens <= (1.0 + margins.tokens + 1e-9) * all / ranks, "{tokens} of {all}");
        let sequences: f64 = of_rank().sum();
        assert!(sequences <= (1.0 + margins.sequences + 1e-9) * units / ranks, "{sequences} of {units}");
    }
    let scale = found.dual.abs().max(1.0);
    assert!(found.primal <= found.dual + 1e-9 * scale && found.dual - found.primal <= 1e-6 * scale, "{found:?}");
    found
}

#[test]
fn highs_agrees() {
    // scipy.optimize.linprog(method="highs") over x[U, R], from the same three formulas.
    for (units, ranks, tokens, sequences, optimum) in [
        (1, 3, 0.05, 0.1, 17.85),
        (7, 2, 0.05, 0.1, 26823.85),
        (12, 3, 0.02, 0.5, 40172.9),
        (20, 4, 0.05, 0.1, 75420.7),
        (25, 4, 1.0, 0.05, 91049.6875),
        (40, 5, 0.05, 0.1, 159672.8491),
        (60, 8, 0.01, 0.01, 250490.0098),
        (9, 1, 0.05, 0.1, 22631.0),
    ] {
        let of_unit: Vec<f64> = (0..units).map(|unit| (1 + unit * 7919 % 97) as f64).collect();
        let value = |at: usize| {
            let (unit, rank) = (at / ranks, at % ranks);
            of_unit[unit] * ((unit * 31 + rank * 17 + unit * rank * 13) % 101) as f64
        };
        let value: Vec<f64> = (0..units * ranks).map(value).collect();
        let found = check(Requests { tokens: &of_unit, value: &value, ranks }, Margins { tokens, sequences });
        for figure in [found.primal, found.dual] {
            assert!((figure / optimum - 1.0).abs() < 1e-6, "{units} x {ranks}: {figure}, not {optimum}");
        }
    }
}

proptest! {
    #[test]
    fn prices_prove_every_division(
        ranks in 1usize..7,
        rows in proptest::collection::vec((1u32..5000, proptest::collection::vec(0u32..100, 6)), 1..60),
        margins in (0.001f64..0.5, 0.001f64..0.5),
    ) {
        let tokens: Vec<f64> = rows.iter().map(|row| f64::from(row.0)).collect();
        let value: Vec<f64> = rows.iter()
            .flat_map(|(tokens, shares)| shares[..ranks].iter().map(|share| f64::from(*tokens) * f64::from(*share)))
            .collect();
        let margins = Margins { tokens: margins.0, sequences: margins.1 };
        let requests = Requests { tokens: &tokens, value: &value, ranks };
        let found = check(requests, margins);
        // Looser limits cannot lower the value.
        let wider = check(requests, Margins { tokens: 2.0 * margins.tokens, ..margins });
        prop_assert!(wider.dual >= found.primal - 1e-6 * found.dual);
    }
}
