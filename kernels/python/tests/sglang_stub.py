"""The classes and functions of SGLang that the plug-in hooks and reads, of each version that it supports, in
`sys.modules`. Ranks are threads.

What they are called and take is checked against SGLang's sources by sglang_source.py."""
import enum
import functools
import sys
import threading
import types

import torch

HIDDEN, VOCABULARY, LAYERS = 16, 50, 4
PLAIN = "plain"


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN)), 1e-6
        self.variance_size_override = None


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """Mirrors SGLang's: the hook receives the bare function of a class method."""

    @staticmethod
    def register(target, hook, hook_type):
        assert hook_type is HookType.AROUND
        path, name = target.rsplit(".", 1)
        owner = sys.modules.get(path) or getattr(sys.modules[path.rsplit(".", 1)[0]], path.rsplit(".", 1)[1])
        raw = vars(owner)[name]
        function = getattr(raw, "__func__", raw)

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            return hook(function, *args, **kwargs)

        setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)


PARALLEL = {"attn_tp_size": None, "attn_tp_rank": None, "attn_cp_size": 1, "moe_ep_size": None, "moe_ep_rank": None}
SETTINGS = {"chunked_prefill_size": 64, "max_prefill_tokens": 128, "speculative_algorithm": None, "enable_two_batch_overlap": False,
            "enable_lora": None, "enable_return_routed_experts": False, "expert_distribution_recorder_mode": None}
MODEL = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS + 2, "dtype": torch.float32}


def space(defaults, changes):
    return types.SimpleNamespace(**{name: changes.get(name, value) for name, value in defaults.items()})


class Runner:
    """The members that ModelRunners of all versions have. `rank` and `world` replace the setup of SGLang's processes."""

    device, gpu_id, is_draft_worker = "cuda", 0, False

    def __init__(self, rank, world, **changes):
        layout = PARALLEL | {"attn_tp_size": world, "attn_tp_rank": rank, "moe_ep_size": world, "moe_ep_rank": rank}
        self.parallel, self.settings, self.model_config = space(layout, changes), space(SETTINGS, changes), space(MODEL, changes)
        self.group = types.SimpleNamespace(cpu_group=None, rank_in_group=rank, world_size=world)


class ScatterMode(enum.Enum):
    SCATTERED, TP_ATTN_FULL, FULL = range(3)


class Communicator:
    """SGLang 0.5.16."""

    class ModelRunner(Runner):
        def init_torch_distributed(self):
            self.ps, self.server_args, self.attention_tp_group = self.parallel, self.settings, self.group
            return "groups"

    class LayerScatterModes:
        @classmethod
        def init_new(cls, **kwargs):
            self = cls()
            self.layer_input_mode = ScatterMode.TP_ATTN_FULL if kwargs["layer_id"] == 0 else cls._compute_layer_output_mode(kwargs)
            self.mlp_mode = ScatterMode.SCATTERED
            self.layer_output_mode = cls._compute_layer_output_mode(kwargs)
            return self

        @classmethod
        def _compute_layer_output_mode(cls, context):
            return ScatterMode.SCATTERED

    class LayerCommunicator:
        def __init__(self, modes, norm, world):
            self.layer_scatter_modes, self.post_attention_layernorm = modes, norm
            self._context = types.SimpleNamespace(attn_tp_size=world)

        def prepare_mlp(self, hidden_states, residual, forward_batch, cache=None):
            return PLAIN, residual

        def postprocess_layer(self, hidden_states, residual, forward_batch):
            return PLAIN, residual

    def modules(self):
        fresh = {cls.__name__: type(cls.__name__, (cls,), dict(vars(cls))) for cls in (self.LayerScatterModes, self.LayerCommunicator)}
        return {"layers": {}, "layers.communicator": fresh | {"ScatterMode": ScatterMode}}

    def layers(self, numbers, world, runner):
        module = sys.modules["sglang.srt.layers.communicator"]
        return {number: module.LayerCommunicator(module.LayerScatterModes.init_new(layer_id=number), RMSNorm(), world) for number in numbers}

    @staticmethod
    def enter(layer, *given):
        return layer.prepare_mlp(*given)

    @staticmethod
    def leave(layer, *given):
        return layer.postprocess_layer(*given)

    @staticmethod
    def norm(layer):
        return layer.post_attention_layernorm


Rows = enum.Enum("Rows", ["ATTENTION", "TBO_SPLIT"])
Variant = enum.Enum("Variant", ["ORDINARY"])
Kind = enum.Enum("Kind", ["ATTENTION", "FFN"])
_context = threading.local()


class StageBoundary:
    """An FFN's stage boundary. Like SGLang's, it binds its exit when it is built."""

    kind = Kind.FFN

    def __init__(self, stub):
        layers = "sglang.srt.layers.layer_boundary"
        rows = getattr(sys.modules[f"{layers}.adapters.overlap"], stub.rows)(True, True)
        self.norm, self.stub = RMSNorm(), stub
        move = functools.partial(vars(sys.modules[f"{layers}.ops"])[stub.leave_name], update=stub.update) if rows is Rows.ATTENTION else len
        self.declaration = types.SimpleNamespace(sparse=True, output_transform=None)
        path = types.SimpleNamespace(output_move=move)
        self.plan = types.SimpleNamespace(fusions=None, **{stub.paths: {Variant.ORDINARY: path}})


