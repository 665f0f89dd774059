//! Exact linear assignment, with and without capacities, for the baselines that need one.

/// Finds the column of each row that minimises the sum of `cost` [n, n], by the Hungarian algorithm with potentials in
/// O(n^3).
pub(crate) fn assign(n: usize, cost: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    // Rows and columns are 1-based; 0 marks a free one.
    let (mut row_price, mut column_price) = (vec![0.0; n + 1], vec![0.0; n + 1]);
    let mut row_of = vec![0usize; n + 1];
    for row in 1..=n {
        row_of[0] = row;
        let mut least = vec![f64::INFINITY; n + 1];
        let mut from = vec![0usize; n + 1];
        let mut done = vec![false; n + 1];
        let mut column = 0;
        while row_of[column] != 0 {
            done[column] = true;
            let (at, mut step, mut next) = (row_of[column], f64::INFINITY, 0);
            for other in (1..=n).filter(|&other| !done[other]) {
                let reduced = cost(at - 1, other - 1) - row_price[at] - column_price[other];
                if reduced < least[other] {
                    least[other] = reduced;
                    from[other] = column;
                }
                if least[other] < step {
                    step = least[other];
                    next = other;
                }
            }
            for other in 0..=n {
                if done[other] {
                    row_price[row_of[other]] += step;
                    column_price[other] -= step;
                } else {
                    least[other] -= step;
                }
            }
            column = next;
        }
        while column != 0 {
            row_of[column] = row_of[from[column]];
            column = from[column];
        }
    }
    let mut column_of = vec![0; n];
    (1..=n).for_each(|column| column_of[row_of[column] - 1] = column - 1);
    column_of
}

/// Assigns n items to groups, n / groups items each, maximising the sum of `gain(item, group)`.
pub(crate) fn assign_groups(n: usize, groups: usize, gain: impl Fn(usize, usize) -> f64) -> Vec<u16> {
    let each = n / groups;
    assign(n, |item, slot| -gain(item, slot / each)).into_iter().map(|slot| (slot / each) as u16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_order(n: usize, taken: &mut Vec<usize>, value: &dyn Fn(&[usize]) -> f64, best: &mut f64) {
        if taken.len() == n {
            *best = best.min(value(taken));
            return;
        }
        for next in 0..n {
            if !taken.contains(&next) {
                taken.push(next);
                every_order(n, taken, value, best);
                taken.pop();
            }
        }
    }

    #[test]
    fn equals_brute_force() {
        let mut random = fastrand::Rng::with_seed(3);
        for n in 1..7 {
            for _ in 0..20 {
                let cost: Vec<f64> = (0..n * n).map(|_| f64::from(random.i32(-9..9))).collect();
                let value = |order: &[usize]| order.iter().enumerate().map(|(i, &j)| cost[i * n + j]).sum::<f64>();
                let mut best = f64::INFINITY;
                every_order(n, &mut Vec::new(), &value, &mut best);
                assert!((value(&assign(n, |i, j| cost[i * n + j])) - best).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn groups_are_full() {
        let groups = assign_groups(8, 4, |item, group| ((item * 5 + group * 3) % 7) as f64);
        assert!((0..4).all(|group| groups.iter().filter(|&&g| g == group).count() == 2));
    }
}
