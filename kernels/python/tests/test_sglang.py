"""The plug-in against a stub of SGLang's classes, from the entry point on: every rank sees what a plain SGLang would have made, tokens are
where the tables say, and what does not fit leaves all ranks plain. Ranks are threads over fake GPUs (fake_gpu.py) if the library is that
of kernels/capi-shim, which runs the CUDA sources; in any case over the CPU's ranks."""
import enum
import json
import logging
import os
import pathlib
import sys
import tempfile
import threading
import types

import gloo
import torch
from fake_gpu import FakeGpu, on_threads
from safetensors.torch import save_file
from semmoe_kernels import Communicator, SharedMemory, comm as comm_module, cuda_communicator, sglang as plug
from semmoe_kernels.exchange import StoreExchange
from semmoe_kernels.groups import Groups

WORLD, HIDDEN, VOCABULARY, LAYERS = 2, 16, 50, 4


class ScatterMode(enum.Enum):
    SCATTERED, TP_ATTN_FULL, FULL = range(3)


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
    def __init__(self, layer, norm, world=WORLD):
        modes = sys.modules["sglang.srt.layers.communicator"].LayerScatterModes
        self.layer_scatter_modes = modes.init_new(layer_id=layer)
        self.post_attention_layernorm = norm
        self._context = types.SimpleNamespace(attn_tp_size=world)

    def prepare_mlp(self, hidden_states, residual, forward_batch, cache=None):
        return "plain", residual

    def postprocess_layer(self, hidden_states, residual, forward_batch):
        return "plain", residual


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN)), 1e-6


class ModelRunner:
    """Of one rank; `groups` stands for what SGLang's processes set up."""

    device, gpu_id, is_draft_worker = "cuda", 0, False

    def __init__(self, rank, world=WORLD, **changes):
        self.ps = types.SimpleNamespace(**{"attn_tp_size": world, "attn_tp_rank": rank, "attn_cp_size": 1, "moe_ep_size": world,
                                           "moe_ep_rank": rank, **{k: v for k, v in changes.items() if k in PARALLEL}})
        arguments = {"chunked_prefill_size": 64, "max_prefill_tokens": 128, "speculative_algorithm": None, "enable_two_batch_overlap": False}
        model = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS + 2, "dtype": torch.float32}
        self.server_args = types.SimpleNamespace(**{name: changes.get(name, value) for name, value in arguments.items()})
        self.model_config = types.SimpleNamespace(**{name: changes.get(name, value) for name, value in model.items()})

    def init_torch_distributed(self):
        self.attention_tp_group = types.SimpleNamespace(rank_in_group=self.ps.attn_tp_rank, world_size=self.ps.attn_tp_size)
        return "groups"


PARALLEL = ("attn_tp_size", "attn_tp_rank", "attn_cp_size", "moe_ep_size", "moe_ep_rank")


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """As SGLang's: the hook gets the bare function of a class method."""

    @staticmethod
    def register(target, hook, hook_type):
        assert hook_type is HookType.AROUND
        module, owner, method = target.rsplit(".", 2)
        owner = getattr(sys.modules[module], owner)
        raw = vars(owner)[method]
        function = getattr(raw, "__func__", raw)
        wrapped = lambda *args, **kwargs: hook(function, *args, **kwargs)
        setattr(owner, method, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)


def stub(version=plug.VERSIONS[0]):
    """Fresh classes in `sys.modules`."""
    fresh = {cls.__name__: type(cls.__name__, (cls,), dict(vars(cls))) for cls in (LayerScatterModes, LayerCommunicator, ModelRunner)}
    runner = fresh.pop("ModelRunner")
    modules = {
        "sglang": {"__version__": version}, "sglang.srt": {}, "sglang.srt.layers": {},
        "sglang.srt.layers.communicator": {**fresh, "ScatterMode": ScatterMode}, "sglang.srt.plugins": {},
        "sglang.srt.model_executor": {}, "sglang.srt.model_executor.model_runner": {"ModelRunner": runner},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    }
    for name, content in modules.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    return sys.modules["sglang.srt.layers.communicator"]


