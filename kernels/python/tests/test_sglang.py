"""The plug-in against a stub of SGLang's classes, from the entry point on: every rank sees what a plain SGLang would
have made, tokens are where the tables say, and what does not fit leaves all ranks plain. Ranks are threads over fake
GPUs (fake_gpu.py) if the library is that of tests/capi-shim, which runs the CUDA sources; in any case over the
CPU's ranks."""
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
import threading
import types

import gloo
import sglang_stub
import torch
from fake_gpu import FakeGpu, on_threads
from safetensors.torch import save_file
from semmoe_kernels import Communicator, SharedMemory, comm as comm_module, cuda_communicator, sglang as plug
from semmoe_kernels import sglang_shuffle as shuffle
from semmoe_kernels.exchange import StoreExchange
from semmoe_kernels.groups import Groups, even_groups
from sglang_stub import HIDDEN, LAYERS, PLAIN, VOCABULARY, RMSNorm, runner

WORLD = 2


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
    """The rule of `group_shares`, token by token: the likeliest group, and all shares if it is not -1."""
    G, least = tables.groups, 2.0 ** -14

    def labels(groups, shares):
        return [(int(g), float(s)) for g, s in zip(groups, shares) if g >= 0]

    first = labels(tables.token_group[layer, token], tables.token_share[layer, token]) if 0 <= token < VOCABULARY else []
    known = layer >= 2 and older >= 0 and newer >= 0
    second = labels(tables.next_group[layer, older, newer], tables.next_share[layer, older, newer]) if known else []
    if not first and not second:
        return -1, None

    def share(labels, group):
        if group in dict(labels):
            return max(dict(labels)[group], least)
        return max(min((1 - sum(s for _, s in labels)) / max(G - len(labels), 1), labels[-1][1]), least)

    scores = [math.prod(share(labels, group) for labels in (first, second) if labels) for group in range(G)]
    best = max([g for g, _ in first + second], key=scores.__getitem__)
    whole = sum(scores) if first and second else 1.0
    return best, [score / whole for score in scores]


def rule(folder):
    for groups, labels in ((2, 2), (5, 3), (8, 4)):
        found = Groups(tables(folder / "rule", groups, seed=groups, labels=labels))
        tokens = torch.arange(-1, VOCABULARY + 1)
        for layer in range(LAYERS):
            for older in range(-1, groups):
                for newer in range(-1, groups):
                    answer, shares, both = found._expected(layer, tokens, torch.full_like(tokens, older), torch.full_like(tokens, newer))
                    shares = shares / torch.where(both, shares.sum(1), 1.0)[:, None]
                    for token, group, row in zip(tokens, answer, shares):
                        expected, by_group = by_hand(found, layer, int(token), older, newer)
                        assert group == expected, (layer, older, newer)
                        if by_group is not None:
                            torch.testing.assert_close(row, torch.tensor(by_group, dtype=torch.float64))


def evened():
    """The golden steps of the crate semmoe-tables; then those of one shape together."""
    by_shape = {}
    for case in json.loads((pathlib.Path(__file__).parents[3] / "tables/tests/even.json").read_text()):
        world, rows = case["groups"], case["sixty_fourths"]
        shares = torch.tensor([row or [0] * world for row in rows], dtype=torch.float64).reshape(1, -1, world) / 64
        likeliest = torch.where(torch.tensor([[row is not None for row in rows]]), shares.argmax(2), -1)
        expected = torch.tensor([case["expected"]], dtype=torch.int64)
        assert torch.equal(even_groups(likeliest, shares), expected), case
        by_shape.setdefault(shares.shape, []).append((likeliest, shares, expected))
    assert len(by_shape) > 5 and max(map(len, by_shape.values())) > 3
    for steps in by_shape.values():
        likeliest, shares, expected = map(torch.cat, zip(*steps))
        assert torch.equal(even_groups(likeliest, shares), expected)


class PerThread:
    """Replaces a Plugin: each thread acts as a process with its own plug-in."""

    def __init__(self, plugin):
        self.plugin, self.local = plugin, threading.local()

    def __call__(self, *args):
        self.args = args
        return self

    def own(self):
        if not hasattr(self.local, "plugin"):
            self.local.plugin = self.plugin(*self.args)
        return self.local.plugin

    def __getattr__(self, name):
        return lambda *args, **kwargs: getattr(self.own(), name)(*args, **kwargs)


