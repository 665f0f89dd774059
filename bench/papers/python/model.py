"""The planner's own model, asked for predictions, and the fit of its constants.

Constants are fitted as logarithms, to the logarithms of measured over predicted times, TTFT and TPOT together, with
weights that make the least absolute error of the least squares. First one set for all rows, held near round values;
then one for each regime, held near the common one.
"""

import json
import subprocess

import numpy as np

# Name, round value, minimum, maximum, and how far it may move easily (standard deviation of the logarithm).
PARAMETERS = [
    ("dense_flops_share", 0.7, 0.05, 1.0, 0.4),
    ("expert_flops_share", 0.5, 0.03, 1.0, 0.5),
    ("attention_flops_share", 0.5, 0.03, 1.0, 0.5),
    ("weight_bandwidth_share", 0.8, 0.1, 1.0, 0.3),
    ("expert_bandwidth_share", 0.65, 0.05, 1.0, 0.5),
    ("cache_bandwidth_share", 0.7, 0.05, 1.0, 0.5),
    ("roofline_sharpness", 4.0, 0.7, 16.0, 0.5),
    ("link_bandwidth_share", 0.75, 0.05, 1.0, 0.5),
    ("collective_seconds", 5e-6, 1e-7, 2e-4, 1.0),
    ("layer_seconds", 3e-5, 1e-6, 5e-4, 0.8),
    ("moe_layer_seconds", 2e-5, 1e-7, 5e-4, 1.0),
    ("step_seconds", 1e-3, 1e-5, 3e-2, 1.0),
    ("sequence_seconds", 1e-5, 1e-7, 1e-3, 1.0),
    ("request_seconds", 3e-2, 1e-4, 3.0, 1.5),
    ("admission_steps", 1.0, 1e-2, 30.0, 1.0),
    ("burst_share", 0.1, 1e-4, 3.0, 1.5),
    ("expert_load_max_over_mean", 1.2, 1.0, 6.0, 0.4),
    ("expert_spread", 0.8, 0.05, 1.0, 0.5),
    ("prefill_interference", 1.0, 0.05, 3.0, 0.5),
]
FIXED = {"dispatch_bytes": 2.0, "combine_bytes": 2.0, "overlap_share": 0.0, "memory_share": 0.88, "step_tokens": 8192.0}
NAMES = [name for name, *_ in PARAMETERS]
ROUND, LEAST, MOST = (np.log([parameter[at] for parameter in PARAMETERS]) for at in (1, 2, 3))
FREEDOM = np.array([parameter[4] for parameter in PARAMETERS])
# Errors below this (in the logarithm) count quadratically, larger ones linearly.
EVEN = 0.05
STEP = 0.02


def constants(point):
    """Constants in the planner's form, from a point in logarithmic space."""
    return dict(zip(NAMES, np.exp(point).tolist())) | FIXED


class Planner:
    """`semmoe-bench-papers rows` with its rows: `first` and `last` rows of each regime must be neighbours."""

    def __init__(self, program, rows):
        self.process = subprocess.Popen([program, "rows", rows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, ranges):
        """`[first, end, constants]` to an array of [TTFT, TPOT], NaN where a layout cannot run."""
        self.process.stdin.write(json.dumps(ranges) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the planner ended: its message is above")
        return np.array([found or [np.nan, np.nan] for found in json.loads(line)])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def damped(jacobian, errors, weights, pull, towards):
    """The step of a weighted least-squares problem that is pulled towards a point."""
    left = jacobian.T @ (weights[:, None] * jacobian) + np.diag(pull)
    right = jacobian.T @ (weights * errors) + pull * towards
    return np.linalg.solve(left, right)


def step(point, jacobian, errors, mean, freedom, scale):
    """The next point: `errors` are logarithms of measured over predicted, NaN where unused."""
    used = ~np.isnan(errors)
    if not used.any():
        return mean.copy()
    weights = 1.0 / np.maximum(np.abs(errors[used]), EVEN)
    pull = scale / freedom**2
    move = damped(jacobian[used], errors[used], weights, pull, mean - point)
    return np.clip(point + np.clip(move, -0.7, 0.7), LEAST, MOST)


class Fit:
    """Fits over rows in regimes: `spans` are their ranges, `measured` an array of [TTFT, TPOT]."""

    def __init__(self, ask, spans, measured):
        self.ask, self.spans, self.log = ask, spans, np.log(measured)

    def predicted(self, points):
        """Logarithms of predictions with a point for each regime."""
        ranges = [[first, end, constants(point)] for (first, end), point in zip(self.spans, points)]
        return np.log(self.ask(ranges))

    def slopes(self, points):
        """Predictions, and their derivatives by each parameter."""
        base = self.predicted(points)
        moved = []
        for at in range(len(NAMES)):
            # Inwards, so that no constant leaves its domain.
            sign = np.where(points[:, at] + STEP > MOST[at], -1.0, 1.0)
            change = points.copy()
            change[:, at] += STEP * sign
            by_row = np.concatenate([np.full(end - first, s) for (first, end), s in zip(self.spans, sign)])
            moved.append((self.predicted(change) - base) / (STEP * by_row[:, None]))
        return base, np.stack(moved, axis=-1)

    def run(self, train, common_steps, own_steps, start=None):
        """A point for each regime from the rows that `train` marks, and the common point."""
        common = ROUND.copy() if start is None else start.copy()
        for _ in range(common_steps):
            base, slopes = self.slopes(np.tile(common, (len(self.spans), 1)))
            errors = np.where(train[:, None], self.log - base, np.nan)
            common = step(common, slopes.reshape(-1, len(NAMES)), errors.ravel(), ROUND, FREEDOM, 10.0)
        points = np.tile(common, (len(self.spans), 1))
        for _ in range(own_steps):
            base, slopes = self.slopes(points)
            errors = np.where(train[:, None], self.log - base, np.nan)
            for at, (first, end) in enumerate(self.spans):
                own = slopes[first:end].reshape(-1, len(NAMES))
                points[at] = step(points[at], own, errors[first:end].ravel(), common, FREEDOM, 20.0)
        return points, common
