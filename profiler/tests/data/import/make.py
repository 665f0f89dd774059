#!/usr/bin/env python3
"""Makes the fixtures beside it, as SGLang's recorder, EPLB's users and NumPy write theirs. Needs torch and numpy: make.py

A model of four layers, the first dense; 8 experts, top-2, 100 tokens. The truth, which the tests know too: token t has in layer l the
experts (t + l) % 8 and then (t + l + 3) % 8. Physical experts: 12, of which the last four are replicas of the logical experts 0 to 3."""
import pathlib
from collections import OrderedDict

import numpy
import torch

HERE = pathlib.Path(__file__).resolve().parent
LAYERS, EXPERTS, PHYSICAL, WIDTH = 4, 8, 12, 8
# Another order in every layer, so that a reader that takes the wrong layer's row is found.
MAP = torch.tensor([[(slot + layer) % 8 if slot < 8 else (slot - 8 + layer) % 8 for slot in range(PHYSICAL)] for layer in range(LAYERS)])


def physical(layer, logical, which):
    slots = [slot for slot in range(PHYSICAL) if MAP[layer][slot] == logical]
    return slots[which % len(slots)]


def record(number, rank, mode, tokens, positions, lens):
    ids = torch.full((LAYERS, len(tokens), WIDTH), -1, dtype=torch.int32)
    for layer in range(1, LAYERS):
        for at, token in enumerate(tokens):
            first = (token + layer) % EXPERTS
            ids[layer, at, 0] = physical(layer, first, at)
            ids[layer, at, 1] = physical(layer, (first + 3) % EXPERTS, at)
    counts = torch.zeros((LAYERS, PHYSICAL), dtype=torch.int32)
    for layer in range(LAYERS):
        for slot in ids[layer].flatten().tolist():
            if slot >= 0:
                counts[layer, slot] += 1
    return dict(
        forward_pass_id=number, rank=rank, gatherer_key="primary", input_ids=tokens, positions=positions, extend_seq_lens=lens,
        forward_mode=mode, topk_ids_of_layer=ids, misc_objects=MISC, global_physical_count=counts)


MISC = []  # One list for all records, as the recorder has it.
EXTEND, DECODE, MIXED, IDLE = 1, 2, 3, 4
passes = lambda rank: [
    record(10, rank, EXTEND, [1, 2, 3, 4, 50, 60, 70], [0, 1, 2, 3, 0, 1, 2], [4, 3]),
    record(11, rank, DECODE, [8, 9], [4, 3], None),
    record(12, rank, MIXED, [10, 11, 12], [0, 1, 5], [2, 1]),
    record(13, rank, IDLE, [], [], None),
]
torch.save(dict(records=passes(0), last_physical_to_logical_map=MAP), HERE / "per_token_0.pt")
# With attention TP every rank records the same tokens; one pass more here.
second = passes(1) + [record(14, 1, EXTEND, [99], [0], [1])]
torch.save(dict(records=second, last_physical_to_logical_map=MAP), HERE / "per_token_1.pt")
# A router that returns fewer rows, and an expert that is not there.
bad = passes(0)
bad[0]["topk_ids_of_layer"] = bad[0]["topk_ids_of_layer"][:, :-1, :]
bad[2]["topk_ids_of_layer"][1, 0, 0] = 77
torch.save(dict(records=bad, last_physical_to_logical_map=MAP), HERE / "per_token_bad.pt")
torch.save(dict(records=[dict(forward_pass_id=1, rank=0, gatherer_key="primary", global_physical_count=MAP)], last_physical_to_logical_map=MAP), HERE / "per_pass.pt")

counts = torch.arange(3 * LAYERS * EXPERTS, dtype=torch.int32).reshape(3, LAYERS, EXPERTS)
counts[:, 0, :] = 0
torch.save(dict(rank=0, logical_count=counts, average_utilization_rate_over_window=None), HERE / "stat.pt")
logcnt = counts.sum(dim=0)
torch.save(logcnt, HERE / "logcnt.pt")
torch.save(logcnt.t().contiguous().t(), HERE / "logcnt_strided.pt")
numpy.save(HERE / "logcnt.npy", logcnt.numpy())
numpy.savez(HERE / "logcnt.npz", logical_count=logcnt.numpy())

tokens = numpy.array([1, 2, 3, 50, 60], dtype=numpy.int64)
routes = numpy.array([[[(t + l) % 8, (t + l + 3) % 8] for l in (1, 2, 3)] for t in tokens], dtype=numpy.uint8)
offsets, prompts = numpy.array([0, 3, 5]), numpy.array([2, 2])
numpy.savez(HERE / "routes.npz", token_ids=tokens, experts=routes, request_offsets=offsets, prompt_lengths=prompts)
numpy.savez_compressed(HERE / "compressed.npz", token_ids=tokens, experts=routes)

# What the reader of arrays knows beyond dumps.
kinds = OrderedDict((str(kind), torch.tensor([0, 1, 2], dtype=kind)) for kind in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
base = torch.arange(24, dtype=torch.int64).reshape(4, 6)
views = dict(kinds=kinds, part=base[1:, 2:4], turned=base.t(), scalar=torch.tensor(7), empty=torch.empty((0, 3)), shared=[base, base],
             others=(True, False, None, -5, 2**40, -(2**40), 1.5, "text \u20ac", 70000, 300, (), [], {}))
torch.save(views, HERE / "views.pt")
torch.save(views, HERE / "views_protocol_4.pt", pickle_protocol=4)
torch.save(logcnt, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
for name, array in (("fortran", numpy.asfortranarray(logcnt.numpy())), ("objects", numpy.array([{}], dtype=object)), ("big", logcnt.numpy().astype(">i4"))):
    numpy.save(HERE / f"{name}.npy", array)