def meeting(world, on_gpu):
    """`group_of` for ranks that share one store: over fake GPUs, or over the CPU's shared memory."""
    store, memory = torch.distributed.HashStore(), SharedMemory(world, 1 << 16)

    class Group:
        def __init__(self, runner, layout):
            self.rank = layout.attn_tp_rank
            self.exchange = StoreExchange(store, self.rank, world, "plugin", timeout_s=60)

        def device(self):
            return torch.device("cpu")

        def communicator(self, buffer_bytes, max_tokens):
            if not on_gpu:
                return Communicator(self.rank, memory, max_tokens)
            return cuda_communicator(buffer_bytes, store=store, rank=self.rank, world=world, gpu=FakeGpu(), max_tokens=max_tokens)

    return Group


def activated(path, world, on_gpu, version):
    """A fresh SGLang with the plug-in activated by its entry point."""
    stub, generation = sglang_stub.install(version), plug.generation_of(version)
    os.environ["SEMMOE_SGLANG_TABLES"] = str(path)
    plugin = generation.Plugin
    generation.Plugin = PerThread(plugin)
    try:
        return stub, plug.activate(meeting(world, on_gpu))
    finally:
        generation.Plugin = plugin


def batch_of(tokens, real=None):
    return types.SimpleNamespace(input_ids=tokens, num_token_non_padded=real)


