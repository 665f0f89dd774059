#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to aiconfigurator's measured rows, and judges them on rows that were held out.

    fit.py --program ../../../target/release/semmoe-bench-papers --sample silicon_sample.csv --configs model_configs \
        --theirs aic.csv --work /tmp/fit --out ../../../planner/fitted/aiconfigurator.json --report report.md

README.md has the whole recipe. Nothing is downloaded here.
"""

import argparse
import csv
import datetime
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np

import judge
import model
import rows as measured_rows

COMMON_STEPS, OWN_STEPS = 5, 4
# Fewer rows than these held out say nothing about a regime, and constants that miss half of them by more than half are
# no calibration.
LEAST_ROWS, LARGEST_MEDIAN = 20, 0.5
# Must equal `Constants::uncalibrated`.
UNCALIBRATED = dict(
    roofline_sharpness=8.0, moe_layer_seconds=0.0, sequence_seconds=0.0, request_seconds=5e-3, admission_steps=0.0,
    burst_share=0.0, expert_spread=1.0)


def spans_of(rows):
    """Ranges of consecutive rows of one regime."""
    spans, at = [], 0
    for _, members in groupby(rows, key=lambda row: row.regime()):
        spans.append((at, at + len(list(members))))
        at = spans[-1][1]
    return spans


def held_out(fits, fold):
    """Logarithms of predictions for each row, by constants fitted to the other folds."""
    names = sorted(set(fold.tolist()))

    def one(at):
        fit = fits[at % len(fits)]
        return [(name, fit.predicted(fit.run(fold != name, COMMON_STEPS, OWN_STEPS)[0]))
                for name in names[at::len(fits)]]

    result = np.zeros_like(fits[0].log)
    with ThreadPoolExecutor(len(fits)) as pool:
        for found in pool.map(one, range(len(fits))):
            for name, predicted in found:
                result[fold == name] = predicted[fold == name]
                print("held out", name, int((fold == name).sum()), file=sys.stderr, flush=True)
    return result


def read_theirs(path, rows):
    """aiconfigurator's predictions, NaN where it has none."""
    with open(path, newline="") as file:
        known = {line["id"]: (float(line["ttft_ms"]) / 1e3, float(line["tpot_ms"]) / 1e3) for line in csv.DictReader(file)}
    return np.array([known.get(row.id, (np.nan, np.nan)) for row in rows])


def with_residuals(rows, predicted, log, fold, used):
    """Predictions corrected by the fit of their residuals on other folds: the same for every predictor."""
    x, labels = judge.features(rows), [str(row.regime()) for row in rows]
    columns = []
    for at in (0, 1):
        errors = np.where(used, log[:, at] - predicted[:, at], np.nan)
        columns.append(predicted[:, at] + judge.held_out(x, labels, errors, fold))
    return np.stack(columns, axis=1)


def table(title, columns, log, used):
    """Lines of a report: TTFT and TPOT, median and mean, of each column."""
    lines = [f"{title}: {int(used.sum())} rows", "| predictor | TPOT median | TPOT MAPE | TTFT median | TTFT MAPE |",
             "| --- | --- | --- | --- | --- |"]
    for name, predicted in columns:
        ttft, tpot = (judge.figures(np.exp(predicted[:, at]), np.exp(log[:, at]), used) for at in (0, 1))
        lines.append(f"| {name} | " + " | ".join(f"{100 * value:.1f}%" for value in (*tpot, *ttft)) + " |")
    return lines + [""]


