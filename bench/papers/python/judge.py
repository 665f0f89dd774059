"""Splits of rows, the fit of residuals, and figures of errors."""

import numpy as np

FOLDS = 5
# Features whose slopes may differ between labels: level, requests in flight, prompt.
OWN = 3


def groups(keys):
    """A number for each row, the same for rows that share any of their keys: duplicates of one measurement stay with
    the configuration that they were recorded under twice."""
    parent, owner = list(range(len(keys))), {}

    def root(at):
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    for at, own in enumerate(keys):
        for key in own:
            parent[root(at)] = root(owner.setdefault(key, at))
    return np.array([root(at) for at in range(len(keys))])


def folds(group, seed=1):
    """A fold for each row, whole groups to the fold with the fewest rows, largest first, ties by a seeded order."""
    names, sizes = np.unique(group, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, of = np.zeros(FOLDS), {}
    for at in order:
        of[names[at]] = int(np.argmin(filled))
        filled[of[names[at]]] += sizes[at]
    return np.array([of[name] for name in group])


def features(rows):
    """Features of the residuals: layout and load, each near 0 on average."""
    columns = [[1.0, np.log(r.concurrency / r.decode[2]) - 3, np.log(r.input) - 7.5, np.log(r.output) - 7,
                np.log(r.decode[1]) - 1, np.log(r.decode[2]), np.log(r.decode[4]),
                np.log(r.arriving / r.prefill[2]) - 3] for r in rows]
    return np.array(columns)


def residual_fit(x, labels, errors, train, common=30.0, own=30.0, rounds=4):
    """Residuals that a ridge regression expects in every row: slopes for all rows, and for each label deviations from
    them that must pay for themselves. Least absolute errors by reweighting."""
    blocks, pull = [x], [np.full(x.shape[1], common)]
    for name in sorted(set(labels)):
        blocks.append(x[:, :OWN] * np.array([label == name for label in labels])[:, None])
        pull.append(np.full(OWN, own))
    design, pull = np.concatenate(blocks, axis=1), np.concatenate(pull)
    used = train & ~np.isnan(errors)
    coefficients = np.zeros(design.shape[1])
    for _ in range(rounds):
        left = errors[used] - design[used] @ coefficients
        weights = 1.0 / np.maximum(np.abs(left), 0.05)
        scaled = design[used] * weights[:, None]
        coefficients = np.linalg.solve(scaled.T @ design[used] + np.diag(pull), scaled.T @ errors[used])
    return design @ coefficients


def held_out(x, labels, errors, fold):
    """The residuals of every row predicted by the fit on other folds."""
    expected = np.zeros(len(errors))
    for name in np.unique(fold):
        expected[fold == name] = residual_fit(x, labels, errors, fold != name)[fold == name]
    return expected


def figures(predicted, measured, used):
    """Median and mean of the relative errors."""
    errors = np.abs(predicted[used] / measured[used] - 1.0)
    return float(np.median(errors)), float(np.mean(errors))