def tables(path, groups=WORLD, attention="tp", seed=0, labels=2):
    generator = torch.Generator().manual_seed(seed)

    def table(*shape):
        order = torch.rand(*shape, groups, generator=generator).argsort(-1)[..., :labels]
        share = (torch.rand(*shape, labels, generator=generator) / labels).sort(-1, descending=True).values
        unused = torch.arange(labels) >= torch.randint(0, labels + 1, (*shape, 1), generator=generator)
        return torch.where(unused, 65535, order).to(torch.uint16), torch.where(unused, 0, share).half()

    tensors = dict(zip(("T_group", "T_prob"), table(LAYERS, VOCABULARY)))
    tensors |= dict(zip(("A_group", "A_prob"), table(LAYERS, groups, groups)))
    metadata = {"attention": attention, "groups": str(groups), "layer_ids": json.dumps([1, 2, 3, 4]), "vocab_size": str(VOCABULARY)}
    save_file(tensors, path, metadata)
    return path


def by_hand(tables, layer, token, older, newer):
    """The rule of `likeliest_group`, one token at a time."""
    G, least = tables.groups, 2.0 ** -14

    def labels(groups, shares):
        return [(int(g), float(s)) for g, s in zip(groups, shares) if g >= 0]

    first = labels(tables.token_group[layer, token], tables.token_share[layer, token]) if 0 <= token < VOCABULARY else []
    known = layer >= 2 and older >= 0 and newer >= 0
    second = labels(tables.next_group[layer, older, newer], tables.next_share[layer, older, newer]) if known else []
    if not first or not second:
        return (first or second or [(-1, 0)])[0]

    def share(labels, group):
        if group in dict(labels):
            return max(dict(labels)[group], least)
        return max(min((1 - sum(s for _, s in labels)) / max(G - len(labels), 1), labels[-1][1]), least)

    candidates = [g for g, _ in first] + [g for g, _ in second if g not in dict(first)]
    scores = {g: share(first, g) * share(second, g) for g in [*candidates, *range(G)]}
    best = max(candidates, key=scores.get)
    return best, scores[best] / sum(scores.values())


def rule(folder):
    for groups, labels in ((2, 2), (5, 3), (8, 4)):
        found = Groups(tables(folder / "rule", groups, seed=groups, labels=labels))
        tokens = torch.arange(-1, VOCABULARY + 1)
        for layer in range(LAYERS):
            for older in range(-1, groups):
                for newer in range(-1, groups):
                    answer, shares = found.likeliest(layer, tokens, torch.full_like(tokens, older), torch.full_like(tokens, newer))
                    expected = [by_hand(found, layer, int(token), older, newer) for token in tokens]
                    assert answer.tolist() == [group for group, _ in expected], (layer, older, newer)
                    torch.testing.assert_close(shares, torch.tensor([share for _, share in expected], dtype=torch.float64))


