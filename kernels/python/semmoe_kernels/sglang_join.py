"""How the plug-in for SGLang gets its communicator: when SGLang has made its groups, all ranks of the attention-TP
group check that tables, model and layout fit, and join, or none does."""
import hashlib
import os
from dataclasses import dataclass, fields
from typing import Optional

import torch

from .cuda import cuda_communicator
from .exchange import GroupExchange
from .groups import Groups

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SelfCheckError(RuntimeError):
    """Why the plug-in stays off."""


def check_tables(path):
    """The metadata of a tables file, with the number of groups; nothing else is read."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("attention") != "tp":
        raise SelfCheckError(f"{path} is for attention {metadata.get('attention')}, expected tp")
    return metadata


@dataclass
class Layout:
    """SGLang's launch settings that the plug-in depends on, under SGLang's names."""

    # The attention-TP process group that takes CPU tensors.
    cpu_group: object
    attn_tp_size: int
    attn_tp_rank: int
    attn_cp_size: int
    moe_ep_size: int
    moe_ep_rank: int
    chunked_prefill_size: Optional[int]
    max_prefill_tokens: int
    speculative_algorithm: Optional[str]
    enable_two_batch_overlap: bool
    enable_lora: Optional[bool]
    enable_return_routed_experts: bool
    expert_distribution_recorder_mode: Optional[str]

    @classmethod
    def read(cls, group, sources):
        """`group` is SGLang's GroupCoordinator of attention TP, `sources` has for each object the fields to read from
        it."""
        found = {name: getattr(source, name) for source, names in sources for name in names}
        missing = {field.name for field in fields(cls)} - found.keys() - {"cpu_group"}
        assert not missing, missing
        return cls(cpu_group=group.cpu_group, **found)


PARALLEL = ("attn_tp_size", "attn_tp_rank", "attn_cp_size", "moe_ep_size", "moe_ep_rank")
# Settings under which shuffled tokens would be mistaken for others, or not be returned.
_OFF = ("speculative_algorithm", "enable_two_batch_overlap", "enable_lora", "enable_return_routed_experts")
SETTINGS = ("chunked_prefill_size", "max_prefill_tokens", "expert_distribution_recorder_mode", *_OFF)


def _require(what, found, expected):
    if found != expected:
        raise SelfCheckError(f"{what} is {found}, expected {expected}")


def check_fits(layout, model, metadata):
    """Checks that SGLang's layout is the one that the tables are for."""
    groups = int(metadata["groups"])
    if layout.attn_tp_size != groups:
        raise SelfCheckError(f"the tables have {groups} groups, the attention-TP group has {layout.attn_tp_size} ranks")
    if groups < 2:
        raise SelfCheckError("the attention-TP group has one rank: there is nothing to shuffle")
    # Rank g has exactly group g's experts, so tokens do not leave the group for them.
    _require("the number of expert-parallel ranks", layout.moe_ep_size, groups)
    _require("the expert-parallel rank", layout.moe_ep_rank, layout.attn_tp_rank)
    _require("the number of context-parallel ranks", layout.attn_cp_size, 1)
    for name in _OFF:
        if getattr(layout, name):
            raise SelfCheckError(f"{name} is {getattr(layout, name)}, expected it to be off")
    if layout.expert_distribution_recorder_mode == "per_token":
        raise SelfCheckError("expert_distribution_recorder_mode is per_token, which would record shuffled tokens as others")
    if model.dtype not in _DTYPES:
        raise SelfCheckError(f"the model's type is {model.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    for name in ("num_hidden_layers", "vocab_size"):
        if (told := metadata.get(name)) is not None and int(told) != getattr(model, name):
            raise SelfCheckError(f"the tables are for a model with {name} {told}, this one has {getattr(model, name)}")


def most_tokens(layout):
    """Tokens of the largest batch that is shuffled."""
    if given := os.environ.get("SEMMOE_SGLANG_TOKENS"):
        if not given.isdecimal() or not 0 < int(given) < 1 << 24:
            raise SelfCheckError(f"SEMMOE_SGLANG_TOKENS is {given!r}, expected 1 to {(1 << 24) - 1}")
        return int(given)
    chunk = layout.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else layout.max_prefill_tokens


class GpuGroup:
    """The attention-TP group of a ModelRunner and its Layout: how its ranks find each other, and where their tensors are."""

    def __init__(self, runner, layout):
        self.cpu_group = layout.cpu_group
        self.exchange = GroupExchange(self.cpu_group)
        self.kind, self.ordinal = runner.device, runner.gpu_id

    def device(self):
        if self.kind != "cuda":
            raise SelfCheckError(f"the device is {self.kind}, expected cuda")
        return torch.device("cuda", self.ordinal)

    def communicator(self, buffer_bytes, max_tokens):
        return cuda_communicator(buffer_bytes, group=self.cpu_group, gpu=self.ordinal, max_tokens=max_tokens)


def join_group(runner, layout, path, group):
    """The tables on this rank's device, and its communicator, which has proved itself. Raises on all ranks, or on none.

    `runner` is SGLang's ModelRunner, `layout` its Layout, `group` a GpuGroup of both."""
    tables = error = digest = None
    tokens = buffer_bytes = 0
    try:
        check_fits(layout, runner.model_config, check_tables(path))
        tokens = most_tokens(layout)
        buffer_bytes = tokens * runner.model_config.hidden_size * runner.model_config.dtype.itemsize
        group.device()
        digest = _digest(path)
    except Exception as refused:
        error = refused
    # Ranks that read different tables would shuffle differently.
    group.exchange.agree("fits", error, {"tables": digest})
    comm = group.communicator(buffer_bytes, tokens)
    try:
        comm.self_check()
        tables = Groups(path, group.device())
    except Exception as refused:
        error = refused
    try:
        group.exchange.agree("proved", error)
    except Exception:
        comm.close()
        raise
    return tables, comm


def _digest(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
