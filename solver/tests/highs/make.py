"""Small random instances with their optimum by HiGHS, for the tests: `pip install highspy scipy`, `python make.py > instances.json`.

transport: mass [U], profit [U][G], capacity [G]; the greatest sum of mass times profit, units in parts where need be.
clusters: routes [L][occurrences][2] of tokens `ids` on `experts` experts of each layer; the greatest number of local activations of
any placement with experts/groups experts on each group and any shares of tokens, one group over all layers, with at most `capacity`
occurrences on each group.
"""

import json
import sys

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

SEED, TRANSPORTS, CLUSTERS, MARGIN = 20261121, 40, 16, 0.02


def solve(cost, integral, equal, below):
    rows = [(row, value, value) for row, value in equal] + [(row, -np.inf, value) for row, value in below]
    entries = [(i, column, x) for i, (row, _, _) in enumerate(rows) for column, x in row.items()]
    i, j, x = zip(*entries)
    matrix = csr_matrix((x, (i, j)), shape=(len(rows), len(cost)))
    limits = LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows])
    found = milp(-np.asarray(cost, float), constraints=limits, integrality=integral, bounds=Bounds(0, np.inf),
                 options={"mip_rel_gap": 0.0})
    if found.status != 0:
        sys.exit(f"HiGHS ended with {found.message}")
    return -found.fun


def transport(random):
    units, groups = int(random.integers(1, 25)), int(random.integers(1, 7))
    mass = random.integers(1, 40, units)
    profit = random.integers(-99, 100, (units, groups))
    share = random.dirichlet(np.full(groups, 2.0))
    capacity = np.floor(share * mass.sum() * random.uniform(1.0, 1.3)).astype(int)
    capacity[0] += max(0, mass.sum() - capacity.sum())
    at = lambda unit, group: unit * groups + group
    equal = [({at(u, g): 1 for g in range(groups)}, mass[u]) for u in range(units)]
    below = [({at(u, g): 1 for u in range(units)}, capacity[g]) for g in range(groups)]
    value = solve(profit.ravel(), np.zeros(units * groups), equal, below)
    if abs(value - round(value)) > 1e-5:
        sys.exit(f"{value} is no whole number")
    return {"mass": mass.tolist(), "profit": profit.tolist(), "capacity": capacity.tolist(), "optimum": round(value)}


def clusters(random):
    layers, groups = int(random.integers(1, 3)), int(random.integers(2, 4))
    experts = 6 if layers == 2 or groups == 3 else 8
    tokens = int(random.integers(5, 8))
    ids = random.integers(0, tokens, 60)
    likes = random.dirichlet(np.full(experts, 0.4), (layers, tokens)) + 1e-6
    likes /= likes.sum(axis=2, keepdims=True)
    routes = [[random.choice(experts, 2, replace=False, p=likes[layer, t]).tolist() for t in ids] for layer in range(layers)]
    counts = np.zeros((layers, tokens, experts), int)
    for layer in range(layers):
        for token, route in zip(ids, routes[layer]):
            counts[layer, token, route] += 1
    mass = np.bincount(ids, minlength=tokens)
    capacity = max(int((1 + MARGIN) * len(ids) / groups), -(-len(ids) // groups))
    used = [t for t in range(tokens) if mass[t] > 0]
    # Where experts are (whole), where tokens are (shares), and both: what is local.
    names = {}
    name = lambda *key: names.setdefault(key, len(names))
    for l in range(layers):
        for e in range(experts):
            for g in range(groups):
                name("expert", l, e, g)
    whole = len(names)
    for t in used:
        for g in range(groups):
            name("token", t, g)
    equal, below, gain = [], [], {}
    for l in range(layers):
        equal += [({name("expert", l, e, g): 1 for g in range(groups)}, 1) for e in range(experts)]
        equal += [({name("expert", l, e, g): 1 for e in range(experts)}, experts // groups) for g in range(groups)]
    equal += [({name("token", t, g): 1 for g in range(groups)}, 1) for t in used]
    below += [({name("token", t, g): int(mass[t]) for t in used}, capacity) for g in range(groups)]
    # Groups are alike: one expert's is given.
    equal.append(({name("expert", 0, 0, 0): 1}, 1))
    for l in range(layers):
        for t in used:
            for e in range(experts):
                if counts[l, t, e]:
                    for g in range(groups):
                        both = name("both", l, t, e, g)
                        gain[both] = int(counts[l, t, e])
                        below.append(({both: 1, name("expert", l, e, g): -1}, 0))
                        below.append(({both: 1, name("token", t, g): -1}, 0))
    cost = [gain.get(column, 0) for column in range(len(names))]
    value = solve(cost, np.arange(len(names)) < whole, equal, below)
    return {"experts": experts, "groups": groups, "capacity": capacity, "ids": ids.tolist(), "routes": routes,
            "optimum": round(value, 6)}


random = np.random.default_rng(SEED)
made = {
    "transport": [transport(random) for _ in range(TRANSPORTS)],
    "clusters": [clusters(random) for _ in range(CLUSTERS)],
}
separators = {"separators": (",", ":")}
print("{")
for last, (key, instances) in enumerate(made.items()):
    lines = ",\n".join(json.dumps(instance, **separators) for instance in instances)
    print(f'"{key}": [\n{lines}\n]' + ("" if last else ","))
print("}")
