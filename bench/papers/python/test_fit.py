"""`python3 -m unittest discover bench/papers/python`: the pure parts, on a few of the measured rows. Needs numpy only."""

import json
import math
import tempfile
import unittest
from pathlib import Path

import numpy as np

import fit
import judge
import model
import rows
import tables

FIXTURE = Path(__file__).parent / "fixture" / "silicon_sample.csv"


def stand_in(ranges):
    """A planner whose times are simple functions of its constants."""
    found = []
    for first, end, given in ranges:
        size = np.arange(first, end) + 1.0
        ttft = given["request_seconds"] + 0.01 * size / given["dense_flops_share"]
        tpot = given["step_seconds"] + 0.002 * size / given["weight_bandwidth_share"]
        found.append(np.stack([ttft, tpot], axis=1))
    return np.concatenate(found)


class Rows(unittest.TestCase):
    def setUp(self):
        self.rows = {row.id: row for row in rows.read(FIXTURE)}

    def find(self, part):
        return next(row for name, row in self.rows.items() if part in name)

    def test_rows_are_read_as_recorded(self):
        row = self.find("dsr1_h200_sglang_fp8_agg_1024x1024_c64")
        self.assertEqual((row.decode, row.concurrency, row.weights, row.cache), ((1, 8, 1, 8, 1), 64, ("fp8", "fp8"), "bf16"))
        self.assertAlmostEqual(row.tpot, 0.03298719256861589)
        self.assertEqual(row.regime(), ("H200", "sglang", "fp8", "together"))

    def test_degrees_that_were_multiplied_are_repaired(self):
        repaired = {row.decode for row in self.rows.values() if row.repaired}
        self.assertEqual(repaired, {(1, 8, 1, 1, 8), (1, 1, 8, 1, 8)})

    def test_rows_without_a_number_of_units_are_marked(self):
        self.assertEqual([row.complete for row in self.rows.values() if row.split], [True, True, False])

    def test_what_is_no_row_is_named(self):
        lines = FIXTURE.read_text().splitlines()
        cells = lines[1].split(",")
        for bad in ("nan", "-3.0", "0", "x", "1e300", ""):
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write("\n".join([lines[0], ",".join([*cells[:-1], bad])]))
                file.flush()
                with self.assertRaisesRegex(ValueError, f"row {cells[0]}"):
                    rows.read(file.name)


class Judge(unittest.TestCase):
    def test_duplicates_stay_on_one_side(self):
        """The file has one measurement under two ids, with two configurations before the repair."""
        group = judge.groups([["a", 1], ["b", 1], ["b", 2], ["c", 3]])
        self.assertEqual(len(set(group[:3])), 1)
        self.assertNotEqual(group[3], group[0])
        fold = judge.folds(np.repeat(np.arange(20), 5))
        self.assertTrue((fold.reshape(20, 5) == fold.reshape(20, 5)[:, :1]).all())
        self.assertEqual(np.bincount(fold).tolist(), [20] * judge.FOLDS)

    def test_residuals_held_out_are_not_seen(self):
        """Shifting the held-out rows changes nothing that is predicted for them."""
        members = [row for row in rows.read(FIXTURE) if not row.split]
        x, labels = judge.features(members), [row.backend for row in members]
        fold = np.arange(len(members)) % 2
        errors = np.random.default_rng(1).normal(size=len(members))
        expected = judge.held_out(x, labels, errors, fold)
        shifted = judge.held_out(x, labels, np.where(fold == 1, errors + 5.0, errors), fold)
        np.testing.assert_allclose(expected[fold == 1], shifted[fold == 1])
        self.assertGreater(abs(expected[fold == 0] - shifted[fold == 0]).min(), 0.1)

    def test_figures(self):
        used = np.array([True, True, True, False])
        found = judge.figures(np.array([1.1, 0.8, 1.0, 9.0]), np.ones(4), used)
        np.testing.assert_allclose(found, (0.1, 0.1))