def fitted_file(rows, spans, points, predicted, log, divides, sample):
    """The fitted constants of each regime with their errors on rows held out, those whose degrees divide the heads."""
    regimes = []
    for (first, end), point in zip(spans, points):
        used = divides & (np.arange(len(rows)) >= first) & (np.arange(len(rows)) < end)
        if used.sum() < LEAST_ROWS or rows[first].split:
            continue
        gpu, engine, weights, _ = rows[first].regime()
        errors = {}
        for at, name in enumerate(("ttft", "tpot")):
            median, mean = judge.figures(np.exp(predicted[:, at]), np.exp(log[:, at]), used)
            errors[name] = {"rows": int(used.sum()), "median": round(median, 4), "mean": round(mean, 4)}
        if errors["tpot"]["median"] > LARGEST_MEDIAN:
            continue
        constants = {name: float(f"{value:.4g}") for name, value in model.constants(point).items()}
        regimes.append({"engine": engine, "gpu": gpu, "weights": weights, "constants": constants, **errors})
    return {
        "source": f"{sample} of aiconfigurator 0.12.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "licence": "Apache-2.0",
        "script": "bench/papers/python/fit.py",
        "date": datetime.date.today().isoformat(),
        "regimes": regimes,
    }


def splits(rows):
    """A fold for each row: by configuration, by model."""
    group = judge.groups([[row.configuration(), (round(row.ttft, 7), round(row.tpot, 8))] for row in rows])
    families = sorted({row.family() for row in rows})
    return {"configurations held out": judge.folds(group),
            "models held out": np.array([families.index(row.family()) for row in rows])}


def report(rows, log, found, theirs, divides):
    """The figures as Markdown."""
    lines = [f"{len(rows)} complete rows, {sum(row.repaired for row in rows)} layouts repaired", ""]
    everything, both = np.ones(len(rows), bool), ~np.isnan(theirs[:, 0])
    subsets = [("all", everything), ("heads divide", divides), ("aiconfigurator predicts", both)]
    for title, fold in splits(rows).items():
        ours = [("uncalibrated", found["uncalibrated"]), ("fitted constants", found[title])]
        for name, used in subsets:
            predictors = ours + ([("aiconfigurator", theirs)] if used is both else [])
            columns = []
            for predictor, predicted in predictors:
                columns.append((predictor, predicted))
                columns.append((f"{predictor}, residuals fitted", with_residuals(rows, predicted, log, fold, used)))
            if used.any():
                lines += table(f"{title}, {name}", columns, log, used)
    return lines


def fit_and_predict(args, rows, log):
    """Fits on all rows, and on all but each fold; the points of all rows, and logarithms of predictions by name."""
    path = measured_rows.write_inputs(rows, args.configs, args.work)
    spans = spans_of(rows)
    planners = [model.Planner(args.program, str(path)) for _ in range(args.processes)]
    fits = [model.Fit(planner.ask, spans, np.exp(log)) for planner in planners]
    found = {"uncalibrated": np.log(planners[0].ask([[0, len(rows), model.constants(model.ROUND) | UNCALIBRATED]]))}
    found["points"] = fits[0].run(np.ones(len(rows), bool), COMMON_STEPS, OWN_STEPS)[0]
    for title, fold in splits(rows).items():
        found[title] = held_out(fits, fold)
    for planner in planners:
        planner.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("sample", "configs", "work"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--program", help="`semmoe-bench-papers`; without it the predictions in --work are judged again")
    parser.add_argument("--out", help="where the fitted constants go")
    parser.add_argument("--theirs", help="aiconfigurator's predictions, by aic.py")
    parser.add_argument("--report", help="a Markdown file of the figures")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    every = sorted(measured_rows.read(args.sample), key=lambda row: row.regime())
    rows = [row for row in every if row.complete]
    log = np.log([[row.ttft, row.tpot] for row in rows])
    saved = Path(args.work) / "predictions.npz"
    if args.program:
        found = fit_and_predict(args, rows, log)
        np.savez(saved, **found)
    found = dict(np.load(saved))
    divides = np.array(measured_rows.divides(rows, args.configs))
    theirs = np.log(read_theirs(args.theirs, rows)) if args.theirs else np.full_like(log, np.nan)
    if args.out:
        document = fitted_file(rows, spans_of(rows), found["points"], found["configurations held out"], log, divides,
                               Path(args.sample).name)
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    lines = report(rows, log, found, theirs, divides)
    text = "\n".join([f"{len(every)} rows", *lines])
    print(text)
    if args.report:
        Path(args.report).write_text(text + "\n")


if __name__ == "__main__":
    main()
