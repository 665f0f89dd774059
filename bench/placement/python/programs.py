"""Placements by METIS and by the integer programs of MoETuner and ExFlow, for semmoe-bench-placement --placements.

    pip install numpy scipy highspy pymetis
    python programs.py --groups 4,8 --seconds 60 PROFILE... > placements.json

Of every profile but one, all ways, it places the experts of the others' summed counts, as `domains` does. Each program gets
SECONDS; what HiGHS has then is taken, and the gap it still had is in "note".

* METIS: experts are vertices with their load as weight, co-activations beyond chance (as in the bench, where above zero) the weights of
  edges; multilevel k-way, then the cheapest moves until every part has N/G experts.
* MoETuner: (1) experts in groups of N/G, least greatest load; (2) the groups on devices, so that most of what follows from layer to layer
  stays on its device. Both are programs here.
* ExFlow: experts on devices, most of what follows from layer to layer on one device.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pymetis
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix


def profile(path):
    """Layers, counts [L, V, N] and occurrences [V]."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])

    def tensor(name, kind):
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(data[8 + length + begin : 8 + length + end], kind)

    meta = header["__metadata__"]
    vocabulary, experts = int(meta["vocab_size"]), int(meta["num_experts"])
    tokens = tensor("token_count", "<u8").astype(float)
    spans = tensor("indptr", "<u8").reshape(-1, vocabulary + 1).astype(int)
    expert, count = tensor("expert", "<u2"), tensor("count", "<u4")
    counts = np.zeros((len(spans), vocabulary, experts))
    for layer, row in enumerate(spans):
        tokens_of = np.repeat(np.arange(vocabulary), np.diff(row))
        counts[layer, tokens_of, expert[row[0] : row[-1]]] = count[row[0] : row[-1]]
    return counts, tokens


def shares(counts, tokens):
    return counts / np.maximum(tokens, 1.0)[None, :, None]


def program(cost, whole, equal, seconds, below=()):
    """Minimum cost; rows are (columns, values, right side)."""
    rows = [*equal, *below]
    index = np.concatenate([np.full(len(columns), i) for i, (columns, _, _) in enumerate(rows)])
    columns = np.concatenate([np.asarray(columns) for columns, _, _ in rows])
    values = np.concatenate([np.broadcast_to(np.asarray(v, float), len(c)) for c, v, _ in rows])
    right = np.array([r for _, _, r in rows], float)
    left = right.copy()
    left[len(equal) :] = -np.inf
    limits = LinearConstraint(csr_matrix((values, (index, columns)), shape=(len(rows), len(cost))), left, right)
    high = np.where(whole, 1.0, np.inf)
    found = milp(cost, constraints=limits, integrality=whole.astype(int), bounds=Bounds(0, high), options={"time_limit": seconds})
    if found.x is None:
        return None, f"nothing in {seconds:g} s"
    return found.x, f"gap {found.mip_gap:.1%}" if found.mip_gap is not None else ""