class Boundary:
    """SGLang 0.5.22; subclasses have the names of other versions."""

    rows, rows_enum, enter_name, leave_name, paths = ("tbo_exit_rows", "ExitRows", "_attn_tp_reduce_scatter_update_read",
                                                      "update_attn_tp_gather_output", "paths")
    update, read = types.SimpleNamespace(is_plain_add=True), types.SimpleNamespace(is_plain_norm=True, bind=None)

    class ModelRunner(Runner):
        def init_torch_distributed(self):
            parallel = types.SimpleNamespace(**vars(self.parallel), attn_tp_group=self.group)
            run = types.SimpleNamespace(overlap=self.settings, features=self.settings, moe=self.settings)
            _context.found = dict.fromkeys(("schedule", "spec", "lora"), self.settings) | {"parallel": parallel, "exec": run}
            return "groups"

        def load_model(self):
            return "loaded"

    @staticmethod
    def exit_rows(sparse, next_layer_sparse):
        return None

    @staticmethod
    def entry(hidden_states, residual, forward_batch, norm, *, cache=None, scatters_residual, read_fusions=(), read=None, update=None):
        return PLAIN, residual

    @staticmethod
    def exit(hidden_states, residual, forward_batch, update=None, gather=None):
        return PLAIN, residual

    def modules(self):
        def named(function, name):
            fresh = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
            fresh.__kwdefaults__ = function.__kwdefaults__
            return {name: fresh}

        context = {f"get_{name}": lambda name=name: _context.found[name] for name in ("parallel", "schedule", "spec", "lora", "exec")}
        return {
            "layers": {}, "layers.layer_boundary": {}, "layers.layer_boundary.adapters": {},
            "layers.layer_boundary.adapters.overlap": named(self.exit_rows, self.rows),
            "layers.layer_boundary.prepare": named(self.entry, self.enter_name),
            "layers.layer_boundary.ops": named(self.exit, self.leave_name),
            "layers.layer_boundary.contracts": {self.rows_enum: Rows},
            "layers.layernorm_sp": {"layernorm_sp_enabled": lambda: False},
            "layers.moe": {}, "layers.moe.utils": {"is_moe_input_scattered_across_dp_ranks": lambda: True},
            "runtime_context": context,
        }

    def model(self, numbers):
        """Named `Model.layers.1` and so on, each with an FFN."""
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleDict()
        for number in numbers:
            model.layers[str(number)] = torch.nn.Module()
            model.layers[str(number)].ffn_boundary = StageBoundary(self)
        return model

    def layers(self, numbers, world, runner):
        runner.model = self.model(numbers)
        assert runner.load_model() == "loaded"
        return {number: runner.model.layers[str(number)].ffn_boundary for number in numbers}

    def enter(self, layer, hidden_states, residual, batch, **call):
        function = vars(sys.modules["sglang.srt.layers.layer_boundary.prepare"])[self.enter_name]
        given = {"scatters_residual": True, "read": self.read, "update": self.update} | call
        return function(hidden_states, residual, batch, layer.norm, **given)

    def leave(self, layer, hidden_states, residual, batch):
        move = getattr(layer.plan, self.paths)[Variant.ORDINARY].output_move
        if move is len:
            return PLAIN, residual
        return move(hidden_states=hidden_states, residual=residual, forward_batch=batch)

    @staticmethod
    def norm(layer):
        return layer.norm


class FirstBoundary(Boundary):
    """SGLang 0.5.21."""

    rows, rows_enum, enter_name, leave_name, paths = "tbo_handoff", "HandoffRows", "_mlp_input_scatter", "update_and_gather", "_paths"
    update, read = types.SimpleNamespace(adds_plainly=True), types.SimpleNamespace(norms_plainly=True)

    @staticmethod
    def exit_rows(sparse, next_sparse):
        return None

    @staticmethod
    def entry(hidden_states, residual, forward_batch, layernorm, *, cache=None, scatters_residual, read=None, update=None):
        return PLAIN, residual

    @staticmethod
    def exit(hidden_states, residual, forward_batch, update=None, **kwargs):
        return PLAIN, residual


class ThirdBoundary(Boundary):
    """SGLang 0.5.23."""

    @staticmethod
    def entry(hidden_states, residual, forward_batch, norm, *, cache=None, scatters_residual, read_fusions=(), read_fusion_indices=(),
              read=None, update=None):
        return PLAIN, residual


OF_VERSION = {"0.5.16": Communicator, "0.5.21": FirstBoundary, "0.5.22": Boundary, "0.5.23": ThirdBoundary}


def install(version):
    """Installs fresh modules; returns the stub of the version (for an unknown one, of 0.5.16)."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    stub = OF_VERSION.get(version, Communicator)()
    modules = stub.modules() | {
        "plugins": {}, "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType}, "model_executor": {},
        "model_executor.model_runner": {"ModelRunner": type("ModelRunner", (stub.ModelRunner,), dict(vars(stub.ModelRunner)))},
    }
    place("sglang", {"__version__": version})
    place("sglang.srt", {})
    for name, content in modules.items():
        place(f"sglang.srt.{name}", content)
    return stub


def place(name, content):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    if "." in name:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)


def runner(rank, world, **changes):
    return sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner(rank, world, **changes)
