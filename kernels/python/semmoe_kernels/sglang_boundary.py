"""The hooks of SGLang 0.5.21 to 0.5.23, where `srt/layers/layer_boundary/` binds, when layers are built, how each
stage (attention or FFN) gets its input and hands on its output.

Where experts take scattered tokens, an FFN's entry is one function (reduce-scatter, residual, norm): SRS takes its
place. Its exit would leave tokens scattered; FFNs are declared to hand them on in the attention's rows instead, which
SGLang does by another function (residual, allgather): SAG takes its place. Neither function is given its layer: when
the model is loaded, the number of each layer that can be shuffled is noted on the norm that its entry is given."""
import logging
import re
from typing import NamedTuple

from .sglang_join import PARALLEL, Layout
from .sglang_shuffle import Shuffle, logger

_PACKAGE = "sglang.srt.layers.layer_boundary"
_RUNNER = "sglang.srt.model_executor.model_runner"


class Names(NamedTuple):
    """Names that 0.5.22 changed."""

    enter: str
    enter_norm: str
    enter_more: tuple
    leave: str
    leave_more: tuple
    rows: str
    next_sparse: str
    rows_enum: str
    paths: str
    is_plain_add: str
    is_plain_norm: str


_FIRST = Names("_mlp_input_scatter", "layernorm", (), "update_and_gather", ("kwargs",), "tbo_handoff", "next_sparse", "HandoffRows",
               "_paths", "adds_plainly", "norms_plainly")
_SECOND = Names("_attn_tp_reduce_scatter_update_read", "norm", ("read_fusions",), "update_attn_tp_gather_output", ("gather",),
                "tbo_exit_rows", "next_layer_sparse", "ExitRows", "paths", "is_plain_add", "is_plain_norm")
_THIRD = _SECOND._replace(enter_more=("read_fusions", "read_fusion_indices"))
_NAMES = {"0.5.21": _FIRST, "0.5.22": _SECOND, "0.5.23": _THIRD}
VERSIONS = tuple(_NAMES)


def hooked(version):
    """The hooked functions of a version: module, function or method, and the parameters that the hook relies on; by hook."""
    names = _NAMES[version]
    enter = ["hidden_states", "residual", "forward_batch", names.enter_norm, "cache", "scatters_residual", *names.enter_more, "read", "update"]
    leave = ["hidden_states", "residual", "forward_batch", "update", *names.leave_more]
    return {
        "rows": (f"{_PACKAGE}.adapters.overlap", names.rows, ["sparse", names.next_sparse]),
        "enter": (f"{_PACKAGE}.prepare", names.enter, enter),
        "leave": (f"{_PACKAGE}.ops", names.leave, leave),
        "join": (_RUNNER, "ModelRunner.init_torch_distributed", ["self"]),
        "load": (_RUNNER, "ModelRunner.load_model", ["self"]),
    }


