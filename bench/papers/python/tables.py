#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts aiconfigurator's measured operators to `[[measured]]` tables of a cluster file, those that one model needs.

    tables.py --systems SITE/aiconfigurator_core/systems --system h200_sxm --backend sglang --weights fp8 \
        --model config.json >> cluster.toml

Products, routed experts, attention of prompts and of decoding, all-reduce and NCCL's collectives. Where aiconfigurator
measured several releases the newest one counts. Times of one point that differ are replaced by their median.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import median

# The planner's types, and the names of the same in aiconfigurator's tables, best first.
DTYPES = {"bf16": ["bfloat16"], "fp8": ["fp8_block", "fp8"], "nvfp4": ["nvfp4"], "int4": ["int4_wo"],
          "mxfp4": ["w4a16_mxfp4"]}
CACHES = {"bf16": "bfloat16", "fp8": "fp8"}
COLLECTIVES = {"all_reduce": "all_reduce", "alltoall": "all_to_all", "reduce_scatter": "scatter"}
MAX_POINTS = 4096
RANKS = (1, 2, 4, 8, 16, 32, 64)


def curve(points):
    """Points of a size and ms to lines of a table, rising, or None if fewer than one is usable: times that are not
    finite and above 0, and sizes below 0, are dropped."""
    times = {}
    for size, milliseconds in points:
        if size >= 0 and math.isfinite(milliseconds) and 0 < milliseconds < 1e6:
            times.setdefault(int(size), []).append(milliseconds * 1e3)
    return [(size, median(times[size])) for size in sorted(times)][:MAX_POINTS] or None


def table(fields, unit, points):
    """One `[[measured]]` table as TOML."""
    lines = ["[[measured]]"]
    for key, value in fields.items():
        lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    pairs = ", ".join(f"{{ {unit} = {size}, us = {time:.4g} }}" for size, time in points)
    return "\n".join([*lines, f"points = [{pairs}]"]) + "\n"


def grouped(records, keys):
    found = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def products(records, dtype, shapes):
    """`shapes`: inputs and outputs that the model has under some layout."""
    for name in DTYPES[dtype]:
        own = [record for record in records if record["gemm_dtype"] == name]
        if not own:
            continue
        grid = grouped(own, ("k", "n"))
        wanted = {min(grid, key=lambda at: abs(math.log(at[0] / k)) + abs(math.log(at[1] / n))) for k, n in shapes}
        for k, n in sorted(wanted):
            points = curve((record["m"], record["latency"]) for record in grid[k, n])
            if points:
                yield table(dict(operator="product", dtype=dtype, inputs=int(k), outputs=int(n)), "tokens", points)
        return


