"""The measured rows of aiconfigurator (`silicon_sample.csv`, Apache-2.0, NVIDIA) as the planner takes them.

A row is a layout of a model on a system under a constant number of requests in flight, with the TTFT and TPOT that
were measured. Nothing here predicts.
"""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

# GPUs as `cluster.toml` names them; GPUs in an NVLink domain and its bandwidth, GB/s one way; the network's.
SYSTEMS = {
    "h100_sxm": ("H100", 8, 450, 50),
    "h200_sxm": ("H200", 8, 450, 50),
    "b200_sxm": ("B200", 8, 900, 100),
    "b300_sxm": ("B300", 8, 900, 100),
    "gb200": ("GB200", 72, 900, 100),
    "gb300": ("GB300", 72, 900, 100),
}
DOMAINS = 16
WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4", "int4_wo": "int4", "": "bf16"}
# Checkpoints without a configuration of their own, and another one of equal shape.
CONFIGS = {
    "meta-llama/Llama-3.1-70B": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
CHECKPOINTS = {"nvidia/Llama-3.1-8B-Instruct-FP8": "fp8", "nvidia/DeepSeek-R1-NVFP4": "nvfp4",
               "nvidia/Qwen3-32B-NVFP4": "nvfp4", "nvidia/DeepSeek-V3.1-NVFP4": "nvfp4",
               "Qwen/Qwen3-235B-A22B-FP8": "fp8"}
DENSE = ("Llama", "Qwen3-32B")


@dataclass(frozen=True)
class Row:
    """One measured row; layouts are PP, attention TP and DP, expert TP and EP; times in seconds. A row is not complete
    if prefill has units of its own and their number is not recorded: one of each is assumed."""

    id: str
    model: str
    system: str
    backend: str
    weights: tuple[str, str]
    cache: str
    split: bool
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    concurrency: float
    arriving: float
    input: int
    output: int
    ttft: float
    tpot: float
    repaired: bool
    complete: bool

    def regime(self):
        """Rows of one regime share fitted constants: GPU, engine, type of the weights, own units for prefill."""
        return (SYSTEMS[self.system][0], self.backend, self.weights[0], "split" if self.split else "together")

    def configuration(self):
        """The key that stays on one side of a split."""
        return (self.family(), self.system, self.backend, self.decode, self.prefill, self.split)

    def family(self):
        """Models of one shape, which are left out together."""
        name = self.model.split("/")[1]
        return "DeepSeek" if "DeepSeek" in name else re.sub("-Instruct|-NVFP4|-FP8", "", name)


def number(text, absent=1):
    value = int(float(text)) if text else absent
    return value or absent


def layout(row, prefix=""):
    """Degrees as the row has them, and whether they were repaired.

    Rows of 4 or 8 GPUs with TP n and EP n are recorded with n x n ranks; that many GPUs were not there (the id has both
    degrees). With attention DP they are (1, n^2, n, n) or (n, n, 1, n^2).
    """
    tp, dp, expert_tp, ep = (number(row[prefix + key]) for key in
                             ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"))
    named = re.search(r"_tp(\d+)(?:_\d+)?_ep(\d+)_", row["id"])
    for n in (2, 4, 8):
        sure = n > 2 or (named and named.groups() == ("2", "2"))
        if not prefix and sure and (tp, dp, expert_tp, ep) == (n * n, 1, n, n):
            return (1, n, 1, 1, n), True
        if not prefix and sure and (tp, dp, expert_tp, ep) in ((1, n * n, n, n), (n, n, 1, n * n)):
            return (1, 1, n, 1, n), True
    if row[prefix + "attention_dp_size"] in ("", "0") and tp * dp != expert_tp * ep and expert_tp * ep % tp == 0:
        dp = expert_tp * ep // tp
    if tp * dp != expert_tp * ep and tp * dp % ep == 0:
        expert_tp = tp * dp // ep
    return (number(row[prefix + "pp_size"]), tp, dp, expert_tp, ep), False


def weights(row):
    """Types of routed experts and of dense weights. Except for FP8, quantised mixtures keep attention at 16 bits."""
    model = row["model_path"]
    dtype = WEIGHTS[row["gemm_quant_mode"]] if row["gemm_quant_mode"] else CHECKPOINTS.get(model, "bf16")
    if "gpt-oss" in model:
        return ("mxfp4", "bf16")
    if any(name in model for name in DENSE) or dtype in ("fp8", "bf16"):
        return (dtype, dtype)
    return (dtype, "bf16")


def row_of(row):
    """A line of the CSV file."""
    split = row["mode"] == "disagg"
    types = weights(row)
    named = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    if split:
        prefill, decode = layout(row, "prefill_")[0], layout(row, "decode_")[0]
        repaired = False
        workers = [number(row[key + "_num_workers"]) for key in ("prefill", "decode")]
        total = float(named.group(1)) if named else number(row["decode_batch_size"]) * workers[1] * decode[2]
        arriving, concurrency = total / workers[0], total / workers[1]
    else:
        decode, repaired = layout(row)
        prefill = decode
        dp = number(row["attention_dp_size"])
        concurrency = float(named.group(1)) if named else float(number(row["batch_size"]) * dp)
        arriving = concurrency
    quantised = types[0] != "bf16"
    return Row(
        id=row["id"], model=row["model_path"], system=row["system"], backend=row["backend"], weights=types,
        cache="fp8" if row["backend"] == "trtllm" and quantised else "bf16", split=split, decode=decode,
        prefill=prefill, concurrency=max(concurrency, 1.0), arriving=max(arriving, 1.0), input=int(row["isl"]),
        output=int(row["osl"]), ttft=float(row["silicon_ttft_ms"]) / 1e3, tpot=float(row["silicon_tpot_ms"]) / 1e3,
        repaired=repaired, complete=not split or bool(row["decode_num_workers"]),
    )


def read(path):
    """All rows of the CSV file whose times are finite and above 0; a row that is not one is an error with its id."""
    rows = []
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            try:
                row = row_of(line)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: row {line.get('id')}: {error}") from error
            if not (0 < row.ttft < 1e5 and 0 < row.tpot < 1e4):
                raise ValueError(f"{path}: row {row.id}: TTFT {row.ttft} s, TPOT {row.tpot} s")
            rows.append(row)
    return rows


def configuration_file(model, folder):
    """The `config.json` that the planner reads for a model, from aiconfigurator's folder of them.

    Two models stand in as near ones that the planner reads: linear attention (Qwen3.5) as a window as large as its
    state, sparse attention (GLM-5) as a window of the tokens that it selects.
    """
    name = CONFIGS.get(model, model).replace("/", "--")
    config = json.loads((Path(folder) / f"{name}_config.json").read_text())
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    if text.get("index_topk"):
        text.update(architectures=["DeepseekV3ForCausalLM"], sliding_window=text["index_topk"])
    if "linear_num_value_heads" in text:
        state = text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"] * 4
        window = state // (2 * text["num_key_value_heads"] * text["head_dim"] * 2)
        kinds = ["sliding_attention" if kind == "linear_attention" else kind for kind in text["layer_types"]]
        text.update(architectures=["Qwen2MoeForCausalLM"], sliding_window=window, layer_types=kinds)
        config = text
    return config


def divides(rows, configs):
    """Whether a model's heads can be divided as each row says. Rows of other degrees are units of another kind."""
    heads = {}
    for model in {row.model for row in rows}:
        config = configuration_file(model, configs)
        heads[model] = config.get("text_config", config)["num_attention_heads"]
    return [heads[row.model] % row.decode[1] == 0 and heads[row.model] % row.prefill[1] == 0 for row in rows]


def cluster_file(system):
    """The `cluster.toml` of a system."""
    gpu, count, inside, between = SYSTEMS[system]
    level = '[[levels]]\nname = "{}"\ncount = {}\nbandwidth_gb_per_second = {}\nlatency_us = {}\n'
    return f'gpu = "{gpu}"\n' + level.format("nvlink", count, inside, 3) + level.format("network", DOMAINS, between, 12)


def write_inputs(rows, configs, folder):
    """Writes the files and the lines that `semmoe-bench-papers rows` reads; rows in their order."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = {}
    for model in sorted({row.model for row in rows}):
        path[model] = folder / (model.replace("/", "--") + ".json")
        path[model].write_text(json.dumps(configuration_file(model, configs)))
    for system in sorted({row.system for row in rows}):
        path[system] = folder / f"{system}.toml"
        path[system].write_text(cluster_file(system))
    with open(folder / "rows.jsonl", "w") as file:
        for row in rows:
            line = dict(model=str(path[row.model]), cluster=str(path[row.system]), weights=row.weights, cache=row.cache,
                        decode=row.decode, prefill=row.prefill, split=row.split, concurrency=row.concurrency,
                        arriving=row.arriving, input=row.input, output=row.output)
            file.write(json.dumps(line) + "\n")
    return folder / "rows.jsonl"