class Plugin(Shuffle):
    def __init__(self, path, version, group_of):
        super().__init__(path, group_of)
        self.names = _NAMES[version]

    def layout(self, runner):
        from sglang.srt import runtime_context as context

        parallel, run = context.get_parallel(), context.get_exec()
        return Layout.read(parallel.attn_tp_group, [
            (parallel, PARALLEL), (context.get_schedule(), ["chunked_prefill_size", "max_prefill_tokens"]),
            (context.get_spec(), ["speculative_algorithm"]), (context.get_lora(), ["enable_lora"]),
            (run.overlap, ["enable_two_batch_overlap"]), (run.features, ["enable_return_routed_experts"]),
            (run.moe, ["expert_distribution_recorder_mode"])])

    def rows(self, original, sparse, next_sparse):
        """Where an FFN that declares nothing else hands on its output: in the attention's rows, if its input is
        scattered."""
        rows = original(sparse, next_sparse)
        if self.comm is None or not sparse or rows is not None:
            return rows
        from sglang.srt.layers import layernorm_sp
        from sglang.srt.layers.layer_boundary import contracts
        from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks

        # Layers that keep rows scattered for their norms (sequence parallelism) are left alone.
        scattered = is_moe_input_scattered_across_dp_ranks() and not layernorm_sp.layernorm_sp_enabled()
        return getattr(contracts, self.names.rows_enum).ATTENTION if scattered else None

    def load(self, original, runner):
        """Wraps ModelRunner.load_model, which builds the layers."""
        answer = original(runner)
        if self.comm is not None and not getattr(runner, "is_draft_worker", False):
            self.find_layers(runner.model)
        return answer

    def find_layers(self, model):
        """Finds the tables' layers in the model, by names such as `model.layers.5`, and logs which cannot be shuffled."""
        # Layers that are missing here are on another pipeline rank.
        served, plain = 0, {}
        for name, module in model.named_modules():
            number = re.search(r"(?:^|\.)layers\.(\d+)$", name)
            stages = [stage for stage in vars(module).values() if type(stage).__name__ == "StageBoundary" and stage.kind.name == "FFN"]
            if not number or int(number[1]) not in self.moe_layer or not stages:
                continue
            reason = self._unserved(module, stages)
            if reason is None:
                stages[0].norm.semmoe_layer = self.moe_layer[int(number[1])]
                served += 1
            else:
                plain[int(number[1])] = reason
        first = "".join(f"; layer {layer}: {reason}" for layer, reason in list(plain.items())[:1])
        logger.log(logging.INFO if served and not plain else logging.WARNING,
                   "semmoe: %d layers of this process are shuffled, %d of the tables' layers are not%s", served, len(plain), first)

    def _unserved(self, module, stages):
        """Why a layer's FFN cannot be shuffled, or None. What its entry scatters must be gathered by its exit."""
        if len(stages) > 1:
            return f"it has {len(stages)} FFNs"
        if any(type(part).__name__ == "HashTopK" for part in module.modules()):
            return "it routes by token ids, which stay in the tokens' order (HashTopK)"
        plan, declaration = stages[0].plan, stages[0].declaration
        if not declaration.sparse:
            return "it is dense"
        for what in ("output_transform", "row_transport"):
            if getattr(declaration, what, None) is not None:
                return f"{what} is set"
        if plan.fusions is not None:
            return "its kernels may leave the experts' sum to the next layer (fusions)"
        path = next((path for variant, path in getattr(plan, self.names.paths).items() if variant.name == "ORDINARY"), None)
        move = path and path.output_move
        exit_ = getattr(move, "func", None)
        if getattr(exit_, "__name__", None) != self.names.leave:
            return "its experts do not take scattered tokens (moe_a2a_backend is none, or another feature places its rows)"
        if not hasattr(exit_, "__wrapped__"):
            return f"the hook of {self.names.leave} was not applied"
        if not getattr(move.keywords["update"], self.names.is_plain_add):
            return "its output is not simply added to the residual"
        return None

    def enter(self, original, hidden_states, residual, forward_batch, norm, **call):
        """SRS with residual and RMSNorm instead of reduce-scatter and norm, if the tables have the layer."""
        if getattr(forward_batch, "semmoe_order", None) is not None:
            raise RuntimeError("semmoe: a layer's tokens are still shuffled where the next layer begins")
        layer = getattr(norm, "semmoe_layer", None)
        if layer is None or not self._scatters(call) or not self.fits(hidden_states, residual, norm, forward_batch):
            return original(hidden_states, residual, forward_batch, norm, **call)
        return self.scatter(layer, hidden_states, residual, norm, forward_batch)

    def leave(self, original, hidden_states, residual, forward_batch, **call):
        """SAG instead of allgather, if the layer's tokens were shuffled."""
        order = getattr(forward_batch, "semmoe_order", None)
        if order is None:
            return original(hidden_states=hidden_states, residual=residual, forward_batch=forward_batch, **call)
        if order.owner is not residual:
            raise RuntimeError("semmoe: another stage's output arrived before that of the layer whose tokens are shuffled")
        return self.gather(hidden_states, residual, forward_batch), None

    def _scatters(self, call):
        """Whether the entry moves whole rows to slices, adds plainly, reads by a plain norm, and has no kernel of its
        own for that."""
        read, update = call["read"], call["update"]
        return (call["scatters_residual"] and getattr(read, self.names.is_plain_norm) and getattr(update, self.names.is_plain_add)
                and getattr(read, "bind", None) is None and not call.get("read_fusions") and not call.get("read_fusion_indices"))
