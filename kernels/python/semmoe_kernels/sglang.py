"""Plug-in of SGLang (entry point `sglang.srt.plugins`): SRS and SAG around LayerCommunicator. Written for SGLang 0.5.16; other versions
are refused. From 0.5.21 on SGLang has no LayerCommunicator: `srt/layers/layer_boundary/` plans the moves between layers in its place.

Where a layer's experts take scattered tokens (an all-to-all backend; `mlp_mode` SCATTERED), SGLang reduce-scatters in the tokens' order
before the experts and keeps tokens scattered after them. With the plug-in each token goes to the rank of its likeliest group instead, and
every layer gathers again, so that the next can shuffle anew.

    SEMMOE_SGLANG=off             nothing is touched
    SEMMOE_SGLANG_TABLES=FILE     tables for attention tp; without it nothing is touched
    SEMMOE_SGLANG_TOKENS=N        the most tokens of one batch that are shuffled; larger ones go plain (default: the chunked prefill)

Routes are not known yet when tokens are shuffled: the groups of the two layers before are those that their tokens were put on. Every rank
gets as many tokens as it would without the plug-in: shapes are then known on the host, nothing waits for the GPU, and calls can be
captured in CUDA graphs. Tokens choose in the order of the shares expected on their groups, the greatest first; one whose group is full goes
to the first one with room."""
import inspect
import logging
import os

import torch

from . import ops
from .comm import Communicator, SharedMemory
from .groups import Groups
from .sglang_join import GpuGroup, SelfCheckError, check_tables, join_group

logger = logging.getLogger(__name__)

VERSIONS = ("0.5.16",)
_COMMUNICATOR = "sglang.srt.layers.communicator"
_RUNNER = "sglang.srt.model_executor.model_runner"
# What is hooked: module, method, and the parameters that the hook relies on.
HOOKED = {
    "init_new": (_COMMUNICATOR, "LayerScatterModes.init_new", ["kwargs"]),
    "output_mode": (_COMMUNICATOR, "LayerScatterModes._compute_layer_output_mode", ["context"]),
    "prepare_mlp": (_COMMUNICATOR, "LayerCommunicator.prepare_mlp", ["self", "hidden_states", "residual", "forward_batch", "cache"]),
    "postprocess_layer": (_COMMUNICATOR, "LayerCommunicator.postprocess_layer", ["self", "hidden_states", "residual", "forward_batch"]),
    "join": (_RUNNER, "ModelRunner.init_torch_distributed", ["self"]),
}


class Plugin:
    """The hooks of one process. They pass everything on as it is until `join` has made a communicator of the attention-TP group, which all
    of its ranks do or none; SGLang builds its layers after that."""

    def __init__(self, path, modes, group_of=GpuGroup):
        self.path, self.modes, self.group_of = path, modes, group_of
        self.comm = self.tables = None
        self.too_large = False

    def use(self, tables, comm):
        """From now on layers are shuffled."""
        self.moe_layer = {layer: index for index, layer in enumerate(tables.layer_ids)}
        self.tables, self.comm = tables, comm

    def join(self, original, runner):
        """Where SGLang has made its groups."""
        answer = original(runner)
        if self.comm is not None or getattr(runner, "is_draft_worker", False):
            return answer
        try:
            tables, comm = join_group(runner, self.path, self.group_of(runner))
        except Exception as error:
            # All ranks of the group come here, with the same sentence or one of their own.
            logger.error("semmoe: the plug-in stays off: %s", error)
            return answer
        self.use(tables, comm)
        logger.info("semmoe: on, for layers %s over %d ranks, up to %d tokens a batch", tables.layer_ids, comm.world, comm.max_tokens)
        return answer

    def init_new(self, original, cls, **kwargs):
        """Keeps the layer's number, which LayerCommunicator is not told."""
        modes = original(cls, **kwargs)
        modes.semmoe_layer = kwargs["layer_id"]
        return modes

    def output_mode(self, original, cls, context):
        """Layers give all tokens to all ranks."""
        mode = original(cls, context)
        return self.modes.TP_ATTN_FULL if self.comm is not None and mode == self.modes.SCATTERED else mode

    def prepare_mlp(self, original, communicator, hidden_states, residual, forward_batch, cache=None):
        """SRS with residual and RMSNorm in place of reduce-scatter, where the layer is one of the tables'."""
        if self.comm is None:
            return original(communicator, hidden_states, residual, forward_batch, cache)
        layer = self.moe_layer.get(getattr(communicator.layer_scatter_modes, "semmoe_layer", None))
        forward_batch.semmoe_order = None
        if layer is None or not self._fits(communicator, hidden_states, residual, forward_batch):
            return original(communicator, hidden_states, residual, forward_batch, cache)
        ranks = self._ranks(layer, forward_batch)
        permutation, _, offsets = ops.argsort(ranks.int(), self.comm.world, self.comm.id)
        norm = communicator.post_attention_layernorm
        normed, new_residual = ops.shuffled_reduce_scatter_norm(
            hidden_states, residual, norm.weight.detach(), norm.variance_epsilon, permutation, offsets,
            even_rows(ranks.shape[0], self.comm.world)[self.comm.rank], self.comm.id)
        forward_batch.semmoe_order = (communicator, permutation, offsets)
        return normed, new_residual

    def postprocess_layer(self, original, communicator, hidden_states, residual, forward_batch):
        """SAG in place of allgather, where the layer's tokens were shuffled."""
        order = getattr(forward_batch, "semmoe_order", None)
        if order is None or order[0] is not communicator:
            return original(communicator, hidden_states, residual, forward_batch)
        forward_batch.semmoe_order = None
        full = ops.shuffled_allgather(hidden_states + residual, order[1], order[2], self.comm.id)
        return full, None

    def _fits(self, communicator, hidden_states, residual, forward_batch):
        """The same on all ranks, as it hangs on shapes and settings alone."""
        modes, norm, tokens = communicator.layer_scatter_modes, communicator.post_attention_layernorm, forward_batch.input_ids
        scattered = modes.mlp_mode == self.modes.SCATTERED and modes.layer_input_mode == self.modes.TP_ATTN_FULL
        gathers = modes.layer_output_mode == self.modes.TP_ATTN_FULL
        if not (scattered and gathers and residual is not None and type(norm).__name__ == "RMSNorm"
                and communicator._context.attn_tp_size == self.comm.world and tokens is not None
                and hidden_states.shape[0] == tokens.shape[0] > 0 and residual.shape == hidden_states.shape
                and norm.weight.dtype == residual.dtype == hidden_states.dtype):
            return False
        fits = tokens.shape[0] <= self.comm.max_tokens and hidden_states.nbytes <= self.comm.memory.buffer_bytes
        if not fits and not self.too_large:
            self.too_large = True
            logger.warning("semmoe: a batch of %d tokens is not shuffled, nor are others of more than %d (SEMMOE_SGLANG_TOKENS)",
                           tokens.shape[0], self.comm.max_tokens)
        return fits

    def _ranks(self, layer, forward_batch):
        """[n]: each token's rank, by the tables and as far as ranks have room."""
        before = getattr(forward_batch, "semmoe_groups", {})
        groups, shares = self.tables.likeliest(layer, forward_batch.input_ids, before.get(layer - 2), before.get(layer - 1))
        forward_batch.semmoe_groups = {layer - 1: before.get(layer - 1), layer: groups}
        return evened(groups, shares, self.comm.world)