def shuffled(folder, world, on_gpu, version):
    """Four layers; the experts add the rank of a token, which shows where it was."""
    path = tables(folder / "tables", world, seed=world)
    stub, plugin = activated(path, world, on_gpu, version)
    generator = torch.Generator().manual_seed(1)
    n, norm = 23, RMSNorm()
    tokens = torch.randint(0, VOCABULARY, (n,), generator=generator)
    parts = [[torch.randn(n, HIDDEN, generator=generator) for _ in range(world)] for _ in range(LAYERS)]

    def one(rank):
        mine, found = runner(rank, world), plugin.own()
        assert mine.init_torch_distributed() == "groups"
        assert found.comm is not None and found.comm.world == world
        layers = stub.layers([*range(1, LAYERS + 1), 9], world, mine)
        real = torch.tensor(5)
        batch, residual, trail = batch_of(tokens, real), torch.ones(n, HIDDEN), []
        for layer in range(LAYERS):
            normed, kept = stub.enter(layers[layer + 1], parts[layer][rank], residual, batch)
            assert len(normed) == len(kept) == -(-n // world)
            # Rows after the first ones are no longer padding.
            assert batch.num_token_non_padded is None
            residual, nothing = stub.leave(layers[layer + 1], normed * 2 + rank, kept, batch)
            assert nothing is None and batch.num_token_non_padded is real
            trail.append(residual)
        # A layer that the tables lack is left alone, and so is a batch that is too large.
        assert stub.enter(layers[9], residual, residual, batch)[0] == PLAIN
        assert stub.leave(layers[9], residual, residual, batch)[0] == PLAIN
        large = residual.repeat(3, 1)
        assert stub.enter(layers[1], large, large, batch_of(tokens.repeat(3)))[0] == PLAIN
        # A norm over a part of each row is left alone, too.
        stub.norm(layers[1]).variance_size_override = HIDDEN // 2
        assert stub.enter(layers[1], residual, residual, batch)[0] == PLAIN
        found.comm.close()
        return trail

    seen = on_threads(world, one)
    found, residual = Groups(path), torch.ones(n, HIDDEN)
    for layer in range(LAYERS):
        ranks = found.ranks(tokens)[layer]
        h = sum(parts[layer][1:], parts[layer][0]) + residual
        normed = torch.nn.functional.rms_norm(h, (HIDDEN,), norm.weight, norm.variance_epsilon)
        residual = (normed * 2 + ranks[:, None] + h).detach()
        for rank in range(world):
            torch.testing.assert_close(seen[rank][layer], residual)


def alone(folder, version):
    """The plug-in of one thread of two, with a communicator that is never called."""
    stub, plugin = activated(tables(folder / "alone"), WORLD, False, version)
    own = plugin.own()
    own.use(Groups(folder / "alone"), Communicator(0, SharedMemory(WORLD, 1 << 16), 64, timeout_ms=100))
    return stub, own


def layers_that_stay_plain(folder):
    """The second generation checks a loaded model: each layer that cannot be shuffled is named with the
    reason."""
    messages = listen()
    for version in plug.sglang_boundary.VERSIONS:
        stub, own = alone(folder, version)

        def dense(layer):
            layer.ffn_boundary.declaration.sparse = False

        def two(layer):
            layer.other = layer.ffn_boundary

        def hashed(layer):
            layer.topk = type("HashTopK", (torch.nn.Module,), {})()

        def set_on(place, name):
            return lambda layer: setattr(getattr(layer.ffn_boundary, place), name, "something")

        def path_of(layer):
            return getattr(layer.ffn_boundary.plan, stub.paths)[sglang_stub.Variant.ORDINARY]

        def kept(layer):
            path_of(layer).output_move = len

        def other_update(layer):
            flag = next(iter(vars(stub.update)))
            path_of(layer).output_move.keywords["update"] = types.SimpleNamespace(**{flag: False})

        def unhooked(layer):
            move = path_of(layer).output_move
            path_of(layer).output_move = type(move)(move.func.__wrapped__, **move.keywords)

        for prepare, message in [
            (lambda layer: None, None), (dense, "it is dense"), (hashed, "it routes by token ids"), (two, "it has 2 FFNs"),
            (set_on("declaration", "output_transform"), "output_transform is set"),
            (set_on("declaration", "row_transport"), "row_transport is set"),
            (set_on("plan", "fusions"), "its kernels may leave the experts' sum to the next layer (fusions)"),
            (kept, "its experts do not take scattered tokens"), (other_update, "its output is not simply added"),
            (unhooked, f"the hook of {stub.leave_name} was not applied"),
        ]:
            model = stub.model([1, 2, 9])
            prepare(model.layers["2"])
            own.find_layers(model)
            served = [number for number in ("1", "2", "9") if hasattr(model.layers[number].ffn_boundary.norm, "semmoe_layer")]
            assert served == (["1", "2"] if message is None else ["1"]), (version, message, served)
            if message is None:
                assert messages[-1] == "semmoe: 2 layers of this process are shuffled, 0 of the tables' layers are not", messages[-1]
            else:
                assert f"1 of the tables' layers are not; layer 2: {message}" in messages[-1], messages[-1]
        # Without an all-to-all backend, or where rows stay scattered for the norms, exits are SGLang's.
        for module, name, value in [("moe.utils", "is_moe_input_scattered_across_dp_ranks", False), ("layernorm_sp", "layernorm_sp_enabled", True)]:
            stub, own = alone(folder, version)
            setattr(sys.modules[f"sglang.srt.layers.{module}"], name, lambda: value)
            own.find_layers(stub.model([1]))
            assert "0 layers of this process are shuffled" in messages[-1] and "do not take scattered tokens" in messages[-1], messages[-1]


def entries_that_stay_plain(folder):
    """When the second generation leaves a single call to SGLang, and when it stops rather than mix up tokens."""
    states, tokens = torch.ones(4, HIDDEN), torch.arange(4)
    for version in plug.sglang_boundary.VERSIONS:
        stub, own = alone(folder, version)
        flag = next(iter(vars(stub.read)))
        model = stub.model([1])
        own.find_layers(model)
        layer = model.layers["1"].ffn_boundary
        calls = [{"scatters_residual": False}, {"read": types.SimpleNamespace(**{flag: False})},
                 {"update": types.SimpleNamespace(**{next(iter(vars(stub.update))): False})}]
        if version != "0.5.21":
            calls += [{"read_fusions": ("kernel",)}, {"read": types.SimpleNamespace(**{flag: True}, bind=len)}]
        if version == "0.5.23":
            calls += [{"read_fusion_indices": (0,)}]
        for call in calls:
            assert stub.enter(layer, states, states, batch_of(tokens), **call)[0] == PLAIN, (version, call)
        for given in [(states[:2], states[:2], batch_of(tokens)), (states, None, batch_of(tokens)), (states, states, batch_of(None)),
                      (states.half(), states, batch_of(tokens))]:
            assert stub.enter(layer, *given)[0] == PLAIN

        batch = batch_of(tokens)
        batch.semmoe_order = shuffle.Order(states, None, None, None)
        for call, message in [(lambda: stub.leave(layer, states, states.clone(), batch), "another stage's output arrived before"),
                              (lambda: stub.enter(layer, states, states, batch), "still shuffled where the next layer begins")]:
            try:
                call()
            except RuntimeError as error:
                assert message in str(error), error
            else:
                raise AssertionError(f"{version}: expected: {message}")


def listen():
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    plug.logger.addHandler(handler)
    plug.logger.setLevel(logging.INFO)
    plug.logger.propagate = False
    return messages


def hooked_now(version):
    """The functions at all places that a version's hooks patch."""
    found = []
    for module, name, _ in plug.generation_of(version).hooked(version).values():
        owner = sys.modules.get(module)
        for part in name.split("."):
            owner = getattr(owner, part, None)
        found.append(getattr(owner, "__func__", owner))
    return found


def nothing_is_hooked(folder):
    """Checks made before SGLang has groups."""
    messages, good = listen(), str(tables(folder / "good"))

    def renamed(version):
        module, name, _ = next(iter(plug.generation_of(version).hooked(version).values()))
        owner = sys.modules[module]
        *owners, last = name.split(".")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, lambda self, hidden_states: None)

    def moved(version):
        sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner = type("ModelRunner", (), {})

    with_tables = {"SEMMOE_SGLANG_TABLES": good}
    for version in plug.VERSIONS:
        for prepare, environment, message in [
            (len, {"SEMMOE_SGLANG": "off", **with_tables}, None),
            (len, {}, "SEMMOE_SGLANG_TABLES is not set"),
            (renamed, with_tables, "has the parameters ['self', 'hidden_states'], expected"),
            (moved, with_tables, "ModelRunner.init_torch_distributed has the parameters None, expected ['self']"),
            (len, {"SEMMOE_SGLANG_TABLES": str(folder / "none")}, "none"),
            (len, {"SEMMOE_SGLANG_TABLES": str(tables(folder / "dp", attention="dp"))}, "is for attention dp, expected tp"),
        ]:
            for name in ("SEMMOE_SGLANG", "SEMMOE_SGLANG_TABLES"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            sglang_stub.install(version)
            prepare(version)
            before = hooked_now(version)
            messages.clear()
            assert plug.activate() is None
            assert hooked_now(version) == before
            assert messages == [] if message is None else message in messages[-1], messages

    # An unsupported version is refused by name, before an import fails that it may lack.
    os.environ["SEMMOE_SGLANG_TABLES"] = good
    for version in ("0.5.15", "0.5.17", "0.5.20", "0.5.24", "0.6.0"):
        sglang_stub.install(version)
        sys.modules["sglang.srt.layers.communicator"] = None
        assert plug.activate() is None
        assert f"SGLang is {version}, the plug-in supports 0.5.16, 0.5.21, 0.5.22, 0.5.23 only" in messages[-1], messages


def stays_off(folder, version):
    """Failures when the ranks join: all of them stay plain, and each reports why."""
    messages, path = listen(), tables(folder / "two")
    other = tables(folder / "other", seed=9)
    for changes, message in [
        ({"attn_tp_size": 4}, "the tables have 2 groups, the attention-TP group has 4 ranks"),
        ({"moe_ep_size": 4}, "the number of expert-parallel ranks is 4, expected 2"),
        ({"moe_ep_rank": 5}, "the expert-parallel rank is 5, expected"),
        ({"attn_cp_size": 2}, "the number of context-parallel ranks is 2, expected 1"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm is EAGLE, expected it to be off"),
        ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap is True, expected it to be off"),
        ({"enable_lora": True}, "enable_lora is True, expected it to be off"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts is True, expected it to be off"),
        ({"expert_distribution_recorder_mode": "per_token"}, "expert_distribution_recorder_mode is per_token"),
        ({"dtype": torch.float64}, "the model's type is torch.float64, expected one of"),
        ({"vocab_size": 99}, "the tables are for a model with vocab_size 50, this one has 99"),
        ("tokens", "SEMMOE_SGLANG_TOKENS is 'many', expected 1 to"),
        ("tables", "has tables"),
        ("one rank", "rank 1: speculative_algorithm is NGRAM, expected it to be off"),
    ]:
        stub, plugin = activated(path, WORLD, False, version)
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
            mine = runner(rank, WORLD, **given)
            assert mine.init_torch_distributed() == "groups"
            assert plugin.own().comm is None
            states = torch.ones(4, HIDDEN)
            layer, batch = stub.layers([1], WORLD, mine)[1], batch_of(torch.arange(4))
            assert stub.enter(layer, states, states, batch)[0] == PLAIN
            assert stub.leave(layer, states, states, batch)[0] == PLAIN

        on_threads(WORLD, one)
        off = [text for text in messages if text.startswith("semmoe: the plug-in stays off: ")]
        assert len(off) == WORLD and all(message in text for text in off), (changes, messages)
    os.environ.pop("SEMMOE_SGLANG_TOKENS", None)


def default_process(rank, folder):
    """The entry point as SGLang calls it, with a real process group, without a GPU."""
    messages = listen()
    for version in ("0.5.16", "0.5.23"):
        sglang_stub.install(version)
        os.environ["SEMMOE_SGLANG_TABLES"] = f"{folder}/default"
        plugin, mine = plug.activate(), runner(rank, WORLD)
        mine.group.cpu_group = torch.distributed.group.WORLD
        mine.init_torch_distributed()
        assert plugin.comm is None and "stays off: rank 0: PyTorch finds no GPU" in messages[-1], messages
        mine.device = "xpu"
        mine.init_torch_distributed()
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
        listen()
        for version in plug.VERSIONS:
            for world in (2, 3):
                shuffled(folder, world, False, version)
                if on_gpu:
                    shuffled(folder, world, True, version)
            stays_off(folder, version)
            print(f"{version}: ok")
        for test in (layers_that_stay_plain, entries_that_stay_plain, nothing_is_hooked, without_a_gpu):
            test(folder)
            print(f"{test.__name__}: ok")
        print(f"over fake GPUs: {bool(on_gpu)}")
