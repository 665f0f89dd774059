"""aiconfigurator's own predictions for the rows, as a CSV file of id, TTFT and TPOT in ms: `aic.py ROWS.csv OUT.csv [N]`.

A row takes one to two seconds. With N only so many rows that are complete are predicted, drawn at random.

It gets the inputs that the planner gets: degrees as recorded or repaired, one unit where a row has none, and another checkpoint of the same
shape where the wheel lacks one. A release
whose tables the wheel lacks counts as aiconfigurator's default one, as in NVIDIA's own comparison. Rows without a
prediction are left out, with the reason on standard error.
"""

import contextlib
import csv
import json
import random
import sys

import rows

DEGREES = ("pp_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def arguments(line):
    """Of `cli_estimate` for a line of the CSV file, without the version."""
    row = rows.row_of(line)
    # A model whose configuration the wheel lacks would be looked for on the network.
    given = dict(model_path=rows.CONFIGS.get(row.model, row.model), system_name=line["system"], mode=line["mode"], isl=row.input,
                 backend_name=line["backend"], osl=row.output, gemm_quant_mode=line["gemm_quant_mode"] or None,
                 moe_quant_mode=line["moe_quant_mode"] or None)
    if not row.split:
        batch = max(round(row.concurrency / row.decode[2]), 1)
        return given | dict(zip(DEGREES, row.decode)) | {"batch_size": batch}
    for stage, degrees in (("prefill", row.prefill), ("decode", row.decode)):
        given |= {f"{stage}_{name}": degree for name, degree in zip(DEGREES, degrees)}
        given[f"{stage}_num_workers"] = rows.number(line[f"{stage}_num_workers"])
    given["prefill_batch_size"] = rows.number(line["prefill_batch_size"])
    given["decode_batch_size"] = max(round(row.concurrency / row.decode[2]), 1)
    return given


def estimate(given, version):
    from aiconfigurator.cli.api import cli_estimate

    with contextlib.redirect_stdout(sys.stderr):
        found = cli_estimate(**given, backend_version=version)
    return found.ttft, found.tpot


def drawn(lines, count):
    """`count` of the complete rows, at random, neighbours of one system and engine: their tables are read once."""
    complete = [line for line in lines if rows.row_of(line).complete]
    random.Random(1).shuffle(complete)
    near = sorted(complete[: 3 * count], key=lambda line: [line[key] for key in ("system", "backend", "model_path", "id")])
    return near[::3]


def main(source, target, count=None):
    known, absent = {}, set()
    with open(source, newline="") as file:
        lines = list(csv.DictReader(file))
    with open(target, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["id", "ttft_ms", "tpot_ms"])
        for line in drawn(lines, int(count)) if count else lines:
            given, version = arguments(line), line["backend_version"] or None
            place = (line["system"], line["backend"], version)
            version = None if place in absent else version
            key = json.dumps([given, version])
            try:
                if key not in known:
                    try:
                        known[key] = estimate(given, version)
                    except ValueError:
                        if version is None:
                            raise
                        known[key] = estimate(given, None)
                        absent.add(place)
                writer.writerow([line["id"], *known[key]])
                out.flush()
            except Exception as error:  # aiconfigurator raises many kinds; each is a row without a prediction
                print(f"{line['id']}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