def even_rows(tokens, world):
    """Rows of each rank where parts are even: the first n mod P ranks have one more."""
    return [tokens // world + (rank < tokens % world) for rank in range(world)]


def evened(groups, shares, world):
    """[n] int64: each token's group, or, for tokens without one (-1) and for those that come when it is full, the first rank that still
    has room, so that rank r gets `even_rows(n, world)[r]` tokens. The greatest of `shares` [n] come first, of equals the first token. As
    Alignment::Even of the crate semmoe-kernels, in that order; waits for nothing."""
    order = shares.argsort(descending=True, stable=True)
    return torch.empty_like(groups).scatter_(0, order, _evened_in_turn(groups[order], world))


def _evened_in_turn(groups, world):
    ranks = torch.arange(world, device=groups.device)
    # As even_rows, without a copy from the host.
    room = groups.shape[0] // world + (ranks < groups.shape[0] % world).long()
    asked = groups[:, None] == ranks
    place = asked.cumsum(0).gather(1, groups.clamp(min=0)[:, None])[:, 0]
    placed = (groups >= 0) & (place <= room[groups.clamp(min=0)])
    left = room - (asked & placed[:, None]).sum(0)
    # The i-th token without a place gets the i-th free one.
    index = (~placed).cumsum(0) - 1
    free = torch.searchsorted(left.cumsum(0), index, right=True).clamp(max=world - 1)
    return torch.where(placed, groups, free)


def check_version(version):
    """Comes before SGLang's modules are imported, as other versions lack some of them."""
    if version not in VERSIONS:
        raise SelfCheckError(f"SGLang is {version}, the plug-in supports {', '.join(VERSIONS)} only")


def self_check(modules):
    """What must be true before anything is hooked; `modules` by name.

    Raises SelfCheckError with the first thing that is not."""
    for module, name, expected in HOOKED.values():
        owner, method = name.split(".")
        raw = vars(getattr(modules[module], owner, object)).get(method)
        function = getattr(raw, "__func__", raw)
        found = [p for p in inspect.signature(function).parameters if p != "cls"] if function else None
        if found != expected:
            raise SelfCheckError(f"{name} has the parameters {found}, expected {expected}")
    # One rank: the library is there and moves what it should.
    Communicator(0, SharedMemory(1, 4096)).self_check()


def install(registry, around, plugin):
    """Registers the hooks: `registry` is SGLang's HookRegistry, `around` its HookType.AROUND."""
    for hook, (module, name, _) in HOOKED.items():
        registry.register(f"{module}.{name}", getattr(plugin, hook), around)


def activate(group_of=GpuGroup):
    """The entry point: called in every process before SGLang has groups. `group_of(runner)` is called later, on every rank, for how the
    ranks of the attention-TP group meet."""
    if os.environ.get("SEMMOE_SGLANG", "on") == "off":
        return None
    path = os.environ.get("SEMMOE_SGLANG_TABLES")
    if not path:
        logger.info("semmoe: SEMMOE_SGLANG_TABLES is not set, so nothing is hooked")
        return None
    try:
        import sglang

        check_version(sglang.__version__)
        import sglang.srt.layers.communicator as communicator
        import sglang.srt.model_executor.model_runner as runner
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self_check({_COMMUNICATOR: communicator, _RUNNER: runner})
        check_tables(path)
        plugin = Plugin(path, communicator.ScatterMode, group_of)
    except Exception as error:
        # SGLang would only log it; so is it said in one sentence, and nothing is hooked.
        logger.error("semmoe: the plug-in stays off: %s", error)
        return None
    install(HookRegistry, HookType.AROUND, plugin)
    return plugin