class Constants(unittest.TestCase):
    def fitted(self):
        truth = model.ROUND.copy()
        for name, value in (("step_seconds", 4e-3), ("weight_bandwidth_share", 0.5), ("request_seconds", 0.1)):
            truth[model.NAMES.index(name)] = math.log(value)
        spans = [(0, 30), (30, 60)]
        measured = stand_in([[first, end, model.constants(truth)] for first, end in spans])
        return model.Fit(stand_in, spans, measured), truth, measured

    def test_constants_that_made_the_rows_are_found(self):
        fit_, truth, measured = self.fitted()
        points, _ = fit_.run(np.ones(60, bool), 8, 6)
        errors = np.abs(np.exp(fit_.predicted(points)) / measured - 1.0)
        self.assertLess(np.median(errors), 0.01)
        self.assertTrue((points >= model.LEAST).all() and (points <= model.MOST).all())

    def test_rows_held_out_do_not_move_constants(self):
        fit_, _, _ = self.fitted()
        train = np.arange(60) % 3 != 0
        first, _ = fit_.run(train, 2, 2)
        fit_.log = np.where(train[:, None], fit_.log, 7.0)
        np.testing.assert_allclose(fit_.run(train, 2, 2)[0], first)

    def test_the_file_is_what_the_script_writes(self):
        """The file in the repository has the form, the keys and the regimes that the script gives."""
        members = sorted((row for row in rows.read(FIXTURE) if row.complete), key=lambda row: row.regime())
        log = np.log([[row.ttft, row.tpot] for row in members])
        spans = fit.spans_of(members)
        points = np.tile(model.ROUND, (len(spans), 1))
        made = fit.fitted_file(members, spans, points, log + 0.1, log, np.ones(len(members), bool), FIXTURE.name)
        self.assertEqual([(r["engine"], r["gpu"], r["weights"]) for r in made["regimes"]], [("vllm", "H200", "fp8")])
        self.assertEqual(made["regimes"][0]["tpot"], {"rows": 40, "median": 0.1052, "mean": 0.1052})
        stands = json.loads((Path(__file__).parents[3] / "planner" / "fitted" / "aiconfigurator.json").read_text())
        self.assertEqual(stands.keys(), made.keys())
        self.assertEqual(stands["source"], made["source"])
        for regime in stands["regimes"]:
            self.assertEqual(regime.keys(), made["regimes"][0].keys())
            self.assertEqual(regime["constants"].keys(), made["regimes"][0]["constants"].keys())
            for name, _, least, most, _ in model.PARAMETERS:
                self.assertTrue(least * 0.999 <= regime["constants"][name] <= most * 1.001, name)


class Tables(unittest.TestCase):
    def test_hostile_points_are_dropped(self):
        points = [(4, 2.0), (1, math.nan), (2, -1.0), (8, math.inf), (-1, 1.0), (4, 4.0), (1, 1.0), (16, 0.0), (32, 1e9)]
        self.assertEqual(tables.curve(points), [(1, 1000.0), (4, 3000.0)])
        self.assertIsNone(tables.curve([(1, math.nan)]))
        self.assertEqual(len(tables.curve((size, 1.0) for size in range(10000))), tables.MAX_POINTS)

    def test_the_nearest_products_are_written(self):
        records = [dict(gemm_dtype="fp8", m=m, n=n, k=4096, latency=m * n / 1e6) for n in (1024, 4096) for m in (1, 64)]
        written = list(tables.products(records, "fp8", {(4096, 1280)}))
        self.assertEqual(written, ['[[measured]]\noperator = "product"\ndtype = "fp8"\ninputs = 4096\noutputs = 1024\n'
                                   "points = [{ tokens = 1, us = 1.024 }, { tokens = 64, us = 65.54 }]\n"])
        self.assertEqual(list(tables.products(records, "nvfp4", {(4096, 1280)})), [])

    def test_collectives_are_in_bytes(self):
        records = [dict(nccl_dtype="half", op_name="alltoall", num_gpus=8, message_size=512, latency=0.01)]
        self.assertIn("operator = \"all_to_all\"\nranks = 8\npoints = [{ bytes = 1024, us = 10 }]",
                      next(tables.collectives(records, "nvlink")))


if __name__ == "__main__":
    unittest.main()