def evened():
    """As many tokens for each rank as parts of the batch have, the greatest share first, of equals one token after another."""
    generator = torch.Generator().manual_seed(3)
    for world in (1, 2, 3, 8):
        for n in (1, 7, 8, 40):
            for skew in (1, 3):
                groups = torch.randint(-1, max(world // skew, 1), (n,), generator=generator)
                shares = torch.randint(0, 6, (n,), generator=generator).double() / 8
                room, expected = plug.even_rows(n, world), [-1] * n
                turns = sorted(range(n), key=lambda token: -shares[token])
                for token in turns:
                    group = int(groups[token])
                    if group >= 0 and room[group] > 0:
                        expected[token], room[group] = group, room[group] - 1
                for token in turns:
                    if expected[token] < 0:
                        expected[token] = next(rank for rank in range(world) if room[rank] > 0)
                        room[expected[token]] -= 1
                assert plug.evened(groups, shares, world).tolist() == expected, (world, groups, shares)


class PerThread:
    """In place of Plugin: each thread is a process with a plug-in of its own."""

    def __init__(self, *args):
        self.args, self.local = args, threading.local()

    def own(self):
        if not hasattr(self.local, "plugin"):
            self.local.plugin = PLUGIN(*self.args)
        return self.local.plugin

    def __getattr__(self, name):
        return lambda *args, **kwargs: getattr(self.own(), name)(*args, **kwargs)


PLUGIN = plug.Plugin


def meeting(world, on_gpu):
    """`group_of` of ranks that meet in one store: over fake GPUs, or over the CPU's shared memory."""
    store, memory = torch.distributed.HashStore(), SharedMemory(world, 1 << 16)

    class Group:
        def __init__(self, runner):
            self.rank = runner.ps.attn_tp_rank
            self.exchange = StoreExchange(store, self.rank, world, "plugin", timeout_s=60)

        def device(self):
            return torch.device("cpu")

        def communicator(self, buffer_bytes, max_tokens):
            if not on_gpu:
                return Communicator(self.rank, memory, max_tokens)
            return cuda_communicator(buffer_bytes, store=store, rank=self.rank, world=world, gpu=FakeGpu(), max_tokens=max_tokens)

    return Group


def activated(path, world, on_gpu):
    """A fresh SGLang with the plug-in, as its entry point leaves it."""
    module = stub()
    os.environ["SEMMOE_SGLANG_TABLES"] = str(path)
    plug.Plugin = PerThread
    try:
        return module, plug.activate(meeting(world, on_gpu))
    finally:
        plug.Plugin = PLUGIN


def runner(rank, world, **changes):
    return sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner(rank, world, **changes)


def shuffled(folder, world, on_gpu):
    """Four layers; the experts add the rank that a token is on, which shows where it was."""
    path = tables(folder / "tables", world, seed=world)
    module, plugin = activated(path, world, on_gpu)
    generator = torch.Generator().manual_seed(1)
    n, norm = 23, RMSNorm()
    tokens = torch.randint(0, VOCABULARY, (n,), generator=generator)
    parts = [[torch.randn(n, HIDDEN, generator=generator) for _ in range(world)] for _ in range(LAYERS)]

    def one(rank):
        assert runner(rank, world).init_torch_distributed() == "groups"
        mine = plugin.own()
        assert mine.comm is not None and mine.comm.world == world
        batch, residual, trail = types.SimpleNamespace(input_ids=tokens), torch.ones(n, HIDDEN), []
        for layer in range(LAYERS):
            communicator = module.LayerCommunicator(layer + 1, norm, world)
            normed, kept = communicator.prepare_mlp(parts[layer][rank], residual, batch)
            assert len(normed) == len(kept) == plug.even_rows(n, world)[rank]
            residual, nothing = communicator.postprocess_layer(normed * 2 + rank, kept, batch)
            assert nothing is None
            trail.append(residual)
        # A layer that the tables do not have is left alone, and so is a batch that is too large.
        other = module.LayerCommunicator(9, norm, world)
        assert other.prepare_mlp(residual, residual, batch)[0] == "plain"
        assert other.postprocess_layer(residual, residual, batch)[0] == "plain"
        large = types.SimpleNamespace(input_ids=tokens.repeat(3))
        assert module.LayerCommunicator(1, norm, world).prepare_mlp(residual.repeat(3, 1), residual.repeat(3, 1), large)[0] == "plain"
        mine.comm.close()
        return trail

    seen = on_threads(world, one)
    found, residual, before = Groups(path), torch.ones(n, HIDDEN), {}
    for layer in range(LAYERS):
        groups, shares = found.likeliest(layer, tokens, before.get(layer - 2), before.get(layer - 1))
        before[layer] = groups
        ranks = plug.evened(groups, shares, world)
        h = sum(parts[layer][1:], parts[layer][0]) + residual
        normed = torch.nn.functional.rms_norm(h, (HIDDEN,), norm.weight, norm.variance_epsilon)
        residual = (normed * 2 + ranks[:, None] + h).detach()
        for rank in range(world):
            torch.testing.assert_close(seen[rank][layer], residual)


def listen():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    plug.logger.addHandler(handler)
    plug.logger.setLevel(logging.INFO)
    plug.logger.propagate = False
    return messages


def nothing_is_hooked(folder):
    """What is seen before SGLang has groups."""
    messages, good = listen(), str(tables(folder / "good"))

    def renamed():
        module = stub()
        module.LayerCommunicator.prepare_mlp = lambda self, hidden_states: None

    def moved():
        stub()
        del sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner.init_torch_distributed
        sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner = type("ModelRunner", (), {})

    for prepare, environment, message in [
        (stub, {"SEMMOE_SGLANG": "off", "SEMMOE_SGLANG_TABLES": good}, None),
        (stub, {}, "SEMMOE_SGLANG_TABLES is not set"),
        (lambda: stub("0.5.23"), {"SEMMOE_SGLANG_TABLES": good}, "SGLang is 0.5.23, the plug-in supports 0.5.16 only"),
        (renamed, {"SEMMOE_SGLANG_TABLES": good}, "prepare_mlp has the parameters ['self', 'hidden_states'], expected"),
        (moved, {"SEMMOE_SGLANG_TABLES": good}, "ModelRunner.init_torch_distributed has the parameters None, expected ['self']"),
        (stub, {"SEMMOE_SGLANG_TABLES": str(folder / "none")}, "none"),
        (stub, {"SEMMOE_SGLANG_TABLES": str(tables(folder / "dp", attention="dp"))}, "is for attention dp, expected tp"),
    ]:
        for name in ("SEMMOE_SGLANG", "SEMMOE_SGLANG_TABLES"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        prepare()
        before = dict(vars(sys.modules["sglang.srt.layers.communicator"].LayerCommunicator))
        messages.clear()
        assert plug.activate() is None
        assert dict(vars(sys.modules["sglang.srt.layers.communicator"].LayerCommunicator)) == before
        assert messages == [] if message is None else message in messages[-1], messages

    # From 0.5.21 on the module is gone; the message is about the version all the same.
    os.environ["SEMMOE_SGLANG_TABLES"] = good
    stub("0.5.23")
    sys.modules["sglang.srt.layers.communicator"] = None
    assert plug.activate() is None and "SGLang is 0.5.23, the plug-in supports" in messages[-1], messages


def stays_off(folder):
    """What the ranks find when they join: all of them stay plain, and each says why."""
    messages, path = listen(), tables(folder / "two")
    other = tables(folder / "other", seed=9)
    for changes, message in [
        ({"attn_tp_size": 4}, "the tables have 2 groups, the attention-TP group has 4 ranks"),
        ({"moe_ep_size": 4}, "the number of expert-parallel ranks is 4, expected 2"),
        ({"moe_ep_rank": 5}, "the expert-parallel rank is 5, expected"),
        ({"attn_cp_size": 2}, "the number of context-parallel ranks is 2, expected 1"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm is EAGLE, expected None"),
        ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap is True, expected False"),
        ({"dtype": torch.float64}, "the model's type is torch.float64, expected one of"),
        ({"vocab_size": 99}, "the tables are for a model with vocab_size 50, this one has 99"),
        ("tokens", "SEMMOE_SGLANG_TOKENS is 'many', expected 1 to"),
        ("tables", "has tables"),
        ("one rank", "rank 1: speculative_algorithm is NGRAM, expected None"),
    ]:
        module, plugin = activated(path, WORLD, False)
        os.environ.pop("SEMMOE_SGLANG_TOKENS", None)
        if changes == "tokens":
            os.environ["SEMMOE_SGLANG_TOKENS"] = "many"
        messages.clear()

        def one(rank):
            if changes == "tables" and rank == 1:
                plugin.own().path = other
            given = changes if isinstance(changes, dict) else {}
            if changes == "one rank" and rank == 1:
                given = {"speculative_algorithm": "NGRAM"}
            assert runner(rank, WORLD, **given).init_torch_distributed() == "groups"
            assert plugin.own().comm is None
            states = torch.ones(4, HIDDEN)
            communicator, batch = module.LayerCommunicator(1, RMSNorm()), types.SimpleNamespace(input_ids=torch.arange(4))
            assert communicator.layer_scatter_modes.layer_output_mode == ScatterMode.SCATTERED
            assert communicator.prepare_mlp(states, states, batch)[0] == "plain"
            assert communicator.postprocess_layer(states, states, batch)[0] == "plain"

        on_threads(WORLD, one)
        off = [text for text in messages if text.startswith("semmoe: the plug-in stays off: ")]
        assert len(off) == WORLD and all(message in text for text in off), (changes, messages)
    os.environ.pop("SEMMOE_SGLANG_TOKENS", None)


def default_process(rank, folder):
    """The entry point as SGLang calls it, with a real process group, where there is no GPU."""
    messages = listen()
    stub()
    os.environ["SEMMOE_SGLANG_TABLES"] = f"{folder}/default"
    plugin, mine = plug.activate(), runner(rank, WORLD)

    class Coordinator:
        cpu_group, rank_in_group, world_size = torch.distributed.group.WORLD, rank, WORLD

    mine.attention_tp_group = Coordinator
    plugin.join(lambda runner: "groups", mine)
    assert plugin.comm is None and "stays off: rank 0: PyTorch finds no GPU" in messages[-1], messages
    mine.device = "xpu"
    plugin.join(lambda runner: "groups", mine)
    assert "stays off: rank 0: the device is xpu, expected cuda" in messages[-1], messages


def without_a_gpu(folder):
    if torch.cuda.is_available():
        return
    tables(folder / "default")
    gloo.processes(WORLD, folder, default_process)


if __name__ == "__main__":
    on_gpu = comm_module.native().semmoe_has_cuda() and not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        rule(folder)
        evened()
        for world in (2, 3):
            shuffled(folder, world, False)
            if on_gpu:
                shuffled(folder, world, True)
        for test in (nothing_is_hooked, stays_off, without_a_gpu):
            test(folder)
            print(f"{test.__name__}: ok")
        print(f"over fake GPUs: {bool(on_gpu)}")