def experts(records, dtype, shape):
    """Routed experts with tokens spread as by a power law, as aiconfigurator assumes for real loads."""
    keys = ("moe_tp_size", "moe_ep_size")
    for name in DTYPES[dtype]:
        own = [r for r in records if r["moe_dtype"] == name and r["distribution"] == "power_law_1.01"
               and (r["hidden_size"], r["inter_size"], r["num_experts"], r["topk"]) == shape]
        for (tp, ep), members in sorted(grouped(own, keys).items()):
            hidden, width, count, top_k = shape
            points = curve((record["num_tokens"], record["latency"]) for record in members)
            if points and width % tp == 0 and count % ep == 0:
                yield table(dict(operator="experts", dtype=dtype, hidden=hidden, width=int(width // tp), experts=count,
                                 local=int(count // ep), top_k=top_k), "tokens", points)
        if own:
            return


def attention(records, cache, heads, head_dim, decoding):
    """Tables of attention. `heads`: query and key heads of a rank under some layout. Prompts alone; decoding by the
    context that is cached."""
    own = [r for r in records if r["head_dim"] == head_dim and r["kv_cache_dtype"] == CACHES[cache] and not r["window_size"]]
    for (query, key), members in sorted(grouped(own, ("num_heads", "num_key_value_heads")).items()):
        # aiconfigurator writes 0 for as many key heads as query heads.
        if (query, key or query) not in heads:
            continue
        fields = dict(operator="prefill", dtype=cache, heads=int(query), kv_heads=int(key or query), head_dim=int(head_dim))
        if not decoding:
            points = curve((r["isl"], r["latency"]) for r in members if r["batch_size"] == 1)
            if points:
                yield table(fields, "tokens", points)
            continue
        for step, group in sorted(grouped(members, ("step",)).items()):
            points = curve((r["batch_size"], r["latency"]) for r in group)
            if points and step[0] >= 127:
                yield table(fields | dict(operator="decode", context=int(step[0]) + 1), "tokens", points)


def latent(records, cache, config, decoding):
    """Multi-head latent attention."""
    own = [r for r in records if r["kv_cache_dtype"] == CACHES[cache]]
    rope = config["qk_rope_head_dim"]
    for (heads,), members in sorted(grouped(own, ("num_heads",)).items()):
        if heads not in {config["num_attention_heads"] // ranks for ranks in RANKS}:
            continue
        if not decoding:
            points = curve((r["isl"], r["latency"]) for r in members if r["batch_size"] == 1)
            fields = dict(operator="prefill", dtype=cache, heads=int(heads), kv_heads=int(heads),
                          head_dim=config["qk_nope_head_dim"] + rope)
            if points:
                yield table(fields, "tokens", points)
            continue
        for (step,), group in sorted(grouped(members, ("step",)).items()):
            points = curve((r["batch_size"], r["latency"]) for r in group)
            fields = dict(operator="decode", dtype=cache, heads=int(heads), kv_heads=1,
                          head_dim=config["kv_lora_rank"] + rope, context=int(step) + 1)
            if points and step >= 127:
                yield table(fields, "tokens", points)


def collectives(records, level):
    """NCCL's, of 16-bit elements. aiconfigurator counts elements for an all-reduce of NCCL and for the others those
    that one rank sends or receives."""
    own = [r for r in records if r["nccl_dtype"] == "half" and r["op_name"] in COLLECTIVES]
    for (name, ranks), members in sorted(grouped(own, ("op_name", "num_gpus")).items()):
        points = curve((2 * r["message_size"], r["latency"]) for r in members)
        if points:
            yield table(dict(level=level, operator=COLLECTIVES[name], ranks=int(ranks)), "bytes", points)


def custom_reduce(records, level):
    """The engine's own all-reduce, in CUDA graphs where both were measured."""
    graphs = [r for r in records if "eager" not in str(r.get("backend", ""))]
    for (ranks,), members in sorted(grouped(graphs or records, ("num_gpus",)).items()):
        points = curve((2 * r["message_size"], r["latency"]) for r in members)
        if points and ranks > 1:
            yield table(dict(level=level, operator="all_reduce", ranks=int(ranks)), "bytes", points)


def shapes_of(config):
    """Inputs and outputs of the dense products on one rank, for every degree of TP that divides."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    found = set()
    for ranks in RANKS:
        own = max(heads // ranks, 1)
        if config.get("kv_lora_rank"):
            rank, nope, rope = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
            query = config.get("q_lora_rank")
            found |= {(hidden, (query or own * (nope + rope)) + rank + rope), (rank, own * (nope + config["v_head_dim"])),
                      (own * config["v_head_dim"], hidden)} | ({(query, own * (nope + rope))} if query else set())
        else:
            size = config.get("head_dim") or hidden // heads
            keys = max(config.get("num_key_value_heads", heads) // ranks, 1)
            found |= {(hidden, size * (own + 2 * keys)), (own * size, hidden)}
        width = config.get("moe_intermediate_size", config.get("intermediate_size")) * config.get("n_shared_experts", 0)
        for size in (width, config.get("intermediate_size") if config.get("first_k_dense_replace") else 0):
            if size:
                found |= {(hidden, 2 * size // ranks), (size // ranks, hidden)}
        found.add((hidden, config["vocab_size"] // ranks))
    return {(inputs, outputs) for inputs, outputs in found if inputs and outputs}


def newest(folder, name):
    """Records of the table `name` in the newest release below a folder, empty where there is none."""
    import pyarrow.parquet

    def release(path):
        return [int(part) for part in re.findall(r"\d+", path.parent.name)]

    files = sorted(Path(folder).glob(f"*/{name}.parquet"), key=release)
    return pyarrow.parquet.read_table(files[-1]).to_pylist() if files else []


def convert(data, backend, config, weights, cache, level):
    """All tables, as texts. `data` is the folder of one system."""
    def own(kind, name):
        return newest(Path(data) / kind / backend, name)

    yield from products(own("gemm", "gemm_perf"), weights, shapes_of(config))
    count = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    if count:
        yield from experts(own("moe", "moe_perf"), weights, (config["hidden_size"], width, count, config["num_experts_per_tok"]))
    for decoding, stage in ((False, "context"), (True, "generation")):
        if config.get("kv_lora_rank"):
            yield from latent(own("mla", f"{stage}_mla_perf"), cache, config, decoding)
        else:
            heads, keys = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
            cuts = {(heads // ranks, max(keys // ranks, 1)) for ranks in RANKS if heads % ranks == 0}
            size = config.get("head_dim") or config["hidden_size"] // heads
            yield from attention(own("attention", f"{stage}_attention_perf"), cache, cuts, size, decoding)
    reduce = own("comm", "custom_allreduce_perf")
    yield from custom_reduce(reduce, level)
    for text in collectives(newest(Path(data) / "comm" / "nccl", "nccl_perf"), level):
        if not (reduce and 'operator = "all_reduce"' in text):
            yield text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("systems", "system", "backend", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--weights", choices=DTYPES, default="bf16")
    parser.add_argument("--cache", choices=CACHES, default="bf16")
    parser.add_argument("--level", default="nvlink", help="name of the innermost level in the cluster file")
    args = parser.parse_args()
    config = json.loads(Path(args.model).read_text())
    config = config.get("text_config", config)
    count = 0
    print(f"\n# {args.system}, {args.backend}: aiconfigurator 0.12.0, Copyright (c) 2025-2026 NVIDIA CORPORATION &")
    print("# AFFILIATES, Apache-2.0; converted by bench/papers/python/tables.py")
    for text in convert(Path(args.systems) / "data" / args.system, args.backend, config, args.weights, args.cache, args.level):
        print(text)
        count += 1
    print(f"{count} tables", file=sys.stderr)


if __name__ == "__main__":
    main()