def even_load(load, groups, seconds):
    """MoETuner's first program: x[e, g] integer, minimum largest load."""
    n = len(load)
    at = lambda e, g: e * groups + g
    most = n * groups
    cost = np.zeros(most + 1)
    cost[most] = 1.0
    whole = np.arange(most + 1) < most
    equal = [([at(e, g) for g in range(groups)], 1.0, 1.0) for e in range(n)]
    equal += [([at(e, g) for e in range(n)], 1.0, n // groups) for g in range(groups)]
    mean = load.sum() / groups
    below = [([*(at(e, g) for e in range(n)), most], [*(load / mean), -1.0], 0.0) for g in range(groups)]
    x, note = program(cost, whole, equal, seconds, below)
    if x is None:
        return (np.arange(n) * groups // n).tolist(), note
    return x[:most].reshape(n, groups).argmax(axis=1).tolist(), note


def moetuner(counts, flows, groups, seconds):
    layers = len(counts)
    found = [even_load(layer.sum(axis=0), groups, seconds / (layers + 1)) for layer in counts]
    clusters, notes = [f[0] for f in found], [f[1] for f in found]
    # Second program: y[l, c, d] integer, kept flow between neighbours z[l, c, c', d] <= both.
    at = lambda l, c, d: (l * groups + c) * groups + d
    whole_count = layers * groups * groups
    cost, below = [0.0] * whole_count, []
    for l in range(layers - 1):
        kept = np.zeros((groups, groups))
        np.add.at(kept, (np.array(clusters[l])[:, None], np.array(clusters[l + 1])[None, :]), flows[l])
        for c in range(groups):
            for c2 in range(groups):
                for d in range(groups):
                    z = len(cost)
                    cost.append(-kept[c, c2] / flows[l].sum())
                    below += [([z, at(l, c, d)], [1.0, -1.0], 0.0), ([z, at(l + 1, c2, d)], [1.0, -1.0], 0.0)]
    equal = []
    for l in range(layers):
        equal += [([at(l, c, d) for d in range(groups)], 1.0, 1.0) for c in range(groups)]
        equal += [([at(l, c, d) for c in range(groups)], 1.0, 1.0) for d in range(groups)]
    equal += [([at(0, c, c)], 1.0, 1.0) for c in range(groups)]
    x, note = program(np.array(cost), np.arange(len(cost)) < whole_count, equal, seconds / (layers + 1), below)
    notes.append(note)
    if x is None:
        return clusters, ", ".join(notes)
    device = x[:whole_count].reshape(layers, groups, groups).argmax(axis=2)
    return [[int(device[l, c]) for c in clusters[l]] for l in range(layers)], ", ".join(notes)


def exflow(flows, experts, groups, seconds):
    """x[l, e, d] whole; for each device and pair of experts that follow each other, kept <= both. All pairs are N^2 G columns a layer:
    those with most flow are kept, ten for each expert and way."""
    layers = len(flows) + 1
    at = lambda l, e, d: (l * experts + e) * groups + d
    whole_count = layers * experts * groups
    cost, below = [0.0] * whole_count, []
    for l, flow in enumerate(flows):
        beyond = flow - np.outer(flow.sum(axis=1), flow.sum(axis=0)) / flow.sum()
        likely = (-beyond).argsort(axis=1).argsort(axis=1) < 10
        likely |= (-beyond).argsort(axis=0).argsort(axis=0) < 10
        for a, b in zip(*np.nonzero(likely & (beyond > 0))):
            for d in range(groups):
                z = len(cost)
                cost.append(-beyond[a, b] / flow.sum())
                below += [([z, at(l, a, d)], [1.0, -1.0], 0.0), ([z, at(l + 1, b, d)], [1.0, -1.0], 0.0)]
    equal = []
    for l in range(layers):
        equal += [([at(l, e, d) for d in range(groups)], 1.0, 1.0) for e in range(experts)]
        equal += [([at(l, e, d) for e in range(experts)], 1.0, experts // groups) for d in range(groups)]
    equal.append(([at(0, 0, 0)], 1.0, 1.0))
    x, note = program(np.array(cost), np.arange(len(cost)) < whole_count, equal, seconds, below)
    if x is None:
        return None, note
    return x[:whole_count].reshape(layers, experts, groups).argmax(axis=2).tolist(), note


def metis(counts, tokens, groups):
    """One layer."""
    load = counts.sum(axis=0)
    together = shares(counts[None], tokens)[0].T @ counts - np.outer(load, load) / tokens.sum()
    np.fill_diagonal(together, 0.0)
    weight = np.rint(1e6 * np.maximum(together, 0.0) / together.max()).astype(int)
    weight = np.maximum(weight, weight.T)
    n = len(load)
    neighbours = [np.nonzero(weight[e])[0] for e in range(n)]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in neighbours])])
    _, parts = pymetis.part_graph(
        groups, pymetis.CSRAdjacency(starts.tolist(), np.concatenate(neighbours).tolist()),
        eweights=np.concatenate([weight[e, row] for e, row in enumerate(neighbours)]).tolist(),
    )
    parts = np.array(parts)
    while True:
        size = np.bincount(parts, minlength=groups)
        over, under = np.nonzero(size > n // groups)[0], np.nonzero(size < n // groups)[0]
        if len(over) == 0:
            return parts.tolist()
        gain = np.stack([together[:, parts == g].sum(axis=1) for g in range(groups)], axis=1)
        moves = [(gain[e, to] - gain[e, parts[e]], e, to) for e in np.nonzero(np.isin(parts, over))[0] for to in under]
        _, e, to = max(moves)
        parts[e] = to


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("profiles", nargs="+")
    arguments.add_argument("--groups", default="4,8", help="group counts")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of each method, group count and profile held out")
    given = arguments.parse_args()
    loaded = [profile(path) for path in given.profiles]
    rows = []
    for held, path in enumerate(given.profiles):
        others = [one for at, one in enumerate(loaded) if at != held] or loaded
        counts, tokens = sum(c for c, _ in others), sum(t for _, t in others)
        layers, _, experts = counts.shape
        each = shares(counts, tokens)
        flows = [each[l].T @ counts[l + 1] for l in range(layers - 1)]
        for groups in map(int, given.groups.split(",")):
            made = [("METIS", [metis(counts[l], tokens, groups) for l in range(layers)], "")]
            made.append(("MoETuner, HiGHS", *moetuner(counts, flows, groups, given.seconds)))
            made.append(("ExFlow, HiGHS", *exflow(flows, experts, groups, given.seconds)))
            for name, placed, note in made:
                print(f"{Path(path).name} held out, {groups} groups, {name}: {note or 'done'}", file=sys.stderr)
                if placed is not None:
                    rows.append({"held_out": Path(path).name, "groups": groups, "name": name, "layers": placed, "note": note})
    print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
